"""Our own decoder: Llama, Mistral, Qwen, Gemma and Phi, and mixtures of experts, over the paged cache, with fused and
packed products."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from outrider.engine.batch import Batch, StaticBatch
from outrider.engine.hidden_states import Taps
from outrider.engine.kv_cache import KVCache, LayerShape
from outrider.engine.models.census import ExpertCensus
from outrider.engine.models.decoder_config import DecoderConfig, rotary_tables
from outrider.engine.models.feed import Feed, GatedFeed, feed_of
from outrider.engine.models.low_rank import LayerAdapters, StackedAdapters
from outrider.engine.models.products import Product, Products, runs_packed
from outrider.engine.models.weights import WeightReader, num_parameters
from outrider.kernels.attention.plan import AttentionPlan, DevicePlan, plan_attention, plan_on_device
from outrider.kernels.attention.reference import planned_attention
from outrider.kernels.kv_store.reference import store_kv_rotary
from outrider.kernels.layers.reference import add_rms_norm, rms_norm

KEEP_PLAIN_BYTES = 2 << 30  # up to this size the weights are kept in a second layout, for steps of one or two rows


class DecoderLayer:
    """Attention, then the gated feed-forward, of rows that are normed already."""

    def __init__(
        self,
        config: DecoderConfig,
        *,
        qkv: Product,
        output: Product,
        feed: Feed,
        post_norm: Tensor,  # [hidden]: before the feed-forward
        output_norm: Tensor | None = None,  # [hidden]: of attention's output, before it is added
        down_norm: Tensor | None = None,  # [hidden]: of the feed-forward's
        qk_norm: Tensor | None = None,  # [heads + kv_heads, head_dim]
        sinks: Tensor | None = None,  # [heads]
        batch_invariant: bool = False,
    ) -> None:
        self._config = config
        self._batch_invariant = batch_invariant
        self._qkv, self._output, self.feed = qkv, output, feed
        # The spare rows of captured steps go to the experts of the first row: they wake no others.
        self._may_spare = not isinstance(feed, GatedFeed)
        self._post_norm, self._output_norm, self._down_norm, self._qk_norm = post_norm, output_norm, down_norm, qk_norm
        self._sinks = sinks

    def forward(
        self,
        normed: Tensor,  # [rows, inputs of qkv]
        residual: Tensor,  # [rows, hidden]
        rotary: tuple[Tensor, Tensor],  # [rows, 1, head_dim] each
        plan: AttentionPlan,
        slot_mapping: Tensor,  # [rows]
        key_cache: Tensor,  # [blocks, block_size, kv_heads, head_dim]
        value_cache: Tensor,  # [blocks, block_size, kv_heads, head_dim]
        adapters: LayerAdapters | None = None,  # of a step in which some row has one
    ) -> tuple[Tensor, Tensor]:  # [rows, hidden] each
        """Stores the rows' keys and values; returns what this block adds to the residual stream, and the stream without
        it: the next norm adds it on its way."""
        output = self.attend(normed, rotary, plan, slot_mapping, key_cache, value_cache, adapters)
        eps, invariant = self._config.rms_norm_eps, self._batch_invariant
        if self._output_norm is not None:
            output = rms_norm(output, self._output_norm, eps, batch_invariant=invariant)
        normed, residual = add_rms_norm(output, residual, self._post_norm, eps, batch_invariant=invariant)
        if self._may_spare and isinstance(plan, DevicePlan):
            normed = torch.where((slot_mapping < 0)[:, None], normed[:1], normed)  # [rows, hidden]
        down = self.feed(normed, adapters)
        if self._down_norm is not None:
            down = rms_norm(down, self._down_norm, eps, batch_invariant=invariant)
        return down, residual

    def attend(
        self,
        normed: Tensor,  # [rows, inputs of qkv]
        rotary: tuple[Tensor, Tensor],  # [rows, 1, head_dim] each
        plan: AttentionPlan,
        slot_mapping: Tensor,  # [rows]
        key_cache: Tensor,  # [blocks, block_size, kv_heads, head_dim]
        value_cache: Tensor,  # [blocks, block_size, kv_heads, head_dim]
        adapters: LayerAdapters | None = None,
    ) -> Tensor:  # [rows, hidden]
        """What attention alone gives; the rows' keys and values are stored."""
        query = self.store(normed, rotary, slot_mapping, key_cache, value_cache, adapters)
        scale, softcap = self._config.attention_scale, self._config.attention_softcap
        attended = planned_attention(
            plan, query, key_cache, value_cache, scale=scale, softcap=softcap, sinks=self._sinks
        ).flatten(1)
        output = self._output(attended)
        if adapters is not None:
            adapters.add("output", output, attended)
        return output

    def store(
        self,
        normed: Tensor,  # [rows, inputs of qkv]
        rotary: tuple[Tensor, Tensor],  # [rows, 1, head_dim] each
        slot_mapping: Tensor,  # [rows]
        key_cache: Tensor,  # [blocks, block_size, kv_heads, head_dim]
        value_cache: Tensor,  # [blocks, block_size, kv_heads, head_dim]
        adapters: LayerAdapters | None = None,
    ) -> Tensor:  # [rows, heads, head_dim]
        """Stores the rows' keys and values; returns the queries."""
        config = self._config
        qkv = self._qkv(normed)
        if adapters is not None:
            adapters.add("qkv", qkv, normed)
        by_head = qkv.view(-1, config.num_heads + 2 * config.num_kv_heads, config.head_dim)
        qk_norm = self._qk_norm
        if qk_norm is not None and config.family.qk_norm == "of all heads":
            self._norm_all_heads(by_head, qk_norm)
            qk_norm = None
        return store_kv_rotary(
            by_head,
            rotary,
            key_cache,
            value_cache,
            slot_mapping,
            qk_norm=qk_norm,
            eps=config.rms_norm_eps,
            batch_invariant=self._batch_invariant,
        )

    def _norm_all_heads(self, qkv: Tensor, factors: Tensor) -> None:  # [rows, heads, dim], changed; [heads, dim]
        """Queries as one vector, and keys as another."""
        config, end = self._config, len(factors)
        for heads in (slice(0, config.num_heads), slice(config.num_heads, end)):
            part, weight = qkv[:, heads].flatten(1), factors[heads].flatten()
            normed = rms_norm(part, weight, config.rms_norm_eps, batch_invariant=self._batch_invariant)
            qkv[:, heads] = normed.unflatten(1, (-1, config.head_dim))


