"""A gateway is killed in mid-stream, and the client goes on at another one: greedy and coupled completions are, byte by
byte, those of an unbroken stream; those accepted by rejection are whole."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import pytest
from support.gateways import KINDS, Kind, ids_of, text_of_parts
from support.services import Trio

from outrider.cli.local_services import Service
from outrider.client import Client, Part, SyncClient
from outrider.rpc.words.sampling_params import AcceptanceRule, FinishReason

PROMPT = "def parse_args(argv):"
MAX_TOKENS = 600  # no gateway is through with them before it is killed
GREEDY = {"temperature": 0.0}
COUPLED = {"temperature": 1.0, "seed": 41, "acceptance": AcceptanceRule.COUPLED}
REJECTION = {"temperature": 1.0, "seed": 42, "acceptance": AcceptanceRule.REJECTION}


async def whole(trio: Trio, options: dict[str, Any]) -> list[Part]:
    async with Client(trio.gateway) as client:
        return [part async for part in client.generate(PROMPT, **options)]


async def broken(kind: Kind, trio: Trio, after: int, options: dict[str, Any]) -> list[Part]:
    """The parts of a request whose gateway is killed when `after` tokens have arrived."""
    victim = await asyncio.to_thread(trio.victim)
    addresses, killing = [victim.address, trio.gateway], Killing(trio, victim, after)
    if kind == "aio":
        async with Client(addresses) as client:
            async for part in client.generate(PROMPT, **options):
                killing.take(part)
        last = client._index
    else:
        with SyncClient(addresses) as sync_client:
            await asyncio.to_thread(lambda: deque(map(killing.take, sync_client.generate(PROMPT, **options))))
        last = sync_client._index
    assert killing.done and last == 1, "the gateway was through before it was killed"
    return killing.parts


class Killing:
    """Keeps the parts, and kills the gateway in their middle."""

    def __init__(self, trio: Trio, victim: Service, after: int) -> None:
        self.parts: list[Part] = []
        self.done = False
        self._trio, self._victim, self._left = trio, victim, after

    def take(self, part: Part) -> None:
        self.parts.append(part)
        self._left -= len(part.token_ids)
        if self._left <= 0 and not self.done:
            self.done = True
            self._trio.kill(self._victim)


def check(parts: list[Part], unbroken: list[Part], indices: range) -> None:
    for index in indices:
        assert ids_of(parts, index) == ids_of(unbroken, index)
        assert text_of_parts(parts, index) == text_of_parts(unbroken, index)
    ends = [[(part.index, part.finish_reason) for part in one if part.finish_reason] for one in (parts, unbroken)]
    assert sorted(ends[0]) == sorted(ends[1])


@pytest.mark.parametrize(("kind", "options"), [("aio", GREEDY), ("sync", COUPLED)], ids=["greedy", "coupled"])
async def test_output_is_that_of_an_unbroken_stream(kind: Kind, options: dict[str, Any], trio: Trio) -> None:
    options = {"max_tokens": MAX_TOKENS, "ignore_eos": True, **options}
    unbroken = await whole(trio, options)
    parts = await broken(kind, trio, 20, options)
    assert len(ids_of(parts)) == MAX_TOKENS
    check(parts, unbroken, range(1))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("after", [1, 9, 40, 90])
async def test_at_many_points(kind: Kind, after: int, trio: Trio) -> None:
    """Several completions, by both rules."""
    for rule in (GREEDY, COUPLED, REJECTION):
        options = {"max_tokens": MAX_TOKENS, "ignore_eos": True, "n": 2, **rule}
        unbroken = await whole(trio, options)
        parts = await broken(kind, trio, after, options)
        if rule is not REJECTION:
            check(parts, unbroken, range(2))
        for index in range(2):
            assert len(ids_of(parts, index)) == MAX_TOKENS
            (last,) = [part for part in parts if part.index == index and part.finish_reason]
            assert last.finish_reason is FinishReason.LENGTH
            assert last.usage is not None and last.usage.completion_tokens == MAX_TOKENS
