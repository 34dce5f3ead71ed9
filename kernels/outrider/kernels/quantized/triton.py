"""Products with packed weights on an accelerator. Codes become numbers in registers and multiply as they are: integers
of 8 bits and floats of 4 and 8 are exact in every type that rows have. Sums are float32; that of the inputs which share
a scale is multiplied with it, so no weight is ever rounded.

A program has a tile of rows and of outputs, and a part of the inputs, whose steps it adds up in order; the parts are
added in order by a second kernel, so that few outputs fill the device, too. How many there are follows from the matrix
alone. In batch-invariant mode a tile has one size, and a row the bits that it has alone."""

# mypy: allow-untyped-decorators, disable-error-code="import-untyped,import-not-found"
from __future__ import annotations

from math import gcd
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.quantized.packed import BLOCK, TILE_OUT, TURN, PackedMatrix

FEW_ROWS, MANY_ROWS = 16, 64  # of a tile; up to the first many, and in batch-invariant mode, it is the first
PROGRAMS = 512  # of a tile of rows: as many as fill a large device a few times
LEAST_BLOCKS = 8  # of BLOCK inputs, that a program adds up
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
    blocks = triton.cdiv(width, BLOCK)
    num_parts = parts_of(num_out, blocks)
    few = batch_invariant or num_rows <= FEW_ROWS
    tile = FEW_ROWS if few else MANY_ROWS
    sums = out if num_parts == 1 else x.new_empty(num_parts, num_rows, num_out, dtype=torch.float32)
    # The interpreter multiplies no bfloat16; widening it is exact.
    widen = triton.knobs.runtime.interpret and x.dtype == torch.bfloat16
    is_wide = x.dtype == torch.float32
    grid = triton.cdiv(num_rows, tile), triton.cdiv(num_out, TILE_OUT), num_parts
    _product_kernel[grid](
        sums, x, *_tensors(weight), bias if num_parts == 1 else None,
        num_rows, num_out, width, x.stride(0), sums.stride(-2), weight.codes.shape[1],
        blocks, triton.cdiv(blocks, num_parts), **_meaning(weight),
        **_turns(weight), EVEN=width % BLOCK == 0, WIDEN=widen,
        PRECISION="ieee" if is_wide else "tf32",  # "ieee" keeps half types off the tensor cores
        ROWS=tile, OUT=TILE_OUT, num_warps=4, num_stages=2 if is_wide else 4,  # as many as fit sm_89's shared memory
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
    return {"KIND": _kind(weight), "BITS": form.bits, "SPAN": span, "PART": form.part or BLOCK, "ZERO": form.zero}


def _turns(weight: PackedMatrix) -> dict[str, int]:
    """Turns of a block that certainly share a span's and a part's numbers."""
    form = weight.form
    span = BLOCK if form.span == weight.shape[1] else gcd(form.span, BLOCK)
    return {"SPAN_TURNS": span // TURN, "GROUP": gcd(form.part or span, span) // TURN}


def _kind(weight: PackedMatrix) -> int:
    if weight.form.floats:
        if triton.knobs.runtime.interpret:
            return FLOATS_OF_8
        capability = triton.runtime.driver.active.get_current_target().arch
        return NATIVE_FLOATS_OF_8 if capability >= NATIVE_CAPABILITY else FLOATS_OF_8
    return FLOATS_OF_4 if weight.form.table else INTEGERS


@triton.jit
def _unsigned(words: tl.tensor) -> tl.tensor:
    """PyTorch does little with unsigned words, so they are kept as integers with a sign."""
    if words.dtype == tl.int32:
        words = words.to(tl.uint32, bitcast=True)
    if words.dtype == tl.int16:
        words = words.to(tl.uint16, bitcast=True)
    return words


@triton.jit
def _of_codes(codes: tl.tensor, zero: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    """What codes, uint32, stand for before they are scaled, float32. An integer is the last bits of 2^23 plus itself,
    which takes no conversion. Floats become float16 numbers of the same digits, whose exponents are less by as much as
    the types' biases differ."""
    if KIND == 0:  # INTEGERS
        found = (codes | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + zero)
    elif KIND == 1:  # FLOATS_OF_4, doubled
        half = (((codes & 8) << 12) | ((codes & 7) << 9)).to(tl.uint16)
        found = half.to(tl.float16, bitcast=True).to(tl.float32) * 32768.0
    elif KIND == 2:  # FLOATS_OF_8
        half = (((codes & 0x80) << 8) | ((codes & 0x7F) << 7)).to(tl.uint16)
        found = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        found = tl.where((codes & 0x7F) == 0x7F, float("nan"), found)
    else:  # NATIVE_FLOATS_OF_8
        found = codes.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
    return found


@triton.jit
def _of_words(
    words: tl.tensor,  # [16, outputs] uint32
    upper: tl.tensor,  # [16, outputs], unsigned: what is above four bits, or None
    zero: tl.tensor,  # [1, outputs]
    TURN: tl.constexpr,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
) -> tl.tensor:
    """What the codes of a turn stand for, as `_of_codes` says. Integers of 4 or 8 bits stay where they are in the word,
    or at one that is among the digits of a float32: there they are too large by a power of two."""
    SIZE: tl.constexpr = 8 if BITS == 8 else 4
    START: tl.constexpr = TURN % (32 // SIZE) * SIZE
    MASK: tl.constexpr = (1 << SIZE) - 1
    if KIND == 0 and BITS == SIZE:
        SHIFT: tl.constexpr = 0 if START + SIZE <= 23 else 16 if BITS == 8 else 12
        PLACE: tl.constexpr = START - SHIFT
        POWER: tl.constexpr = 1 << PLACE
        placed = ((words >> SHIFT) & (MASK << PLACE)) | 0x4B000000
        found = placed.to(tl.float32, bitcast=True) * (1.0 / POWER) - (8388608.0 / POWER + zero)
    else:
        codes = (words >> START) & MASK
        if upper is not None:
            ABOVE: tl.constexpr = BITS - SIZE
            codes |= ((upper.to(tl.uint32) >> (TURN * ABOVE)) & ((1 << ABOVE) - 1)) << SIZE
        found = _of_codes(codes, zero, KIND)
    return found


@triton.jit
def _times(numbers: tl.tensor, of_parts: tl.tensor, at: tl.tensor) -> tl.tensor:
    """A span's scales or minima times those of its parts, int8, if there are any."""
    return numbers if of_parts is None else numbers * tl.load(of_parts + at).to(tl.float32)


# One binary for every number of rows and for wide and narrow matrices.
@triton.jit(do_not_specialize=["num_rows", "blocks", "blocks_of_part"])
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
    blocks: tl.tensor,
    blocks_of_part: tl.tensor,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    SPAN: tl.constexpr,
    PART: tl.constexpr,
    ZERO: tl.constexpr,
    SPAN_TURNS: tl.constexpr,  # of a block, that share a span's numbers
    GROUP: tl.constexpr,  # turns that share a part's, too
    EVEN: tl.constexpr,  # rows are whole blocks
    WIDEN: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    OUT: tl.constexpr,
) -> None:
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * OUT + tl.arange(0, OUT)
    part = tl.program_id(2)
    index = tl.arange(0, 16)
    place = index[:, None] + column[None, :] * 16
    is_row = (row < num_rows)[:, None]
    x_tile = x + row.to(tl.int64)[:, None] * x_stride + index[None, :]
    total = tl.zeros([ROWS, OUT], tl.float32)
    first = part * blocks_of_part
    for later in range(0, tl.minimum(blocks_of_part, blocks - first)):
        block = first + later
        at = block.to(tl.int64) * columns * 16
        above = None if upper is None else _unsigned(tl.load(upper + at + place))
        if BITS == 8:
            words = _unsigned(tl.load(codes + 2 * at + place))
            second = _unsigned(tl.load(codes + 2 * at + columns * 16 + place))
        else:
            words = _unsigned(tl.load(codes + at + place))
        sums, whole = tl.zeros([ROWS, OUT], tl.float32), tl.zeros([ROWS, OUT], tl.float32)
        for turn in tl.static_range(8):
            inputs = block * 128 + turn * 16
            inside = is_row if EVEN else is_row & (index < width - inputs)[None, :]
            left = tl.load(x_tile + inputs, inside, 0.0)
            if BITS == 8 and turn == 4:
                words = second
            if turn % SPAN_TURNS == 0:
                span = (inputs // SPAN).to(tl.int64) * columns + column
                scale, zero = tl.load(scales + span).to(tl.float32), tl.zeros([OUT], tl.float32) + ZERO
                if zeros is not None:
                    zero += tl.load(zeros + span).to(tl.float32)
                if minima is not None:
                    least = tl.load(minima + span).to(tl.float32)
            if WIDEN:
                left = left.to(tl.float32)
            right = _of_words(words, above, zero[None, :], turn, KIND, BITS).to(left.dtype)  # exact
            sums = tl.dot(left, right, sums, input_precision=PRECISION)
            if minima is not None:  # the sum of the inputs, where it is used: as a product with ones
                whole = tl.dot(left, tl.full([16, OUT], 1.0, left.dtype), whole, input_precision=PRECISION)
            if turn % GROUP == GROUP - 1:
                of_part = (inputs // PART).to(tl.int64) * columns + column
                total += sums * _times(scale, part_scales, of_part)[None, :]
                sums = tl.zeros([ROWS, OUT], tl.float32)
                if minima is not None:
                    total -= whole * _times(least, part_minima, of_part)[None, :]
                    whole = tl.zeros([ROWS, OUT], tl.float32)
    is_column = column < num_out
    if bias is not None:
        total += tl.load(bias + column, is_column, 0.0).to(tl.float32)[None, :]
    start = (part.to(tl.int64) * num_rows + row)[:, None] * out_stride
    tl.store(out + start + column[None, :], total.to(out.dtype.element_ty), is_row & is_column[None, :])


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
    index, turn = inputs % 16, (inputs // 16 % 8).to(tl.uint32)
    at = ((inputs // 128).to(tl.int64) * columns + column) * 16 + index
    if BITS == 8:
        word = tl.load(codes + ((inputs // 64).to(tl.int64) * columns + column) * 16 + index)
        code = (_unsigned(word) >> (turn % 4 * 8)) & 255
    else:
        code = (_unsigned(tl.load(codes + at)) >> (turn * 4)) & 15
    if upper is not None:
        above = _unsigned(tl.load(upper + at)).to(tl.uint32)
        code |= ((above >> (turn * (BITS - 4))) & ((1 << (BITS - 4)) - 1)) << 4
    span = (inputs // SPAN).to(tl.int64) * columns + column
    of_part = (inputs // PART).to(tl.int64) * columns + column
    zero = tl.zeros([TILE], tl.float32) + ZERO
    if zeros is not None:
        zero += tl.load(zeros + span).to(tl.float32)
    number = _of_codes(code, zero, KIND) * _times(tl.load(scales + span).to(tl.float32), part_scales, of_part)
    if minima is not None:
        number -= _times(tl.load(minima + span).to(tl.float32), part_minima, of_part)
    tl.store(out + row * width + inputs, number.to(out.dtype.element_ty), inside)