class _Layer:
    """One layer of the decoder: a block behind its norm."""

    def __init__(
        self,
        config: DecoderConfig,
        index: int,
        reader: WeightReader,
        products: Products,
        census: ExpertCensus | None,
        batch_invariant: bool,
    ) -> None:
        prefix = f"model.layers.{index}."
        self._eps, self._batch_invariant = config.rms_norm_eps, batch_invariant
        self.sliding_window = config.sliding_windows[index]
        self.rotary_type = config.rotary_types[index]
        qkv = products.linear(prefix, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        output = products.linear(prefix, "self_attn.o_proj")
        self._input_norm, post_norm, output_norm, down_norm = reader.block_norms(prefix)  # [hidden]
        self._block = DecoderLayer(
            config,
            qkv=qkv,
            output=output,
            feed=feed_of(config, index, products, census, batch_invariant),
            post_norm=post_norm,
            output_norm=output_norm,
            down_norm=down_norm,
            qk_norm=reader.qk_norm(prefix),
            sinks=reader.sinks(prefix),
            batch_invariant=batch_invariant,
        )

    def forward(
        self,
        update: Tensor | None,  # [rows, hidden]: what the layer before adds to the residual stream
        residual: Tensor,  # [rows, hidden]
        *step: Any,  # as Block.forward takes it
    ) -> tuple[Tensor, Tensor]:  # [rows, hidden] each
        """Computes the layer as DecoderLayer.forward does."""
        if update is None:
            normed = rms_norm(residual, self._input_norm, self._eps, batch_invariant=self._batch_invariant)
        else:
            normed, residual = add_rms_norm(
                update, residual, self._input_norm, self._eps, batch_invariant=self._batch_invariant
            )
        return self._block.forward(normed, residual, *step)


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
        int8: bool = False,  # matrices are rounded to what 8 bits hold, and kept in `dtype`
    ) -> None:
        reader = WeightReader(config, state, dtype, device, int8, codes=runs_packed(device) and not int8)
        self.config = config = reader.config
        keep_plain = num_parameters(config) * dtype.itemsize <= KEEP_PLAIN_BYTES
        self.dtype = dtype
        self.device = device
        self.batch_invariant = batch_invariant
        self.takes_trees = True
        self.layers = (LayerShape(config.num_kv_heads, config.head_dim),) * config.num_layers
        self.vocab_size = config.vocab_size
        self.hidden_size = config.hidden_size
        self.max_model_len = config.max_model_len
        self._rotary = {  # of each kind of layer cos and signed sin, [positions, 1, head_dim] each
            kind: (cos[:, None].to(device), sin[:, None].to(device))
            for kind, (cos, sin) in rotary_tables(config, dtype).items()
        }
        products = Products(reader, dtype, device, batch_invariant, keep_plain)
        self._embedding = products.embedding(config.embedding_scale)
        self.census = None if config.mixture is None else ExpertCensus(config.mixture, device)
        self._blocks = tuple(
            _Layer(config, index, reader, products, self.census, batch_invariant) for index in range(config.num_layers)
        )
        self._norm = reader.norm("model.norm.weight")  # [hidden]
        self._head = products.head(self._embedding)
        self.adapters = StackedAdapters(config, dtype, device, batch_invariant)

    @property
    def embeddings(self) -> Tensor | None:  # [vocab, hidden]
        """The embeddings of the ids, not scaled; None where they stay packed."""
        return self._embedding.weight

    @property
    def output(self) -> Tensor | None:  # [vocab, hidden]
        """The weight of the language-model head; None where it is kept in a layout of the product's own alone."""
        return self._head.weight

    def forward(
        self,
        batch: Batch | StaticBatch,
        cache: KVCache,
        *,
        out: Tensor | None = None,  # [logit rows, vocab] float32, written
        taps: Taps | None = None,
    ) -> Tensor:  # [logit rows, vocab] float32
        """Stores the keys and values of all rows of `batch` in `cache`, and the hidden states that are asked for in
        `taps`; returns the logits of `batch.logit_rows` alone."""
        hidden = self.forward_hidden(batch, cache, taps)
        if taps is not None and taps.wants(len(self.layers)):
            taps.put(len(self.layers), self._normed(hidden))
        if isinstance(batch, StaticBatch) or batch.logit_rows.shape[0] != hidden.shape[0]:
            hidden = hidden[batch.logit_rows]
        return self.logits(hidden, out)

    def forward_hidden(
        self, batch: Batch | StaticBatch, cache: KVCache, taps: Taps | None = None
    ) -> Tensor:  # [rows, hidden]
        """The residual stream after the last block, before the last norm, of every row."""
        plans = {window: self._plan(batch, cache.block_size, window) for window in set(self.config.sliding_windows)}
        rotary = {kind: (cos[batch.positions], sin[batch.positions]) for kind, (cos, sin) in self._rotary.items()}
        slots = batch.adapter_slots
        adapters = [None] * len(self._blocks) if slots is None else self.adapters.step(slots)
        update, residual = None, self._embedding(batch.token_ids)
        for index, (block, keys, values) in enumerate(zip(self._blocks, cache.keys, cache.values, strict=True)):
            if taps is not None and taps.wants(index):
                taps.put(index, residual if update is None else residual + update)
            plan, turn = plans[block.sliding_window], rotary[block.rotary_type]
            step = turn, plan, batch.slot_mapping, keys, values, adapters[index]
            update, residual = block.forward(update, residual, *step)
        if self.census is not None:
            self.census.close()
        return residual if update is None else residual + update

    def _plan(self, batch: Batch | StaticBatch, block_size: int, sliding_window: int | None) -> AttentionPlan:
        """The plan that all layers of one window share. Where keys are split follows from `max_model_len`, in every
        batch alike."""
        if isinstance(batch, StaticBatch):
            return plan_on_device(
                batch.block_tables,
                batch.query_starts,
                batch.context_lens,
                max_query_len=batch.max_query_len,
                sliding_window=sliding_window,
                batch_invariant=self.batch_invariant,
                parents=batch.parents,
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
            parents=batch.parents,
            max_model_len=self.max_model_len,
        )

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:  # [rows, hidden] -> [rows, vocab] float32
        """The language-model head of rows of the residual stream; a step of prompt chunks alone wants none."""
        if hidden.shape[0] == 0:
            return hidden.new_empty(0, self.vocab_size, dtype=torch.float32)
        product = self._head(self._normed(hidden))
        logits = product.float() if out is None else out.copy_(product)
        cap = self.config.logit_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def _normed(self, hidden: Tensor) -> Tensor:  # [rows, hidden] -> the same
        return rms_norm(hidden, self._norm, self.config.rms_norm_eps, batch_invariant=self.batch_invariant)
