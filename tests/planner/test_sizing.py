"""Machines for a number of streams: no more than are needed, within the time and the memory that there is, and what the
closed forms say of a mode is what the simulated loop takes."""

from __future__ import annotations

import pytest

from outrider.cli.plan import simulate
from outrider.planner.policy import OFF, Mode
from outrider.planner.sizing import (
    Memory,
    Pair,
    fastest,
    fastest_together,
    ms_per_token,
    ms_together,
    separate,
    together,
)
from outrider.planner.virtual_services import MAX_ROWS, DraftQuality

PAIR = Pair(((1, 25e3), (64, 30e3), (MAX_ROWS, 80e3)), ((1, 2e3), (128, 3e3), (MAX_ROWS, 8e3)), DraftQuality(0.75), 1.0)
AMPLE = Memory(context=2048)
GB, KB = 1e9, 1e3


def test_in_turn_on_one_device_is_drafting_and_a_verification() -> None:
    tokens = sum(0.75**place for place in range(6))
    assert ms_together(PAIR, fastest_together(PAIR), 1) == pytest.approx((5 * 2 + 25.397) / tokens, rel=1e-3)
    plan = fastest(PAIR, (Mode.SEQUENTIAL,))
    assert ms_per_token(PAIR, plan, 1, 1) == pytest.approx((2 + 5 * 2 + 25.397) / tokens, rel=1e-3)


@pytest.mark.parametrize("mode", Mode)
def test_closed_forms_are_near_the_simulated_loop(mode: Mode) -> None:
    plan = fastest(PAIR, (mode,))
    found = simulate(PAIR, 1, 1, 1, 6.0, plan)
    assert ms_per_token(PAIR, plan, 1, 1) == pytest.approx(found, rel=0.15)


def test_a_useless_draft_is_not_asked() -> None:
    useless = Pair(PAIR.target_costs, PAIR.draft_costs, DraftQuality(0.02), 1.0)
    assert fastest(useless, Mode, 64, 64) is OFF
    fleet = separate(useless, 640, 31.0, AMPLE)
    assert fleet.plan is OFF and fleet.drafts == 0 and fleet.tokens_per_round == pytest.approx(1.0)


@pytest.mark.parametrize("max_ms", [15.0, 22.0, 30.0])
def test_the_fleet_holds_every_stream_in_time(max_ms: float) -> None:
    for size in (separate, together):
        fleet = size(PAIR, 1000, max_ms, AMPLE)
        assert fleet.ms_per_token <= max_ms and fleet.targets * fleet.streams_per_target >= 1000
    beside = together(PAIR, 1000, max_ms, AMPLE)
    one_less = -(-1000 // (beside.targets - 1))
    assert ms_together(PAIR, fastest_together(PAIR, one_less), one_less) > max_ms and beside.bound == "time"


def test_a_dearer_draft_is_shared_by_more_streams() -> None:
    cheap, dear = (separate(PAIR, 1000, 22.0, AMPLE, price) for price in (0.01, 1.0))
    assert cheap.drafts > dear.drafts and cheap.targets <= dear.targets
    assert cheap.targets + 0.01 * cheap.drafts <= dear.targets + 0.01 * dear.drafts


def test_memory_bounds_what_fits_and_a_draft_beside_the_target_takes_its_part() -> None:
    memory = Memory(2048, 40 * GB, 128 * KB, 16 * KB, 2 * GB)
    assert memory.tokens(with_draft=False) == pytest.approx(40e6 / 128)
    assert memory.tokens(with_draft=True) == pytest.approx(38e6 / 144)
    assert memory.draft_share == pytest.approx(1 - (38 / 144) / (40 / 128))
    assert (memory.streams(with_draft=False), memory.streams(with_draft=True)) == (152, 128)
    apart, beside = (size(PAIR, 10_000, 60.0, memory) for size in (separate, together))
    assert (apart.bound, beside.bound) == ("memory", "memory")
    assert (apart.targets, beside.targets) == (-(-10_000 // 152), -(-10_000 // 128))


def test_what_cannot_be_kept_is_refused() -> None:
    with pytest.raises(ValueError, match="no plan keeps to 3 ms a token: one stream alone takes 8"):
        separate(PAIR, 10, 3.0, AMPLE)
    with pytest.raises(ValueError, match="no plan keeps to 3 ms a token"):
        together(PAIR, 10, 3.0, AMPLE)
    with pytest.raises(ValueError, match="no stream fits"):
        separate(PAIR, 10, 30.0, Memory(1 << 20, 4 * GB, 128 * KB))


def test_gateways_are_cores_of_rounds() -> None:
    fleet = separate(PAIR, 1000, 22.0, AMPLE)
    rounds_per_s = fleet.tokens_per_s(1000) / fleet.tokens_per_round
    assert fleet.gateways(1000, 400.0) == -(-rounds_per_s * 400e-6 // 0.6)
