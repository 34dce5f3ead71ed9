"""The Python client of a gateway, in two forms that share everything but the waiting:

    async with Client("localhost:50050") as client:
        async for part in client.generate("Once upon a time", max_tokens=64):
            print(part.text, end="")

    for part in generate("localhost:50050", messages=[{"role": "user", "content": "Hello"}]):
        print(part.text, end="")

Several addresses may be given. A stream that breaks goes on from the tokens received, at the next of them; what no
repetition can mend is raised as one of OutriderError's classes, with what the gateway said: the fields that are wrong,
when to try again."""

from __future__ import annotations

from outrider.client.client import Client, SyncClient, generate
from outrider.client.request import build_request
from outrider.client.resume import NO_RETRY, Retry
from outrider.client.types import GatewayInfo, Part, SpeculationStats, ToolCallDelta, Usage, decode_response

__all__ = [
    "NO_RETRY",
    "Client",
    "GatewayInfo",
    "Part",
    "Retry",
    "SpeculationStats",
    "SyncClient",
    "ToolCallDelta",
    "Usage",
    "build_request",
    "decode_response",
    "generate",
]
