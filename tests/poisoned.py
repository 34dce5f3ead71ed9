"""Tensors that lie in the middle of poisoned memory, so that a read outside of them shows in the result."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

POISON_INTEGER = -(1 << 20)
MARGIN = 7


def poisoned(values: Tensor, device: torch.device | str = "cpu") -> Tensor:
    """A copy of `values`, [rows, width] or [width], with NaN, or a large negative integer, all round."""
    rows, width = (values.shape[0], values.shape[1]) if values.dim() == 2 else (1, values.shape[0])
    poison = float("nan") if values.is_floating_point() else POISON_INTEGER
    memory = torch.full((rows + 2, MARGIN + width + MARGIN), poison, dtype=values.dtype, device=device)
    inside = memory[1 : rows + 1, MARGIN : MARGIN + width]
    inside.copy_(values.view(rows, width))
    return inside if values.dim() == 2 else inside[0]


@contextmanager
def poisoned_allocations() -> Iterator[None]:
    """Fills what torch.empty returns with NaN, or the greatest integer."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
