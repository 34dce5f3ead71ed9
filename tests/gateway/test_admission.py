"""How many requests run and wait: who gives up waiting leaves nothing behind."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from outrider.gateway.admission import Admission


async def test_cancelled_waits_leave_nothing_and_the_one_that_stays_gets_its_place() -> None:
    admission = Admission(max_active=1, max_waiting=10)
    await admission.enter()
    stays = asyncio.create_task(admission.enter())
    for _ in range(1000):
        waits = asyncio.create_task(admission.enter(priority=1))
        await asyncio.sleep(0)
        waits.cancel()
        with suppress(asyncio.CancelledError):
            await waits
    assert len(admission._waiting) <= 3 and admission.num_waiting == 1
    admission.leave()
    await asyncio.wait_for(stays, 1)
    admission.leave()
    assert admission.num_active == 0 and not admission._waiting
