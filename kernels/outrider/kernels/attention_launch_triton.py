"""Launches the attention kernels: tile shapes, grids, and the memory of partial results."""

# mypy: allow-untyped-decorators, disable-error-code="import-untyped,import-not-found"

from __future__ import annotations

import math
from typing import Any

import torch
import triton
from torch import Tensor

from outrider.kernels.device_plan import DevicePlan
from outrider.kernels.paged_attention_triton import attend_kernel, merge_kernel

INVARIANT_QUERIES = 32  # queries of a tile in batch-invariant mode, of any batch
MOST_QUERIES = 64  # queries of a tile otherwise
LEAST_TILE = 16  # of a matrix product
QUERY_TILE_BYTES = 16 << 10
KEY_TILE_BYTES = 8 << 10  # keys of a tile, and as many values; a pipeline of three fits the 99 KiB of an Ada
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
            SPLIT=split, IN_TURN=plan.batch_invariant and not split, SPLIT_KEYS=plan.split_keys,
            TILE_ROWS=tile_rows, TILE_QUERIES=queries, TILE_KEYS=max(LEAST_TILE, min(64, KEY_TILE_BYTES // row_bytes)),
            # In three passes of tf32; for a half type that, or "ieee", would leave its tensor cores unused.
            PRECISION="tf32x3" if query.dtype == torch.float32 else "tf32",
            WIDEN=not query.is_cuda and query.dtype == torch.bfloat16,  # the interpreter multiplies no bfloat16
            num_warps=8 if queries * _tile(value_dim) >= 64 * 256 else 4, num_stages=3, **common,
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
