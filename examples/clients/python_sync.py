"""A gateway's client on plain gRPC: python python_sync.py [ADDRESS [PROMPT]]. `outrider.client` does more."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from outrider.v1 import generation_pb2, generation_pb2_grpc


def violations(error: grpc.RpcError) -> Iterator[error_details_pb2.BadRequest.FieldViolation]:
    """The fields that BadRequest names, among the details of the google.rpc.Status."""
    status = rpc_status.from_call(error)
    for detail in () if status is None else status.details:
        bad = error_details_pb2.BadRequest()
        if detail.Unpack(bad):
            yield from bad.field_violations


def main(address: str = "127.0.0.1:50050", prompt: str = "Once upon a time") -> None:
    with grpc.insecure_channel(address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)

        def generate(**sampling: Any) -> grpc.Call:
            params = generation_pb2.SamplingParams(**sampling)
            return stub.Generate(generation_pb2.GenerateRequest(text=prompt, sampling=params), timeout=60)

        for part in generate(temperature=0, max_tokens=24):
            print(part.text, end="", flush=True)
            if part.HasField("usage"):
                reason = generation_pb2.FinishReason.Name(part.finish_reason)
                print(f"\n{part.usage.completion_tokens} tokens, {reason}")

        call = generate(temperature=0, max_tokens=200)
        try:
            for _ in call:
                call.cancel()  # the first tokens are enough
        except grpc.RpcError as error:
            print("stopped:", error.code().name)

        try:
            for _ in generate(temperature=-1, top_p=3):
                raise AssertionError("not reached")
        except grpc.RpcError as error:
            print("refused:", error.code().name)
            for violation in violations(error):
                print(f"  {violation.field} {violation.description}")


if __name__ == "__main__":
    main(*sys.argv[1:])
