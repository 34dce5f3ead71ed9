"""What `auto` makes of machines of many shapes, in virtual time, with the production loop, controller and hold: from
cold, and once a gateway has run for a while, over plain decoding and over the best of the fixed modes.

python tests/simulation/grid.py --cells 60 --seed 7
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from outrider.cli.virtual_loop import gateway_loop, new_crowd
from outrider.planner.crowd import Machines, NewDriver
from outrider.planner.policy import Mode
from outrider.planner.virtual_services import DraftQuality

MAX_ROWS = 512
LONG_S = 3600.0  # virtual ones, in which every burst ends
LEARNING = 2  # bursts between the first one and those that count as settled
SETTLED = 2  # bursts that do
FIXED = (
    *((Mode.SEQUENTIAL, k) for k in (2, 4, 8)),
    (Mode.CHAINS, 3),
    *((Mode.BRANCHES, k) for k in (3, 6)),
)


class Cell(NamedTuple):
    """Machines, and who asks."""

    step_ms: float  # of the target
    flat_rows: int  # up to which its steps take the same
    draft_cost: float  # a pass of the draft, over a step
    acceptance: float
    round_trip_ms: float
    streams: int

    @property
    def step_costs(self) -> tuple[tuple[int, float], ...]:
        """Of the target, in microseconds by rows."""
        step_us = 1e3 * self.step_ms
        return ((1, step_us), (self.flat_rows, step_us), (MAX_ROWS, step_us * MAX_ROWS / self.flat_rows))

    @property
    def passes(self) -> tuple[tuple[int, float], ...]:
        """Of the draft."""
        draft_us = 1e3 * self.step_ms * self.draft_cost
        return ((1, draft_us), (64, draft_us), (MAX_ROWS, 4 * draft_us))

    def new_loop(self, modes: tuple[Mode, ...] = tuple(Mode), num_draft_tokens: int | None = None) -> NewDriver:
        """A gateway that knows nothing but what target and draft say of their steps."""
        return gateway_loop(self.step_costs, modes, num_draft_tokens, self.passes)


STEPS_MS, FLAT_ROWS, DRAFT_COSTS = (1.9, 10.0, 30.0), (16, 64, 256), (0.05, 0.2, 0.5, 0.8)
ACCEPTANCES, ROUND_TRIPS_MS, STREAMS = (0.3, 0.5, 0.65, 0.85, 0.9), (0.2, 2.0, 10.0), (1, 4, 16, 64, 256)


def sample(number: int, seed: int) -> list[Cell]:
    """Some of all cells."""
    cells = [
        Cell(*values) for values in product(STEPS_MS, FLAT_ROWS, DRAFT_COSTS, ACCEPTANCES, ROUND_TRIPS_MS, STREAMS)
    ]
    return random.Random(seed).sample(cells, number)


def burst(cell: Cell, loop: NewDriver, num_tokens: int) -> float:
    """Tokens a second of streams that begin together, to the end of the last. Every burst has the same texts."""
    machines = Machines(cell.step_costs, cell.passes, DraftQuality(cell.acceptance), cell.round_trip_ms / 2e3)
    crowd = new_crowd(machines)
    crowd.add(loop, cell.streams, num_tokens)
    crowd.run(LONG_S)
    assert all(record.over for record in crowd.records)
    return sum(record.num_tokens for record in crowd.records) / max(one.last_at for one in crowd.records)


@cache
def plain(cell: Cell, num_tokens: int) -> float:
    """Of the same gateway, which decodes plainly."""
    return burst(cell, cell.new_loop((Mode.OFF,)), num_tokens)


def over_plain(cell: Cell, loop: NewDriver, num_tokens: int) -> float:
    """A burst's rate."""
    return burst(cell, loop, num_tokens) / plain(cell, num_tokens)


class Rates(NamedTuple):
    """Over plain decoding."""

    cold_64: float  # of the first 64 tokens of every stream
    cold_256: float
    settled: float
    best: float  # of the fixed modes

    def misses(self) -> Iterator[str]:
        """Of what is promised."""
        if self.cold_64 < 0.9:
            yield "cold, 64 tokens"
        if self.cold_256 < 0.97:
            yield "cold, 256 tokens"
        if self.settled < 0.99:
            yield "settled, over plain"
        if self.settled < 0.95 * self.best:
            yield "settled, over the best mode"


def best_fixed(cell: Cell, num_tokens: int) -> float:
    """Of the fixed modes and off, once it is known what things take."""
    rates = [1.0]
    for mode, num_draft_tokens in FIXED:
        loop = cell.new_loop((mode,), num_draft_tokens)
        burst(cell, loop, 32)
        rates.append(over_plain(cell, loop, num_tokens))
    return max(rates)


def settled_tokens(cell: Cell) -> int:
    """Fewer where more streams tell of them."""
    return 256 if cell.streams <= 16 else 128 if cell.streams <= 64 else 64


def rates_of(cell: Cell) -> Rates:
    """What a cell makes."""
    loop, num_tokens = cell.new_loop(), settled_tokens(cell)
    cold_64, cold_256 = over_plain(cell, cell.new_loop(), 64), over_plain(cell, loop, 256)
    for _ in range(LEARNING):
        burst(cell, loop, num_tokens)
    settled = [over_plain(cell, loop, num_tokens) for _ in range(SETTLED)]
    return Rates(cold_64, cold_256, SETTLED / sum(1 / rate for rate in settled), best_fixed(cell, num_tokens))


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if all cells keep what is promised."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args(arguments)
    cells, found = sample(options.cells, options.seed), 0
    with ProcessPoolExecutor(options.processes) as pool:
        for cell, rates in zip(cells, pool.map(rates_of, cells), strict=True):
            misses = ", ".join(rates.misses())
            found += bool(misses)
            print(*cell, "|", *(f"{rate:.3f}" for rate in rates), misses, flush=True)
    return found > 0


if __name__ == "__main__":
    sys.exit(main())
