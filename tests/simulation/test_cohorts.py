"""Streams that draft in turn share the target's steps: the production core, controller and hold in virtual time, behind
a gateway whose one core computes for every event. The target is of a large GPU's shape: its steps take the same up to
190 rows."""

from __future__ import annotations

from unittest.mock import patch

import pytest

from outrider.cli.virtual_loop import gateway_loop, new_crowd
from outrider.planner.crowd import Machines
from outrider.planner.policy import Mode
from outrider.planner.virtual_services import DraftQuality
from outrider.target_service.cohort import CohortHold

STEP_US, FLAT_ROWS = 5300.0, 190
COSTS = ((1, STEP_US), (FLAT_ROWS, STEP_US), (512, STEP_US * 512 / FLAT_ROWS))
DRAFTED = 4
WARM_S, SECONDS = 0.4, 0.5


def run(streams: int, event_us: float, draft_us: float = 200.0, round_trip_s: float = 0.0003) -> tuple[float, float]:
    """Tokens a step's time and stream, which plain decoding makes one of, and streams a step."""
    passes = ((1, draft_us), (64, draft_us), (512, 4 * draft_us))
    crowd = new_crowd(Machines(COSTS, passes, DraftQuality(0.72), round_trip_s / 2, event_s=1e-6 * event_us))
    crowd.add(gateway_loop(COSTS, (Mode.SEQUENTIAL,), DRAFTED), streams)
    crowd.run(WARM_S)
    crowd.settle()
    crowd.run(SECONDS)
    tokens, rounds = (sum(getattr(one, name) for one in crowd.records) for name in ("num_tokens", "num_rounds"))
    return tokens * 1e-6 * STEP_US / SECONDS / streams, rounds / crowd.targets[0].num_steps


def without_holding(streams: int, event_us: float, **others: float) -> tuple[float, float]:
    with patch.object(CohortHold, "hold", lambda *_: 0.0):
        return run(streams, event_us, **others)


@pytest.mark.parametrize(
    ("streams", "event_us", "least", "share"),
    [(8, 20, 2.0, 0.97), (8, 75, 1.85, 0.97), (8, 150, 1.7, 0.95), (32, 20, 1.9, 0.97), (32, 75, 1.4, 0.97)],
)
def test_one_step_holds_all(streams: int, event_us: float, least: float, share: float) -> None:
    times_plain, together = run(streams, event_us)
    assert together >= share * streams
    assert times_plain >= least


@pytest.mark.parametrize(
    ("streams", "event_us", "gain"), [(8, 75, 1.3), (32, 20, 1.3), (32, 150, 0.99), (64, 75, 0.99)]
)
def test_holding_pays(streams: int, event_us: float, gain: float) -> None:
    """Two cohorts that fill each other's lag stay two."""
    assert run(streams, event_us)[0] >= gain * without_holding(streams, event_us)[0]


@pytest.mark.parametrize(
    "others", [{"round_trip_s": 0.002}, {"round_trip_s": 0.008}, {"draft_us": 3000.0}], ids=["2 ms", "8 ms", "draft"]
)
def test_what_comes_late_is_not_waited_for(others: dict[str, float]) -> None:
    assert run(16, 40, **others)[0] >= 0.98 * without_holding(16, 40, **others)[0]
