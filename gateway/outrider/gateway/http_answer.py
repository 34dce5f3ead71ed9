"""From an Ask to its answer: one request of the gateway for each prompt, their deltas merged, whole or as a stream."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from outrider.gateway import http_stream as sse
from outrider.gateway.admission import Party
from outrider.gateway.generation import GenerationDelta, written
from outrider.gateway.http_errors import error_body, renamed
from outrider.gateway.http_options import options_of
from outrider.gateway.http_request import FINGERPRINT, Ask
from outrider.gateway.http_shapes import UsageSum, join
from outrider.gateway.service import GenerationEngine, merge
from outrider.wire.errors import OutriderError


class Face(Protocol):
    """What an endpoint's answers look like."""

    prefix: str  # of ids
    whole_object: str
    chunk_object: str

    def opening(self, index: int) -> dict[str, Any] | None:
        """The choice that a completion's stream begins with."""

    def choice(self, delta: GenerationDelta) -> dict[str, Any]:
        """A whole completion."""

    def piece(self, delta: GenerationDelta) -> dict[str, Any] | None:
        """What a stream says of a delta; None: nothing."""


async def answer(request: Request, engine: GenerationEngine, ask: Ask, face: Face) -> Response:
    """The response. An error before the first token has a status of its own, unless the stream was kept alive before
    it; one after that is an event."""
    deltas = generate(engine, ask)
    if not ask.stream:
        return await sse.unless_gone(request.receive, _whole(engine, ask, face, deltas))
    keep_alive_s = options_of(request).sse_keep_alive_s
    first = asyncio.ensure_future(anext(deltas))
    try:
        await sse.unless_gone(request.receive, asyncio.wait((first,), timeout=keep_alive_s or None))
    except BaseException:
        await sse.end(first)
        raise
    if first.done():
        first.result()
    return sse.EventStream(_events(engine, ask, face, first, deltas), keep_alive_s)


async def generate(engine: GenerationEngine, ask: Ask) -> AsyncGenerator[GenerationDelta, None]:
    """The deltas of all prompts, admitted or refused as one; completion j of prompt i has the index i * n + j."""
    party = Party(engine.admission, len(ask.requests))
    async with aclosing(merge([_one(engine, ask, place, party) for place in range(len(ask.requests))])) as deltas:
        async for delta in deltas:
            yield delta


async def _one(engine: GenerationEngine, ask: Ask, place: int, party: Party) -> AsyncGenerator[GenerationDelta, None]:
    try:
        async with aclosing(engine.generate(ask.requests[place], party)) as deltas:
            async for delta in deltas:
                yield replace(delta, index=place * ask.n + delta.index) if place else delta
    except OutriderError as error:
        raise renamed(error, ask.names[place]) from error


async def _whole(
    engine: GenerationEngine, ask: Ask, face: Face, deltas: AsyncGenerator[GenerationDelta, None]
) -> Response:
    completions: dict[int, list[GenerationDelta]] = {}
    usage, num_logprobs = UsageSum(), 0
    async with aclosing(deltas):
        async for delta in deltas:
            completions.setdefault(delta.index, []).append(delta)
            usage.add(delta, ask.n)
            num_logprobs += delta.num_logprobs

    def body() -> Response:
        envelope = _envelope(ask, face.prefix, completions[0][0], face.whole_object)
        choices = [face.choice(join(completions[index])) for index in sorted(completions)]
        return JSONResponse({**envelope, "choices": choices, "usage": usage.shape()})

    return await written(num_logprobs, body)


async def _events(
    engine: GenerationEngine,
    ask: Ask,
    face: Face,
    first: asyncio.Future[GenerationDelta],
    rest: AsyncGenerator[GenerationDelta, None],
) -> AsyncGenerator[str, None]:
    """The chunks. Usage, where it is asked for, comes last, and is null before."""
    envelope: dict[str, Any] = {}
    usage, opened = UsageSum(), set[int]()
    async with aclosing(rest):
        try:
            async for delta in _chained(first, rest):
                if not envelope:
                    no_usage = {"usage": None} if ask.include_usage else {}
                    envelope = {**_envelope(ask, face.prefix, delta, face.chunk_object), **no_usage}
                usage.add(delta, ask.n)
                opens = delta.index not in opened
                opened.add(delta.index)
                for chunk in await written(delta.num_logprobs, _chunks, face, delta, opens, envelope):
                    yield chunk
            if ask.include_usage:
                yield sse.data({**envelope, "choices": [], "usage": usage.shape()})
        except OutriderError as error:
            yield sse.data(error_body(error))
        yield sse.DONE


def _chunks(face: Face, delta: GenerationDelta, opens: bool, envelope: dict[str, Any]) -> list[str]:
    """What a stream says of a delta; `opens`: the first of its completion."""
    choices = [*([face.opening(delta.index)] if opens else []), face.piece(delta)]
    return [sse.data({**envelope, "choices": [choice]}) for choice in choices if choice is not None]


async def _chained(
    first: asyncio.Future[GenerationDelta], rest: AsyncGenerator[GenerationDelta, None]
) -> AsyncGenerator[GenerationDelta, None]:
    yield await first
    async for delta in rest:
        yield delta


def _envelope(ask: Ask, prefix: str, first: GenerationDelta, kind: str) -> dict[str, Any]:
    """The fingerprint names the model that a seed's answer depends on."""
    return {
        "id": f"{prefix}-{first.request_id}",
        "object": kind,
        "created": int(time.time()),
        "model": ask.model,
        "system_fingerprint": FINGERPRINT + first.model_digest,
    }
