"""A step is held back for windows that are on their way, where that gains more than it costs; by clocks and counts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from support.engines import COUPLED, VOCAB, TargetHarness, opened, tiny_model

from outrider.engine.loader import LoadedModel
from outrider.planner.estimates import Lag, StepTime
from outrider.rpc.messages import Close, Credit, DraftTokens
from outrider.target_service.cohort import SLACK, CohortHold
from outrider.target_service.goodput import Goodput

STEP_S = 0.01
FLAT = StepTime([(1, 1e6 * STEP_S), (512, 1e6 * STEP_S)])
STEEP = StepTime([(rows, 2_000.0 * rows) for rows in (1, 2, 4, 8, 16, 32, 64, 512)])
NOW = 5.0


@dataclass(slots=True)
class Stream:
    """One that commits and is drafted for."""

    last_commit: float
    lag: Lag
    ready_since: float = NOW
    last_rows: int = 5
    patience: float = 0.5


def lag_of(*seconds: float) -> Lag:
    lag = Lag()
    for one in seconds:
        lag.add(one)
    return lag


def ready(count: int, waited_s: float = 0.0) -> list[Stream]:
    return [Stream(NOW - STEP_S, lag_of(0.002), NOW - waited_s) for _ in range(count)]


def missing(count: int, lag_s: float, last_commit: float = NOW) -> list[Stream]:
    return [Stream(last_commit, lag_of(lag_s)) for _ in range(count)]


def hold(there: Sequence[Stream], away: Sequence[Stream], time: StepTime = FLAT, now: float = NOW) -> float:
    return CohortHold().hold(there, away, time, now)


@pytest.mark.parametrize("lag_s", [0.001, 0.006, 0.008])
def test_two_cohorts_become_one(lag_s: float) -> None:
    """The ready ones waited for the other cohort's step, from their window on: each round costs two steps."""
    assert hold(ready(16, STEP_S - lag_s), missing(16, lag_s)) == pytest.approx(SLACK * lag_s)


def test_where_the_device_has_time_nobody_waits_long() -> None:
    """The other cohort's step fills their lag: waiting would take away what it gains."""
    assert hold(ready(16), missing(16, 0.006)) == 0.0
    assert hold(ready(16), missing(16, 0.001)) == pytest.approx(SLACK * 0.001)
    assert hold(ready(31), missing(1, 0.001)) == 0.0
    assert hold(ready(1), missing(31, 0.006)) == pytest.approx(SLACK * 0.006)


def test_a_lag_of_a_step_and_more_is_not_waited_for() -> None:
    assert hold(ready(16, 0.009), missing(16, 1.01 * STEP_S)) == 0.0


def test_rows_that_cost_are_no_reason_to_wait() -> None:
    assert hold(ready(4, 0.008), missing(4, 0.005), STEEP) == 0.0


def test_who_comes_sooner_is_waited_for_alone() -> None:
    assert hold(ready(4), [*missing(12, 0.001), *missing(4, 0.0099)]) == pytest.approx(SLACK * 0.001)


@pytest.mark.parametrize(
    "away",
    [
        pytest.param(missing(16, 0.004, NOW - 0.0049), id="late"),
        pytest.param([Stream(NOW, Lag()) for _ in range(16)], id="unknown"),
        pytest.param([], id="none"),
    ],
)
def test_nobody_waits_for_what_may_never_come(away: list[Stream]) -> None:
    assert hold(ready(16, 0.006), away) == 0.0


def test_who_waits_for_no_draft_is_not_kept_waiting() -> None:
    there = ready(16, 0.006)
    there[3].patience = 0.0
    assert hold(there, missing(16, 0.004)) == 0.0


def test_it_ends_with_the_last_one_that_comes_or_with_the_time_of_the_latest() -> None:
    there, away = ready(16, 0.006), missing(16, 0.004)
    made = CohortHold()
    assert made.hold(there, away, FLAT, NOW) == pytest.approx(SLACK * 0.004)
    assert made.hold([*there, *away[:15]], away[15:], FLAT, NOW + 0.001) == pytest.approx(SLACK * 0.004 - 0.001)
    assert made.hold([*there, *away[:15]], away[15:], FLAT, NOW + 0.0049) == 0.0
    made.stepped()
    assert made.hold(there, away, FLAT, NOW) == pytest.approx(SLACK * 0.004)
    assert made.hold([*there, *away], [], FLAT, NOW + 0.001) == 0.0


