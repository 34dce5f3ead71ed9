"""Our own decoder: Llama, Mistral, Qwen2 and Qwen3 over the paged cache, with fused and packed products."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.engine.batch import Batch, StaticBatch
from outrider.engine.kv_cache import KVCache, LayerShape
from outrider.engine.models.base import UnsupportedModel
from outrider.engine.models.decoder_config import DecoderConfig
from outrider.engine.models.rope import rotary_tables
from outrider.engine.models.weights import WeightReader, check_state
from outrider.kernels.attention_plan import AttentionPlan, plan_attention, plan_on_device
from outrider.kernels.gated_silu import gated_silu
from outrider.kernels.kv_store import store_kv_rotary
from outrider.kernels.linear import Linear
from outrider.kernels.paged_attention import planned_attention
from outrider.kernels.rms_norm import add_rms_norm, rms_norm

KEEP_PLAIN_BYTES = 2 << 30  # up to this size the weights are kept in a second layout, for steps of one or two rows


class _Layer:
    """One block: attention, then the gated feed-forward, each around a residual."""

    def __init__(
        self, config: DecoderConfig, index: int, reader: WeightReader, batch_invariant: bool, keep_plain: bool
    ) -> None:
        prefix = f"model.layers.{index}."

        def linear(*names: str) -> Linear:
            weight, bias = (reader.stacked(prefix, names, kind) for kind in (".weight", ".bias"))
            if weight is None:
                raise UnsupportedModel(f"no weight for {prefix}{names[0]}")
            return Linear(weight, bias, batch_invariant=batch_invariant, keep_plain=keep_plain)

        self._config = config
        self._batch_invariant = batch_invariant
        self.sliding_window = config.sliding_windows[index]
        self._qkv = linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        self._output = linear("self_attn.o_proj")
        self._gate_up = linear("mlp.gate_proj", "mlp.up_proj")
        self._down = linear("mlp.down_proj")
        self._input_norm = reader.tensor(f"{prefix}input_layernorm.weight")  # [hidden]
        self._post_norm = reader.tensor(f"{prefix}post_attention_layernorm.weight")  # [hidden]
        self._qk_norm: Tensor | None = None  # [heads + kv_heads, head_dim]
        if config.qk_norm:
            query_norm, key_norm = (reader.tensor(f"{prefix}self_attn.{name}_norm.weight") for name in "qk")
            self._qk_norm = torch.cat(
                [query_norm.expand(config.num_heads, -1), key_norm.expand(config.num_kv_heads, -1)]
            ).contiguous()

    def forward(
        self,
        update: Tensor | None,  # [rows, hidden]: what the block before adds to the residual stream
        residual: Tensor,  # [rows, hidden]
        rotary: tuple[Tensor, Tensor],  # [rows, 1, head_dim] each
        plan: AttentionPlan,
        slot_mapping: Tensor,  # [rows]
        key_cache: Tensor,  # [blocks, block_size, kv_heads, head_dim]
        value_cache: Tensor,  # [blocks, block_size, kv_heads, head_dim]
    ) -> tuple[Tensor, Tensor]:  # [rows, hidden] each
        """Stores the rows' keys and values; returns what this block adds to the residual stream, and the stream without
        it: the next norm adds it on its way."""
        eps, invariant = self._config.rms_norm_eps, self._batch_invariant
        heads, kv_heads, dim = self._config.num_heads, self._config.num_kv_heads, self._config.head_dim

        if update is None:
            normed = rms_norm(residual, self._input_norm, eps, batch_invariant=invariant)
        else:
            normed, residual = add_rms_norm(update, residual, self._input_norm, eps, batch_invariant=invariant)
        qkv = self._qkv(normed).view(-1, heads + 2 * kv_heads, dim)
        query = store_kv_rotary(
            qkv, rotary, key_cache, value_cache, slot_mapping, qk_norm=self._qk_norm, eps=eps, batch_invariant=invariant
        )
        attended = self._output(planned_attention(plan, query, key_cache, value_cache, scale=dim**-0.5).flatten(1))

        normed, residual = add_rms_norm(attended, residual, self._post_norm, eps, batch_invariant=invariant)
        return self._down(gated_silu(self._gate_up(normed), batch_invariant=invariant)), residual


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
        check_state(config, state)
        reader = WeightReader(state, dtype, device)
        keep_plain = sum(tensor.numel() for tensor in state.values()) * dtype.itemsize <= KEEP_PLAIN_BYTES
        self.config = config
        self.dtype = dtype
        self.device = device
        self.batch_invariant = batch_invariant
        self.layers = (LayerShape(config.num_kv_heads, config.head_dim),) * config.num_layers
        self.vocab_size = config.vocab_size
        self.hidden_size = config.hidden_size
        self.max_model_len = config.max_model_len
        cos, sin = rotary_tables(config.hf, config.head_dim, config.max_model_len, dtype)
        self._cos, self._sin = cos[:, None].to(device), sin[:, None].to(device)  # [positions, 1, head_dim]
        self._embedding = reader.tensor("model.embed_tokens.weight")  # [vocab, hidden]
        self._blocks = tuple(
            _Layer(config, index, reader, batch_invariant, keep_plain) for index in range(config.num_layers)
        )
        self._norm = reader.tensor("model.norm.weight")  # [hidden]
        head = self._embedding if config.tied_embeddings else reader.tensor("lm_head.weight")
        self._head = Linear(head, batch_invariant=batch_invariant, keep_plain=keep_plain or config.tied_embeddings)

    def forward(
        self,
        batch: Batch | StaticBatch,
        cache: KVCache,
        *,
        out: Tensor | None = None,  # [logit rows, vocab] float32, written
    ) -> Tensor:  # [logit rows, vocab] float32
        """Stores the keys and values of all rows of `batch` in `cache`; returns the logits of `batch.logit_rows`
        alone."""
        hidden = self.forward_hidden(batch, cache)
        if isinstance(batch, StaticBatch) or batch.logit_rows.shape[0] != hidden.shape[0]:
            hidden = hidden[batch.logit_rows]
        return self.logits(hidden) if out is None else out.copy_(self._head_product(hidden))

    def forward_hidden(self, batch: Batch | StaticBatch, cache: KVCache) -> Tensor:  # [rows, hidden]
        """The residual stream after the last block, before the last norm, of every row."""
        plans = {window: self._plan(batch, cache.block_size, window) for window in set(self.config.sliding_windows)}
        rotary = self._cos[batch.positions], self._sin[batch.positions]
        update, residual = None, F.embedding(batch.token_ids, self._embedding)
        for block, keys, values in zip(self._blocks, cache.keys, cache.values, strict=True):
            plan = plans[block.sliding_window]
            update, residual = block.forward(update, residual, rotary, plan, batch.slot_mapping, keys, values)
        return residual if update is None else residual + update

    def _plan(self, batch: Batch | StaticBatch, block_size: int, sliding_window: int | None) -> AttentionPlan:
        """Of all layers of one window. Where keys are split follows from `max_model_len`, in every batch alike."""
        if isinstance(batch, StaticBatch):
            return plan_on_device(
                batch.block_tables,
                batch.query_starts,
                batch.context_lens,
                max_query_len=batch.max_query_len,
                sliding_window=sliding_window,
                batch_invariant=self.batch_invariant,
                max_model_len=self.max_model_len,
            )
        return plan_attention(
            batch.block_tables,
            batch.query_starts,
            batch.context_lens,
            block_size=block_size,
            heads_per_kv_head=self.config.num_heads // self.config.num_kv_heads,
            dtype=self.dtype,
            sliding_window=sliding_window,
            batch_invariant=self.batch_invariant,
            max_model_len=self.max_model_len,
        )

    def logits(self, hidden: Tensor) -> Tensor:  # [rows, hidden] -> [rows, vocab] float32
        """The language-model head of rows of the residual stream; a step of prompt chunks alone wants none."""
        if hidden.shape[0] == 0:
            return hidden.new_empty(0, self.vocab_size, dtype=torch.float32)
        return self._head_product(hidden).float()

    def _head_product(self, hidden: Tensor) -> Tensor:  # [rows, hidden] -> [rows, vocab]
        normed = rms_norm(hidden, self._norm, self.config.rms_norm_eps, batch_invariant=self.batch_invariant)
        return self._head(normed)
