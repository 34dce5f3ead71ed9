"""What a rollout does, under load: every service is restarted in its turn. No request fails, and none comes out
otherwise."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
from chaos.fleet import Fleet, Member
from chaos.streams import Ask, Readers, all_asks, expectations

SEED = int(os.environ.get("TEST_SEED", "0"))
NUM_TOKENS, NUM_READERS = 100, 4
GRACE_S = "120"  # longer than any stream takes, as a rollout's has to be
WAIT_S = 300.0
NUM_STREAMS = 3  # that have to end between two steps of a rollout

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def some_asks() -> list[Ask]:
    """A third of the fault runner's, and what its reader over HTTP asks."""
    asks = all_asks(SEED, NUM_TOKENS)
    return [ask for place, ask in enumerate(asks) if place % 3 == 0 or ask.name.startswith("greedy, ")]


async def progress(readers: Readers, count: int = NUM_STREAMS) -> None:
    """Waits until so many more streams have ended, and others run."""
    before = _num_ended(readers)
    async with asyncio.timeout(WAIT_S):
        while _num_ended(readers) < before + count or not readers.running():  # noqa: ASYNC110 (readers go on)
            await asyncio.sleep(0.05)


def _num_ended(readers: Readers) -> int:
    return sum(stream.ended is not None for stream in readers.streams)


async def roll(fleet: Fleet, member: Member, readers: Readers) -> None:
    """SIGTERM while streams run; then another process, which everybody knows before the next is struck."""
    await progress(readers)
    os.killpg(member.pid, signal.SIGTERM)
    assert await member.ended(WAIT_S) == 0, member.service.tail()
    await member.restart()
    assert await fleet.whole(WAIT_S)


def failed(readers: Readers) -> list[str]:
    """Streams that were not as they are without a rollout."""
    wrong = [stream for stream in readers.streams if stream.error or stream.change]
    lines = [f"{stream.ask.name} ({stream.reader}): {stream.error or stream.change}" for stream in wrong]
    lines += [f"over HTTP: {error}" for error in readers.errors_told]
    return lines + ([f"{readers.broken_off} streams over HTTP were broken off"] if readers.broken_off else [])


@asynccontextmanager
async def reading(fleet: Fleet, asks: Sequence[Ask]) -> AsyncIterator[Readers]:
    """While in it, streams run; at the end all have come to theirs."""
    readers = Readers(fleet, asks, await expectations(asks, fleet), NUM_READERS)
    yield readers
    async with asyncio.timeout(WAIT_S):
        await readers.stop()


async def test_a_rolling_restart_of_every_service_fails_no_request() -> None:
    async with Fleet(GRACE_S) as fleet:
        pids = [member.pid for member in fleet.members.values()]
        async with reading(fleet, some_asks()) as readers:
            for member in fleet.members.values():
                await roll(fleet, member, readers)
            await progress(readers)
        assert failed(readers) == []
        assert not set(pids) & {member.pid for member in fleet.members.values()}
        assert len(readers.streams) > 6 * NUM_STREAMS
