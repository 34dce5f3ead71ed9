"""Estimates alone: how many drafted tokens are accepted, what a step costs, what of a round is overhead."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outrider.planner.estimates import Acceptance, RunningMean, StepTime
from outrider.planner.forecast import VerifyCosts
from outrider.planner.policy import Round
from outrider.rpc.messages import Commit, StepTimings

FLAT = tuple((rows, 10_000) for rows in (1, 2, 4, 8, 16, 32, 64))
HALF = tuple((rows, 10_000 + 1_000 * rows) for rows in (1, 2, 4, 8, 16, 32, 64))


def test_one_step_is_counted_once() -> None:
    """Each of 16 sequences reports the step that they share: a slow one is still one step."""
    costs = VerifyCosts([(16, 30_000.0)])
    for _ in range(16):
        costs.add(16, 60_000.0, False, 1 / 16)
    assert costs.at(16, False) == pytest.approx(30_000 * 2**0.1, rel=0.06)


def test_what_all_steps_show_holds_for_sizes_that_none_has() -> None:
    costs = VerifyCosts([(1, 10_000.0), (16, 20_000.0), (64, 80_000.0)])
    for _ in range(100):
        costs.add(64, 160_000.0, False)  # the machine is half as fast
    assert 30_000 < costs.at(16, False) < 42_000  # most of it may be the machine, some of it that size
    for _ in range(40):
        costs.add(64, 200_000.0, True)  # and the draft takes a fifth of it
    assert 1.1 < costs.at(16, True) / costs.at(16, False) < 1.3


def test_estimates() -> None:
    acceptance = Acceptance()
    for _ in range(500):
        acceptance.add(4, 2)
    assert acceptance.at(0) > 0.95 and acceptance.at(2) < 0.05 and 2.8 < acceptance.tokens(4) < 3.1
    mean = RunningMean(memory=4)
    for value in (1.0, 3.0):
        mean.add(value)
    assert mean.value == 2.0 and RunningMean().or_else(7.0) == 7.0


def test_acceptance_is_by_position_under_a_prior() -> None:
    known = Acceptance(forgets_untested=True)
    assert known.first(3) == pytest.approx([0.7] * 3) and known.first(1, [0.4]) == [0.4]
    for _ in range(400):
        known.add(4, 1)
    first, second, third = known.first(3)
    assert first > 0.95 and second < 0.1 and third == pytest.approx(0.5, abs=0.05)  # never tested: the mean of all
    for _ in range(400):
        known.add(4, 0)
    assert known.first(1)[0] < 0.1  # what is long ago is forgotten


def test_what_others_know_is_the_prior_and_what_is_not_tested_is_forgotten_where_windows_are_cut() -> None:
    others, cut = Acceptance(), Acceptance(forgets_untested=True)
    for _ in range(400):
        others.add(2, 0)
        cut.add(2, 1)
    assert Acceptance(others).at(0) == others.at(0) < 0.1
    whole = replace(cut, forgets_untested=False, tested=list(cut.tested), accepted=list(cut.accepted))
    for _ in range(400):
        cut.add(1, 1)
        whole.add(1, 1)
    assert whole.at(1) < 0.1 and cut.at(1) == pytest.approx(cut.first(3)[2], abs=0.05)  # that of one never tested


def test_step_time_between_and_beyond_what_was_measured() -> None:
    """Eight rows cannot take less than four: each is as likely the one that was measured wrong, so both are 115."""
    time = StepTime([(2, 100), (4, 120), (8, 110), (16, 190)])
    assert [time.at(rows) for rows in (1, 2, 3, 4, 6, 8)] == pytest.approx([100, 100, 107.5, 115, 115, 115])
    assert time.at(12) == pytest.approx(152.5)
    assert time.at(32) == pytest.approx(340)  # as steep as between the last two
    assert time.between(1, 40, 7) == pytest.approx([time.at(rows, 7) for rows in range(1, 41)], rel=1e-12)
    assert time.between(5, 5) == [time.at(5)]
    flat = StepTime([(1, 50)])  # one number says nothing of others: flat to twice as many, from there in proportion
    assert [flat.at(rows) for rows in (1, 2, 500)] == [50, 50, 250 * 50]
    some = StepTime([(8, 100), (16, 104)], context_us=0.5)
    assert some.between(10, 99, 8) == pytest.approx([some.at(rows, 8) for rows in range(10, 100)], rel=1e-12)


def test_step_time_learns_without_a_profile() -> None:
    time = StepTime()
    assert time.at(5) == 0.0
    for _ in range(100):
        time.add(1, 10.0)
        time.add(9, 50.0)
        time.add(5, 8.0)  # less than fewer rows: both are 9
    assert [time.at(rows) for rows in (1, 5, 7)] == pytest.approx([9.0, 9.0, 29.5], rel=0.05) and time.at(500) > 500


def test_step_time_follows_the_steps_that_run() -> None:
    """Not to the digit where one size takes twice its time and another six times: others, untried, are taken to be as
    slow as both, and more rows never take less."""
    time = StepTime(FLAT)
    for _ in range(200):
        time.add(8, 20_000)
        time.add(48, 60_000)
        time.add(8, 0)  # a clock that stood still
    assert time.at(8) == pytest.approx(20_000, rel=0.2) and time.at(48) == pytest.approx(60_000, rel=0.2)
    assert time.at(4) <= time.at(8) <= time.at(16) <= time.at(48) <= time.at(200)


def test_step_time_forgets_what_held_up_few_steps() -> None:
    time = StepTime(HALF)
    time.add(8, 10_000_000)
    assert time.at(8) < 1.15 * 18_000
    for _ in range(20):
        time.add(8, 90_000)
    held_up = time.at(8) / time.at(64)
    for _ in range(1500):
        time.add(64, 74_000)
    assert held_up > 0.3 and time.at(8) / time.at(64) == pytest.approx(18 / 74, rel=0.15)


def test_overhead_is_what_no_forward_pass_explains() -> None:
    timings = StepTimings(verify_us=6_000, sample_us=500)
    closed = Round(1, Commit(0, 0, (1,), num_drafted=4, timings=timings), 4, 0.0, 0.010, 3_000, "sequential")
    assert (closed.overhead_us, closed.wire_us) == (1_000, 500)
    ahead = replace(closed, mode="branches")  # the draft worked meanwhile
    assert (ahead.overhead_us, ahead.wire_us) == (4_000, 3_500)
    assert replace(ahead, draft_us=20_000).overhead_us == 0
