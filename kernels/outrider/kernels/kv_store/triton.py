"""The cache's writes on an accelerator: one kernel turns and stores, one stores alone.

A program handles a few heads of one row. Everything is computed in float32 and rounded once, when it is stored."""

# mypy: allow-untyped-decorators, disable-error-code="import-untyped,import-not-found"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

HEADS_TILE = 8


def store_kv(
    keys: Tensor,  # [rows, kv_heads, head_dim]
    values: Tensor,  # [rows, kv_heads, value_dim]
    key_cache: Tensor,  # [blocks, block_size, kv_heads, head_dim], written
    value_cache: Tensor,  # [blocks, block_size, kv_heads, value_dim], written
    slot_mapping: Tensor,  # [rows]; -1: stored nowhere
    *,
    kv_scales: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Launches the reference's `store_kv`."""
    for new, cache, scale in zip((keys, values), (key_cache, value_cache), kv_scales or (None, None), strict=True):
        new = new if new.stride(2) == 1 else new.contiguous()
        rows, heads, dim = new.shape
        _store_kernel[(rows, triton.cdiv(heads, HEADS_TILE))](
            cache, new, slot_mapping, scale, new.stride(0), new.stride(1), cache.stride(1), cache.stride(2), heads,
            DIM=dim, DIM_TILE=triton.next_power_of_2(dim), HEADS_TILE=HEADS_TILE,
            MOST=0.0 if scale is None else torch.finfo(cache.dtype).max,
        )  # fmt: skip


def store_kv_rotary(
    qkv: Tensor,  # [rows, heads + 2 * kv_heads, head_dim]
    rotary: tuple[Tensor, Tensor],  # [rows, 1, head_dim] each
    key_cache: Tensor,  # [blocks, block_size, kv_heads, head_dim], written
    value_cache: Tensor,  # [blocks, block_size, kv_heads, head_dim], written
    slot_mapping: Tensor,  # [rows]; -1: the queries are turned, nothing is stored
    *,
    qk_norm: Tensor | None = None,  # [heads + kv_heads, head_dim]
    eps: float = 1e-6,
    kv_scales: tuple[Tensor, Tensor] | None = None,
) -> Tensor:  # [rows, heads, head_dim]
    """Launches the reference's `store_kv_rotary`."""
    qkv = qkv if qkv.stride(2) == 1 else qkv.contiguous()
    (rows, all_heads, dim), kv_heads = qkv.shape, key_cache.shape[2]
    cos, sin = (part.contiguous() for part in rotary)
    out = qkv.new_empty(rows, all_heads - 2 * kv_heads, dim)
    _turn_kernel[(rows, triton.cdiv(all_heads, HEADS_TILE))](
        out, key_cache, value_cache, qkv, cos, sin, qk_norm, slot_mapping, *(kv_scales or (None, None)), eps,
        qkv.stride(0), qkv.stride(1), key_cache.stride(1), key_cache.stride(2),
        value_cache.stride(1), value_cache.stride(2),
        HEADS=out.shape[1], KV_HEADS=kv_heads, DIM=dim, DIM_TILE=triton.next_power_of_2(dim), HEADS_TILE=HEADS_TILE,
        MOST=0.0 if kv_scales is None else torch.finfo(key_cache.dtype).max,
    )  # fmt: skip
    return out


@triton.jit
def _fitted(x: tl.tensor, scale: tl.tensor, MOST: tl.constexpr) -> tl.tensor:
    """x / scale within the range of an fp8 cache; x where there is no scale."""
    if scale is not None:
        x = tl.minimum(tl.maximum(x / tl.load(scale), -MOST), MOST)
    return x


@triton.jit
def _store_kernel(
    cache: tl.tensor,  # [slots, heads, dim], written
    new: tl.tensor,  # [rows, heads, dim]
    slot_mapping: tl.tensor,  # [rows]
    scale: tl.tensor,  # [1] or None
    row_stride: int,
    head_stride: int,
    slot_stride: int,
    cache_head_stride: int,
    heads: int,
    DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    HEADS_TILE: tl.constexpr,
    MOST: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + row).to(tl.int64)
    if slot < 0:
        return
    head = tl.program_id(1) * HEADS_TILE + tl.arange(0, HEADS_TILE)
    dim = tl.arange(0, DIM_TILE)
    inside = (head < heads)[:, None] & (dim < DIM)[None, :]
    x = tl.load(new + row * row_stride + head[:, None] * head_stride + dim[None, :], mask=inside, other=0.0)
    x = _fitted(x.to(tl.float32), scale, MOST)
    place = cache + slot * slot_stride + head[:, None] * cache_head_stride + dim[None, :]
    tl.store(place, x.to(cache.dtype.element_ty), mask=inside)


@triton.jit
def _turn_kernel(
    out: tl.tensor,  # [rows, heads, dim], written
    key_cache: tl.tensor,  # [slots, kv_heads, dim], written
    value_cache: tl.tensor,  # [slots, kv_heads, dim], written
    qkv: tl.tensor,  # [rows, heads + 2 * kv_heads, dim]
    cos: tl.tensor,  # [rows, dim]
    signed_sin: tl.tensor,  # [rows, dim]
    qk_norm: tl.tensor,  # [heads + kv_heads, dim] or None
    slot_mapping: tl.tensor,  # [rows]
    key_scale: tl.tensor,  # [1] or None
    value_scale: tl.tensor,  # [1] or None
    eps: float,
    row_stride: int,
    head_stride: int,
    key_slot_stride: int,
    key_head_stride: int,
    value_slot_stride: int,
    value_head_stride: int,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    HEADS_TILE: tl.constexpr,
    MOST: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS_TILE + tl.arange(0, HEADS_TILE)
    dim = tl.arange(0, DIM_TILE)
    partner = (dim + DIM // 2) % DIM  # element i turns with element i + dim / 2
    inside = (head < HEADS + 2 * KV_HEADS)[:, None] & (dim < DIM)[None, :]
    source = qkv + row * row_stride + head[:, None] * head_stride
    plain = tl.load(source + dim[None, :], mask=inside, other=0.0).to(tl.float32)
    x, other = plain, tl.load(source + partner[None, :], mask=inside, other=0.0).to(tl.float32)
    if qk_norm is not None:
        factor = 1.0 / tl.sqrt(tl.sum(x * x, 1) / DIM + eps)
        normed = inside & (head < HEADS + KV_HEADS)[:, None]
        weights = qk_norm + head[:, None] * DIM
        x = x * factor[:, None] * tl.load(weights + dim[None, :], mask=normed, other=0.0).to(tl.float32)
        other = other * factor[:, None] * tl.load(weights + partner[None, :], mask=normed, other=0.0).to(tl.float32)
    turn_cos = tl.load(cos + row * DIM + dim, mask=dim < DIM, other=0.0).to(tl.float32)
    turn_sin = tl.load(signed_sin + row * DIM + dim, mask=dim < DIM, other=0.0).to(tl.float32)
    turned = x * turn_cos[None, :] + other * turn_sin[None, :]

    is_query, is_value = head < HEADS, head >= HEADS + KV_HEADS
    place = out + (row * HEADS + head)[:, None] * DIM + dim[None, :]
    tl.store(place, turned.to(out.dtype.element_ty), mask=inside & is_query[:, None])
    slot = tl.load(slot_mapping + row).to(tl.int64)
    stored = inside & (slot >= 0)
    key = key_cache + slot * key_slot_stride + (head - HEADS)[:, None] * key_head_stride + dim[None, :]
    turned = _fitted(turned, key_scale, MOST).to(key_cache.dtype.element_ty)
    tl.store(key, turned, mask=stored & (~is_query & ~is_value)[:, None])
    kv_head = head - HEADS - KV_HEADS
    value = value_cache + slot * value_slot_stride + kv_head[:, None] * value_head_stride + dim[None, :]
    plain = _fitted(plain, value_scale, MOST).to(value_cache.dtype.element_ty)
    tl.store(value, plain, mask=stored & is_value[:, None])
