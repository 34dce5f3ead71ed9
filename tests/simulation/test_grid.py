"""What is promised of `auto`, in a few cells of the grid. Of others `python tests/simulation/grid.py` tells."""

from __future__ import annotations

import pytest
from simulation.grid import Cell, over_plain, rates_of, sample
from support.environment import SEED

from outrider.cli.virtual_loop import gateway_loop
from outrider.gateway.learning import Learned, RequestKind
from outrider.planner.crowd import NewDriver
from outrider.planner.forecast import VerifyCosts

FEW = (
    Cell(10, 64, 0.2, 0.65, 0.2, 1),
    Cell(1.9, 64, 0.05, 0.3, 2, 1),
    Cell(1.9, 16, 0.2, 0.65, 10, 4),
    Cell(10, 64, 0.5, 0.3, 10, 16),
    Cell(1.9, 64, 0.5, 0.65, 0.2, 16),
)


@pytest.mark.parametrize("cell", FEW)
def test_what_is_promised(cell: Cell) -> None:
    rates = rates_of(cell)
    assert not list(rates.misses()), rates


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("cell", sample(8, SEED), ids=str)
def test_no_cell_is_far_from_it(cell: Cell) -> None:
    """Other cells every night. Of some a little is missing: the script says of which, and how much."""
    rates = rates_of(cell)
    print(rates, *rates.misses())
    assert rates.cold_64 >= 0.87 and rates.cold_256 >= 0.93
    assert rates.settled >= max(0.97, 0.88 * rates.best)


def test_mixed_traffic() -> None:
    """Greedy requests of repeating text among sampled ones: neither is decoded by what is best for the other."""
    greedy = Cell(10, 64, 0.05, 0.9, 0.2, 1)
    drawn = greedy._replace(acceptance=0.1)

    def new_loops() -> list[NewDriver]:
        known, passes = Learned(("t", "d"), VerifyCosts(greedy.step_costs)), [(n, round(us)) for n, us in greedy.passes]
        kinds = RequestKind(), RequestKind(is_drawn=True)
        return [gateway_loop(greedy.step_costs, known=known.of((), kind=kind, draft_costs=passes)) for kind in kinds]

    alone, _ = new_loops()
    rates_alone = [over_plain(greedy, alone, 96) for _ in range(12)]
    mixed, sampled = new_loops()
    pairs = [(over_plain(drawn, sampled, 96), over_plain(greedy, mixed, 96)) for _ in range(12)]
    print(rates_alone, pairs)
    assert sum(rate for _, rate in pairs) >= 0.9 * sum(rates_alone)
    assert sum(rate for rate, _ in pairs[1:]) >= 0.97 * len(pairs[1:])
