"""Experts that rows wake: foreseen from what steps woke, and what that does to a step's time and to windows."""

from __future__ import annotations

import random

import pytest

from outrider.planner.estimates import Acceptance, StepTime
from outrider.planner.forecast import VerifyCosts
from outrider.planner.woken import WokenExperts, woken_experts
from outrider.rpc.words.expert_costs import ExpertCosts
from outrider.target_service.goodput import Goodput, GoodputRequest

LAYERS, EXPERTS, CHOSEN = 4, 64, 4
COSTS = ExpertCosts(LAYERS, EXPERTS, CHOSEN, expert_us=50.0, along=1.0)
ROWS = (1, 2, 4, 8, 16, 32, 64)


def drawn(generator: random.Random, num_sequences: int, rows_each: int, stays: float) -> int:
    """Experts woken in all layers by sequences whose every next row goes, with chance `stays`, where the one before it
    went, and else anywhere."""
    total = 0
    for _ in range(LAYERS):
        woken: set[int] = set()
        for _ in range(num_sequences):
            chosen: list[int] = []
            for _ in range(rows_each):
                if not chosen or generator.random() >= stays:
                    chosen = generator.sample(range(EXPERTS), CHOSEN)
                woken.update(chosen)
        total += len(woken)
    return total


def profile_us(rows: int) -> float:
    """Of rows that choose independently: a millisecond, 20 us a row, and the experts."""
    return 1000 + 20 * rows + 50.0 * LAYERS * EXPERTS * (1 - (1 - CHOSEN / EXPERTS) ** rows)


def test_independent_rows_wake_what_the_formula_says() -> None:
    experts, generator = WokenExperts(COSTS), random.Random(1)
    for rows in (1, 5, 20):
        mean = sum(drawn(generator, 1, rows, 0.0) for _ in range(300)) / 300
        assert experts.at(rows) == pytest.approx(mean, rel=0.03)
        assert experts.extra_us(rows) == 0


@pytest.mark.parametrize("stays", [0.0, 0.5, 0.9])
def test_rows_of_one_text_and_of_many_are_told_apart(stays: float) -> None:
    """From steps of few shapes those of others are foreseen."""
    experts, generator = WokenExperts(COSTS), random.Random(2)
    for step in range(200):
        sequences, rows_each = ((1, 5), (3, 5), (3, 2))[step % 3]
        experts.add(sequences * rows_each, sequences, drawn(generator, sequences, rows_each, stays))
    for sequences, rows_each in ((1, 8), (2, 3), (6, 1), (5, 5)):
        mean = sum(drawn(generator, sequences, rows_each, stays) for _ in range(300)) / 300
        assert experts.at(sequences * rows_each, sequences) == pytest.approx(mean, rel=0.08)


def test_what_says_nothing_changes_nothing() -> None:
    experts = WokenExperts(COSTS)
    before = experts.at(9, 3)
    experts.add(1, 1, LAYERS * CHOSEN)  # one row wakes its own
    experts.add(30, 3, LAYERS * EXPERTS)  # all are awake
    experts.add(7, 1, 0)  # not said
    assert experts.at(9, 3) == before
    for _ in range(500):
        experts.add(8, 2, 1)  # nonsense
    assert 0 < experts.at(64, 8) <= LAYERS * EXPERTS
    assert woken_experts(None) is None and woken_experts(ExpertCosts(2, 8, 8, 1.0, 1.0)) is None


def test_a_step_is_as_long_as_what_it_wakes() -> None:
    """Rows that choose alike cost their rows, and little more; what a row alone takes is learned apart from that."""
    profile, generator = [(rows, profile_us(rows)) for rows in ROWS], random.Random(3)
    time, plain = StepTime(profile, experts=woken_experts(COSTS)), StepTime(profile)
    assert time.at(8) == pytest.approx(plain.at(8))
    for _ in range(300):
        woken = drawn(generator, 1, 5, 0.9)
        took = 1000 + 20 * 5 + 50.0 * woken
        time.add(5, took, sequences=1, num_woken=woken)
        plain.add(5, took)
    expected = 1000 + 20 * 8 + 50.0 * sum(drawn(generator, 1, 8, 0.9) for _ in range(300)) / 300
    assert time.at(8) == pytest.approx(expected, rel=0.1)
    assert abs(time.at(8) / expected - 1) < abs(plain.at(8) / expected - 1)
    assert time.between(3, 9, 0, 1) == [time.at(rows, 0, 1) for rows in range(3, 10)]


def test_a_gateway_learns_the_same_from_what_commits_say() -> None:
    costs, generator = VerifyCosts([(rows, profile_us(rows)) for rows in ROWS], COSTS), random.Random(4)
    before = costs.at(8, beside_draft=False)
    for _ in range(200):
        woken = drawn(generator, 1, 4, 0.9)
        costs.add(4, 1000 + 20 * 4 + 50.0 * woken, beside_draft=False, sequences=1, num_woken=woken)
    assert costs.at(8, beside_draft=False) < 0.75 * before


@pytest.mark.parametrize(("stays", "longer"), [(0.0, False), (0.95, True)])
def test_windows_are_cut_by_the_experts_that_their_rows_wake(stays: float, longer: bool) -> None:
    """Two sequences with tokens that hold by 0.6: each further row is worth it where it wakes no experts of its own."""
    goodput, generator = Goodput([(rows, round(profile_us(rows))) for rows in ROWS], experts=COSTS), random.Random(5)
    for _ in range(200):
        woken = drawn(generator, 2, 4, stays)
        goodput.add_step(8, 1000 + 20 * 8 + 50.0 * woken, 0.0, sequences=2, num_woken=woken)
    acceptance = Acceptance(tested=[1e9] * 6, accepted=[0.6e9] * 6)
    chosen = goodput.choose([GoodputRequest(acceptance, 1, 0, 6)] * 2, 512)
    assert (sum(chosen) > 4) == longer
