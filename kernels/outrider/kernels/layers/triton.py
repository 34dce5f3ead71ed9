"""RMS norm on an accelerator: one program a row (and head), so that a row's bits depend on the row alone.

The feed-forward gates on an accelerator, computed in float32 and rounded once.

A matrix product whose bits depend on the row alone: y = x W^T + b with float32 accumulation.

One tile shape serves every number of rows: a program computes TILE_ROWS x TILE_OUT outputs and adds its products up
along K in one order, in steps that depend on the data type alone. Rows past the last are read as zeros and not stored.
There is no split along K and no tuning by shape: a row verified among many has the bits that it has alone."""

# mypy: allow-untyped-decorators, disable-error-code="import-untyped,import-not-found"
from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.common_triton import add_products, tanh


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Launches the reference's `rms_norm`: x [rows, ..., dim]; weight [dim] or [..., dim]."""
    rows = x.flatten(1, -2) if x.dim() > 2 else x[:, None]  # [rows, heads, dim]
    rows = rows if rows.stride(2) == 1 else rows.contiguous()
    out = x.new_empty(x.shape)
    _launch(out, None, rows, None, weight, eps)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Launches the reference's `add_rms_norm`: x and residual [rows, dim]."""
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


WIDTH_TILE = 1024


def gated(gate_up: Tensor, activation: Literal["silu", "gelu", "gelu_tanh"]) -> Tensor:
    """Launches the reference's `gated_silu` or `gated_gelu`: [rows, 2 * width] -> [rows, width]."""
    gate_up = gate_up if gate_up.stride(-1) == 1 else gate_up.contiguous()
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    tile = min(WIDTH_TILE, triton.next_power_of_2(width))
    _gate_kernel[(rows, triton.cdiv(width, tile))](
        out, gate_up, width, gate_up.stride(0), ACTIVATION=activation, TILE=tile
    )
    return out


@triton.jit
def _gate_kernel(
    out: tl.tensor,  # [rows, width], written
    gate_up: tl.tensor,  # [rows, 2 * width]
    width: int,
    row_stride: int,
    ACTIVATION: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < width
    source = gate_up + row * row_stride + column
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + width, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        fade = tl.exp(-tl.abs(gate))  # at most 1, where exp(-gate) might overflow
        active = gate * tl.where(gate >= 0, 1.0, fade) / (1.0 + fade)
    elif ACTIVATION == "gelu_tanh":
        active = 0.5 * gate * (1.0 + tanh(0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)))
    else:
        active = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    tl.store(out + row * width + column, (active * up).to(out.dtype.element_ty), mask=inside)


TILE_ROWS = 64
TILE_OUT = 32
TILE_BYTES = 128  # along K, of one row of a tile


def linear(
    x: Tensor,  # [rows, in]
    weight: Tensor,  # [out, in], the data type of x
    bias: Tensor | None = None,  # [out]
) -> Tensor:  # [rows, out]
    """Launches the product."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    num_rows, width = x.shape
    num_out = weight.shape[0]
    out = x.new_empty(num_rows, num_out)
    if num_rows == 0:
        return out
    # The interpreter multiplies no bfloat16; widening it is exact.
    widen = triton.knobs.runtime.interpret and x.dtype == torch.bfloat16
    _linear_kernel[(triton.cdiv(num_out, TILE_OUT), triton.cdiv(num_rows, TILE_ROWS))](
        x, weight, weight if bias is None else bias, out, num_rows, num_out, width,
        x.stride(0), weight.stride(0), weight.stride(1), bias is not None,
        widen, "ieee" if x.dtype == torch.float32 else "tf32",  # "ieee" keeps half types off the tensor cores
        TILE_ROWS, TILE_OUT, TILE_BYTES // x.element_size(), num_warps=4, num_stages=3,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_rows"])  # one binary for every number of rows
def _linear_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    num_out: tl.tensor,
    width: tl.tensor,
    x_stride: tl.tensor,
    weight_out_stride: tl.tensor,
    weight_in_stride: tl.tensor,
    HAS_BIAS: tl.constexpr,
    WIDEN: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    OUT: tl.constexpr,
    STEP: tl.constexpr,
) -> None:
    columns = tl.program_id(0) * OUT + tl.arange(0, OUT)
    rows = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    steps = tl.arange(0, STEP)
    is_row, is_column = rows < num_rows, columns < num_out
    x_tile = x + rows[:, None] * x_stride + steps[None, :]
    weight_tile = weight + columns.to(tl.int64)[None, :] * weight_out_stride + steps[:, None] * weight_in_stride
    total = add_products(
        tl.zeros([ROWS, OUT], tl.float32), x_tile, weight_tile, is_row, is_column, width, weight_in_stride, WIDEN,
        PRECISION, STEP,
    )  # fmt: skip
    if HAS_BIAS:
        total += tl.load(bias + columns, is_column, 0.0).to(tl.float32)[None, :]
    stored = rows[:, None] * num_out + columns[None, :]
    tl.store(out + stored, total.to(out.dtype.element_ty), is_row[:, None] & is_column[None, :])
