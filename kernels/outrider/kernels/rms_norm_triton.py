"""RMS norm on an accelerator: one program a row (and head), so that a row's bits depend on the row alone."""

# mypy: allow-untyped-decorators, disable-error-code="import-untyped,import-not-found"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Launches `rms_norm.rms_norm`: x [rows, ..., dim]; weight [dim] or [..., dim]."""
    rows = x.flatten(1, -2) if x.dim() > 2 else x[:, None]  # [rows, heads, dim]
    rows = rows if rows.stride(2) == 1 else rows.contiguous()
    out = x.new_empty(x.shape)
    _launch(out, None, rows, None, weight, eps)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Launches `rms_norm.add_rms_norm`: x and residual [rows, dim]."""
    x = x if x.stride(1) == 1 else x.contiguous()
    residual = residual if residual.stride() == x.stride() else residual.contiguous()
    out, total = x.new_empty(x.shape), x.new_empty(x.shape)
    _launch(out, total, x[:, None], residual[:, None], weight, eps)
    return out, total


def _launch(
    out: Tensor,  # [rows, ..., dim], written
    total: Tensor | None,  # [rows, dim], written
    x: Tensor,  # [rows, heads, dim]
    residual: Tensor | None,  # [rows, 1, dim]
    weight: Tensor,  # [dim] or [..., dim]
    eps: float,
) -> None:
    rows, heads, dim = x.shape
    tile = triton.next_power_of_2(dim)
    residual_stride = 0 if residual is None else residual.stride(0)
    _norm_kernel[(rows * heads,)](
        out, total, x, residual, weight.contiguous(), eps, x.stride(0), x.stride(1), residual_stride,
        HEADS=heads, WEIGHT_HEADS=weight.numel() // dim, DIM=dim, DIM_TILE=tile,
        num_warps=min(16, max(1, tile // 512)),
    )  # fmt: skip


@triton.jit
def _norm_kernel(
    out: tl.tensor,  # [rows, heads, dim], written
    total: tl.tensor,  # [rows, dim], written, or None
    x: tl.tensor,  # [rows, heads, dim]
    residual: tl.tensor,  # [rows, dim] or None
    weight: tl.tensor,  # [weight heads, dim]
    eps: float,
    row_stride: int,
    head_stride: int,
    residual_stride: int,
    HEADS: tl.constexpr,
    WEIGHT_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
) -> None:
    place = tl.program_id(0).to(tl.int64)
    row, head = place // HEADS, place % HEADS
    dim = tl.arange(0, DIM_TILE)
    inside = dim < DIM
    wide = tl.load(x + row * row_stride + head * head_stride + dim, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        wide += tl.load(residual + row * residual_stride + dim, mask=inside, other=0.0).to(tl.float32)
        rounded = wide.to(total.dtype.element_ty)
        tl.store(total + row * DIM + dim, rounded, mask=inside)
        wide = rounded.to(tl.float32)
    norm = tl.sqrt(tl.sum(wide * wide) / DIM + eps)
    scale = tl.load(weight + head % WEIGHT_HEADS * DIM + dim, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place * DIM + dim, (wide / norm * scale).to(out.dtype.element_ty), mask=inside)
