"""Which sequence of a ragged batch a program works on: a search on the device, so that a grid depends on the batch's
sizes alone and a captured graph can be replayed with other lengths.

What the attention kernels share: which keys a query sees, and how partial softmaxes are merged. Scores are in units
of log 2."""

# mypy: allow-untyped-decorators, disable-error-code="import-untyped,import-not-found"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def find_sequence(
    query_starts: tl.tensor, place: tl.tensor, num_sequences: tl.tensor, TILE_ROWS: tl.constexpr
) -> tl.tensor:
    """The last sequence that begins at or before `place`. With TILE_ROWS, `place` counts tiles of up to TILE_ROWS rows:
    those of sequence i begin at tile starts[i] // TILE_ROWS + i, which leaves room for the part-filled tiles before."""
    low = tl.zeros((), tl.int32)
    high = tl.zeros((), tl.int32) + num_sequences
    while low < high:
        middle = (low + high) // 2
        begin = tl.load(query_starts + middle)
        if TILE_ROWS > 0:
            begin = begin // TILE_ROWS + middle
        before = begin <= place
        low = tl.where(before, middle + 1, low)
        high = tl.where(before, high, middle)
    return low - 1


@triton.jit
def exp2_from(values: tl.tensor, base: tl.tensor) -> tl.tensor:
    """exp2(values - base); 0 for -inf, also from a base of -inf."""
    return tl.exp2(values - tl.where(base == float("-inf"), 0.0, base))


@triton.jit
def tanh(x: tl.tensor) -> tl.tensor:
    fade = tl.exp(-2.0 * tl.abs(x))
    size = (1.0 - fade) / (1.0 + fade)
    return tl.where(x < 0, -size, size)


@triton.jit
def add_products(
    total: tl.tensor,  # [rows, outputs] float32
    x_tile: tl.tensor,  # [rows, STEP]: where a row's first inputs lie
    weight_tile: tl.tensor,  # [STEP, outputs]: where an output's do
    is_row: tl.tensor,
    is_column: tl.tensor,
    width: tl.tensor,  # inputs
    weight_in_stride: tl.tensor,
    WIDEN: tl.constexpr,
    PRECISION: tl.constexpr,
    STEP: tl.constexpr,
) -> tl.tensor:
    """Adds up along the inputs in one order, whatever the rows."""
    steps = tl.arange(0, STEP)
    for start in range(0, width, STEP):
        inside = steps < width - start
        left = tl.load(x_tile + start, is_row[:, None] & inside[None, :], 0.0)
        right = tl.load(weight_tile + start * weight_in_stride, inside[:, None] & is_column[None, :], 0.0)
        if WIDEN:
            left, right = left.to(tl.float32), right.to(tl.float32)
        total = tl.dot(left, right, total, input_precision=PRECISION)
    return total


@triton.jit
def merge(
    most: tl.tensor, weight: tl.tensor, total: tl.tensor, part_most: tl.tensor, part_weight: tl.tensor, part: tl.tensor
) -> tl.tensor:
    """Adds a partial result; one of nothing changes no bit. most, weight: [queries]; total: [queries, value_dim]."""
    new_most = tl.maximum(most, part_most)
    old, new = exp2_from(most, new_most), exp2_from(part_most, new_most)
    return new_most, weight * old + part_weight * new, total * old[:, None] + part * new[:, None]


@triton.jit
def finish(
    most: tl.tensor,
    weight: tl.tensor,
    total: tl.tensor,
    sinks: tl.tensor,
    value_scale: tl.tensor,
    head: tl.tensor,
    live: tl.tensor,
) -> tl.tensor:
    """[queries, value_dim]; sinks: of the heads, or None; value_scale: of an fp8 cache, or None."""
    if sinks is not None:
        sink = tl.load(sinks + head, mask=live, other=0.0).to(tl.float32) * 1.4426950408889634
        new_most = tl.maximum(most, sink)
        old = exp2_from(most, new_most)
        weight = weight * old + exp2_from(sink, new_most)
        total = total * old[:, None]
    out = total / tl.where(weight == 0.0, 1.0, weight)[:, None]
    if value_scale is not None:
        out = out * tl.load(value_scale)
    return out


@triton.jit
def sees(
    position: tl.tensor,  # [keys]
    local: tl.tensor,  # [queries], rows of the window
    begin: tl.tensor,
    length: tl.tensor,
    window_start: tl.tensor,
    row_bits: tl.tensor,  # [queries] int64
    row_depth: tl.tensor,  # [queries]
    tree_depths: tl.tensor,  # [rows] or None
    WINDOW: tl.constexpr,
) -> tl.tensor:
    """[queries, keys]: causal, or the ancestors of a tree's row; and within the sliding window."""
    row_position = window_start + local
    visible = position[None, :] <= row_position[:, None]
    if tree_depths is not None:
        index = position - window_start
        shift = tl.minimum(tl.maximum(index, 0), 63).to(tl.int64)
        ancestor = ((row_bits[:, None] >> shift[None, :]) & 1) != 0
        is_chain = row_bits == 0
        visible = (visible & is_chain[:, None]) | (index < 0)[None, :] | ancestor
    if WINDOW > 0:
        if tree_depths is not None:
            inside = (index >= 0) & (index < length)
            depth = tl.load(tree_depths + begin + index, mask=inside, other=0)
            position = tl.where(inside, window_start + depth, position)
            row_position = window_start + row_depth
        visible = visible & (position[None, :] > row_position[:, None] - WINDOW)
    return visible
