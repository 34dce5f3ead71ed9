"""Gateways with toy backends whose streams break where a test says, and one way to read from both clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal

from gateway.http_harness import toy_tokenizer
from gateway.toys import ToyDraft, ToyTarget

from outrider.client import Client, Part, Retry, SyncClient
from outrider.gateway.engine import EngineConfig, GenerationEngine
from outrider.gateway.servicer import SERVICE_NAME, GenerationServicer
from outrider.rpc.errors import OutriderError, Unavailable
from outrider.rpc.server import build_server
from outrider.v1 import generation_pb2 as pb

Kind = Literal["aio", "sync"]
KINDS: tuple[Kind, ...] = ("aio", "sync")
PROMPT = [11, 12, 13]
QUICK = Retry(first_wait_s=0.001, most_wait_s=0.004)


AT_THE_END = -1  # after the last response, instead of a status that says that all is well


class _CutContext:
    """A call's context that raises instead of the write after `writes`."""

    def __init__(self, context: Any, writes: int, error: OutriderError) -> None:
        self._context, self._left, self._error = context, writes, error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def write(self, message: Any) -> None:
        if not self._left:
            raise self._error
        self._left -= 1
        await self._context.write(message)


class CuttingServicer(GenerationServicer):
    """Serves, and breaks the first streams after as many responses as `cuts` says, one entry for each stream."""

    def __init__(self, engine: GenerationEngine, cuts: list[int], error: OutriderError) -> None:
        super().__init__(engine)
        self.cuts, self.error = cuts, error
        self.requests: list[pb.GenerateRequest] = []
        self.address = ""

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> None:
        self.requests.append(request)
        cut = self.cuts.pop(0) if self.cuts else None
        if cut is not None:
            context = _CutContext(context, cut, self.error)
        await super().Generate(request, context)
        if cut == AT_THE_END:
            raise self.error


@asynccontextmanager
async def serving(
    *cuts: int, error: OutriderError | None = None, target: ToyTarget | None = None, **config: Any
) -> AsyncIterator[CuttingServicer]:
    """One gateway on the loopback."""
    engine = GenerationEngine(toy_tokenizer(), target or ToyTarget(), ToyDraft(wrong_every=3), EngineConfig(**config))
    servicer = CuttingServicer(engine, list(cuts), error or Unavailable("gone"))
    server = build_server("127.0.0.1:0", [SERVICE_NAME], servicer.register)
    servicer.address = server.address
    await server.start()
    try:
        yield servicer
    finally:
        await server.stop(0)


async def ask(kind: Kind, *gateways: CuttingServicer, retry: Retry = QUICK, **options: Any) -> list[Part]:
    """All parts of a request, by either client."""
    addresses = [gateway.address for gateway in gateways]
    if kind == "aio":
        async with Client(addresses, retry=retry) as client:
            return [part async for part in client.generate(**options)]

    def read() -> list[Part]:
        with SyncClient(addresses, retry=retry) as client:
            return list(client.generate(**options))

    return await asyncio.to_thread(read)


def ids_of(parts: list[Part], index: int = 0) -> list[int]:
    return [token for part in parts if part.index == index for token in part.token_ids]


def text_of(parts: list[Part], index: int = 0) -> str:
    return "".join(part.text for part in parts if part.index == index)
