"""Heads that are a layer of a decoder: EAGLE, EAGLE-3 and MTP, which differ in what goes in and what comes out.

A row is token t of a sequence and a state of position t - 1, and its rotary position is t - 1, as these heads were
trained. Its keys and values are kept at place t, so that what a block of the cache holds follows from that block's
tokens and those before, and can be shared like the target's. Place 0 holds nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.engine.batch import Batch, StaticBatch
from outrider.engine.kv_cache import KVCache, LayerShape
from outrider.engine.models.base import UnsupportedModel, WrongCheckpoint
from outrider.engine.models.decoder_config import DecoderConfig, parse_config, rotary_tables
from outrider.kernels.attention.plan import AttentionPlan, plan_attention, plan_on_device
from outrider.kernels.layers.reference import add_rms_norm, rms_norm
from outrider.kernels.types import TreeMask
from outrider.proposers.heads.adapters import HeadAdapters
from outrider.proposers.heads.head import HeadReader, MaskRow, TargetWeights
from outrider.proposers.heads.layer_weights import further_layer, read_layer

MOST_TOKENS = 128  # a draft may be as long as a window


class LayerHead(ABC):
    """The layer, or several, without what goes in and comes out: subclasses have `enter` and `leave`."""

    name: str
    taps: tuple[int, ...]
    hidden_size: int
    most_tokens = MOST_TOKENS
    stages = 1
    mask: MaskRow | None = None

    def __init__(
        self, config: DecoderConfig, reader: HeadReader, target: TargetWeights, prefixes: tuple[str, ...], inputs: int
    ) -> None:
        self.config = config
        self.hidden_size = target.output.shape[1]
        self.layers = (LayerShape(config.num_kv_heads, config.head_dim),) * config.num_layers
        self._block = read_layer(config, reader, prefixes, inputs)
        self._further = [further_layer(config, reader, index) for index in range(1, config.num_layers)]
        self._embeddings = target.embeddings
        self.adapters = HeadAdapters(config, reader.dtype, reader.device, attention_inputs=inputs)
        tables = rotary_tables(config, reader.dtype)[config.rotary_types[0]]
        self._cos, self._sin = (table[:, None].to(reader.device) for table in tables)  # [positions, 1, head_dim]

    @property
    def may_learn(self) -> bool:
        """Whether `adapters` may change it: a head of one layer, that drafts a token a pass."""
        return not self._further and self.mask is None

    @abstractmethod
    def enter(self, embedded: Tensor, state: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """embedded: [rows, hidden]; state: [rows, width]; positions: [rows], of the state. Returns what the layer's
        products take, [rows, inputs], and the residual stream, [rows, hidden]."""

    @abstractmethod
    def leave(self, hidden: Tensor) -> tuple[Tensor, Tensor]:  # [rows, hidden] -> [rows, vocab] float32, [rows, width]
        """The logits of the token behind, and the next state."""

    def features_to_state(self, features: Tensor) -> Tensor:  # [rows, taps, hidden] -> [rows, width]
        """Of the target's hidden states."""
        return features[:, 0]

    def first(self, batch: Batch | StaticBatch, features: Tensor, cache: KVCache) -> tuple[Tensor, Tensor]:
        """Shapes: `Head.first`."""
        hidden = self._pass(batch, self.features_to_state(features), cache)
        return self.leave(hidden[batch.logit_rows])

    def fill(self, batch: Batch, features: Tensor, cache: KVCache) -> None:
        """Shapes: `Head.fill`. A lone layer's keys and values are made of its own inputs: nothing is attended to."""
        state = self.features_to_state(features)
        if self._further:
            self._pass(batch, state, cache)
            return
        normed, _, rotary = self._entered(batch, state)
        self._block.store(normed, rotary, batch.slot_mapping, cache.keys[0], cache.values[0])

    def next(self, depth: int, batch: Batch | StaticBatch, state: Tensor, cache: KVCache) -> tuple[Tensor, Tensor]:
        """Shapes: `Head.next`."""
        return self.leave(self._pass(batch, state, cache)[batch.logit_rows])

    def _pass(
        self, batch: Batch | StaticBatch, state: Tensor, cache: KVCache
    ) -> Tensor:  # [rows, width] -> [rows, hidden]
        plan, slots = self._plan(batch, cache.block_size, state.dtype), batch.slot_mapping
        normed, residual, rotary = self._entered(batch, state)
        update, residual = self._block.forward(
            normed, residual, rotary, plan, slots, cache.keys[0], cache.values[0], self.adapters.of(batch)
        )
        for index, (weight, block) in enumerate(self._further, start=1):
            normed, residual = add_rms_norm(update, residual, weight, self.config.rms_norm_eps)
            update, residual = block.forward(
                normed, residual, rotary, plan, slots, cache.keys[index], cache.values[index]
            )
        return residual + update

    def _entered(
        self, batch: Batch | StaticBatch, state: Tensor
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:  # [rows, inputs], [rows, hidden], [rows, 1, head_dim] each
        positions = batch.positions - 1
        normed, residual = self.enter(F.embedding(batch.token_ids, self._embeddings), state, positions)
        return normed, residual, (self._cos[positions], self._sin[positions])

    def _plan(self, batch: Batch | StaticBatch, block_size: int, dtype: torch.dtype) -> AttentionPlan:
        return plan_rows(batch, self.config, block_size, dtype, self.config.sliding_windows[0])

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:  # [rows, hidden], [hidden] -> [rows, hidden]
        """RMS norm by the layer's epsilon."""
        return rms_norm(x, weight, self.config.rms_norm_eps)


def plan_rows(
    batch: Batch | StaticBatch,
    config: DecoderConfig,
    block_size: int,
    dtype: torch.dtype,
    window: int | None,
    tree: TreeMask | None = None,  # of blocks, in place of a batch's own parents
) -> AttentionPlan:
    """What each row sees of a head's cache, whose place 0 holds nothing."""
    if isinstance(batch, StaticBatch):
        return plan_on_device(
            batch.block_tables,
            batch.query_starts,
            batch.context_lens,
            max_query_len=batch.max_query_len,
            sliding_window=window,
            max_model_len=config.max_model_len,
            first_key=1,
            tree=tree,
        )
    return plan_attention(
        batch.block_tables,
        batch.query_starts,
        batch.context_lens,
        block_size=block_size,
        heads_per_kv_head=config.num_heads // config.num_kv_heads,
        dtype=dtype,
        sliding_window=window,
        parents=batch.parents,
        max_model_len=config.max_model_len,
        first_key=1,
        tree=tree,
    )


def layer_fields(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a head's config.json says of its layers: speculators keeps it apart."""
    found: Mapping[str, Any] = config.get("transformer_layer_config") or config
    return found


def layer_config(config: Mapping[str, Any], target: TargetWeights, most_layers: int = 1) -> DecoderConfig:
    """Of a head's layers, by the words of a decoder's config.json; as long as the target's context. Raises
    UnsupportedModel."""
    num_layers = config.get("num_hidden_layers", 1)
    if not 1 <= num_layers <= most_layers:
        allowed = f"1 to {most_layers}" if most_layers > 1 else "1"
        raise UnsupportedModel(f"a head of {num_layers} layers (num_hidden_layers); allowed: {allowed}")
    vocab_size = config.get("vocab_size", len(target.output))
    if vocab_size != len(target.output):
        raise WrongCheckpoint(f"vocab_size: is {vocab_size}; allowed: the target's, {len(target.output)}")
    limit = max(int(config.get("max_position_embeddings") or 0), target.max_model_len)
    parsed = parse_config({**config, "num_hidden_layers": num_layers, "max_position_embeddings": limit})
    if parsed.mixture is not None or parsed.family.qk_norm == "of all heads":
        raise UnsupportedModel(f"a head of {parsed.model_type}'s layers; allowed: those of models without experts")
    return replace(parsed, max_model_len=target.max_model_len)
