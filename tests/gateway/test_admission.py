"""How much work runs and waits: what is refused, who comes first, and that who gives up waiting leaves nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

import pytest

from outrider.gateway.admission import Admission, AdmissionCost
from outrider.gateway.http.serving import AdmissionGroup
from outrider.rpc.errors import InvalidArgument, OutriderError, ResourceExhausted

ONE = AdmissionCost(1, 10)


async def test_cancelled_waits_leave_nothing_and_the_one_that_stays_gets_its_place() -> None:
    admission = Admission(max_active=1, max_waiting=10)
    await admission.enter(ONE)
    stays = asyncio.create_task(admission.enter(ONE))
    for _ in range(1000):
        waits = asyncio.create_task(admission.enter(ONE, priority=1))
        await asyncio.sleep(0)
        waits.cancel()
        with suppress(asyncio.CancelledError):
            await waits
    assert len(admission._waiting) <= 3 and (admission.num_waiting, admission.num_tokens) == (1, 20)
    admission.leave(ONE)
    await asyncio.wait_for(stays, 30)
    admission.leave(ONE)
    assert admission.num_active == admission.num_tokens == 0 and not admission._waiting


async def test_sequences_are_counted_not_requests() -> None:
    admission = Admission(max_active=4, max_waiting=4)
    await admission.enter(AdmissionCost(3, 30))
    large = asyncio.create_task(admission.enter(AdmissionCost(2, 20)))
    small = asyncio.create_task(admission.enter(ONE))
    await asyncio.sleep(0)
    assert (admission.num_active, admission.num_waiting) == (3, 3), "who came later has overtaken"
    admission.leave(ONE)  # one of three completions has ended
    await large
    assert (admission.num_active, admission.num_waiting) == (4, 1)
    with pytest.raises(ResourceExhausted, match=r"9 sequences .* at most 8 sequences \(max_active and max_") as busy:
        admission.require_room(AdmissionCost(4, 1))
    assert busy.value.retry_after_ms > 0 and busy.value.reason == "TOO_MANY_SEQUENCES"
    with pytest.raises(InvalidArgument, match="n: asks for 9 completions; allowed: at most 8"):
        admission.require_room(AdmissionCost(9, 1))
    small.cancel()


async def test_a_request_of_more_sequences_than_may_run_runs_alone() -> None:
    admission = Admission(max_active=2, max_waiting=6)
    await admission.enter(ONE)
    large = asyncio.create_task(admission.enter(AdmissionCost(5, 5)))
    await asyncio.sleep(0)
    assert admission.num_active == 1
    admission.leave(ONE)
    await asyncio.wait_for(large, 30)
    assert admission.num_active == 5


async def test_tokens_are_counted() -> None:
    admission = Admission(max_active=8, max_waiting=8, max_tokens=lambda: 100)
    await admission.enter(AdmissionCost(1, 60))
    with pytest.raises(ResourceExhausted, match=r"110 tokens running.*100 tokens \(max_admitted_tokens\)") as busy:
        await admission.enter(AdmissionCost(1, 50))
    assert busy.value.retry_after_ms > 0 and busy.value.reason == "TOO_MANY_TOKENS"
    with pytest.raises(InvalidArgument, match=r"sampling\.max_tokens: asks for 101 tokens in all"):
        await admission.enter(AdmissionCost(1, 101))
    admission.leave(AdmissionCost(1, 60))
    await admission.enter(AdmissionCost(1, 100))


async def together(admission: Admission, works: Sequence[AdmissionCost]) -> list[OutriderError | None]:
    group = AdmissionGroup(admission, len(works))
    return await asyncio.gather(*map(group.enter, works), return_exceptions=True)  # type: ignore[return-value]


async def test_a_party_is_admitted_or_refused_as_one() -> None:
    admission = Admission(max_active=4, max_waiting=2, max_tokens=lambda: 100)
    assert await together(admission, [ONE] * 3) == [None] * 3
    refusals = await together(admission, [AdmissionCost(1, 1)] * 4)
    assert all(isinstance(refusal, ResourceExhausted) for refusal in refusals) and admission.num_waiting == 0
    refusals = await together(admission, [AdmissionCost(1, 40)] * 3)
    assert all(isinstance(refusal, InvalidArgument) for refusal in refusals) and admission.num_tokens == 30


async def test_who_leaves_a_party_before_its_decision_is_not_reserved_for() -> None:
    admission = Admission(max_active=4, max_waiting=4)
    group = AdmissionGroup(admission, 2)
    leaves = asyncio.create_task(group.enter(ONE))
    await asyncio.sleep(0)
    leaves.cancel()
    await asyncio.gather(leaves, return_exceptions=True)
    await asyncio.wait_for(group.enter(AdmissionCost(1, 5)), 30)
    assert (admission.num_active, admission.num_waiting, admission.num_tokens) == (1, 0, 5)


async def test_who_leaves_a_party_gives_its_place_back() -> None:
    for turns in range(4):
        admission = Admission(max_active=1, max_waiting=2)
        group = AdmissionGroup(admission, 3)
        tasks = [asyncio.create_task(group.enter(ONE)) for _ in range(3)]
        for _ in range(turns):
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        for end in ends:
            if end is None:
                admission.leave(ONE)
        assert (admission.num_active, admission.num_waiting, admission.num_tokens) == (0, 0, 0), turns
