"""Beats: whoever waits for one of a period waits for the same."""

from __future__ import annotations

import asyncio

from outrider.rpc.beats import next_beat

PERIOD_S = 0.02


async def beats(number: int, after_s: float) -> list[int]:
    await asyncio.sleep(after_s)
    return [round(await next_beat(PERIOD_S) / PERIOD_S) for _ in range(number)]


async def test_those_that_begin_apart_wake_together() -> None:
    began = asyncio.get_running_loop().time() / PERIOD_S
    first, second = await asyncio.gather(beats(20, 0.0), beats(20, 0.4 * PERIOD_S))
    assert len(set(first)) == len(set(second)) == 20, "none comes twice"
    assert set(first) & set(second)
    assert first[0] >= began - 0.5 and first == sorted(first) and second == sorted(second)


async def test_a_beat_is_no_earlier_than_its_time() -> None:
    loop = asyncio.get_running_loop()
    for _ in range(10):
        beat = await next_beat(PERIOD_S)
        assert loop.time() >= beat - 0.001
