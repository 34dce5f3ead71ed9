"""The fault runner's short form, on six processes, and what it would not see without its checks."""

from __future__ import annotations

import os

import pytest
from chaos.campaign import run
from chaos.faults import BLOWS, LOSING, POINTS, first_of
from chaos.fleet import Fleet
from chaos.streams import EXACT, HOW, RULES, SHAPES, all_asks

SEED = int(os.environ.get("TEST_SEED", "0"))
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
    assert len({ask.name.split(", ")[0] for ask in asks}) == len(RULES)
    drafted = {(ask.rule, ask.options.get("method") or ask.options.get("mode")) for ask in asks}
    assert len(drafted) == len(RULES) * len(HOW)
    shapes = {(ask.rule, ask.name.split(", ")[-1]) for ask in asks if ask.exact}
    assert len(shapes) == len(EXACT) * len(SHAPES)


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_no_fault_costs_more_than_time() -> None:
    """And with nobody struck, each of them is missed."""
    async with Fleet() as fleet:
        records, streams = await run(
            fleet, first_of(SEED, NUM_FAULTS), all_asks(SEED), told=lambda one: print(one.fault)
        )
        assert [f"{record.fault}: {record.problems}" for record in records if record.problems] == []
        assert len(records) == NUM_FAULTS and len(streams) > NUM_FAULTS
        assert [stream for stream in streams if stream.error or stream.change] == []
        kinds = {kind: next(fault for fault in first_of(SEED, 1000) if fault.kinds == (kind,)) for kind in BLOWS}
        missed, _ = await run(fleet, list(kinds.values()), all_asks(SEED), injecting=False)
        assert [record.fault.kinds for record in missed if record.took_place] == []
        assert len(missed) == len(BLOWS)
