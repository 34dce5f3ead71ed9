"""Root-mean-square normalisation over the last dimension, alone or after a residual is added."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from outrider.kernels import dispatch
from outrider.kernels.batch_invariant import by_row_tiles


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, batch_invariant: bool = False) -> Tensor:
    """x: [rows, ..., dim]; weight: [dim] or [..., dim] -> [rows, ..., dim], computed in float32. A float32 weight
    multiplies before the result is rounded to the type of x; on the CPU one of x's own type does so after."""
    if dispatch.runs_triton(x):
        from outrider.kernels.rms_norm_triton import rms_norm as launch

        return launch(x, weight, eps)
    if weight.dtype != x.dtype:
        return rms_norm(x.float(), weight.float(), eps, batch_invariant=batch_invariant).to(x.dtype)
    if batch_invariant:
        return by_row_tiles(lambda tile: _reference(tile, weight, eps), x)
    if weight.dim() == 1:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    return F.rms_norm(x, (x.shape[-1],), None, eps) * weight


def add_rms_norm(
    x: Tensor,  # [rows, dim]
    residual: Tensor,  # [rows, dim]
    weight: Tensor,  # [dim]
    eps: float,
    *,
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor]:  # [rows, dim] each
    """The norm of the sum, and the sum, rounded to its type before it is normed."""
    if dispatch.runs_triton(x):
        from outrider.kernels.rms_norm_triton import add_rms_norm as launch

        return launch(x, residual, weight, eps)
    total = residual + x
    return rms_norm(total, weight, eps, batch_invariant=batch_invariant), total


def _reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:  # [rows, ..., dim]
    wide = x.float()
    norm = (wide.square().mean(-1, keepdim=True) + eps).sqrt()  # [rows, ..., 1]
    return (wide / norm).to(x.dtype) * weight
