"""Clients that read as many streams as they are told, for the bench of a gateway's own cost: each asks for a completion
without an end, and what comes is counted, not read."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import grpc.aio

from outrider.bench.worker import Send, take_output
from outrider.rpc.channel import connect
from outrider.v1 import generation_pb2 as pb

GENERATE = "/outrider.v1.GenerationService/Generate"
PROMPT_LEN = 70  # more than what chooses a replica
MAX_TOKENS = 1 << 22


def request_of(stream: int, mode: str, num_draft_tokens: int) -> pb.GenerateRequest:
    """Of one stream; mode "plain" is without speculation, "auto" without a number of tokens."""
    request = pb.GenerateRequest()
    request.token_ids.ids.extend((stream * 7 + place) % 4000 + 20 for place in range(PROMPT_LEN))
    request.sampling.max_tokens, request.sampling.temperature = MAX_TOKENS, 0.0
    request.sampling.ignore_eos = True
    request.speculation.enabled = mode != "plain"
    if mode != "plain":
        request.speculation.mode = mode
    if mode not in ("plain", "auto"):
        request.speculation.num_draft_tokens = num_draft_tokens
    return request


class StreamCounter:
    """Streams over a few connections, and what came of them."""

    def __init__(self, address: str, num_connections: int) -> None:
        self._channels = [connect(address) for _ in range(num_connections)]
        self._tasks: list[asyncio.Task[None]] = []
        self._started = asyncio.Event()  # or broken
        self._num_wanted = 0
        self.num_messages = 0
        self.error = ""

    async def open(self, num_streams: int, mode: str, num_draft_tokens: int) -> None:
        """Opens them, and waits until something has come of each."""
        self._num_wanted = num_streams
        for stream in range(num_streams):
            channel = self._channels[stream % len(self._channels)]
            request = request_of(stream, mode, num_draft_tokens)
            call = channel.unary_stream(GENERATE, request_serializer=pb.GenerateRequest.SerializeToString)
            self._tasks.append(asyncio.create_task(self._read(call(request, wait_for_ready=True))))
        await self._started.wait()

    async def _read(self, call: Any) -> None:
        try:
            if await call.read() is not grpc.aio.EOF:
                self._num_wanted -= 1
                if not self._num_wanted:
                    self._started.set()
            while await call.read() is not grpc.aio.EOF:
                self.num_messages += 1
            self.error = "a stream ended by itself"
        except grpc.aio.AioRpcError as error:
            self.error = f"{error.code().name}: {error.details()}"
        self._started.set()

    async def close(self) -> None:
        """Ends all."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for channel in self._channels:
            await channel.close()


async def serve(send: Send) -> None:
    """{"address", "connections", "streams", "mode", "k"} opens streams in place of those before, {"count": true} says
    how many messages came since, {} ends them."""
    counter: StreamCounter | None = None
    send({"ready": True})
    while line := await asyncio.to_thread(sys.stdin.readline):
        question: dict[str, Any] = json.loads(line)
        if counter is not None and "count" not in question:
            await counter.close()
            counter = None
        if "streams" in question:
            counter = StreamCounter(question["address"], question["connections"])
            await counter.open(question["streams"], question["mode"], question["k"])
        if counter is not None and counter.error:
            send({"error": counter.error})
            return
        send({"messages": 0 if counter is None else counter.num_messages})


if __name__ == "__main__":
    asyncio.run(serve(take_output()))
