"""The closed forms of time per token, against values worked out before, a simulation, and each other."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from support.environment import SEED

from outrider.planner.formulas import Costs, branches, chains, floor, sequential


def independent_tokens(acceptance: float, num_draft_tokens: int) -> float:
    """Mean tokens of a round if drafted tokens are accepted independently."""
    return sum(acceptance**place for place in range(num_draft_tokens + 1))


def costs(k: int, acceptance: float = 0.75, pass_ms: float = 1.3) -> Costs:
    """A verification of 14 ms and a tenth for each drafted token."""
    return Costs(k, acceptance, independent_tokens(acceptance, k), 14.0 + 0.1 * k, pass_ms)


@pytest.mark.parametrize(
    ("form", "acceptance", "pass_ms", "round_trip_ms", "known"),
    [
        (sequential, 0.75, 1.3, 0.0, 6.39),
        (sequential, 0.60, 1.3, 0.7, 8.69),
        (sequential, 0.75, 1.3, 20.0, 12.2),
        (sequential, 0.75, 6.0, 0.7, 11.6),
        (chains, 0.75, 1.3, 0.7, 6.55),
        (chains, 0.75, 1.3, 20.0, 11.4),
        (chains, 0.85, 1.3, 5.0, 5.36),
    ],
)
def test_forms_give_the_values_that_were_worked_out_before(
    form: Callable[[Costs, float], float], acceptance: float, pass_ms: float, round_trip_ms: float, known: float
) -> None:
    """The best of all numbers of drafted tokens up to 12, to the digits given."""
    best = min(form(costs(k, acceptance, pass_ms), round_trip_ms) for k in range(1, 13))
    assert best == pytest.approx(known, rel=0.006)


def test_forms_meet_a_simulation() -> None:
    """Rounds drawn one by one, the draft's work laid beside them on a clock."""
    rng, given, away = random.Random(SEED), costs(4), 9.0
    drafting, ahead = 4 * given.pass_ms, max(given.verify_ms, away + given.enumerate_ms)
    late = {"sequential": 0.0, "chains": 0.0, "branches": 0.0}
    tokens = dict.fromkeys(late, 0)
    fresh = True
    for _ in range(200_000):
        accepted = next((place for place in range(4) if rng.random() >= given.acceptance), 4)
        tokens["sequential"] += accepted + 1
        late["sequential"] += away + drafting + given.verify_ms
        tokens["chains"] += accepted + (accepted < 4)
        late["chains"] += away + drafting + given.verify_ms if fresh else max(drafting, given.verify_ms)
        fresh = accepted < 4
        tokens["branches"] += accepted + 1
        late["branches"] += ahead
        if rng.random() >= 0.8:  # a miss: plain tokens for as long as the draft is behind
            steps = -(-(away + given.enumerate_ms) // given.verify_ms)
            tokens["branches"] += int(steps)
            late["branches"] += steps * 14.0
    assert late["sequential"] / tokens["sequential"] == pytest.approx(sequential(given, away), rel=0.01)
    assert late["chains"] / tokens["chains"] == pytest.approx(chains(given, away), rel=0.01)
    assert late["branches"] / tokens["branches"] == pytest.approx(branches(given, away, 0.8, 14.0), rel=0.01)


def test_the_floor_is_a_verification_for_every_wrong_token() -> None:
    """Three of four drafted tokens hold, and a verification of four takes 14.4 ms: one in four tokens pays it."""
    assert floor(costs(4, 0.75)) == pytest.approx(3.6)
    assert floor(costs(10, 0.9)) == pytest.approx(1.5)
    assert floor(costs(4, 0.0)) == pytest.approx(14.4) and floor(costs(4, 1.0)) == 0.0


@pytest.mark.parametrize("acceptance", [0.0, 0.5, 0.9, 1.0])
def test_nothing_beats_the_floor(acceptance: float) -> None:
    for k in range(1, 13):
        given = costs(k, acceptance, pass_ms=0.0)
        assert floor(given) <= min(sequential(given, 0.0), chains(given, 0.0), branches(given, 0.0, 1.0, 14.0)) + 1e-9


@pytest.mark.parametrize("acceptance", [0.0, 0.5, 0.9])
def test_the_floor_is_reached_by_long_windows_that_cost_nothing(acceptance: float) -> None:
    given = costs(400, acceptance, pass_ms=0.0)
    assert floor(given) == pytest.approx(chains(given, 0.0))
