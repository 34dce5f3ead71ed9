// A gateway's client in C++: build/clients/cpp/generate [ADDRESS [PROMPT]], built by examples/clients/build.sh cpp.
#include <google/rpc/error_details.pb.h>
#include <google/rpc/status.pb.h>
#include <grpcpp/grpcpp.h>

#include <chrono>
#include <iostream>

#include "outrider/v1/generation.grpc.pb.h"

using namespace outrider::v1;

// Prints a completion as it comes, and cancels it when it has `most` tokens.
grpc::Status Stream(GenerationService::Stub& stub, const GenerateRequest& request, int most) {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::minutes(1));
  auto parts = stub.Generate(&context, request);
  GenerateResponse part;
  for (int taken = 0; parts->Read(&part);) {
    if ((taken += part.token_ids_size()) >= most) {
      context.TryCancel();
      continue;
    }
    std::cout << part.text() << std::flush;
    if (part.has_usage())
      std::cout << '\n'
                << part.usage().completion_tokens() << " tokens, " << FinishReason_Name(part.finish_reason()) << '\n';
  }
  return parts->Finish();
}

int main(int argc, char** argv) {
  auto channel = grpc::CreateChannel(argc > 1 ? argv[1] : "127.0.0.1:50050", grpc::InsecureChannelCredentials());
  auto stub = GenerationService::NewStub(channel);
  GenerateRequest request;
  request.set_text(argc > 2 ? argv[2] : "Once upon a time");
  request.mutable_sampling()->set_temperature(0);
  request.mutable_sampling()->set_max_tokens(24);
  Stream(*stub, request, 1000);

  request.mutable_sampling()->set_max_tokens(200);
  std::cout << "stopped: code " << Stream(*stub, request, 1).error_code() << '\n';  // 1: CANCELLED

  request.mutable_sampling()->set_temperature(-1);
  request.mutable_sampling()->set_top_p(3);
  grpc::Status refusal = Stream(*stub, request, 1000);
  std::cout << "refused: code " << refusal.error_code() << '\n';  // 3: INVALID_ARGUMENT
  google::rpc::Status status;
  status.ParseFromString(refusal.error_details());
  google::rpc::BadRequest bad;
  for (const auto& detail : status.details())
    if (detail.UnpackTo(&bad))
      for (const auto& violation : bad.field_violations())
        std::cout << "  " << violation.field() << ' ' << violation.description() << '\n';
}
