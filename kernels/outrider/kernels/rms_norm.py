"""Root-mean-square normalisation over the last dimension."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from outrider.kernels.batch_invariant import by_row_tiles


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, batch_invariant: bool = False) -> Tensor:
    """x: [rows, ..., dim]; weight: [dim] or [..., dim] -> [rows, ..., dim], computed in float32."""
    if batch_invariant:
        return by_row_tiles(lambda tile: _reference(tile, weight, eps), x)
    if weight.dim() == 1:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    return F.rms_norm(x, (x.shape[-1],), None, eps) * weight


def _reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:  # [rows, ..., dim]
    wide = x.float()
    norm = (wide.square().mean(-1, keepdim=True) + eps).sqrt()  # [rows, ..., 1]
    return (wide / norm).to(x.dtype) * weight
