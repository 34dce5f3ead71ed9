"""The short forms of the long proofs beside it, which every run of the tests has: some faults, requests that are given
up under kills, a rolling restart, on one fleet of six processes; and requests of which nothing is kept."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from chaos.asks import Answer, Ask, all_asks, expectations
from chaos.campaign import Outcome, run
from chaos.faults import Fault, first_of
from chaos.fleet import Drafting, Fleet
from chaos.objects import ask_many
from chaos.rolling import failed, progress, reading, roll, told
from chaos.soak import soak
from support.environment import SEED

GRACE_S = "20"  # longer than any of these streams takes
STRUCK = {("kill", "target"), ("kill", "gateway"), ("reset", "draft")}  # by what, and who
ROLLED = ("draft 0", "target 0", "gateway 0")
NUM_TOKENS, ONE_OF = 48, 6
NUM_READERS = 2  # and one over HTTP

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
async def fleet() -> AsyncIterator[Fleet]:
    async with Fleet(GRACE_S, Drafting.of(SEED)) as running:
        yield running


def some_asks(fleet: Fleet) -> list[Ask]:
    """Some of the fault runner's, and all greedy ones, which are asked for over HTTP, too."""
    asks = all_asks(SEED, NUM_TOKENS, fleet.drafting)
    return [ask for place, ask in enumerate(asks) if place % ONE_OF == 0 or ask.name.startswith("greedy, auto")]


@pytest.fixture(scope="module")
async def expected(fleet: Fleet) -> dict[str, Answer]:
    """What comes of them undisturbed."""
    return await expectations(some_asks(fleet), fleet)


def some_faults() -> list[Fault]:
    """The first of each kind in the schedule."""
    found: dict[tuple[str, str], Fault] = {}
    for fault in first_of(SEED, 400):
        blow = (fault.kinds[0], fault.victims[0].split()[0])
        if len(fault.kinds) == 1 and blow in STRUCK:
            found.setdefault(blow, fault)
    return list(found.values())


async def test_no_fault_costs_more_than_time(fleet: Fleet, expected: dict[str, Answer]) -> None:
    faults = some_faults()
    outcome = await run(fleet, faults, some_asks(fleet), num_readers=NUM_READERS, outcome=Outcome(expected=expected))
    assert [f"{record.fault}: {record.problems}" for record in outcome.records if record.problems] == []
    assert outcome.failures == [] and len(outcome.records) == len(faults) == len(STRUCK)
    assert len(outcome.streams) > len(faults)
    assert [stream for stream in outcome.streams if stream.error or stream.change] == []


async def test_a_rolling_restart_fails_no_request(fleet: Fleet, expected: dict[str, Answer]) -> None:
    pids = [fleet.members[name].pid for name in ROLLED]
    async with reading(fleet, some_asks(fleet), expected, NUM_READERS) as readers:
        for name in ROLLED:
            await roll(fleet, fleet.members[name], readers, num_streams=1)
        await progress(readers, 1)
    assert failed(readers) == [], told(fleet)
    assert not set(pids) & {fleet.members[name].pid for name in ROLLED}


async def test_nothing_is_kept_lost_or_changed_under_kills(fleet: Fleet, expected: dict[str, Answer]) -> None:
    outcome = await soak(
        fleet, seed=SEED, seconds=0, round_s=4, num_readers=NUM_READERS, kills_every_s=1.5, asks=some_asks(fleet),
        known=expected, told=print,
    )  # fmt: skip
    assert outcome.problems == [] and outcome.num_requests > 0 and outcome.blows.total() > 0
    assert len(outcome.readings) >= 2 * len(fleet.members)


async def test_nothing_is_kept_of_many_requests(tmp_path: Path) -> None:
    outcome = await ask_many(tmp_path, 120, SEED, rounds=4)
    assert outcome.problems == []
    assert outcome.ends.total() >= 120
