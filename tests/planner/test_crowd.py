"""What virtual machines say of a token's time, against what real ones took: the stored points of the network bench,
whose draft sleeps as long as its passes are to take."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from outrider.cli.virtual_loop import gateway_loop, new_crowd
from outrider.planner.crowd import Machines, VirtualFleet
from outrider.planner.estimates import StepTime
from outrider.planner.policy import Mode
from outrider.planner.virtual_services import MAX_ROWS, DraftQuality

MEASURED = "20261121T2153-intel-xeon-processor-4c.json"  # ten runs of every cell
MODES = {"sequential": (Mode.SEQUENTIAL,), "chains": (Mode.CHAINS,), "branches": (Mode.BRANCHES,), "auto": tuple(Mode)}
GREEDY_CORRECTIONS = (0.66, 0.16, 0.06)  # docs/performance.md, "Why branches pay"
LOOPBACK_S = 0.00025  # of a message between two services of one machine
CROSSINGS = 4  # ways in a round trip over the gateway
REQUESTS = 4
AT_MOST = 0.15


def cells(repository: Path) -> list[tuple[dict[str, Any], dict[str, Any], float]]:
    """Blocks of one stream, their cells, and the time of a plain step in milliseconds."""
    result = json.loads((repository / "outrider-bench/results/network" / MEASURED).read_text(encoding="utf-8"))
    found = []
    for block in result["blocks"]:
        if block["batch"] == 1:
            plain = next(cell for cell in block["cells"] if cell["mode"] == "plain")
            of_services = [cell for cell in block["cells"] if cell["mode"] in MODES and cell["steady"]]
            found += [(block, cell, plain["costs"]["verify_ms"]) for cell in of_services]
    return found


def simulated_ms(block: dict[str, Any], cell: dict[str, Any], plain_ms: float) -> float:
    """A token's time, with what the cell measured of steps, passes and acceptance, and requests one after the other."""
    k, step_us, pass_us = block["k"], 1e3 * cell["costs"]["verify_ms"], 1e3 * block["pass_ms"]
    costs = ((1, 1e3 * plain_ms), (k + 1, step_us), (MAX_ROWS, step_us))
    quality = DraftQuality(cell["costs"]["acceptance"], GREEDY_CORRECTIONS)
    way_s = LOOPBACK_S + cell["round_trip_ms"] / CROSSINGS / 1e3
    crowd = new_crowd(Machines(costs, ((1, pass_us), (MAX_ROWS, pass_us)), quality, way_s))
    loop = gateway_loop(costs, MODES[cell["mode"]], None if cell["mode"] == "auto" else k)
    for _ in range(REQUESTS):
        crowd.add(loop, 1, max_tokens=96)
        crowd.run(60.0)
    assert all(record.over for record in crowd.records)
    return crowd.ms_per_token()


def test_a_tokens_time_is_that_of_real_services(repository: Path) -> None:
    errors = {}
    for block, cell, plain_ms in cells(repository):
        measured = cell["ms_per_token"]["median"]
        name = f"{cell['mode']}, {cell['network']}, draft cost {block['cost']:g}"
        errors[name] = simulated_ms(block, cell, plain_ms) / measured - 1
    print({name: f"{error:+.1%}" for name, error in errors.items()})
    assert len(errors) == 24
    assert max(map(abs, errors.values())) < AT_MOST


COSTS = ((1, 25e3), (64, 30e3), (MAX_ROWS, 80e3))
PASSES = ((1, 2e3), (128, 3e3), (MAX_ROWS, 8e3))


def crowd_of(streams: int, modes: tuple[Mode, ...], k: int | None, targets: int = 1, drafts: int = 1) -> VirtualFleet:
    crowd = new_crowd(Machines(COSTS, PASSES, DraftQuality(0.75), 0.0005, targets, drafts))
    crowd.add(gateway_loop(COSTS, modes, k), streams, spread_s=0.02)
    return crowd


def test_plain_streams_share_every_step() -> None:
    crowd = crowd_of(16, (Mode.OFF,), 0)
    crowd.run(0.5)
    crowd.settle()
    crowd.run(1.0)
    assert crowd.ms_per_token() == pytest.approx(26.2, rel=0.02)  # a step of 16 rows
    assert crowd.targets[0].num_rows == 16 * crowd.targets[0].num_steps
    assert crowd.targets[0].device.busy_s == pytest.approx(1.0, abs=0.03) and crowd.drafts[0].num_steps == 0


def test_a_round_in_turn_takes_its_parts() -> None:
    """Four ways, four passes and a step of five rows, for 3.05 tokens."""
    crowd = crowd_of(1, (Mode.SEQUENTIAL,), 4)
    crowd.run(20.0)
    (record,) = crowd.records
    assert crowd.ms_per_token() * record.num_tokens / record.num_rounds == pytest.approx(2 + 8 + 25.3, abs=0.1)
    assert record.num_tokens / record.num_rounds == pytest.approx(3.05, rel=0.06)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_thousand_streams_on_a_hundred_targets() -> None:
    """Two virtual seconds: forty gateways, the production core and controller in each."""
    began = time.perf_counter()
    crowd = new_crowd(Machines(COSTS, PASSES, DraftQuality(0.75), 0.0005, num_targets=100, num_drafts=100))
    for _ in range(40):
        crowd.add(gateway_loop(COSTS), 250, spread_s=0.05)
    crowd.run(2.0)
    rounds = sum(record.num_rounds for record in crowd.records)
    modes = sum((record.modes for record in crowd.records), Counter[str]())
    plain_ms = StepTime(COSTS).at(100) / 1e3
    busy = [target.device.busy_s / 2 for target in crowd.targets]
    print(f"{rounds} rounds in {time.perf_counter() - began:.0f} s, {crowd.ms_per_token():.1f} ms a token, {modes}")
    assert min(record.num_rounds for record in crowd.records) >= 15
    assert min(busy) > 0.7 and max(busy) <= 1.05
    # The first rounds go to finding out what is faster.
    assert crowd.ms_per_token() < 1.05 * plain_ms
