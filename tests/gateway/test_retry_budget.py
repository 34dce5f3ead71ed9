"""An outage does not multiply the load: retries are a tenth of the requests, beside one move of all that runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from support.fakes import PROMPT, ToyDraft, ToyLink, ToyTarget, expected, request

from outrider.gateway.speculation import loop
from outrider.gateway.speculation.loop import speculate
from outrider.gateway.speculation.retry_budget import Retries
from outrider.planner.policy import Policy, Round
from outrider.rpc import retry_budget
from outrider.rpc.errors import OutriderError, Unavailable
from outrider.rpc.messages import Failure, Open
from outrider.rpc.retry_budget import RATIO

BROKEN = Failure(0, 14, "no step runs here", "NO_STEP_RUNS")


def test_drafts_take_nothing_from_targets() -> None:
    retries = Retries(2)
    assert [retries.take_draft(0.0) for _ in range(3)] == [True, True, False]
    assert retries.allows_target(0.0)


async def ids_of(
    target: Any, opened: Open, policy: Policy, retries: Retries, draft: ToyDraft | None = None
) -> list[int]:
    retries.num_sequences += 1
    rounds = speculate(draft, target, opened, policy, retries=retries)
    return [token async for item in rounds if isinstance(item, Round) for token in item.commit.ids]


async def test_targets_that_fail_are_not_asked_three_times_for_every_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry_budget, "REFILL_S", 1e9)
    monkeypatch.setattr(loop, "TARGET_RETRY_S", 0.001)
    target, retries = ToyTarget(full=BROKEN), Retries(4)
    for _ in range(40):
        with pytest.raises(OutriderError) as raised:
            await ids_of(target, request(), Policy(0, reopen_s=0.002), retries)
        assert isinstance(raised.value, Unavailable)
    assert len(target.opens) <= 40 + 4 + RATIO * 40


async def test_what_waits_for_the_budget_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what finds no target takes nothing from it."""
    monkeypatch.setattr(retry_budget, "REFILL_S", 0.2)
    monkeypatch.setattr(loop, "TARGET_RETRY_S", 0.01)
    target, retries = ToyTarget(step_s=0.002), Retries(1)
    tasks = [asyncio.create_task(ids_of(target, request(100, completion=n), Policy(0), retries)) for n in range(4)]
    await asyncio.sleep(0.05)
    target.available = False
    for link in list(target.links):
        link.lose()
    await asyncio.sleep(0.1)
    assert retries.targets.left >= 0
    target.available = True
    assert await asyncio.gather(*tasks) == [expected(PROMPT, 100)] * 4


class LosingDraft(ToyDraft):
    """Takes every sequence, and loses it at once."""

    def open(self, request: Open, on_event: Callable[[Any], None]) -> ToyLink | None:
        link = super().open(request, on_event)
        if link is not None:
            asyncio.get_running_loop().call_soon(link.lose)
        return link


async def test_drafts_are_asked_again_within_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "DRAFT_RETRY_S", 0.0)
    monkeypatch.setattr(retry_budget, "REFILL_S", 1e9)
    draft, retries = LosingDraft(), Retries(3)
    target = ToyTarget(step_s=0.001)
    assert await ids_of(target, request(200), Policy(4), retries, draft) == expected(PROMPT, 200)
    assert len(draft.opens) == 1 + 3
