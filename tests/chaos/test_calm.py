"""Nobody is taken for lost on a machine that has too much to do; and that it would be seen if one were."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
from chaos.asks import all_asks
from chaos.calm import stay_calm, watch
from chaos.fleet import Fleet

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


async def test_load_and_long_steps_raise_no_alarm() -> None:
    async with Fleet() as fleet:
        calm = await stay_calm(fleet, all_asks(0), 15.0, times_load=1.0)
    assert calm.problems == [] and calm.streams


async def test_an_alarm_is_seen() -> None:
    async def strike(pid: int) -> None:
        await asyncio.sleep(2)
        os.killpg(pid, signal.SIGSTOP)
        await asyncio.sleep(4)
        os.killpg(pid, signal.SIGCONT)

    async with Fleet() as fleet:
        alarms, _ = await asyncio.gather(watch(fleet, fleet.gateways, 10.0), strike(fleet.drafts[0].pid))
    assert alarms
