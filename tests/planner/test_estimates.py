"""Estimates alone: how many drafted tokens are accepted, what a step costs, what of a round is overhead."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outrider.planner.acceptance import Acceptance, RunningMean
from outrider.planner.policy import Round
from outrider.planner.step_costs import StepCosts, VerifyCosts
from outrider.rpc.messages import Commit, StepTimings


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
    costs = StepCosts()
    assert costs.at(5) == 0.0
    costs.add(1, 10.0)
    costs.add(9, 50.0)
    costs.add(5, 8.0)  # less than fewer rows: both are 9
    assert costs.at(1) == 9.0 and costs.at(5) == 9.0 and costs.at(7) == 29.5 and costs.at(500) > 50.0
    mean = RunningMean(memory=4)
    for value in (1.0, 3.0):
        mean.add(value)
    assert mean.value == 2.0 and RunningMean().or_else(7.0) == 7.0


def test_overhead_is_what_no_forward_pass_explains() -> None:
    timings = StepTimings(verify_us=6_000, sample_us=500)
    closed = Round(1, Commit(0, 0, (1,), num_drafted=4, timings=timings), 4, 0.0, 0.010, 3_000, "sequential")
    assert (closed.overhead_us, closed.wire_us) == (1_000, 500)
    ahead = replace(closed, mode="branches")  # the draft worked meanwhile
    assert (ahead.overhead_us, ahead.wire_us) == (4_000, 3_500)
    assert replace(ahead, draft_us=20_000).overhead_us == 0
