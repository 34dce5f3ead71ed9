"""Batched decoding with the training model: a plain key/value cache, for text that the target writes."""

import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.training.model import Attention, Llama, rotate


class _Cache:
    """Keys and values of one layer for a batch of sequences of equal length."""

    def __init__(self, batch: int, heads: int, length: int, head_dim: int, dtype: torch.dtype) -> None:
        self.key = torch.zeros(batch, heads, length, head_dim, dtype=dtype)
        self.value = torch.zeros(batch, heads, length, head_dim, dtype=dtype)


@torch.no_grad()
def continue_windows(
    model: Llama, prompts: Tensor, length: int, temperature: float, generator: torch.Generator
) -> Tensor:
    """Extend `prompts` [batch, prompt] to [batch, length]; temperature 0 is greedy."""
    shape = model.shape
    batch, position = prompts.shape
    caches = [_Cache(batch, shape.num_kv_heads, length, shape.head_dim, model.dtype) for _ in range(shape.num_layers)]
    ids = torch.cat([prompts, prompts.new_zeros(batch, length - position)], dim=1)
    logits = _forward(model, prompts, 0, caches)
    while position < length:
        ids[:, position] = _choose(logits, temperature, generator)
        logits = _forward(model, ids[:, position : position + 1], position, caches)
        position += 1
    return ids


def _choose(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    if temperature == 0:
        return logits.argmax(-1)
    probs = F.softmax(logits.float() / temperature, dim=-1)
    return torch.multinomial(probs, 1, generator=generator)[:, 0]


def _forward(model: Llama, ids: Tensor, start: int, caches: list[_Cache]) -> Tensor:
    """Logits [batch, vocabulary] after the last of `ids` [batch, new], which begin at position `start`."""
    end = start + ids.shape[1]
    cos, sin = model.cos[start:end], model.sin[start:end]
    hidden = model.model.embed_tokens(ids).to(model.dtype)  # [batch, new, hidden]
    for layer, cache in zip(model.model.blocks(), caches, strict=True):
        normed = layer.input_layernorm(hidden)
        hidden = hidden + _attend(layer.self_attn, normed, cos, sin, start, cache)
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    last = model.model.norm(hidden[:, -1])
    return F.linear(last, model.model.embed_tokens.weight.to(model.dtype))


def _attend(attention: Attention, hidden: Tensor, cos: Tensor, sin: Tensor, start: int, cache: _Cache) -> Tensor:
    batch, new, _ = hidden.shape
    query, key, value = attention.heads(hidden)  # [batch, heads, new, head_dim] each
    end = start + new
    cache.key[:, :, start:end] = rotate(key, cos, sin)
    cache.value[:, :, start:end] = value
    query, key, value = rotate(query, cos, sin), cache.key[:, :, :end], cache.value[:, :, :end]
    if new == 1:  # the query heads of a group read the same keys: they are the rows of one product, with no copies
        grouped = query.view(batch, -1, attention.group, attention.head_dim)
        return attention.join(F.scaled_dot_product_attention(grouped, key, value).view(query.shape))
    key, value = (part.repeat_interleave(attention.group, dim=1) for part in (key, value))
    return attention.join(F.scaled_dot_product_attention(query, key, value, is_causal=True))
