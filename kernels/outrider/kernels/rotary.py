"""Rotary position embedding, in the layout where element i turns with element i + dim / 2."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_table(inv_freq: Tensor, scaling: float, max_positions: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """inv_freq: [dim / 2] -> cos and signed sin, [max_positions, dim] each. The first half of the sines is negated, so
    that a turn is x * cos + roll(x) * sin."""
    angles = (
        torch.arange(max_positions, dtype=torch.float32)[:, None] * inv_freq.float()[None, :]
    )  # [positions, dim / 2]
    cos, sin = angles.cos() * scaling, angles.sin() * scaling
    return torch.cat([cos, cos], -1).to(dtype), torch.cat([-sin, sin], -1).to(dtype)


def apply_rotary(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """x: [rows, heads, dim]; cos and signed_sin: [rows, 1, dim], the table's rows of their positions -> [rows, heads,
    dim]."""
    return (x * cos).add_(x.roll(x.shape[-1] // 2, -1).mul_(signed_sin))
