"""Writes the keys and values of new rows into the paged cache: as they are, or from the fused projection with
normalisation and rotary embedding on the way."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.kernels import dispatch
from outrider.kernels.layers.reference import apply_rotary, rms_norm


def store_kv(
    keys: Tensor,  # [rows, kv_heads, head_dim]
    values: Tensor,  # [rows, kv_heads, value_dim]
    key_cache: Tensor,  # [blocks, block_size, kv_heads, head_dim], written
    value_cache: Tensor,  # [blocks, block_size, kv_heads, value_dim], written
    slot_mapping: Tensor,  # [rows] int64: block * block_size + offset
    *,
    kv_scales: tuple[Tensor, Tensor] | None = None,  # [1] float32 each, of an fp8 cache
) -> None:
    """Copies row i to slot `slot_mapping[i]`; all other slots keep what they hold. An fp8 cache holds x / scale. On an
    accelerator a row of slot -1 is padding and stored nowhere."""
    if dispatch.runs_triton(keys):
        from outrider.kernels.kv_store.triton import store_kv as launch

        launch(keys, values, key_cache, value_cache, slot_mapping, kv_scales=kv_scales)
        return
    if kv_scales is not None:
        keys = _quantised(keys, kv_scales[0], key_cache.dtype)
        values = _quantised(values, kv_scales[1], value_cache.dtype)
        key_cache, value_cache = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
    key_cache.flatten(0, 1).index_copy_(0, slot_mapping, keys)
    value_cache.flatten(0, 1).index_copy_(0, slot_mapping, values)


def store_kv_rotary(
    qkv: Tensor,  # [rows, heads + 2 * kv_heads, head_dim]: queries, keys, values
    rotary: tuple[Tensor, Tensor],  # cos and signed sin of the rows' positions, [rows, 1, head_dim] each
    key_cache: Tensor,  # [blocks, block_size, kv_heads, head_dim], written
    value_cache: Tensor,  # [blocks, block_size, kv_heads, head_dim], written
    slot_mapping: Tensor,  # [rows] int64
    *,
    qk_norm: Tensor | None = None,  # [heads + kv_heads, head_dim]: weights of the norm before the turn
    eps: float = 1e-6,
    kv_scales: tuple[Tensor, Tensor] | None = None,  # [1] float32 each, of an fp8 cache
    batch_invariant: bool = False,
) -> Tensor:  # [rows, heads, head_dim]
    """Norms and turns queries and keys, stores keys and values, returns the queries."""
    if dispatch.runs_triton(qkv):
        from outrider.kernels.kv_store.triton import store_kv_rotary as launch

        return launch(qkv, rotary, key_cache, value_cache, slot_mapping, qk_norm=qk_norm, eps=eps, kv_scales=kv_scales)
    kv_heads = key_cache.shape[2]
    heads = qkv.shape[1] - 2 * kv_heads
    turned = qkv[:, : heads + kv_heads]  # [rows, heads + kv_heads, head_dim]
    if qk_norm is not None:
        turned = rms_norm(turned, qk_norm, eps, batch_invariant=batch_invariant)
    turned = apply_rotary(turned, *rotary)
    store_kv(turned[:, heads:], qkv[:, heads + kv_heads :], key_cache, value_cache, slot_mapping, kv_scales=kv_scales)
    return turned[:, :heads]


def _quantised(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The bytes of x / scale in an 8-bit float; what lies outside its range becomes its greatest value."""
    most = torch.finfo(dtype).max
    return (x.float() / scale).clamp(-most, most).to(dtype).view(torch.uint8)
