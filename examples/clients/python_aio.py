"""The same as python_sync.py inside an event loop: python python_aio.py [ADDRESS [PROMPT]]."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import grpc.aio
from google.rpc import error_details_pb2, status_pb2

from outrider.v1 import generation_pb2, generation_pb2_grpc


def violations(error: grpc.aio.AioRpcError) -> list[error_details_pb2.BadRequest.FieldViolation]:
    """The fields that BadRequest names, among the details of the google.rpc.Status."""
    packed = dict(error.trailing_metadata()).get("grpc-status-details-bin", b"")
    bad = error_details_pb2.BadRequest()
    details = status_pb2.Status.FromString(packed).details
    return [violation for detail in details if detail.Unpack(bad) for violation in bad.field_violations]


async def main(address: str = "127.0.0.1:50050", prompt: str = "Once upon a time") -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)

        def generate(**sampling: Any) -> grpc.aio.UnaryStreamCall:
            params = generation_pb2.SamplingParams(**sampling)
            return stub.Generate(generation_pb2.GenerateRequest(text=prompt, sampling=params), timeout=60)

        async for part in generate(temperature=0, max_tokens=24):
            print(part.text, end="", flush=True)
            if part.HasField("usage"):
                reason = generation_pb2.FinishReason.Name(part.finish_reason)
                print(f"\n{part.usage.completion_tokens} tokens, {reason}")

        call = generate(temperature=0, max_tokens=200)
        async for _ in call:
            break  # the first tokens are enough
        call.cancel()  # cancelling the task that reads does the same
        print("stopped:", (await call.code()).name)

        try:
            await anext(aiter(generate(temperature=-1, top_p=3)))
        except grpc.aio.AioRpcError as error:
            print("refused:", error.code().name)
            for violation in violations(error):
                print(f"  {violation.field} {violation.description}")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
