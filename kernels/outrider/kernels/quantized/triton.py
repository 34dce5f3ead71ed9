"""Products with packed weights on an accelerator. Codes become numbers in registers and multiply as they are: integers
of 8 bits and floats of 4 and 8 are exact in every type that rows have. Sums are float32; those of the inputs that share a
scale are multiplied with it, so no weight is ever rounded.

A program has a tile of rows and of outputs, and a part of the inputs, whose steps it adds up in order; the parts are
added in order by a second kernel, so that few outputs fill the device, too. How many there are follows from the matrix
alone. In batch-invariant mode a tile has one size, and a row the bits that it has alone."""

# mypy: allow-untyped-decorators, disable-error-code="import-untyped,import-not-found"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.quantized.packed import BLOCK_IN, HALF, STEP, TILE_OUT, PackedMatrix

FEW_ROWS, MANY_ROWS = 16, 64  # of a tile; up to the first many, and in batch-invariant mode, it is the first
PROGRAMS = 512  # of a tile of rows: as many as fill a large device a few times
LEAST_BLOCKS = 8  # of BLOCK_IN inputs, that a program adds up
MOST_PARTS = 8
WHOLE_ROW = 1 << 30  # inputs that share a scale where all do: one binary for every width
INTEGERS, FLOATS_OF_4, FLOATS_OF_8, NATIVE_FLOATS_OF_8 = 0, 1, 2, 3
NATIVE_CAPABILITY = 89  # of devices that convert floats of 8 bits
ROW_TILE = 1024  # numbers of a row that a program decodes, or of the parts that it adds


def linear(
    x: Tensor,  # [rows, in]
    weight: PackedMatrix,
    bias: Tensor | None = None,  # [out]
    *,
    out: Tensor | None = None,  # [rows, out], written
    batch_invariant: bool = False,
) -> Tensor:  # [rows, out]
    """Launches `packed_linear`."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    (num_rows, width), num_out = x.shape, len(weight)
    out = x.new_empty(num_rows, num_out) if out is None else out
    if num_rows == 0:
        return out
    blocks = triton.cdiv(width, BLOCK_IN)
    num_parts = parts_of(num_out, blocks)
    few = batch_invariant or num_rows <= FEW_ROWS
    tile = FEW_ROWS if few else MANY_ROWS
    sums = out if num_parts == 1 else x.new_empty(num_parts, num_rows, num_out, dtype=torch.float32)
    # The interpreter multiplies no bfloat16; widening it is exact.
    widen = triton.knobs.runtime.interpret and x.dtype == torch.bfloat16
    grid = triton.cdiv(num_rows, tile), triton.cdiv(num_out, TILE_OUT), num_parts
    _product_kernel[grid](
        sums, x, *_tensors(weight), bias if num_parts == 1 else None,
        num_rows, num_out, width, x.stride(0), sums.stride(-2), weight.codes.shape[1],
        blocks, triton.cdiv(blocks, num_parts), **_meaning(weight),
        HALVES=HALF in (weight.form.span, weight.form.part), WIDEN=widen,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",  # "ieee" keeps half types off the tensor cores
        ROWS=tile, OUT=TILE_OUT, num_warps=4, num_stages=4,
    )  # fmt: skip
    if num_parts > 1:
        _join_kernel[(num_rows, triton.cdiv(num_out, ROW_TILE))](
            out, sums, bias, num_rows, num_out, out.stride(0), PARTS=num_parts, TILE=ROW_TILE
        )
    return out


def rows(weight: PackedMatrix, ids: Tensor, dtype: torch.dtype) -> Tensor:  # [rows] -> [rows, in]
    """Launches `packed_rows`."""
    width = weight.shape[1]
    out = torch.empty(len(ids), width, dtype=dtype, device=ids.device)
    if len(ids):
        _rows_kernel[(len(ids), triton.cdiv(width, ROW_TILE))](
            out, ids, *_tensors(weight), width, weight.codes.shape[1], **_meaning(weight), TILE=ROW_TILE
        )
    return out


def parts_of(num_out: int, blocks: int) -> int:
    """Into how many parts the inputs of a matrix are split."""
    parts = 1
    while (
        parts < MOST_PARTS
        and triton.cdiv(num_out, TILE_OUT) * parts < PROGRAMS
        and blocks // (2 * parts) >= LEAST_BLOCKS
    ):
        parts *= 2
    return parts


def _tensors(weight: PackedMatrix) -> tuple[Tensor | None, ...]:
    """As both kernels take them."""
    return (
        weight.codes, weight.upper, weight.scales, weight.minima, weight.part_scales, weight.part_minima, weight.zeros,
    )  # fmt: skip


def _meaning(weight: PackedMatrix) -> dict[str, Any]:
    """What both kernels are compiled for."""
    form = weight.form
    span = WHOLE_ROW if form.span == weight.shape[1] else form.span
    return {"KIND": _kind(weight), "BITS": form.bits, "SPAN": span, "PART": form.part or STEP, "ZERO": form.zero}


def _kind(weight: PackedMatrix) -> int:
    if weight.form.floats:
        if triton.knobs.runtime.interpret:
            return FLOATS_OF_8
        capability = triton.runtime.driver.active.get_current_target().arch
        return NATIVE_FLOATS_OF_8 if capability >= NATIVE_CAPABILITY else FLOATS_OF_8
    return FLOATS_OF_4 if weight.form.table else INTEGERS


@triton.jit
def _of_codes(codes: tl.tensor, zero: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    """What codes, uint8, stand for before they are scaled, float32. An integer below 2^23 is the last bits of that power
    of two plus itself, which takes no conversion. Floats become float16 numbers of the same digits, whose exponents are
    less by as much as the types' biases differ."""
    if KIND == 0:  # INTEGERS
        return (codes.to(tl.uint32) | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + zero)
    if KIND == 1:  # FLOATS_OF_4, doubled
        wide = codes.to(tl.uint16)
        return (((wide & 8) << 12) | ((wide & 7) << 9)).to(tl.float16, bitcast=True).to(tl.float32) * 32768.0
    if KIND == 3:  # NATIVE_FLOATS_OF_8
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    wide = codes.to(tl.uint16)
    number = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where((wide & 0x7F) == 0x7F, float("nan"), number)


