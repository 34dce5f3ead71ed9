"""The low-rank products of adapters on an accelerator, gathered by row as Punica's (Chen et al., arXiv 2310.18547): one
kernel for A x, one for B times that.

A program has a tile of rows, and computes the tile's product with each of the adapters that its rows have, of which a
row keeps its own: the rows of a sequence lie together, so most tiles have one. The inputs are added up in parts of
SPLIT, and the parts in order, so that few rows fill the device, too. A row's sums have one order whatever its
neighbours are."""

# mypy: allow-untyped-decorators, disable-error-code="import-untyped,import-not-found"
from __future__ import annotations

from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.types import LowRankWeights

TILE_ROWS = 16
TILE_OUT = 64
SPLIT = 512  # inputs of one program
STEP_BYTES = 128  # of the inputs of a row, at once
MOST_SLICES = 3


def add_low_rank(
    y: Tensor,  # [rows, out], changed
    x: Tensor,  # [rows, in]
    weights: LowRankWeights,
    slots: Tensor,  # [rows] int32
) -> None:
    """Launches the reference's `add_low_rank`."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    (num_rows, width), (_, num_slices, rank, _) = x.shape, weights.down.shape
    if num_rows == 0:
        return
    row_tiles, splits = triton.cdiv(num_rows, TILE_ROWS), triton.cdiv(width, SPLIT)
    inner = torch.empty(splits, num_rows, num_slices, rank, dtype=torch.float32, device=x.device)
    # The interpreter multiplies no bfloat16; widening it is exact.
    widen = triton.knobs.runtime.interpret and x.dtype == torch.bfloat16
    _down_kernel[(row_tiles, num_slices, splits)](
        inner, x, weights.down, weights.scaling, slots, num_rows, width, x.stride(0), num_slices,
        widen, "ieee" if x.dtype == torch.float32 else "tf32",
        TILE_ROWS, rank, SPLIT, STEP_BYTES // x.element_size(), num_warps=4,
    )  # fmt: skip
    bounds = [*weights.bounds, *[weights.bounds[-1]] * (MOST_SLICES - num_slices)]
    out_tiles = sum(triton.cdiv(end - start, TILE_OUT) for start, end in pairwise(bounds))
    _up_kernel[(row_tiles, out_tiles)](
        y, inner, weights.up, slots, num_rows, y.stride(0), num_slices, splits, *bounds[1:],
        TILE_ROWS, rank, TILE_OUT, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def _down_kernel(
    inner: tl.tensor,  # [splits, rows, slices, rank] float32, written
    x: tl.tensor,  # [rows, in]
    down: tl.tensor,  # [slots, slices, rank, in]
    scaling: tl.tensor,  # [slots, slices]
    slots: tl.tensor,  # [rows]
    num_rows: tl.tensor,
    width: tl.tensor,
    x_stride: tl.tensor,
    num_slices: tl.tensor,
    WIDEN: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    RANK: tl.constexpr,
    SPLIT: tl.constexpr,
    STEP: tl.constexpr,
) -> None:
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    slice_index, split = tl.program_id(1), tl.program_id(2)
    slot_of = tl.load(slots + rows, rows < num_rows, -1)  # [ROWS]
    ranks, steps = tl.arange(0, RANK), tl.arange(0, STEP)
    begin = split * SPLIT
    end = tl.minimum(begin + SPLIT, width)
    result = tl.zeros([ROWS, RANK], tl.float32)
    for slot in range(tl.min(tl.where(slot_of < 0, 1 << 30, slot_of)), tl.max(slot_of) + 1):
        mine = slot_of == slot
        scale = tl.load(scaling + slot * num_slices + slice_index)
        place = ((tl.zeros([1], tl.int64) + slot) * num_slices + slice_index)[:, None]  # of more numbers than 32 bits
        if (tl.max(mine.to(tl.int32)) > 0) & (scale != 0.0):
            total = tl.zeros([ROWS, RANK], tl.float32)
            for start in range(begin, end, STEP):
                inside = steps < end - start
                left = tl.load(
                    x + rows[:, None] * x_stride + start + steps[None, :], mine[:, None] & inside[None, :], 0.0
                )
                right = tl.load(
                    down + (place * RANK + ranks[None, :]) * width + start + steps[:, None], inside[:, None], 0.0
                )
                if WIDEN:
                    left, right = left.to(tl.float32), right.to(tl.float32)
                total = tl.dot(left, right, total, input_precision=PRECISION)
            result = tl.where(mine[:, None], total * scale, result)
    stored = ((split * num_rows + rows[:, None]) * num_slices + slice_index) * RANK + ranks[None, :]
    tl.store(inner + stored, result, (slot_of >= 0)[:, None])


@triton.jit(do_not_specialize=["num_rows"])
def _up_kernel(
    y: tl.tensor,  # [rows, out], changed
    inner: tl.tensor,  # [splits, rows, slices, rank] float32
    up: tl.tensor,  # [slots, out, rank]
    slots: tl.tensor,  # [rows]
    num_rows: tl.tensor,
    y_stride: tl.tensor,
    num_slices: tl.tensor,
    splits: tl.tensor,
    first_end: tl.tensor,  # of each slice's outputs
    second_end: tl.tensor,
    num_out: tl.tensor,
    ROWS: tl.constexpr,
    RANK: tl.constexpr,
    OUT: tl.constexpr,
) -> None:
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    slot_of = tl.load(slots + rows, rows < num_rows, -1)  # [ROWS]
    has_adapter = slot_of >= 0
    ranks = tl.arange(0, RANK)
    tile = tl.program_id(1)
    first_tiles = tl.cdiv(first_end, OUT)
    second_tiles = first_tiles + tl.cdiv(second_end - first_end, OUT)
    is_second, is_third = tile >= first_tiles, tile >= second_tiles
    slice_index = is_second.to(tl.int32) + is_third.to(tl.int32)
    start = tl.where(is_third, second_end, tl.where(is_second, first_end, 0))
    end = tl.where(is_third, num_out, tl.where(is_second, second_end, first_end))
    before = tl.where(is_third, second_tiles, tl.where(is_second, first_tiles, 0))
    columns = start + (tile - before) * OUT + tl.arange(0, OUT)
    is_column = columns < end
    wide = tl.zeros([ROWS, RANK], tl.float32)
    for split in range(0, splits):
        place = ((split * num_rows + rows[:, None]) * num_slices + slice_index) * RANK + ranks[None, :]
        wide += tl.load(inner + place, has_adapter[:, None], 0.0)
    result = tl.zeros([ROWS, OUT], tl.float32)
    for slot in range(tl.min(tl.where(has_adapter, slot_of, 1 << 30)), tl.max(slot_of) + 1):
        mine = slot_of == slot
        if tl.max(mine.to(tl.int32)) > 0:
            first = ((tl.zeros([1], tl.int64) + slot) * num_out)[:, None]
            place = (first + columns[None, :]) * RANK + ranks[:, None]
            weights = tl.load(up + place, is_column[None, :], 0.0).to(tl.float32)
            total = tl.dot(wide, weights, input_precision="ieee")
            result = tl.where(mine[:, None], total, result)
    stored = y + rows[:, None] * y_stride + columns[None, :]
    inside = has_adapter[:, None] & is_column[None, :]
    result += tl.load(stored, inside, 0.0).to(tl.float32)
    tl.store(stored, result.to(y.dtype.element_ty), inside)
