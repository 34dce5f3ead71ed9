"""What `auto` makes of its first tokens, when nothing was measured but what target and draft say of their steps: in
virtual time, with the production loop, on machines of which some make speculation pay and others do not."""

from __future__ import annotations

import pytest
from simulation.grid import Cell, over_plain

PROMISED = {64: 0.9, 256: 0.97}  # of plain decoding, by the tokens of a stream

COLD = (
    Cell(1.9, 16, 0.05, 0.4, 10, 1),
    Cell(1.9, 64, 0.5, 0.65, 10, 16),
    Cell(1.9, 64, 0.5, 0.4, 2, 16),
    Cell(10, 64, 0.2, 0.4, 10, 16),
    Cell(1.9, 64, 0.05, 0.4, 2, 1),
    Cell(10, 16, 0.2, 0.4, 10, 4),
    Cell(30, 64, 0.5, 0.65, 10, 16),
    Cell(10, 16, 0.2, 0.85, 0.2, 16),
)


@pytest.mark.parametrize("num_tokens", PROMISED)
@pytest.mark.parametrize("cell", COLD)
def test_what_does_not_pay_costs_little(cell: Cell, num_tokens: int) -> None:
    assert over_plain(cell, cell.new_loop(), num_tokens) >= PROMISED[num_tokens]


@pytest.mark.parametrize(
    ("cell", "least"),
    [
        (Cell(10, 64, 0.05, 0.65, 0.2, 1), 1.95),
        (Cell(30, 64, 0.05, 0.65, 2, 4), 1.65),
        (Cell(1.9, 64, 0.05, 0.65, 0.2, 4), 1.5),
    ],
)
def test_what_pays_pays_at_once(cell: Cell, least: float) -> None:
    """So that to begin with plain decoding is no answer."""
    assert over_plain(cell, cell.new_loop(), 64) >= least
