"""Writes the keys and values of new rows into the paged cache."""

from __future__ import annotations

from torch import Tensor


def store_kv(
    keys: Tensor,  # [rows, kv_heads, head_dim]
    values: Tensor,  # [rows, kv_heads, value_dim]
    key_cache: Tensor,  # [blocks, block_size, kv_heads, head_dim], written
    value_cache: Tensor,  # [blocks, block_size, kv_heads, value_dim], written
    slot_mapping: Tensor,  # [rows] int64: block * block_size + offset
) -> None:
    """Copies row i to slot `slot_mapping[i]`; all other slots keep what they hold."""
    key_cache.flatten(0, 1).index_copy_(0, slot_mapping, keys)
    value_cache.flatten(0, 1).index_copy_(0, slot_mapping, values)