@triton.jit
def _numbers(
    of_spans: tl.tensor,  # [spans, columns]
    of_parts: tl.tensor,  # [parts, columns] int8, or None
    inputs: tl.tensor,
    column: tl.tensor,
    columns: tl.tensor,
    SPAN: tl.constexpr,
    PART: tl.constexpr,
) -> tl.tensor:
    """The scales, minima or zeros that these inputs have, float32."""
    found = tl.load(of_spans + (inputs // SPAN).to(tl.int64) * columns + column).to(tl.float32)
    if of_parts is not None:
        found *= tl.load(of_parts + (inputs // PART).to(tl.int64) * columns + column).to(tl.float32)
    return found


@triton.jit
def _zero(
    zeros: tl.tensor,  # [spans, columns], or None
    inputs: tl.tensor,
    column: tl.tensor,
    columns: tl.tensor,
    SPAN: tl.constexpr,
    ZERO: tl.constexpr,
) -> tl.tensor:
    """The codes that stand for 0."""
    zero = tl.zeros(column.shape, tl.float32) + ZERO
    if zeros is not None:
        zero += _numbers(zeros, None, inputs, column, columns, SPAN, SPAN)
    return zero


@triton.jit
def _codes_of_step(
    codes: tl.tensor,
    upper: tl.tensor,
    step: tl.tensor,
    place: tl.tensor,  # [16, outputs]: where the bytes of a step lie, which are as many as a half's inputs
    column: tl.tensor,  # [outputs]
    columns: tl.tensor,
    BITS: tl.constexpr,
) -> tl.tensor:
    """Those of both halves of a step, [16, outputs] uint8 each."""
    if BITS == 8:
        start = codes + step.to(tl.int64) * 32 * columns
        return tl.load(start + place), tl.load(start + 16 * columns + place)
    both = tl.load(codes + step.to(tl.int64) * 16 * columns + place)
    first, second = both & 15, both >> 4
    if BITS > 4:
        ABOVE: tl.constexpr = BITS - 4
        index = tl.arange(0, 16)
        spread = index % (4 * ABOVE)
        above = tl.load(upper + step.to(tl.int64) * (4 * ABOVE) * columns + spread[:, None] * columns + column[None, :])
        shift = (index // (4 * ABOVE) * ABOVE).to(tl.uint8)[:, None]
        MASK: tl.constexpr = (1 << ABOVE) - 1
        first |= ((above >> shift) & MASK) << 4
        second |= ((above >> (shift + 4)) & MASK) << 4
    return first, second


@triton.jit(do_not_specialize=["num_rows"])  # one binary for every number of rows
def _product_kernel(
    out: tl.tensor,  # [rows, out], or [parts, rows, out] float32, written
    x: tl.tensor,  # [rows, in]
    codes: tl.tensor,
    upper: tl.tensor,
    scales: tl.tensor,
    minima: tl.tensor,
    part_scales: tl.tensor,
    part_minima: tl.tensor,
    zeros: tl.tensor,
    bias: tl.tensor,  # [out], or None
    num_rows: tl.tensor,
    num_out: tl.tensor,
    width: tl.tensor,
    x_stride: tl.tensor,
    out_stride: tl.tensor,
    columns: tl.tensor,
    blocks: tl.tensor,  # of BLOCK_IN inputs
    blocks_of_part: tl.tensor,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    SPAN: tl.constexpr,
    PART: tl.constexpr,
    ZERO: tl.constexpr,
    HALVES: tl.constexpr,  # scales are of 16 inputs
    WIDEN: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    OUT: tl.constexpr,
) -> None:
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * OUT + tl.arange(0, OUT)
    part = tl.program_id(2)
    index = tl.arange(0, 16)
    place = index[:, None] * columns + column[None, :]
    is_row = (row < num_rows)[:, None]
    x_tile = x + row.to(tl.int64)[:, None] * x_stride + index[None, :]
    total = tl.zeros([ROWS, OUT], tl.float32)
    for block in range(part * blocks_of_part, tl.minimum((part + 1) * blocks_of_part, blocks)):
        for turn in tl.static_range(4):  # steps of a block
            step = block * 4 + turn
            inputs = step * 32
            inside = (index < width - inputs)[None, :]
            left = tl.load(x_tile + inputs, is_row & inside, 0.0)
            inside = (index < width - inputs - 16)[None, :]
            right = tl.load(x_tile + inputs + 16, is_row & inside, 0.0)
            first, second = _codes_of_step(codes, upper, step, place, column, columns, BITS)
            zero = _zero(zeros, inputs, column, columns, SPAN, ZERO)
            first = _of_codes(first, zero[None, :], KIND)
            if SPAN == 16:
                zero = _zero(zeros, inputs + 16, column, columns, SPAN, ZERO)
            second = _of_codes(second, zero[None, :], KIND)
            if WIDEN:
                left, right = left.to(tl.float32), right.to(tl.float32)
            first, second = first.to(left.dtype), second.to(left.dtype)
            sums = tl.dot(left, first, input_precision=PRECISION)
            scale = _numbers(scales, part_scales, inputs, column, columns, SPAN, PART)
            if HALVES:
                total += sums * scale[None, :]
                scale = _numbers(scales, part_scales, inputs + 16, column, columns, SPAN, PART)
                sums = tl.dot(right, second, input_precision=PRECISION)
            else:
                sums = tl.dot(right, second, sums, input_precision=PRECISION)
            total += sums * scale[None, :]
            if minima is not None:
                less = _numbers(minima, part_minima, inputs, column, columns, SPAN, PART)
                whole = tl.sum(left.to(tl.float32), 1)[:, None]
                if HALVES:
                    total -= whole * less[None, :]
                    less = _numbers(minima, part_minima, inputs + 16, column, columns, SPAN, PART)
                    whole = tl.zeros([ROWS, 1], tl.float32)
                total -= (whole + tl.sum(right.to(tl.float32), 1)[:, None]) * less[None, :]
    is_column = column < num_out
    if bias is not None:
        total += tl.load(bias + column, is_column, 0.0).to(tl.float32)[None, :]
    at = (part.to(tl.int64) * num_rows + row)[:, None] * out_stride + column[None, :]
    tl.store(out + at, total.to(out.dtype.element_ty), is_row & is_column[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def _join_kernel(
    out: tl.tensor,  # [rows, out], written
    sums: tl.tensor,  # [parts, rows, out] float32
    bias: tl.tensor,  # [out], or None
    num_rows: tl.tensor,
    num_out: tl.tensor,
    out_stride: tl.tensor,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < num_out
    total = tl.load(sums + row * num_out + column, inside, 0.0)
    for part in tl.static_range(1, PARTS):
        total += tl.load(sums + (part * num_rows + row) * num_out + column, inside, 0.0)
    if bias is not None:
        total += tl.load(bias + column, inside, 0.0).to(tl.float32)
    tl.store(out + row * out_stride + column, total.to(out.dtype.element_ty), inside)


@triton.jit
def _rows_kernel(
    out: tl.tensor,  # [rows, in], written
    ids: tl.tensor,  # [rows] int32 or int64
    codes: tl.tensor,
    upper: tl.tensor,
    scales: tl.tensor,
    minima: tl.tensor,
    part_scales: tl.tensor,
    part_minima: tl.tensor,
    zeros: tl.tensor,
    width: tl.tensor,
    columns: tl.tensor,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    SPAN: tl.constexpr,
    PART: tl.constexpr,
    ZERO: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    inputs = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = inputs < width
    inputs = tl.where(inside, inputs, 0)
    column = tl.load(ids + row).to(tl.int64)
    step, index, second = inputs // 32, inputs % 16, inputs // 16 % 2
    if BITS == 8:
        code = tl.load(codes + inputs.to(tl.int64) * columns + column)
    else:
        both = tl.load(codes + (step * 16 + index).to(tl.int64) * columns + column)
        code = (both >> (4 * second).to(tl.uint8)) & 15
        if BITS > 4:
            ABOVE: tl.constexpr = BITS - 4
            at = step * (4 * ABOVE) + index % (4 * ABOVE)
            above = tl.load(upper + at.to(tl.int64) * columns + column)
            shift = (4 * second + index // (4 * ABOVE) * ABOVE).to(tl.uint8)
            code |= ((above >> shift) & ((1 << ABOVE) - 1)) << 4
    zero = tl.zeros([TILE], tl.float32) + ZERO
    if zeros is not None:
        zero += _numbers(zeros, None, inputs, column, columns, SPAN, SPAN)
    number = _of_codes(code, zero, KIND) * _numbers(scales, part_scales, inputs, column, columns, SPAN, PART)
    if minima is not None:
        number -= _numbers(minima, part_minima, inputs, column, columns, SPAN, PART)
    tl.store(out + row * width + inputs, number.to(out.dtype.element_ty), inside)
