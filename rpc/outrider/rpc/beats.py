"""The beats of a process: what is looked at again and again is looked at together, so that an idle event loop wakes
once for all of it. A wake of a process that has slept costs more than what it then does."""

from __future__ import annotations

import asyncio

_EARLY = 0.1  # of a period: a timer may fire a little before its time, and must not do so again at once


async def next_beat(period_s: float) -> float:
    """Sleeps until the next multiple of a period by the event loop's clock; returns when that was, in its seconds."""
    loop = asyncio.get_running_loop()
    beat = ((loop.time() + _EARLY * period_s) // period_s + 1) * period_s
    await asyncio.sleep(beat - loop.time())
    return beat
