"""Attention of a ragged batch over the paged cache.

Query heads that share a key-value head are laid out as further rows, so keys and values are gathered once and never
repeated."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.kernels.attention.plan import SPLIT_KEYS, AttentionGroup, AttentionPlan, DevicePlan, plan_attention
from outrider.kernels.types import TreeMask


def paged_attention(
    query: Tensor,  # [rows, heads, head_dim]
    key_cache: Tensor,  # [blocks, block_size, kv_heads, head_dim]
    value_cache: Tensor,  # [blocks, block_size, kv_heads, value_dim]
    block_tables: Tensor,  # [sequences, most blocks] int64
    query_starts: tuple[int, ...],  # [sequences + 1]
    context_lens: tuple[int, ...],  # [sequences]
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,  # [heads]
    batch_invariant: bool = False,
    parents: Tensor | None = None,  # [rows] int32, see tree_mask
    kv_scales: tuple[Tensor, Tensor] | None = None,  # [1] float32 each, of an fp8 cache
    first_key: int = 0,
    tree: TreeMask | None = None,  # of blocks, see block_mask
) -> Tensor:  # [rows, heads, value_dim]
    """Causal attention by absolute position, from `first_key` on: the rows of a sequence are the last ones of its
    context. With `parents`, that of drafted trees; with `tree`, that of blocks."""
    plan = plan_attention(
        block_tables,
        query_starts,
        context_lens,
        block_size=key_cache.shape[1],
        heads_per_kv_head=query.shape[1] // key_cache.shape[2],
        dtype=query.dtype,
        sliding_window=sliding_window,
        batch_invariant=batch_invariant,
        parents=parents,
        first_key=first_key,
        tree=tree,
    )
    return planned_attention(
        plan, query, key_cache, value_cache, scale=scale, softcap=softcap, sinks=sinks, kv_scales=kv_scales
    )


def planned_attention(
    plan: AttentionPlan,
    query: Tensor,  # [rows, heads, head_dim]
    key_cache: Tensor,  # [blocks, block_size, kv_heads, head_dim]
    value_cache: Tensor,  # [blocks, block_size, kv_heads, value_dim]
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,  # [heads]
    kv_scales: tuple[Tensor, Tensor] | None = None,  # [1] float32 each, of an fp8 cache
) -> Tensor:  # [rows, heads, value_dim]
    """The same with a plan made once for all layers of a pass."""
    if isinstance(plan, DevicePlan):
        from outrider.kernels.attention.triton import attention

        return attention(
            plan, query, key_cache, value_cache, scale=scale, softcap=softcap, sinks=sinks, kv_scales=kv_scales
        )
    results = [
        _attend_group(
            group, bias, plan.batch_invariant, query, key_cache, value_cache, scale, softcap, sinks, kv_scales
        )
        for group, bias in zip(plan.groups, plan.biases, strict=True)
    ]
    if len(results) == 1 and isinstance(plan.groups[0].rows, slice) and plan.groups[0].kept is None:
        return results[0]
    out = query.new_empty(query.shape[0], query.shape[1], value_cache.shape[3])
    for group, result in zip(plan.groups, results, strict=True):
        _put(out, group, result)
    return out


def _attend_group(
    group: AttentionGroup,
    bias: Tensor | None,  # [sequences, 1, query_len * heads per kv head, num_keys]
    batch_invariant: bool,
    query: Tensor,  # [rows, heads, head_dim]
    key_cache: Tensor,  # [blocks, block_size, kv_heads, head_dim]
    value_cache: Tensor,  # [blocks, block_size, kv_heads, value_dim]
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,  # [heads]
    kv_scales: tuple[Tensor, Tensor] | None,  # [1] float32 each
) -> Tensor:  # [sequences * query_len, heads, value_dim]
    sequences, query_len, heads, kv_heads = group.num_sequences, group.query_len, query.shape[1], key_cache.shape[2]
    keys = _gather(key_cache, group)
    values = _gather(value_cache, group)
    if kv_scales is not None:
        keys = (keys.float() * kv_scales[0]).to(query.dtype)
        values = (values.float() * kv_scales[1]).to(query.dtype)
    grouped = query[group.rows].view(sequences, query_len, kv_heads, heads // kv_heads, -1).transpose(1, 2)
    grouped = grouped.reshape(sequences, kv_heads, query_len * (heads // kv_heads), -1)
    if batch_invariant:
        attended = _by_splits(grouped, keys, values, bias, scale, softcap, sinks)
    elif softcap is None and sinks is None:
        attended = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=bias, scale=scale)
    else:
        attended = _by_scores(grouped, keys, values, bias, scale, softcap, sinks)
    attended = attended.view(sequences, kv_heads, query_len, heads // kv_heads, -1).transpose(1, 2)
    return attended.reshape(sequences * query_len, heads, -1)


def _gather(cache: Tensor, group: AttentionGroup) -> Tensor:
    """cache: [blocks, block_size, kv_heads, dim] -> [sequences, kv_heads, num_keys, dim], a copy."""
    kv_heads, dim = cache.shape[2:]
    rows = cache.view(-1, kv_heads * dim).index_select(0, group.slots)
    return rows.view(group.num_sequences, group.num_keys, kv_heads, dim).transpose(1, 2)


def _put(out: Tensor, group: AttentionGroup, result: Tensor) -> None:
    """out: [rows, heads, value_dim], written; result: [sequences * query_len, heads, value_dim]."""
    if isinstance(group.rows, slice) or group.kept is None:
        out[group.rows] = result
    else:
        out[group.rows[group.kept]] = result[group.kept]


def _by_scores(
    query: Tensor,  # [sequences, kv_heads, queries, head_dim], queries = query_len * heads per kv head
    keys: Tensor,  # [sequences, kv_heads, num_keys, head_dim]
    values: Tensor,  # [sequences, kv_heads, num_keys, value_dim]
    bias: Tensor | None,  # [sequences, 1, queries, num_keys]
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,  # [heads]
) -> Tensor:  # [sequences, kv_heads, queries, value_dim]
    scores = _scores(query, keys, bias, scale, softcap)
    if sinks is not None:
        sink = _sink_column(sinks, query.shape[1], query.shape[2]).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sink], dim=-1)
    probs = scores.softmax(-1)[..., : keys.shape[2]]
    return torch.matmul(probs.to(values.dtype), values)


def _by_splits(
    query: Tensor,  # [1, kv_heads, queries, head_dim]: one tile of rows
    keys: Tensor,  # [1, kv_heads, num_keys, head_dim], num_keys a multiple of SPLIT_KEYS
    values: Tensor,  # [1, kv_heads, num_keys, value_dim]
    bias: Tensor | None,  # [1, 1, queries, num_keys]
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,  # [heads]
) -> Tensor:  # [1, kv_heads, queries, value_dim]
    """Products and sums over fixed splits of the keys, added in order of position; a split that a row does not see adds
    zeros."""
    splits = [slice(start, start + SPLIT_KEYS) for start in range(0, keys.shape[2], SPLIT_KEYS)]
    scores = [
        _scores(query, keys[:, :, split], None if bias is None else bias[..., split], scale, softcap)
        for split in splits
    ]  # each [1, kv_heads, queries, SPLIT_KEYS]
    most = torch.stack([part.amax(-1, keepdim=True) for part in scores]).amax(0)  # [1, kv_heads, queries, 1]
    total = torch.zeros_like(most)
    if sinks is not None:
        sink = _sink_column(sinks, query.shape[1], query.shape[2])
        most = torch.maximum(most, sink)
        total = torch.exp(sink - most)
    weighted = torch.zeros(*query.shape[:3], values.shape[3], device=query.device)  # [1, kv_heads, queries, value_dim]
    for split, part in zip(splits, scores, strict=True):
        weights = torch.exp(part - most)  # -inf gives exactly 0
        total = total + weights.sum(-1, keepdim=True)
        weighted = weighted + torch.bmm(weights[0], values[0, :, split].float())
    return (weighted / total).to(query.dtype)


def _scores(query: Tensor, keys: Tensor, bias: Tensor | None, scale: float, softcap: float | None) -> Tensor:
    """[sequences, kv_heads, queries, keys] float32."""
    scores = torch.matmul(query.float() * scale, keys.float().transpose(-1, -2))
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    return scores if bias is None else scores + bias


def _sink_column(sinks: Tensor, kv_heads: int, queries: int) -> Tensor:  # [heads] -> [1, kv_heads, queries, 1] float32
    per_group = sinks.float().view(kv_heads, 1, -1)
    return per_group.expand(kv_heads, queries // per_group.shape[2], per_group.shape[2]).reshape(
        1, kv_heads, queries, 1
    )
