"""What is learned of requests is kept of so many kinds, and of those that were asked for last."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest

from outrider.gateway.learning import MAX_KINDS, MAX_METHODS, Learned, RequestKind, are_apart, draft_costs_of
from outrider.gateway.speculation.contest import MAX_LIMITS, SharedTrials, TrialsByConcurrency
from outrider.planner.estimates import StepTime
from outrider.planner.forecast import Forecast, SharedStats, VerifyCosts
from outrider.planner.policy import OFF, Mode, Plan, Policy, PolicyLimits
from outrider.rpc.messages import DraftInfo, DraftMethod, ModelInfo, TargetInfo

NAMES = ("ngram", "suffix", "prediction", "draft_model", "pard")


def test_lists_of_methods_that_nobody_names_any_more_are_forgotten() -> None:
    known = Learned(("t", "d"), VerifyCosts())
    usual, first = known.of(()), known.of(NAMES)
    for methods in permutations(NAMES):  # 120
        seen = known.of(methods)
        assert known.of(methods)[0] is seen[0] and known.of(())[0] is usual[0] and known.of_default == [usual[0]]
    assert len(known.by_methods) == MAX_METHODS
    assert known.of(NAMES)[0] is not first[0]


def test_kinds_judge_acceptance_by_their_own() -> None:
    """What things take they learn together."""
    known = Learned(("t", "d"), VerifyCosts())
    first, drawn = known.of(()), known.of((), kind=RequestKind(is_drawn=True))
    assert first[0].costs is drawn[0].costs and first[0].draft_pass is drawn[0].draft_pass
    first[0].acceptance.add(4, 4)
    assert not drawn[0].acceptance.num_tested and first[1] is not drawn[1]
    assert known.of((), kind=RequestKind(is_drawn=True)) is drawn and known.of_default == [first[0], drawn[0]]
    for number in range(MAX_KINDS):
        known.of((), kind=RequestKind(f"a{number}"))
        assert known.of(()) is first  # the one asked for last
    assert len(known.by_methods[()].by_kind) == MAX_KINDS
    assert known.of((), kind=RequestKind(is_drawn=True)) is not drawn


COSTS = ((1, 300), (64, 900))


def test_what_is_known_of_a_draft_to_begin_with() -> None:
    model = ModelInfo("d", "", vocab_size=2, max_model_len=8)
    draft = DraftInfo(model, (DraftMethod("ngram"), DraftMethod("draft_model", step_costs=COSTS)))
    assert draft_costs_of(draft, ("draft_model",)) == draft_costs_of(draft, ("ngram", "draft_model")) == COSTS
    assert draft_costs_of(draft, ()) == draft_costs_of(draft, ("ngram",)) == draft_costs_of(None, ()) == ()
    stats, _ = Learned(("t", "d"), VerifyCosts()).of(("draft_model",), draft_costs=COSTS, apart=False)
    assert stats.draft_costs.at(1) == 300 and not stats.apart
    forecast = Forecast(stats, False, stats.acceptance, stats.hits, lambda: 1.0, lambda: 1)
    assert forecast.draft_us == 300
    stats.draft_pass.add(200.0)
    assert forecast.draft_us == 200


@pytest.mark.parametrize(
    ("target", "draft", "apart"),
    [
        (("a", "cpu"), ("a", "cpu"), False),
        (("a", "cuda"), ("a", "cpu"), False),  # the cores that launch for it
        (("a", "cuda"), ("a", "cuda"), True),
        (("a", "cpu"), ("b", "cpu"), True),
        (("", "cpu"), ("", "cpu"), True),  # older than the field
    ],
)
def test_who_shares_cores(target: tuple[str, str], draft: tuple[str, str], apart: bool) -> None:
    def model(device: str) -> ModelInfo:
        return ModelInfo("m", "", vocab_size=2, max_model_len=8, device=device)

    drafts = DraftInfo(model(draft[1]), (), machine=draft[0])
    assert are_apart(TargetInfo(model(target[1]), 8, machine=target[0]), drafts) == apart
    assert are_apart(TargetInfo(model(target[1]), 8, machine=target[0]), None)


def first_plan(stats: SharedStats, round_trip_us: float = 300.0, **limits: Any) -> Plan:
    """What a gateway's first request begins with."""
    forecast = Forecast(stats, False, stats.acceptance, stats.hits, lambda: round_trip_us, lambda: 1)
    return TrialsByConcurrency(PolicyLimits(Policy(4), 8, **limits)).at(forecast).plan


def stats_of(step_us: int, draft_us: int, apart: bool = True) -> SharedStats:
    return SharedStats(VerifyCosts([(1, step_us), (16, step_us)]), StepTime([(1, draft_us)]), apart)


def test_the_first_request_begins_by_what_is_known() -> None:
    assert first_plan(stats_of(20_000, 500)) == Plan(Mode.SEQUENTIAL, 4)
    assert first_plan(stats_of(20_000, 500, apart=False)) == Plan(Mode.SEQUENTIAL, 4)
    assert first_plan(stats_of(2_000, 1_000)) == Plan(Mode.CHAINS, 4, waits=False)
    assert first_plan(stats_of(20_000, 500), 30_000.0) == Plan(Mode.CHAINS, 4, waits=False)
    assert first_plan(stats_of(2_000, 1_000, apart=False)) is OFF
    assert first_plan(stats_of(2_000, 1_000), weighs=True, modes=(Mode.OFF, Mode.SEQUENTIAL, Mode.CHAINS)) is OFF
    assert first_plan(stats_of(2_000, 1_000), modes=(Mode.BRANCHES,)) == Plan(Mode.BRANCHES, 4)


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
