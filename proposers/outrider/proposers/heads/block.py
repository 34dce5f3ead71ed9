"""Block drafters: DFlash (Chen et al., arXiv 2602.06036) drafts a block of tokens in one pass, from hidden states
of its target.

The states of several layers of the target, joined by `fc` and normed, are the head's context: each of its layers makes
keys and values of them, once for every committed token. A block's rows are the last committed token, whose states are
not known yet, and masks; they see the context and one another. A row's logits are the law of one place, whatever is
drawn at the others: given the context the places are independent.

A row of the context is at place t of the cache what the states of position t - 1 give, turned by t - 1, as in the
heads of layer.py; behind them stand the rows of a block, which the next context overwrites."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.engine.batch import Batch, StaticBatch
from outrider.engine.kv_cache import KVCache, LayerShape
from outrider.engine.models.base import WrongCheckpoint
from outrider.engine.models.decoder import DecoderLayer
from outrider.engine.models.decoder_config import DecoderConfig, rotary_tables
from outrider.engine.models.products import Product
from outrider.kernels.attention.plan import AttentionPlan
from outrider.kernels.attention.tree_mask import block_mask
from outrider.kernels.kv_store.reference import store_kv_rotary
from outrider.kernels.layers.reference import add_rms_norm, rms_norm
from outrider.proposers.heads.block_config import BlockConfig, Sight
from outrider.proposers.heads.head import HeadReader, TargetWeights, check_ids
from outrider.proposers.heads.layer import plan_rows
from outrider.proposers.heads.layer_weights import further_layer, key_value

MASK = -1  # stands for the mask in a batch's ids
MASK_EMBEDDING, LM_HEAD = "mask_embedding", "lm_head.weight"
EMBEDDINGS = "embed_tokens.weight", "model.embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class BlockGuess:
    """What a pass gives of the places of blocks, packed."""

    logits: Tensor  # [places, outputs] float32
    hidden: Tensor  # [places, hidden]: what the language-model head read


@dataclass(frozen=True, slots=True)
class BlockChains:
    """Chains that are drawn from left to right, and where each stands."""

    places: Tensor  # [chains] int64: of the next token, among the guess's
    before: Tensor  # [chains] int64: the token before it
    memory: Tensor | None  # [chains, width]: what the head kept of the place before; None at the first
    adjust: Callable[[Tensor], Tensor]  # of logits, [chains, vocab], by the chains' own masks, bans and penalties


class BlockHead:
    """DFlash, and what others build on: many sequences in one pass, each as many tokens as its block gives."""

    name = "dflash"
    anchor_first = False  # where the checkpoint does not say
    is_independent = True  # a place's law hangs on no token drawn before it
    memory_width = 0  # of what is kept of a place for the next one
    least_confidence = 0.0  # a chain ends before a token that is less likely to be taken; 0: it does not

    def __init__(self, config: Mapping[str, Any], reader: HeadReader, target: TargetWeights) -> None:
        self.config = found = BlockConfig.parse(config, target, self.anchor_first)
        self.taps, self.rows = found.taps, found.rows
        self.most_tokens, self.first_row = found.most_tokens, found.first_row
        self.hidden_size, self._vocab_size = target.output.shape[1], len(target.output)
        layer, hidden = found.layer, found.layer.hidden_size
        self.layers = (LayerShape(layer.num_kv_heads, layer.head_dim),) * layer.num_layers
        self._eps = layer.rms_norm_eps
        names = "fc.weight", "model.fc.weight", "encoder.fc.weight"
        self._fc = reader.product(reader.tensor((hidden, len(self.taps) * self.hidden_size), *names))
        self._context_norm = reader.tensor((hidden,), "hidden_norm.weight", "encoder.output_norm_enc.weight")
        self._last_norm = reader.tensor((hidden,), "norm.weight", "model.norm.weight")
        self._layers = [further_layer(layer, reader, index) for index in range(layer.num_layers)]
        self._context = ContextLayers(layer, reader)
        self._embedding = BlockEmbedding(found, reader, target)
        self._output, self._ids = _output(found, reader, target)
        tables = rotary_tables(layer, reader.dtype)[layer.rotary_types[0]]
        self._cos, self._sin = (table[:, None].to(reader.device) for table in tables)  # [positions, 1, head_dim]

    def fill(self, batch: Batch | StaticBatch, features: Tensor, cache: KVCache) -> None:
        """Stores the context of committed tokens; features: [rows, taps, hidden]."""
        context = self.norm(self._fc(features.flatten(1)), self._context_norm)  # [rows, hidden]
        self._context.store(context, self._rotary(batch), batch.slot_mapping, cache)

    def draft(self, batch: Batch | StaticBatch, cache: KVCache) -> BlockGuess:
        """The rows of blocks, each the last committed token and masks (`MASK`); of the batch's logit rows. A static
        batch may be captured."""
        plans = {sight: self._plan(batch, cache, sight) for sight in set(self.config.sights)}
        rotary, slots = self._rotary(batch), batch.slot_mapping
        residual = self._embedding(batch.token_ids)  # [rows, hidden]
        update = torch.zeros_like(residual)
        for index, (norm, layer) in enumerate(self._layers):
            normed, residual = add_rms_norm(update, residual, norm, self._eps)
            step = rotary, plans[self.config.sights[index]], slots, cache.keys[index], cache.values[index]
            update, residual = self.through(index, layer, normed, residual, step, batch)
        hidden = self.norm((residual + update)[batch.logit_rows], self._last_norm)  # [places, hidden]
        return BlockGuess(self._logits(hidden), hidden)

    def through(
        self,
        index: int,
        layer: DecoderLayer,
        normed: Tensor,  # [rows, hidden]
        residual: Tensor,  # [rows, hidden]
        step: tuple[Any, ...],  # as DecoderLayer.forward takes it
        batch: Batch | StaticBatch,
    ) -> tuple[Tensor, Tensor]:  # [rows, hidden] each
        """A layer, as DecoderLayer.forward."""
        return layer.forward(normed, residual, *step)

    @property
    def tells_confidence(self) -> bool:
        """Whether `confidence` does."""
        return False

    def at(self, guess: BlockGuess, chains: BlockChains) -> tuple[Tensor, Tensor | None]:  # [chains, vocab]
        """The logits of the next token of each chain, behind those drawn before it, and the chains' memory then."""
        return self.of_target(guess.logits[chains.places]), None

    def confidence(self, guess: BlockGuess, chains: BlockChains) -> Tensor | None:  # [chains]
        """How likely the next token is taken if those before are, whichever it is; None where nothing tells."""
        return None

    def of_target(self, logits: Tensor) -> Tensor:  # [rows, outputs] -> [rows, vocab]
        """By the target's ids."""
        if self._ids is None:
            return logits
        whole = logits.new_full((len(logits), self._vocab_size), float("-inf"))
        return whole.index_copy_(1, self._ids, logits)

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:  # [rows, hidden], [hidden] -> [rows, hidden]
        """RMS norm by the layers' epsilon."""
        return rms_norm(x, weight, self._eps)

    def _logits(self, hidden: Tensor) -> Tensor:  # [places, hidden] -> [places, outputs] float32
        logits, cap = self._output(hidden).float() * self.config.logit_scale, self.config.logit_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def _rotary(self, batch: Batch | StaticBatch) -> tuple[Tensor, Tensor]:  # [rows, 1, head_dim] each
        positions = batch.positions - 1
        return self._cos[positions], self._sin[positions]

    def _plan(self, batch: Batch | StaticBatch, cache: KVCache, sight: Sight) -> AttentionPlan:
        window = None if sight.window is None else sight.window + 1  # with the first row itself
        tree = block_mask(starts_of(batch), len(batch.token_ids), sight.whole)
        return plan_rows(batch, self.config.layer, cache.block_size, cache.keys[0].dtype, window, tree)


