"""Our own decoder: Llama, Mistral, Qwen, Gemma and Phi over the paged cache, with fused and packed products."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from outrider.engine.batch import Batch
from outrider.engine.kv_cache import KVCache, LayerShape
from outrider.engine.models.base import UnsupportedModel
from outrider.engine.models.decoder_config import DecoderConfig
from outrider.engine.models.embedding import Embedding
from outrider.engine.models.rope import rotary_tables
from outrider.engine.models.weights import WeightReader
from outrider.kernels.attention_plan import AttentionPlan, plan_attention
from outrider.kernels.gated_silu import gated_gelu, gated_silu
from outrider.kernels.kv_store import store_kv
from outrider.kernels.linear import Linear
from outrider.kernels.paged_attention import planned_attention
from outrider.kernels.rms_norm import rms_norm
from outrider.kernels.rotary import apply_rotary

KEEP_PLAIN_BYTES = 2 << 30  # up to this size the weights are kept in a second layout, for steps of one or two rows


class _Layer:
    """One block: attention, then the gated feed-forward, each around a residual."""

    def __init__(
        self, config: DecoderConfig, index: int, reader: WeightReader, batch_invariant: bool, keep_plain: bool
    ) -> None:
        prefix = f"model.layers.{index}."

        def linear(*names: str) -> Linear:
            return Linear(*reader.linear(prefix, *names), batch_invariant=batch_invariant, keep_plain=keep_plain)

        self._config = config
        self._batch_invariant = batch_invariant
        self._gate: Callable[..., Tensor] = gated_silu if config.activation == "silu" else gated_gelu
        self.sliding_window = config.sliding_windows[index]
        self.rotary_type = config.rotary_types[index]
        self._qkv = linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        self._output = linear("self_attn.o_proj")
        self._gate_up = linear("mlp.gate_proj", "mlp.up_proj")
        self._down = linear("mlp.down_proj")
        self._input_norm, self._post_norm, self._output_norm, self._down_norm = reader.block_norms(prefix)  # [hidden]
        self._qk_norm = reader.qk_norm(prefix)  # [heads + kv_heads, head_dim]

    def forward(
        self,
        hidden: Tensor,  # [rows, hidden]
        rotary: tuple[Tensor, Tensor],  # [rows, 1, head_dim] each
        plan: AttentionPlan,
        slot_mapping: Tensor,  # [rows]
        key_cache: Tensor,  # [blocks, block_size, kv_heads, head_dim]
        value_cache: Tensor,  # [blocks, block_size, kv_heads, head_dim]
    ) -> Tensor:  # [rows, hidden]
        """Stores the rows' keys and values, and returns the residual stream after this block."""
        eps, invariant = self._config.rms_norm_eps, self._batch_invariant
        heads, kv_heads, dim = self._config.num_heads, self._config.num_kv_heads, self._config.head_dim

        qkv = self._qkv(rms_norm(hidden, self._input_norm, eps, batch_invariant=invariant))
        qkv = qkv.view(-1, heads + 2 * kv_heads, dim)
        turned = qkv[:, : heads + kv_heads]  # [rows, heads + kv_heads, head_dim]
        if self._qk_norm is not None:
            turned = rms_norm(turned, self._qk_norm, eps, batch_invariant=invariant)
        turned = apply_rotary(turned, *rotary)
        store_kv(turned[:, heads:], qkv[:, heads + kv_heads :], key_cache, value_cache, slot_mapping)
        attended = planned_attention(
            plan,
            turned[:, :heads],
            key_cache,
            value_cache,
            scale=self._config.attention_scale,
            softcap=self._config.attention_softcap,
        )
        output = self._output(attended.flatten(1))
        if self._output_norm is not None:
            output = rms_norm(output, self._output_norm, eps, batch_invariant=invariant)
        hidden = hidden + output

        gate_up = self._gate_up(rms_norm(hidden, self._post_norm, eps, batch_invariant=invariant))
        down = self._down(self._gate(gate_up, batch_invariant=invariant))
        if self._down_norm is not None:
            down = rms_norm(down, self._down_norm, eps, batch_invariant=invariant)
        return hidden + down


