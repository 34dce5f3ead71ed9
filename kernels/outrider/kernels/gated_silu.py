"""The gate of a feed-forward layer: silu(gate) * up."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def gated_silu(gate_up: Tensor, *, batch_invariant: bool = False) -> Tensor:  # [rows, 2 * width] -> [rows, width]
    """The gate is the first half of each row."""
    gate, up = gate_up.chunk(2, dim=-1)
    if batch_invariant:  # silu's bits depend on the place of an element, those of exp do not
        return gate / (1 + torch.exp(-gate)) * up
    return F.silu(gate).mul_(up)
