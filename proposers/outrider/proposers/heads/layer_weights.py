"""The layers of heads, read from their checkpoints: one weight for what has one input, as files hold it or in parts."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.engine.models.decoder import DecoderLayer
from outrider.engine.models.decoder_config import DecoderConfig
from outrider.engine.models.feed import GatedFeed
from outrider.engine.models.products import Product
from outrider.proposers.heads.head import HeadReader

QKV, GATE_UP = "self_attn.qkv_proj", "mlp.gate_up_proj"  # where the checkpoint holds the parts as one


def read_layer(config: DecoderConfig, reader: HeadReader, prefixes: tuple[str, ...], inputs: int) -> DecoderLayer:
    """A layer whose attention reads rows of `inputs` numbers. Raises WrongCheckpoint."""
    hidden, width, dim = config.hidden_size, config.intermediate_size, config.head_dim

    def linear(columns: int, whole: str, *parts: tuple[str, int]) -> Product:
        return reader.product(*stacked(reader, prefixes, columns, whole, *parts))

    qk_norm = None
    if config.family.qk_norm == "by head":
        query, key = (reader.tensor((dim,), *_named(prefixes, f"self_attn.{part}_norm.weight")) for part in "qk")
        qk_norm = torch.cat([query.expand(config.num_heads, -1), key.expand(config.num_kv_heads, -1)])
    return DecoderLayer(
        config,
        qkv=linear(inputs, QKV, *_qkv(config)),
        output=linear(config.num_heads * dim, "", ("self_attn.o_proj", hidden)),
        feed=GatedFeed(
            config,
            linear(hidden, GATE_UP, ("mlp.gate_proj", width), ("mlp.up_proj", width)),
            linear(width, "", ("mlp.down_proj", hidden)),
        ),
        post_norm=reader.tensor((hidden,), *_named(prefixes, "post_attention_layernorm.weight")),
        qk_norm=qk_norm,
    )


def further_layer(config: DecoderConfig, reader: HeadReader, index: int) -> tuple[Tensor, DecoderLayer]:
    """A layer that is a decoder's: the norm before it, [hidden], and the layer. Raises WrongCheckpoint."""
    prefixes = layer_prefixes(index)
    weight = reader.tensor((config.hidden_size,), *_named(prefixes, "input_layernorm.weight"))
    return weight, read_layer(config, reader, prefixes, config.hidden_size)


def key_value(config: DecoderConfig, reader: HeadReader, index: int) -> tuple[Tensor, Tensor | None, Tensor]:
    """What such a layer makes keys and values with: weight [2 * kv_heads * head_dim, hidden], bias, and the norm of
    the keys, [kv_heads, head_dim]. Raises WrongCheckpoint."""
    queries, prefixes = config.num_heads * config.head_dim, layer_prefixes(index)
    weight, bias = stacked(reader, prefixes, config.hidden_size, QKV, *_qkv(config))
    norm = reader.tensor((config.head_dim,), *_named(prefixes, "self_attn.k_norm.weight"))
    keys = norm.expand(config.num_kv_heads, -1).contiguous()
    return weight[queries:], None if bias is None else bias[queries:], keys


def stacked(
    reader: HeadReader,
    prefixes: tuple[str, ...],
    columns: int,
    whole: str,  # name of what holds the parts as one; empty: nothing does
    *parts: tuple[str, int],  # name and rows, on top of one another
) -> tuple[Tensor, Tensor | None]:  # [rows of all, columns], [rows of all]
    """A weight and its bias. Raises WrongCheckpoint."""
    if whole and any(name in reader for name in _named(prefixes, f"{whole}.weight")):
        parts = ((whole, sum(rows for _, rows in parts)),)
    weight = torch.cat([reader.tensor((rows, columns), *_named(prefixes, f"{part}.weight")) for part, rows in parts])
    if not any(name in reader for name in _named(prefixes, f"{parts[0][0]}.bias")):
        return weight, None
    return weight, torch.cat([reader.tensor((rows,), *_named(prefixes, f"{part}.bias")) for part, rows in parts])


def layer_prefixes(index: int) -> tuple[str, ...]:
    """What the names of a layer's tensors begin with, by who saved it."""
    return f"layers.{index}.", f"model.layers.{index}."


def _named(prefixes: tuple[str, ...], name: str) -> tuple[str, ...]:
    return tuple(prefix + name for prefix in prefixes)


def _qkv(config: DecoderConfig) -> tuple[tuple[str, int], ...]:
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return ("self_attn.q_proj", queries), ("self_attn.k_proj", keys), ("self_attn.v_proj", keys)