class Decoder:
    """A CausalLM. Holds weights and tables; the cache and the batch are passed in."""

    def __init__(
        self,
        config: DecoderConfig,
        state: Mapping[str, Tensor],
        *,
        dtype: torch.dtype,
        device: torch.device,
        batch_invariant: bool = False,
    ) -> None:
        if batch_invariant and device.type != "cpu":
            raise UnsupportedModel("batch-invariant mode is proven on the CPU only")
        reader = WeightReader(config, state, dtype, device)
        keep_plain = sum(tensor.numel() for tensor in state.values()) * dtype.itemsize <= KEEP_PLAIN_BYTES
        self.config = config
        self.dtype = dtype
        self.device = device
        self.batch_invariant = batch_invariant
        self.layers = (LayerShape(config.num_kv_heads, config.head_dim),) * config.num_layers
        self.vocab_size = config.vocab_size
        self.hidden_size = config.hidden_size
        self.max_model_len = config.max_model_len
        self._rotary = {  # of each kind of layer cos and signed sin, [positions, 1, head_dim] each
            kind: (cos[:, None].to(device), sin[:, None].to(device))
            for kind, (cos, sin) in rotary_tables(config, dtype).items()
        }
        self._embedding = Embedding(reader.tensor("model.embed_tokens.weight"), config.embedding_scale)
        self._blocks = tuple(
            _Layer(config, index, reader, batch_invariant, keep_plain) for index in range(config.num_layers)
        )
        self._norm = reader.norm("model.norm.weight")  # [hidden]
        head = self._embedding.weight if config.tied_embeddings else reader.tensor("lm_head.weight")
        self._head = Linear(head, batch_invariant=batch_invariant, keep_plain=keep_plain or config.tied_embeddings)

    def forward(self, batch: Batch, cache: KVCache) -> Tensor:  # [logit rows, vocab] float32
        """Stores the keys and values of all rows of `batch` in `cache`; returns the logits of `batch.logit_rows`
        alone."""
        hidden = self.forward_hidden(batch, cache)
        if batch.logit_rows.shape[0] != hidden.shape[0]:
            hidden = hidden[batch.logit_rows]
        return self.logits(hidden)

    def forward_hidden(self, batch: Batch, cache: KVCache) -> Tensor:  # [rows, hidden]
        """The residual stream after the last block, before the last norm, of every row."""
        plans = {
            window: plan_attention(
                batch.block_tables,
                batch.query_starts,
                batch.context_lens,
                block_size=cache.block_size,
                heads_per_kv_head=self.config.num_heads // self.config.num_kv_heads,
                dtype=self.dtype,
                sliding_window=window,
                batch_invariant=self.batch_invariant,
            )
            for window in set(self.config.sliding_windows)
        }
        rotary = {kind: (cos[batch.positions], sin[batch.positions]) for kind, (cos, sin) in self._rotary.items()}
        hidden = self._embedding(batch.token_ids)
        for block, keys, values in zip(self._blocks, cache.keys, cache.values, strict=True):
            plan, turn = plans[block.sliding_window], rotary[block.rotary_type]
            hidden = block.forward(hidden, turn, plan, batch.slot_mapping, keys, values)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:  # [rows, hidden] -> [rows, vocab] float32
        """The language-model head of rows of the residual stream; a step of prompt chunks alone wants none."""
        if hidden.shape[0] == 0:
            return hidden.new_empty(0, self.vocab_size, dtype=torch.float32)
        normed = rms_norm(hidden, self._norm, self.config.rms_norm_eps, batch_invariant=self.batch_invariant)
        logits = self._head(normed).float()
        cap = self.config.logit_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)
