"""The decoder on a CPU, in float32, by our C kernels: the same function as decoder.py's, in one call for all layers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.engine.batch import Batch
from outrider.engine.kv_cache import KVCache, LayerShape
from outrider.engine.models.base import UnsupportedModel
from outrider.engine.models.decoder_config import DecoderConfig
from outrider.engine.models.rope import rotary_tables
from outrider.engine.models.weights import WeightReader, check_state
from outrider.kernels import cpu_decoder
from outrider.kernels.cpu_decoder import CpuDecoder, LayerWeights, RaggedRows


def can_run(config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernels are there and take this model."""
    if device.type != "cpu" or dtype != torch.float32:
        return False
    return cpu_decoder.can_run(config.hidden_size, config.head_dim)


class NativeDecoder:
    """A CausalLM. Batch-invariant whether that was asked for or not."""

    def __init__(self, config: DecoderConfig, state: Mapping[str, Tensor]) -> None:
        check_state(config, state)
        reader = WeightReader(state, torch.float32, torch.device("cpu"))
        self.config = config
        self.dtype = torch.float32
        self.device = torch.device("cpu")
        self.batch_invariant = True
        self.layers = (LayerShape(config.num_kv_heads, config.head_dim),) * config.num_layers
        self.vocab_size = config.vocab_size
        self.hidden_size = config.hidden_size
        self.max_model_len = config.max_model_len
        self._embedding = reader.tensor("model.embed_tokens.weight")  # [vocab, hidden]
        self.kernel = CpuDecoder(
            [_layer(config, index, reader) for index in range(config.num_layers)],
            rotary_tables(config.hf, config.head_dim, config.max_model_len, torch.float32),
            reader.tensor("model.norm.weight"),
            self._embedding if config.tied_embeddings else reader.tensor("lm_head.weight"),
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            eps=config.rms_norm_eps,
        )

    def forward(self, batch: Batch, cache: KVCache) -> Tensor:  # [logit rows, vocab] float32
        """Stores the keys and values of all rows of `batch` in `cache`; returns the logits of `batch.logit_rows`
        alone."""
        hidden = F.embedding(batch.token_ids, self._embedding)
        rows = RaggedRows(
            batch.positions, batch.slot_mapping, batch.block_tables, batch.query_starts, batch.context_lens
        )
        return self.kernel.forward(hidden, rows, cache.keys, cache.values, batch.logit_rows)


def _layer(config: DecoderConfig, index: int, reader: WeightReader) -> LayerWeights:
    prefix = f"model.layers.{index}."

    def read(*names: str) -> tuple[Tensor, Tensor | None]:
        weight, bias = (reader.stacked(prefix, names, kind) for kind in (".weight", ".bias"))
        if weight is None:
            raise UnsupportedModel(f"no weight for {prefix}{names[0]}")
        return weight, bias

    qkv, qkv_bias = read("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    output, output_bias = read("self_attn.o_proj")
    (gate, gate_bias), (up, up_bias), (down, down_bias) = (read(f"mlp.{name}_proj") for name in ("gate", "up", "down"))
    qk_norm: Tensor | None = None
    if config.qk_norm:
        query_norm, key_norm = (reader.tensor(f"{prefix}self_attn.{name}_norm.weight") for name in "qk")
        qk_norm = torch.cat([query_norm.expand(config.num_heads, -1), key_norm.expand(config.num_kv_heads, -1)])
    return LayerWeights(
        qkv, output, gate, up, down,
        reader.tensor(f"{prefix}input_layernorm.weight"), reader.tensor(f"{prefix}post_attention_layernorm.weight"),
        qk_norm, qkv_bias, output_bias, gate_bias, up_bias, down_bias, config.sliding_windows[index],
    )  # fmt: skip