def starts_of(batch: Batch | StaticBatch) -> Tensor:  # [sequences + 1]
    """Where the rows of its sequences begin."""
    starts = batch.query_starts
    return torch.tensor(starts, device=batch.token_ids.device) if isinstance(starts, tuple) else starts


class ContextLayers:
    """What all layers keep of the context: its keys and values are one product, whose rows are those of each layer. So
    the layers' weights for these are held twice, and a committed token costs no queries."""

    def __init__(self, config: DecoderConfig, reader: HeadReader) -> None:
        self._config = config
        parts = [key_value(config, reader, index) for index in range(config.num_layers)]
        biases = [bias for _, bias, _ in parts if bias is not None]
        weight = torch.cat([weight for weight, _, _ in parts])  # [layers * 2 * kv_heads * head_dim, hidden]
        self._product = reader.product(weight, torch.cat(biases) if biases else None)
        self._norms = [norm for _, _, norm in parts]  # of each layer [kv_heads, head_dim]

    def store(self, context: Tensor, rotary: tuple[Tensor, Tensor], slots: Tensor, cache: KVCache) -> None:
        """Of rows [rows, hidden], turned by `rotary`, at `slots`, [rows]."""
        config = self._config
        shape = len(context), config.num_layers, 2 * config.num_kv_heads, config.head_dim
        layers = self._product(context).view(shape).unbind(1)
        for layer, (rows, norm) in enumerate(zip(layers, self._norms, strict=True)):
            store_kv_rotary(
                rows, rotary, cache.keys[layer], cache.values[layer], slots, qk_norm=norm, eps=config.rms_norm_eps
            )


