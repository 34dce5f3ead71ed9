// A gateway's client in JavaScript: node generate.js [ADDRESS [PROMPT]], with the libraries and protos that
// examples/clients/build.sh node puts into build/clients.
const path = require("path");
const build = process.env.OUT || path.join(__dirname, "../../../build/clients");
const load = (name) => require(require.resolve(name, { paths: [path.join(build, "node"), __dirname] }));
const grpc = load("@grpc/grpc-js");
const protobuf = load("protobufjs");
const options = { keepCase: true, longs: String, enums: String, includeDirs: [path.join(build, "protos")] };
const files = ["outrider/v1/generation.proto", "google/rpc/status.proto", "google/rpc/error_details.proto"];
const { outrider } = grpc.loadPackageDefinition(load("@grpc/proto-loader").loadSync(files, options));
const root = new protobuf.Root();
root.resolvePath = (_, file) => path.join(build, "protos", file);
root.loadSync(files.slice(1));

function violations(error) { // the fields that BadRequest names, among the details of a google.rpc.Status
  const packed = error.metadata.get("grpc-status-details-bin");
  const details = packed.length ? root.lookupType("google.rpc.Status").decode(packed[0]).details : [];
  const BadRequest = root.lookupType("google.rpc.BadRequest");
  const bad = details.filter((detail) => detail.type_url.endsWith("/google.rpc.BadRequest"));
  return bad.flatMap((detail) => BadRequest.decode(detail.value).fieldViolations);
}

async function main(address = "127.0.0.1:50050", prompt = "Once upon a time") {
  const client = new outrider.v1.GenerationService(address, grpc.credentials.createInsecure());
  const generate = (sampling) => client.generate({ text: prompt, sampling }, { deadline: Date.now() + 60000 });
  for await (const part of generate({ temperature: 0, max_tokens: 24 })) {
    process.stdout.write(part.text);
    if (part.usage) console.log(`\n${part.usage.completion_tokens} tokens, ${part.finish_reason}`);
  }

  const call = generate({ temperature: 0, max_tokens: 200 });
  try {
    for await (const _ of call) call.cancel(); // the first tokens are enough
  } catch (error) {
    console.log(`stopped: ${grpc.status[error.code]}`);
  }

  try {
    for await (const part of generate({ temperature: -1, top_p: 3 })) console.log("not reached", part);
  } catch (error) {
    console.log(`refused: ${grpc.status[error.code]}`);
    for (const { field, description } of violations(error)) console.log(`  ${field} ${description}`);
  }
  client.close();
}
main(...process.argv.slice(2));
