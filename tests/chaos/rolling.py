"""A rollout: services that are ended and started again one after another, while streams run."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from chaos.asks import Answer, Ask, expectations
from chaos.fleet import Fleet, Member
from chaos.streams import Readers

NUM_READERS = 4
WAIT_S = 300.0
NUM_STREAMS = 3  # that have to end between two steps of a rollout


async def progress(readers: Readers, count: int = NUM_STREAMS) -> None:
    """Waits until so many more streams have ended, and others run."""
    before = _num_ended(readers)
    async with asyncio.timeout(WAIT_S):
        while _num_ended(readers) < before + count or not readers.running():  # noqa: ASYNC110 (readers go on)
            await asyncio.sleep(0.05)


def _num_ended(readers: Readers) -> int:
    return sum(stream.ended is not None for stream in readers.streams)


async def roll(fleet: Fleet, member: Member, readers: Readers, num_streams: int = NUM_STREAMS) -> None:
    """SIGTERM while streams run; then another process, which everybody knows before the next is struck."""
    await progress(readers, num_streams)
    os.killpg(member.pid, signal.SIGTERM)
    assert await member.ended(WAIT_S) == 0, member.service.tail()
    await member.restart()
    assert await fleet.whole(WAIT_S)


def failed(readers: Readers) -> list[str]:
    """Streams that were not as they are without a rollout."""
    wrong = [stream for stream in readers.streams if stream.error or stream.change]
    lines = [f"{stream.ask.name} ({stream.reader}): {stream.error or stream.change}" for stream in wrong]
    lines += [f"over HTTP: {error}" for error in readers.http.errors_told]
    return lines + ([f"{readers.http.broken_off} streams over HTTP were broken off"] if readers.http.broken_off else [])


def told(fleet: Fleet) -> str:
    """What the gateways wrote of what they lost."""
    return "\n".join(
        f"{gateway.name}: {line}"
        for gateway in fleet.gateways
        for line in gateway.log().splitlines()
        if " INFO " not in line
    )


@asynccontextmanager
async def reading(
    fleet: Fleet, asks: Sequence[Ask], known: Mapping[str, Answer] | None = None, num_readers: int = NUM_READERS
) -> AsyncIterator[Readers]:
    """While in it, streams run; at the end all have come to theirs."""
    readers = Readers(fleet, asks, await expectations(asks, fleet, known), num_readers)
    yield readers
    async with asyncio.timeout(WAIT_S):
        await readers.stop()
