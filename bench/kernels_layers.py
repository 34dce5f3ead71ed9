"""The rows of a decoder's layer: attention, the cache's writes, norms, gates, products."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from kernels_case import BLOCK_SIZE, DEVICES, ROWS, Case, Model, Place, Work, randn
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from outrider.kernels.attention_plan import plan_attention
from outrider.kernels.gated_silu import gated_gelu, gated_silu
from outrider.kernels.kv_store import store_kv, store_kv_rotary
from outrider.kernels.linear import Linear
from outrider.kernels.paged_attention import paged_attention, planned_attention
from outrider.kernels.rms_norm import add_rms_norm, rms_norm
from outrider.kernels.rotary import rotary_table

EPS = 1e-6
CACHE_BLOCKS = 1024


def layer_cases(place: Place) -> Iterator[Case]:
    """Every function of a layer, with the rows of a window for each sequence of the batch."""
    for model in place.models:
        for batch in place.batches:
            for context in place.contexts:
                shape = f"{model.name}, batch {batch}, context {context}"
                work = partial(_attention, place, model, batch, context)
                yield Case("paged_attention.planned_attention", shape, "SDPA, keys in a row", work)
                work = partial(_attention, place, model, batch, context, planned=False)
                yield Case("paged_attention.paged_attention", shape, "SDPA, keys in a row", work)
            for function, form, against, make, devices in LAYER:
                if place.name in devices:
                    yield Case(
                        function, f"{model.name}, batch {batch}{form}", against, partial(make, place, model, batch)
                    )


def _attention(place: Place, model: Model, batch: int, context: int, *, planned: bool = True) -> Work:
    """Against one call over keys and values that lie in a row, which no paged cache has: nothing to gather."""
    rows, heads, kv_heads, dim = batch * ROWS, model.heads, model.kv_heads, model.head_dim
    num_blocks = batch * -(-context // BLOCK_SIZE)
    tables = torch.randperm(num_blocks, device=place.device).view(batch, -1)  # [batch, blocks]
    key_cache, value_cache = randn(place, 2, num_blocks, BLOCK_SIZE, kv_heads, dim)
    query = randn(place, rows, heads, dim)
    starts, lens = tuple(range(0, rows + 1, ROWS)), (context,) * batch
    plan = plan_attention(
        tables, starts, lens, block_size=BLOCK_SIZE, heads_per_kv_head=heads // kv_heads, dtype=place.dtype,
        max_model_len=max(place.contexts),
    )  # fmt: skip
    keys, values = (_in_a_row(cache, tables, context) for cache in (key_cache, value_cache))
    queries = query.view(batch, ROWS, heads, dim).transpose(1, 2)  # [batch, heads, ROWS, dim]
    mask: Tensor = causal_lower_right(ROWS, context)  # takes the flash kernel
    if place.device == "cpu":  # where it would be written out at every call
        mask = torch.ones(ROWS, context, dtype=torch.bool).tril(context - ROWS)

    def kernel() -> Tensor:
        if planned:
            return planned_attention(plan, query, key_cache, value_cache, scale=dim**-0.5)
        return paged_attention(query, key_cache, value_cache, tables, starts, lens, scale=dim**-0.5)

    def against() -> Tensor:
        attended = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)
        return attended.transpose(1, 2).flatten(0, 1)

    elements = 2 * batch * context * kv_heads * dim + 2 * query.numel()
    return Work(kernel, against, elements * place.dtype.itemsize, flops=4 * query.numel() * context)


def _store(place: Place, model: Model, batch: int) -> Work:
    rows, kv_heads, dim = batch * ROWS, model.kv_heads, model.head_dim
    new = randn(place, 2, rows, kv_heads, dim)
    mine, theirs, slots = _caches(place, model, rows)

    def kernel() -> Tensor:
        store_kv(new[0], new[1], mine[0], mine[1], slots)
        return mine

    def against() -> Tensor:
        theirs[0].flatten(0, 1)[slots] = new[0]
        theirs[1].flatten(0, 1)[slots] = new[1]
        return theirs

    return Work(kernel, against, 2 * new.numel() * place.dtype.itemsize)


def _store_rotary(place: Place, model: Model, batch: int) -> Work:
    rows, heads, kv_heads, dim = batch * ROWS, model.heads, model.kv_heads, model.head_dim
    qkv = randn(place, rows, heads + 2 * kv_heads, dim)
    mine, theirs, slots = _caches(place, model, rows)
    inv_freq = 10000.0 ** -(torch.arange(0, dim, 2) / dim)  # [dim / 2]
    cos, signed_sin = (part[:, None].to(place.device) for part in rotary_table(inv_freq, 1.0, rows, place.dtype))
    sin = torch.cat((-signed_sin[..., : dim // 2], signed_sin[..., dim // 2 :]), -1)  # [rows, 1, dim]

    def kernel() -> tuple[Tensor, Tensor]:
        return store_kv_rotary(qkv, (cos, signed_sin), mine[0], mine[1], slots), mine

    def against() -> tuple[Tensor, Tensor]:
        query, key, value = torch.split(qkv, [heads, kv_heads, kv_heads], dim=1)
        query, key = (part * cos + _rotate_half(part) * sin for part in (query, key))
        theirs[0].flatten(0, 1)[slots] = key
        theirs[1].flatten(0, 1)[slots] = value
        return query, theirs

    elements = 2 * qkv.numel() + cos.numel() + sin.numel()
    return Work(kernel, against, elements * place.dtype.itemsize, compared=2)


def _norm(place: Place, model: Model, batch: int) -> Work:
    x, weight = randn(place, batch * ROWS, model.hidden), randn(place, model.hidden)
    work = partial(_formula if place.name == "cpu" else _fused, x, weight)
    return Work(lambda: rms_norm(x, weight, EPS), work, (2 * x.numel() + model.hidden) * place.dtype.itemsize)


def _add_norm(place: Place, model: Model, batch: int) -> Work:
    x, residual = randn(place, 2, batch * ROWS, model.hidden)
    weight = randn(place, model.hidden)
    norm = _formula if place.name == "cpu" else _fused

    def against() -> tuple[Tensor, Tensor]:
        total = residual + x
        return norm(total, weight), total

    num_bytes = (4 * x.numel() + model.hidden) * place.dtype.itemsize
    return Work(lambda: add_rms_norm(x, residual, weight, EPS), against, num_bytes, compared=2)


def _silu(place: Place, model: Model, batch: int) -> Work:
    both = randn(place, batch * ROWS, 2 * model.intermediate)
    gate, up = both.chunk(2, dim=-1)
    return Work(lambda: gated_silu(both), lambda: F.silu(gate) * up, 3 * gate.numel() * place.dtype.itemsize)


def _gelu(place: Place, model: Model, batch: int) -> Work:
    both = randn(place, batch * ROWS, 2 * model.intermediate)
    gate, up = both.chunk(2, dim=-1)
    num_bytes = 3 * gate.numel() * place.dtype.itemsize
    return Work(lambda: gated_gelu(both), lambda: F.gelu(gate, approximate="tanh") * up, num_bytes)


def _linear(place: Place, model: Model, batch: int, *, batch_invariant: bool = False) -> Work:
    """The largest product of a layer: gate and up."""
    rows, inputs, outputs = batch * ROWS, model.hidden, 2 * model.intermediate
    x, weight = randn(place, rows, inputs), randn(place, outputs, inputs) * inputs**-0.5
    linear = Linear(weight, batch_invariant=batch_invariant)
    num_bytes = (weight.numel() + x.numel() + rows * outputs) * place.dtype.itemsize
    flops = 2 * rows * weight.numel()
    return Work(lambda: linear(x), lambda: F.linear(x, weight), num_bytes, flops)


LAYER = (
    ("kv_store.store_kv", "", "cache[slots] = new, twice", _store, DEVICES),
    ("kv_store.store_kv_rotary", "", "x cos + rotate_half(x) sin, then cache[slots] = new", _store_rotary, DEVICES),
    # On a CPU rms_norm is F.rms_norm, so that a comparison with it says nothing.
    ("rms_norm.rms_norm", "", "x / sqrt(mean(x^2) + eps) in float32", _norm, ("cpu",)),
    ("rms_norm.rms_norm", "", "F.rms_norm", _norm, ("cuda",)),
    ("rms_norm.add_rms_norm", "", "x + residual, and the formula", _add_norm, ("cpu",)),
    ("rms_norm.add_rms_norm", "", "x + residual, F.rms_norm", _add_norm, ("cuda",)),
    ("gated_silu.gated_silu", "", "F.silu(gate) * up", _silu, DEVICES),
    ("gated_silu.gated_gelu", "", "F.gelu(gate) * up", _gelu, DEVICES),
    ("linear.Linear", "", "F.linear", _linear, DEVICES),
    ("linear.Linear", ", batch-invariant", "F.linear", partial(_linear, batch_invariant=True), DEVICES),
)


def _caches(place: Place, model: Model, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Two of keys and values, [2, blocks, block_size, kv_heads, head_dim] each, and slots for the rows."""
    shape = 2, CACHE_BLOCKS, BLOCK_SIZE, model.kv_heads, model.head_dim
    mine, theirs = (torch.zeros(shape, dtype=place.dtype, device=place.device) for _ in range(2))
    return mine, theirs, torch.randperm(CACHE_BLOCKS * BLOCK_SIZE, device=place.device)[:rows]


def _in_a_row(cache: Tensor, tables: Tensor, context: int) -> Tensor:
    """cache: [blocks, block_size, kv_heads, dim] -> [batch, kv_heads, context, dim], a copy."""
    return cache[tables].flatten(1, 2)[:, :context].transpose(1, 2).contiguous()


def _rotate_half(x: Tensor) -> Tensor:  # [rows, heads, dim]
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


def _formula(x: Tensor, weight: Tensor) -> Tensor:
    """As transformers' models write it."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).to(x.dtype)


def _fused(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, EPS)
