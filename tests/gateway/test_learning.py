"""What is learned of requests is kept of so many kinds, and of those that were asked for last."""

from __future__ import annotations

from itertools import permutations

from outrider.gateway.learning import MAX_METHODS, Learned
from outrider.gateway.speculation.contest import MAX_LIMITS, SharedTrials
from outrider.planner.forecast import VerifyCosts
from outrider.planner.policy import Policy, PolicyLimits

NAMES = ("ngram", "suffix", "prediction", "draft_model", "pard")


def test_lists_of_methods_that_nobody_names_any_more_are_forgotten() -> None:
    known = Learned(("t", "d"), VerifyCosts())
    usual, first = known.of(()), known.of(NAMES)
    for methods in permutations(NAMES):  # 120
        seen = known.of(methods)
        assert known.of(methods)[0] is seen[0] and known.of(())[0] is usual[0] and known.stats is usual[0]
    assert len(known.by_methods) == MAX_METHODS
    assert known.of(NAMES)[0] is not first[0]


def test_where_the_target_drafts_no_wire_is_measured() -> None:
    known = Learned(("t", "d"), VerifyCosts())
    assert known.of(("eagle3",), at_target=True)[0].between.weight == 1
    assert known.of(("eagle3",), at_target=True)[0].between.weight == 1
    assert known.of(("ngram",))[0].between.weight == 0


def test_choices_that_nobody_makes_any_more_are_forgotten() -> None:
    trials = SharedTrials()
    usual, first = trials.of(PolicyLimits(Policy(4), 8)), trials.of(PolicyLimits(Policy(1), 1, fixed=True))
    for k in range(1, 129):
        seen = trials.of(PolicyLimits(Policy(k), k, fixed=True))
        assert (
            trials.of(PolicyLimits(Policy(k), k, fixed=True)) is seen and trials.of(PolicyLimits(Policy(4), 8)) is usual
        )
    assert len(trials._by_limits) == MAX_LIMITS
    assert trials.of(PolicyLimits(Policy(1), 1, fixed=True)) is not first
