"""The fault runner's short form, on six processes, and what it would not see without its checks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from chaos.asks import EXACT, RULES, SHAPES, all_asks, fresh_ask, ways
from chaos.campaign import Record, run
from chaos.faults import BLOWS, LOSING, POINTS, Fault, first_of
from chaos.fleet import Drafting, Fleet
from chaos.proxy import UP
from chaos.streams import Stream
from support.environment import SEED

from outrider.pairs import pair_path
from outrider.proposers.registry import METHODS

NUM_FAULTS = 14
NUM_CELLS = len(BLOWS) * sum(map(len, POINTS.values()))


def test_every_kind_comes_at_every_point() -> None:
    faults = first_of(SEED, NUM_CELLS)
    cells = {(fault.kinds[0], fault.victims[0].split()[0], fault.direction, fault.message) for fault in faults}
    assert len(cells) == NUM_CELLS
    assert faults == first_of(SEED, NUM_CELLS) != first_of(SEED + 1, NUM_CELLS)
    assert {len(fault.victims) for fault in faults} == {1, 2}
    assert all(len(set(fault.victims)) == len(fault.victims) for fault in faults)
    assert {fault.kinds[0] for fault in faults if fault.lost} == set(LOSING)


def test_every_rule_is_asked_for_by_every_method_and_exact_ones_in_every_shape() -> None:
    asks = all_asks(SEED)
    hows = ways(Drafting.of(0))
    assert len({ask.name.split(", ")[0] for ask in asks}) == len(RULES)
    drafted = {(ask.rule, ask.options.get("method") or ask.options.get("mode")) for ask in asks}
    assert len(drafted) == len(RULES) * len(hows)
    shapes = {(ask.rule, ask.name.split(", ")[-1]) for ask in asks if ask.exact}
    assert len(shapes) == len(EXACT) * len(SHAPES)


def test_every_method_drafts_in_some_fleet_and_answers_stay() -> None:
    heads = pair_path().heads
    fleets = [Drafting.of(SEED + number) for number in range(2 * len(heads))]
    assert {(one.model, one.head) for one in fleets} == {
        (model, head) for model in ("draft_model", "pard") for head in heads
    }
    named = {part for one in fleets for how in ways(one) for part in how.get("method", "").split(",")}
    assert named == {"", *METHODS, *heads}
    keys, *others = ([ask.key for ask in all_asks(SEED, drafting=one)] for one in fleets)
    assert all(one == keys for one in others) and len(set(keys)) == len(keys)


def test_no_two_faults_meet_the_same_schema() -> None:
    fresh = [fresh_ask(number) for number in range(40)]
    assert len({ask.options["structured_output"] for ask in fresh}) == len({ask.key for ask in fresh}) == 40
    assert {ask.rule for ask in fresh} == set(EXACT)


def struck(kinds: Sequence[str], victims: Sequence[str], pause_s: float, **notices: float | None) -> Record:
    """A record of one stream that had to wait so long."""
    fault = Fault(0, tuple(kinds), tuple(victims), UP, "open", lost=False)
    stream = Stream(all_asks(SEED)[0], "client", began=0.0, arrivals=[1.0, 1.0 + pause_s, 20.0], ended=20.0)
    named = {name.replace("_", " "): after_s for name, after_s in notices.items()}
    return Record(fault, True, True, True, notices=named, struck_at=1.0, over_at=1.5 + pause_s, streams=[stream])


def test_bounds_of_time_are_those_of_every_victim() -> None:
    both = struck(["kill", "stop"], ["target 0", "draft 1"], 2.9, target_0=0.4, draft_1=1.9)
    assert both.noticed_in_time == (2, 2) and both.went_on_in_time == (1, 1) and both.late == []
    late = struck(["kill", "stop"], ["target 0", "draft 1"], 3.1, target_0=0.6, draft_1=None)
    assert late.late == ["noticed in time: 0 of 2", "went on in time: 0 of 1"]
    assert late.problems == ["no gateway noticed draft 1 within 8 s"]
    assert struck(["reset"], ["target 1"], 1.6, target_1=0.1).late == ["went on in time: 0 of 1"]
    for kinds, victims in (
        (["kill"], ["gateway 0"]),
        (["kill", "reset"], ["target 0", "target 1"]),
        (["pause"], ["draft 0"]),
    ):
        assert struck(kinds, victims, 9.0).went_on_in_time == (0, 0)


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_no_fault_costs_more_than_time() -> None:
    """And with nobody struck, each of them is missed."""
    async with Fleet(drafting=Drafting.of(SEED)) as fleet:
        asks = all_asks(SEED, drafting=fleet.drafting)
        outcome = await run(fleet, first_of(SEED, NUM_FAULTS), asks, told=lambda one: print(one.fault))
        records, streams = outcome.records, outcome.streams
        assert [f"{record.fault}: {record.problems}" for record in records if record.problems] == []
        assert outcome.failures == []
        assert len(records) == NUM_FAULTS and len(streams) > NUM_FAULTS
        assert [stream for stream in streams if stream.error or stream.change] == []
        kinds = {kind: next(fault for fault in first_of(SEED, 1000) if fault.kinds == (kind,)) for kind in BLOWS}
        off = await run(fleet, list(kinds.values()), asks, injecting=False)
        assert [record.fault.kinds for record in off.records if record.took_place] == []
        assert len(off.records) == len(BLOWS)
        assert off.errors_told == [] and off.broken_off == off.num_resumed == 0
