"""A matrix product whose bits depend on the row alone: y = x W^T + b with float32 accumulation.

One tile shape serves every number of rows: a program computes TILE_ROWS x TILE_OUT outputs and adds its products up
along K in one order, in steps that depend on the data type alone. Rows past the last are read as zeros and not stored.
There is no split along K and no tuning by shape: a row verified among many has the bits that it has alone.
"""

# mypy: allow-untyped-decorators, disable-error-code="import-untyped,import-not-found"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

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
    total = tl.zeros([ROWS, OUT], tl.float32)
    for start in range(0, width, STEP):
        inside = steps < width - start
        left = tl.load(x_tile + start, is_row[:, None] & inside[None, :], 0.0)
        right = tl.load(weight_tile + start * weight_in_stride, inside[:, None] & is_column[None, :], 0.0)
        if WIDEN:
            left, right = left.to(tl.float32), right.to(tl.float32)
        total = tl.dot(left, right, total, input_precision=PRECISION)
    if HAS_BIAS:
        total += tl.load(bias + columns, is_column, 0.0).to(tl.float32)[None, :]
    stored = rows[:, None] * num_out + columns[None, :]
    tl.store(out + stored, total.to(out.dtype.element_ty), is_row[:, None] & is_column[None, :])