def test_one_that_is_new_comes_as_the_others_do() -> None:
    others = lag_of(0.004)
    new = Lag(others)
    assert (new.usual_s, new.late_s) == (0.004, 0.004)
    new.add(0.001)
    assert new.usual_s == 0.001 and others.usual_s == 0.004 and others.late_s == 0.004
    others.add(0.002)
    assert others.usual_s == 0.002


def test_the_usual_lag_is_of_late() -> None:
    lag = lag_of(*[1.0] * 40, *[0.1] * 14, 0.2, 0.3)
    assert (lag.usual_s, lag.late_s) == (0.1, 0.2)


# In the engine


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return tiny_model()[1]


@dataclass(slots=True)
class Pair:
    """Two sequences of a target whose steps take a step's time, drafted for with so much lag."""

    harness: TargetHarness
    drawn: random.Random
    chain: int = 0

    @classmethod
    def of(cls, loaded: LoadedModel, seed: int = 0) -> Pair:
        harness = TargetHarness.of(loaded)
        harness.engine.scheduler.goodput = Goodput([(1, 10_000), (512, 10_000)])
        pair = cls(harness, random.Random(seed))
        for number in range(2):
            harness.send(opened(number, [5, 6, 7], max_tokens=64, acceptance=COUPLED, temperature=1.0, seed=number))
            harness.send(Credit(number, 1 << 20, 4, patience_ms=500))
        harness.run()
        return pair

    def draft(self, number: int) -> None:
        """A piece of any tokens arrives."""
        position = self.harness.engine.scheduler.sequences[1, number].committed
        ids = tuple(self.drawn.randrange(3, VOCAB) for _ in range(4))
        self.harness.send(DraftTokens(number, self.chain, position, ids))
        self.chain += 1

    @property
    def num_steps(self) -> int:
        return self.harness.num_steps


def test_a_step_waits_for_the_other_window(loaded: LoadedModel) -> None:
    pair = Pair.of(loaded)
    for _ in range(3):
        before = pair.num_steps
        pair.harness.now += 0.002
        pair.draft(0)
        pair.harness.now += 0.0001
        pair.draft(1)
        pair.harness.run()
        assert pair.num_steps == before + 1
    before = pair.num_steps
    pair.harness.now += 0.002
    pair.draft(0)
    assert pair.harness.run() == pytest.approx(SLACK * 0.0021 - 0.002)  # until the other is late
    assert pair.num_steps == before
    pair.draft(1)
    pair.harness.run()
    assert pair.num_steps == before + 1


def holding(loaded: LoadedModel) -> tuple[Pair, int]:
    """A pair whose one window waits for the other's, and how many steps have run."""
    pair = Pair.of(loaded)
    for number in (0, 1):
        pair.harness.now += 0.002
        pair.draft(number)
    pair.harness.run()
    pair.harness.now += 0.002
    pair.draft(0)
    before = pair.num_steps
    assert pair.harness.run() == pytest.approx(SLACK * 0.004 - 0.002) and pair.num_steps == before
    return pair, before


def test_a_first_token_is_not_held_up(loaded: LoadedModel) -> None:
    pair, before = holding(loaded)
    pair.harness.send(opened(2, [8, 9], max_tokens=4), Credit(2, 1 << 20, 4, patience_ms=500))
    pair.harness.run()
    assert pair.num_steps > before and pair.harness.output(2)


def test_a_sequence_that_ends_is_waited_for_no_longer(loaded: LoadedModel) -> None:
    pair, before = holding(loaded)
    pair.harness.send(Close(1))
    pair.harness.run()
    assert pair.num_steps == before + 1


def test_what_was_drawn_says_nothing(loaded: LoadedModel) -> None:
    """Other drafted tokens at the same times: the same waits."""

    def waits_of(seed: int) -> list[tuple[int, float | None]]:
        pair, times, waits = Pair.of(loaded, seed), random.Random(3), []
        for _ in range(12):
            for number in (0, 1):
                pair.harness.now += times.uniform(0.0, 0.004)
                pair.draft(number)
                waits.append((pair.num_steps, pair.harness.run()))
        return waits

    first, *others = (waits_of(seed) for seed in range(3))
    assert all(other == first for other in others)
    assert len({wait for _, wait in first}) > 3
