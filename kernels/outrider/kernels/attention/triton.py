"""Paged attention on an accelerator, split over the keys.

A program attends one tile of queries (some rows of one sequence, times the query heads that share a key-value head) to
the keys of one split, or to all splits in turn; a second kernel merges the partial results of a row. Splits, and the
tiles of keys within them, lie at fixed absolute positions; products and sums have one shape and one order; what a row
does not see adds exact zeros. With one tile shape for all batches (batch-invariant mode) a row's bits therefore depend
on nothing but the row. Scores are in units of log 2.

Launches the attention kernels: tile shapes, grids, and the memory of partial results."""

# mypy: allow-untyped-decorators, disable-error-code="import-untyped,import-not-found"
from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.attention.plan import DevicePlan
from outrider.kernels.common_triton import exp2_from, find_sequence, finish, merge, sees, tanh

# What varies from step to step: one binary for all of it, since a step must not wait for a compiler.
SIZES = ["num_sequences", "split_rows", "num_splits", "table_stride"]


@triton.jit
def attend_keys(
    queries: tl.tensor,  # [queries, dim]
    key_cache: tl.tensor,  # [slots, dim], of one head
    value_cache: tl.tensor,  # [slots, value_dim], of one head
    table: tl.tensor,  # [most blocks]
    start: tl.tensor,
    end: tl.tensor,
    key_slot_stride: tl.tensor,
    value_slot_stride: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    local: tl.tensor,  # [queries], rows of the window
    begin: tl.tensor,
    length: tl.tensor,
    window_start: tl.tensor,
    row_bits: tl.tensor,  # [queries]
    row_depth: tl.tensor,  # [queries]
    tree_depths: tl.tensor,  # [rows] or None
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TILE_QUERIES: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """The keys from `start` to `end`: greatest score [queries], sum of weights [queries], and weighted values [queries,
    value_dim]. Tiles of keys begin at multiples of TILE_KEYS; what lies outside is not read."""
    dim, value_dim = tl.arange(0, DIM_TILE), tl.arange(0, VALUE_TILE)
    most = tl.full((TILE_QUERIES,), float("-inf"), tl.float32)
    weight = tl.zeros((TILE_QUERIES,), tl.float32)
    total = tl.zeros((TILE_QUERIES, VALUE_TILE), tl.float32)
    for tile_start in range(start // TILE_KEYS * TILE_KEYS, end, TILE_KEYS):
        position = tile_start + tl.arange(0, TILE_KEYS)
        stored = (position >= start) & (position < end)
        block = tl.load(table + position // BLOCK_SIZE, mask=stored, other=0)
        slot = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
        keys = tl.load(
            key_cache + (slot * key_slot_stride)[:, None] + dim[None, :],
            mask=stored[:, None] & (dim < DIM)[None, :],
            other=0.0,
        ).to(queries.dtype)
        values = tl.load(
            value_cache + (slot * value_slot_stride)[:, None] + value_dim[None, :],
            mask=stored[:, None] & (value_dim < VALUE_DIM)[None, :],
            other=0.0,
        ).to(queries.dtype)
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scale
        if SOFTCAP:
            scores = softcap * tanh(scores)
        visible = sees(position, local, begin, length, window_start, row_bits, row_depth, tree_depths, WINDOW)
        scores = tl.where(visible & stored[None, :], scores, float("-inf"))
        new_most = tl.maximum(most, tl.max(scores, 1))
        old, weights = exp2_from(most, new_most), exp2_from(scores, new_most[:, None])
        weight = weight * old + tl.sum(weights, 1)
        total = tl.dot(weights.to(values.dtype), values, total * old[:, None], input_precision=PRECISION)
        most = new_most
    return most, weight, total


@triton.jit
def part_of(
    row: tl.tensor, sequence: tl.tensor, local: tl.tensor, split_rows: tl.tensor, PART_BY_ROW: tl.constexpr
) -> tl.tensor:
    """Where the partial results of a row are: at its place in the batch, or among the `split_rows` of its sequence,
    which are fewer beside long prompts."""
    return row if PART_BY_ROW else sequence * split_rows + local


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=["block_tables"])
def attend_kernel(
    out: tl.tensor,  # [rows, heads, value_dim], written if not SPLIT
    partial: tl.tensor,  # [parts, heads, splits, value_dim] float32, written if SPLIT; see part_of
    partial_most: tl.tensor,  # [parts, heads, splits] float32, written if SPLIT
    partial_weight: tl.tensor,  # the same
    query: tl.tensor,  # [rows, heads, dim]
    key_cache: tl.tensor,  # [slots, kv_heads, dim]
    value_cache: tl.tensor,  # [slots, kv_heads, value_dim]
    block_tables: tl.tensor,  # [sequences, most blocks]
    query_starts: tl.tensor,  # [sequences + 1]
    context_lens: tl.tensor,  # [sequences]
    tree_bits: tl.tensor,  # [rows] or None
    tree_depths: tl.tensor,  # [rows] or None
    sinks: tl.tensor,  # [heads] or None
    key_scale: tl.tensor,  # [1] or None
    value_scale: tl.tensor,  # [1] or None
    scale: tl.tensor,
    softcap: tl.tensor,  # 0: none
    num_sequences: tl.tensor,
    split_rows: tl.tensor,
    num_splits: tl.tensor,
    query_row_stride: tl.tensor,
    query_head_stride: tl.tensor,
    key_slot_stride: tl.tensor,
    key_head_stride: tl.tensor,
    value_slot_stride: tl.tensor,
    value_head_stride: tl.tensor,
    table_stride: tl.tensor,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    FIRST_KEY: tl.constexpr,  # no row sees a position below it
    SOFTCAP: tl.constexpr,
    SPLIT: tl.constexpr,  # one split a program, of sequences of up to split_rows rows; else all keys of the others
    IN_TURN: tl.constexpr,  # all keys split by split
    PART_BY_ROW: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_QUERIES: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    WIDEN: tl.constexpr,  # to float32
    PRECISION: tl.constexpr,  # of products
) -> None:
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    sequence = find_sequence(query_starts, tile, num_sequences, TILE_ROWS)
    begin = tl.load(query_starts + sequence)
    length = tl.load(query_starts + sequence + 1) - begin
    first = (tile - begin // TILE_ROWS - sequence) * TILE_ROWS  # row of the window
    if first >= length:
        return
    is_short = length <= split_rows
    if is_short != SPLIT:
        return
    window_start = tl.load(context_lens + sequence) - length
    end = window_start + tl.minimum(first + TILE_ROWS, length)
    if tree_bits is not None:  # a block's row sees those behind it
        end = window_start + length
    start = FIRST_KEY
    if WINDOW > 0:  # a tree's row may be as near to the root as the first row
        start = tl.maximum(FIRST_KEY, window_start + (0 if tree_bits is not None else first) - WINDOW + 1)
    if SPLIT:
        split = tl.program_id(2)
        start = tl.maximum(start, split * SPLIT_KEYS)
        end = tl.minimum(end, (split + 1) * SPLIT_KEYS)
        if start >= end:
            return

    lane = tl.arange(0, TILE_QUERIES)
    local = first + lane // GROUP
    head = kv_head * GROUP + lane % GROUP
    live = (lane < TILE_ROWS * GROUP) & (local < length)
    row = (begin + local).to(tl.int64)
    dim, value_dim = tl.arange(0, DIM_TILE), tl.arange(0, VALUE_TILE)
    queries = tl.load(
        query + (row * query_row_stride + head * query_head_stride)[:, None] + dim[None, :],
        mask=live[:, None] & (dim < DIM)[None, :],
        other=0.0,
    )
    queries = queries.to(tl.float32 if WIDEN else queries.dtype)
    row_bits, row_depth = 0, 0
    if tree_bits is not None:
        row_bits = tl.load(tree_bits + row, mask=live, other=0)
        row_depth = tl.load(tree_depths + row, mask=live, other=0)
    if key_scale is not None:
        scale = scale * tl.load(key_scale)
    keys = key_cache + kv_head * key_head_stride
    values = value_cache + kv_head * value_head_stride
    table = block_tables + sequence * table_stride
    most = tl.full((TILE_QUERIES,), float("-inf"), tl.float32)
    weight = tl.zeros((TILE_QUERIES,), tl.float32)
    total = tl.zeros((TILE_QUERIES, VALUE_TILE), tl.float32)
    if IN_TURN:
        for split in range(start // SPLIT_KEYS, tl.cdiv(end, SPLIT_KEYS)):
            part_most, part_weight, part = attend_keys(
                queries, keys, values, table, tl.maximum(start, split * SPLIT_KEYS),
                tl.minimum(end, (split + 1) * SPLIT_KEYS), key_slot_stride, value_slot_stride, scale, softcap,
                local, begin, length, window_start, row_bits, row_depth, tree_depths, DIM, VALUE_DIM, DIM_TILE,
                VALUE_TILE, BLOCK_SIZE, WINDOW, SOFTCAP, TILE_QUERIES, TILE_KEYS, PRECISION,
            )  # fmt: skip
            most, weight, total = merge(most, weight, total, part_most, part_weight, part)
    else:
        most, weight, total = attend_keys(
            queries, keys, values, table, start, end, key_slot_stride, value_slot_stride, scale, softcap,
            local, begin, length, window_start, row_bits, row_depth, tree_depths, DIM, VALUE_DIM, DIM_TILE,
            VALUE_TILE, BLOCK_SIZE, WINDOW, SOFTCAP, TILE_QUERIES, TILE_KEYS, PRECISION,
        )  # fmt: skip

    columns = live[:, None] & (value_dim < VALUE_DIM)[None, :]
    if SPLIT:
        kept = part_of(row, sequence, local, split_rows, PART_BY_ROW)
        place = (kept.to(tl.int64) * HEADS + head) * num_splits + tl.program_id(2)
        tl.store(partial_most + place, most, mask=live)
        tl.store(partial_weight + place, weight, mask=live)
        tl.store(partial + place[:, None] * VALUE_DIM + value_dim[None, :], total, mask=columns)
    else:
        result = finish(most, weight, total, sinks, value_scale, head, live)
        place = (row * HEADS + head) * VALUE_DIM
        tl.store(out + place[:, None] + value_dim[None, :], result.to(out.dtype.element_ty), mask=columns)


@triton.jit(do_not_specialize=SIZES[:3])
def merge_kernel(
    out: tl.tensor,  # [rows, heads, value_dim], written
    partial: tl.tensor,  # [parts, heads, splits, value_dim] float32
    partial_most: tl.tensor,  # [parts, heads, splits] float32
    partial_weight: tl.tensor,  # the same
    query_starts: tl.tensor,  # [sequences + 1]
    context_lens: tl.tensor,  # [sequences]
    sinks: tl.tensor,  # [heads] or None
    value_scale: tl.tensor,  # [1] or None
    num_sequences: tl.tensor,
    split_rows: tl.tensor,
    num_splits: tl.tensor,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_TILE: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    TREE: tl.constexpr,
    PART_BY_ROW: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
) -> None:
    """Merges the splits that a row sees, in order of position; rows of no sequence get zeros."""
    row, kv_head = tl.program_id(0), tl.program_id(1)
    sequence = find_sequence(query_starts, row, num_sequences, 0)
    begin, after = tl.load(query_starts + sequence), tl.load(query_starts + sequence + 1)
    lane, value_dim = tl.arange(0, GROUP_TILE), tl.arange(0, VALUE_TILE)
    head, live = kv_head * GROUP + lane, lane < GROUP
    columns = live[:, None] & (value_dim < VALUE_DIM)[None, :]
    place = (row.to(tl.int64) * HEADS + head)[:, None] * VALUE_DIM + value_dim[None, :]
    if row >= after:
        tl.store(out + place, tl.zeros((GROUP_TILE, VALUE_TILE), out.dtype.element_ty), mask=columns)
        return
    if after - begin > split_rows:
        return
    local = row - begin
    window_start = tl.load(context_lens + sequence) - (after - begin)
    start = 0
    if WINDOW > 0:
        start = tl.maximum(0, window_start + (0 if TREE else local) - WINDOW + 1)
    most = tl.full((GROUP_TILE,), float("-inf"), tl.float32)
    weight = tl.zeros((GROUP_TILE,), tl.float32)
    total = tl.zeros((GROUP_TILE, VALUE_TILE), tl.float32)
    source = (part_of(row, sequence, local, split_rows, PART_BY_ROW).to(tl.int64) * HEADS + head) * num_splits
    end = window_start + (after - begin if TREE else local + 1)
    for split in range(start // SPLIT_KEYS, tl.cdiv(end, SPLIT_KEYS)):
        part_most = tl.load(partial_most + source + split, mask=live, other=float("-inf"))
        part_weight = tl.load(partial_weight + source + split, mask=live, other=0.0)
        part = tl.load(partial + (source + split)[:, None] * VALUE_DIM + value_dim[None, :], mask=columns, other=0.0)
        most, weight, total = merge(most, weight, total, part_most, part_weight, part)
    result = finish(most, weight, total, sinks, value_scale, head, live)
    tl.store(out + place, result.to(out.dtype.element_ty), mask=columns)


INVARIANT_QUERIES = 32  # queries of a tile in batch-invariant mode, of any batch
MOST_QUERIES = 64  # queries of a tile otherwise
LEAST_TILE = 16  # of a matrix product
QUERY_TILE_BYTES = 16 << 10
KEY_TILE_BYTES = 16 << 10  # keys of a tile, and as many values; a pipeline of two fits the 99 KiB of an Ada
LOG2_E = math.log2(math.e)


def attention(
    plan: DevicePlan,
    query: Tensor,  # [rows, heads, dim]
    key_cache: Tensor,  # [blocks, block_size, kv_heads, dim]
    value_cache: Tensor,  # [blocks, block_size, kv_heads, value_dim]
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,  # [heads]
    kv_scales: tuple[Tensor, Tensor] | None = None,  # [1] float32 each
) -> Tensor:  # [rows, heads, value_dim]
    """Short windows with their keys split over programs, then the long prompts, if there may be any."""
    query = query if query.stride(2) == 1 else query.contiguous()
    (rows, heads, _), (block_size, kv_heads, value_dim) = query.shape, value_cache.shape[1:]
    num_sequences, num_splits = len(plan.context_lens), -(-plan.block_tables.shape[1] * block_size // plan.split_keys)
    split_rows = plan.split_rows if num_splits > 1 else 0
    out = query.new_empty(rows, heads, value_dim)
    part_by_row = rows <= num_sequences * split_rows  # the fewer of the two
    parts = rows if part_by_row else num_sequences * split_rows
    partial = query.new_empty(parts, heads, num_splits, value_dim, dtype=torch.float32)
    sums = query.new_empty(2, *partial.shape[:3], dtype=torch.float32)  # greatest score and weight of each part
    row_bytes = _tile(max(query.shape[2], value_dim)) * query.dtype.itemsize
    key_scale, value_scale = kv_scales or (None, None)
    common: dict[str, Any] = {
        "num_sequences": num_sequences, "split_rows": split_rows, "num_splits": num_splits,
        "HEADS": heads, "GROUP": heads // kv_heads, "VALUE_DIM": value_dim, "VALUE_TILE": _tile(value_dim),
        "WINDOW": plan.sliding_window or 0, "PART_BY_ROW": part_by_row,
        "enable_fp_fusion": False,  # a fused product here and not there would part bits
    }  # fmt: skip
    for split in (True,) * (split_rows > 0) + (False,) * (plan.max_query_len > split_rows):
        queries = _tile_queries(plan, row_bytes, heads // kv_heads, split)
        tile_rows = queries // (heads // kv_heads)
        attend_kernel[(rows // tile_rows + num_sequences, kv_heads, num_splits if split else 1)](
            out, partial, sums[0], sums[1], query, key_cache, value_cache,
            plan.block_tables, plan.query_starts, plan.context_lens,
            plan.tree and plan.tree.bits, plan.tree and plan.tree.depths, sinks, key_scale, value_scale,
            scale / softcap if softcap else scale * LOG2_E, softcap * LOG2_E if softcap else 0.0,
            query_row_stride=query.stride(0), query_head_stride=query.stride(1),
            key_slot_stride=key_cache.stride(1), key_head_stride=key_cache.stride(2),
            value_slot_stride=value_cache.stride(1), value_head_stride=value_cache.stride(2),
            table_stride=plan.block_tables.stride(0),
            DIM=query.shape[2], DIM_TILE=_tile(query.shape[2]), BLOCK_SIZE=block_size, SOFTCAP=bool(softcap),
            FIRST_KEY=plan.first_key, SPLIT=split, IN_TURN=plan.batch_invariant and not split,
            SPLIT_KEYS=plan.split_keys,
            TILE_ROWS=tile_rows, TILE_QUERIES=queries, TILE_KEYS=max(LEAST_TILE, min(64, KEY_TILE_BYTES // row_bytes)),
            # In three passes of tf32; for a half type that, or "ieee", would leave its tensor cores unused.
            PRECISION="tf32x3" if query.dtype == torch.float32 else "tf32",
            WIDEN=not query.is_cuda and query.dtype == torch.bfloat16,  # the interpreter multiplies no bfloat16
            num_warps=8 if queries * _tile(value_dim) >= 64 * 256 else 4, num_stages=2, **common,
        )  # fmt: skip
    merge_kernel[(rows, kv_heads)](
        out, partial, sums[0], sums[1], plan.query_starts, plan.context_lens, sinks, value_scale,
        GROUP_TILE=triton.next_power_of_2(heads // kv_heads), TREE=plan.tree is not None, SPLIT_KEYS=plan.split_keys,
        num_warps=4, **common,
    )  # fmt: skip
    return out


def _tile(dim: int) -> int:
    return max(LEAST_TILE, 1 << (dim - 1).bit_length())


def _tile_queries(plan: DevicePlan, row_bytes: int, group: int, split: bool) -> int:
    """Queries of a tile, at least one row's. In batch-invariant mode one number for all batches."""
    most = min(MOST_QUERIES, QUERY_TILE_BYTES // row_bytes)
    if plan.batch_invariant:
        wanted = INVARIANT_QUERIES
    else:
        wanted = _tile(group * (plan.split_rows if split else plan.max_query_len))
    return max(min(wanted, most), _tile(group))
