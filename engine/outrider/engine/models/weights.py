"""The tensors of a Hugging Face checkpoint, by name and shape, and their fusion into ours."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from outrider.engine.models.base import WrongCheckpoint
from outrider.engine.models.decoder_config import DecoderConfig


def expected_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that the checkpoint must hold."""
    hidden, width, dim = config.hidden_size, config.intermediate_size, config.head_dim
    heads, kv_heads = config.num_heads * dim, config.num_kv_heads * dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    linears = [
        ("self_attn.q_proj", heads, hidden, config.attention_bias),
        ("self_attn.k_proj", kv_heads, hidden, config.attention_bias),
        ("self_attn.v_proj", kv_heads, hidden, config.attention_bias),
        ("self_attn.o_proj", hidden, heads, config.output_bias),
        ("mlp.gate_proj", width, hidden, config.mlp_bias),
        ("mlp.up_proj", width, hidden, config.mlp_bias),
        ("mlp.down_proj", hidden, width, config.mlp_bias),
    ]
    norms = [("input_layernorm", hidden), ("post_attention_layernorm", hidden)]
    if config.qk_norm:
        norms += [("self_attn.q_norm", dim), ("self_attn.k_norm", dim)]
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        for name, rows, columns, bias in linears:
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
        for name, size in norms:
            shapes[f"{prefix}{name}.weight"] = (size,)
    return shapes


def check_state(config: DecoderConfig, state: Mapping[str, Tensor]) -> None:
    """Raises WrongCheckpoint that names missing, unexpected and misshapen tensors."""
    expected = expected_shapes(config)
    ignored = {"lm_head.weight"} if config.tied_embeddings else set()
    names = {name for name in state if name not in ignored and not name.endswith("rotary_emb.inv_freq")}
    problems = [
        *(f"missing {name}" for name in sorted(expected.keys() - names)),
        *(f"unexpected {name}" for name in sorted(names - expected.keys())),
        *(
            f"{name} has shape {tuple(state[name].shape)}, not {shape}"
            for name, shape in expected.items()
            if name in names and tuple(state[name].shape) != shape
        ),
    ]
    if problems:
        more = f" and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise WrongCheckpoint(f"not a {config.model_type} of this configuration: {'; '.join(problems[:8])}{more}")


class WeightReader:
    """Hands out tensors of one dtype and device, several stacked into one where asked."""

    def __init__(self, state: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device) -> None:
        self._state = state
        self._dtype = dtype
        self._device = device

    def tensor(self, name: str) -> Tensor:
        """A copy that shares no memory with the checkpoint (whose mapping may not be aligned)."""
        return self._state[name].to(device=self._device, dtype=self._dtype, copy=True)

    def stacked(self, prefix: str, names: tuple[str, ...], kind: str) -> Tensor | None:
        """The tensors `prefix + name + kind` on top of one another; None where the checkpoint has none of that kind."""
        if prefix + names[0] + kind not in self._state:
            return None
        return torch.cat([self.tensor(prefix + name + kind) for name in names])