class BlockEmbedding:
    """Of the ids of a block's rows: the target's, or the head's own where it has some; and a row for the mask."""

    def __init__(self, config: BlockConfig, reader: HeadReader, target: TargetWeights) -> None:
        self._weight, self._scale = target.embeddings, config.embedding_scale
        own = next((name for name in EMBEDDINGS if name in reader), None)
        if own is not None:
            hidden = config.layer.hidden_size
            self._weight = reader.tensor((reader.size_of(own) // hidden, hidden), own)
        self._mask = self._mask_row(config.mask_token_id, reader)

    def __call__(self, token_ids: Tensor) -> Tensor:  # [rows], of which some are MASK -> [rows, hidden]
        """The residual stream before the first layer."""
        known = F.embedding(token_ids.clamp(min=0), self._weight)
        found = torch.where((token_ids == MASK)[:, None], self._mask, known)
        return found if self._scale == 1.0 else found * self._scale

    def _mask_row(self, token_id: Any, reader: HeadReader) -> Tensor:  # [hidden]
        """Of the embeddings, where an id beyond the tokenizer's may have one; or a tensor of its own."""
        if MASK_EMBEDDING in reader:
            return reader.vector(self._weight.shape[1], MASK_EMBEDDING)
        if type(token_id) is not int or not 0 <= token_id < len(self._weight):
            raise WrongCheckpoint(
                f"mask_token_id: is {token_id!r:.100}; allowed: a row of the embeddings, 0 to {len(self._weight) - 1}, "
                f"or a tensor {MASK_EMBEDDING}"
            )
        return self._weight[token_id]


def _output(config: BlockConfig, reader: HeadReader, target: TargetWeights) -> tuple[Product, Tensor | None]:
    """The language-model head, and what ids its outputs are where they are fewer than the target's, [outputs]."""
    shape, vocab_size = (config.num_outputs, config.layer.hidden_size), len(target.output)
    if config.num_outputs > vocab_size:
        raise WrongCheckpoint(f"draft_vocab_size: is {config.num_outputs}; allowed: the target's {vocab_size} or fewer")
    if LM_HEAD not in reader:
        if config.num_outputs != vocab_size:
            told = f"is {config.num_outputs}, and there is no {LM_HEAD}"
            raise WrongCheckpoint(f"draft_vocab_size: {told}; allowed: {vocab_size}")
        return reader.product(target.output), None
    output = reader.product(reader.tensor(shape, LM_HEAD))
    if config.num_outputs == vocab_size:
        return output, None
    ids = reader.tensor((config.num_outputs,), "d2t") + torch.arange(config.num_outputs, device=reader.device)
    check_ids("d2t", ids, vocab_size)
    return output, ids
