"""A small random model of a checkpoint's architecture: every kind of layer once, narrow, few ids, short windows."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

MAX_WINDOW = 24  # of the copy
MAX_LAYERS = 4
MAX_PARAMETERS = 400_000_000
_MOST = {  # upper bounds that change no mechanism, or make it show in short texts and small scores
    "vocab_size": 512,
    "vocab_size_per_layer_input": 512,
    "intermediate_size": 128,
    "ffn_dim": 128,
    "n_inner": 128,
    "shared_expert_intermediate_size": 64,
    "shared_intermediate_size": 64,
    "moe_intermediate_size": 64,
    "sliding_window": MAX_WINDOW,
    "attention_chunk_size": MAX_WINDOW,
    "first_k_dense_replace": 1,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 2.0,
}


def small_copy(config: PreTrainedConfig, *, narrow: bool, trust_remote_code: bool) -> PreTrainedModel:
    """Builds the copy in float32 on the CPU with eager attention and weights drawn from a fixed seed. Without `narrow`
    only layers, ids, feed-forward sizes and windows are cut. Raises ValueError if it is still too large, and whatever
    the class raises for a configuration that it does not like."""
    small = _small_config(config, narrow)
    options = {"attn_implementation": "eager", "dtype": torch.float32, "trust_remote_code": trust_remote_code}
    with torch.device("meta"):
        size = sum(weight.numel() for weight in AutoModelForCausalLM.from_config(small, **options).parameters())
    if size > MAX_PARAMETERS:
        raise ValueError(f"it would still have {size} parameters")
    with torch.random.fork_rng(devices=[]):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(small, **options)
    _randomise(model)
    return model.eval()


def _small_config(config: PreTrainedConfig, narrow: bool) -> PreTrainedConfig:
    small = copy.deepcopy(config)
    if hasattr(small, "quantization_config"):
        del small.quantization_config
    for part in _parts(small):
        _cut_layers(part)
        for name, most in _MOST.items():
            value = getattr(part, name, None)
            if isinstance(value, int | float) and value > most:
                setattr(part, name, most)
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            if getattr(part, name, None) is not None:
                setattr(part, name, 0)
        if narrow:
            _cut_heads(part)
    return small


def _parts(config: PreTrainedConfig) -> list[Any]:
    """The configuration and those inside it (text, vision)."""
    inner = [getattr(config, name, None) for name in config.sub_configs]
    return [config, *(part for found in inner if isinstance(found, PreTrainedConfig) for part in _parts(found))]


def _cut_layers(part: Any) -> None:
    """Keeps the first layer of each kind, at least two layers; a kind is what the lists by layer say of it."""
    count = getattr(part, "num_hidden_layers", None)
    if not isinstance(count, int) or count <= 2:
        return
    lists = {name: v for name, v in vars(part).items() if isinstance(v, list | tuple) and len(v) == count}
    kinds = [repr([values[layer] for values in lists.values()]) for layer in range(count)]
    keep = sorted({kinds.index(kind) for kind in kinds})[:MAX_LAYERS]
    keep = sorted({*keep, *[layer for layer in range(count) if layer not in keep][: max(0, 2 - len(keep))]})
    part.num_hidden_layers = len(keep)
    for name, values in lists.items():
        setattr(part, name, type(values)(values[layer] for layer in keep))


def _cut_heads(part: Any) -> None:
    """Two key-value heads with two query heads each, of the same head_dim, and a hidden size in proportion."""
    heads, hidden = getattr(part, "num_attention_heads", None), getattr(part, "hidden_size", None)
    if not isinstance(heads, int) or not isinstance(hidden, int):
        return
    kv_heads = getattr(part, "num_key_value_heads", None) or heads
    new_kv = min(kv_heads, 2)
    new_heads = new_kv * min(heads // kv_heads, 2)
    # Where heads do not divide it, the hidden size is free, and stays even enough for anything that halves it.
    new_hidden = hidden * new_heads // heads if hidden % heads == 0 else -(-hidden * new_heads // heads // 16) * 16
    for name in ("word_embed_proj_dim", "hidden_size"):  # OPT's embeddings are as wide, except in one size
        if getattr(part, name, None) == hidden:
            setattr(part, name, new_hidden)
    part.num_attention_heads = new_heads
    if getattr(part, "num_key_value_heads", None) is not None:
        part.num_key_value_heads = new_kv


@torch.no_grad()
def _randomise(model: nn.Module) -> None:
    """Weights large enough that every mechanism shows in the logits: initial biases and sinks are often zero."""
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if weight.dim() >= 2:
            weight.copy_(noise * weight.shape[-1] ** -0.5)
        else:
            weight.add_(noise * 0.2)
