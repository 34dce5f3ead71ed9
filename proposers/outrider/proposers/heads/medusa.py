"""Medusa (Cai et al., arXiv 2401.10774): a head for each of the next positions, all from one hidden state.

Head i gives the token i + 2 positions after that state's; the one right after it is the target's own. A head is some
residual blocks and a language-model head, its own or the target's. Its checkpoint has vLLM's names (blocks.0.layers.0,
lm_heads.0) or those of the original (0.0.linear, 0.1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch.nn.functional as F
from torch import Tensor

from outrider.engine.batch import Batch, StaticBatch
from outrider.engine.kv_cache import KVCache, LayerShape
from outrider.engine.models.base import WrongCheckpoint
from outrider.engine.models.products import Product
from outrider.proposers.heads.head import HeadReader, TargetWeights, check_ids


@dataclass(frozen=True, slots=True)
class MedusaConfig:
    """What config.json says."""

    num_heads: int
    num_layers: int
    hidden_size: int
    vocab_size: int
    num_outputs: int  # rows of a language-model head: fewer than vocab_size with a token map
    shares_output: bool  # one language-model head, the target's, serves all

    @classmethod
    def parse(cls, config: Mapping[str, Any], target: TargetWeights) -> Self:
        """Of either layout; what is not said is the target's. Raises WrongCheckpoint."""
        vocab_size, hidden_size = target.output.shape
        found = cls(
            num_heads=int(config.get("num_heads", config.get("medusa_num_heads", 0))),
            num_layers=int(config.get("num_hidden_layers", config.get("medusa_num_layers", 1))),
            hidden_size=int(config.get("hidden_size") or hidden_size),
            vocab_size=int(config.get("vocab_size") or vocab_size),
            num_outputs=int(config.get("truncated_vocab_size") or config.get("vocab_size") or vocab_size),
            shares_output=bool(config.get("original_lm_head", False)),
        )
        if found.num_heads < 1 or (found.hidden_size, found.vocab_size) != (hidden_size, vocab_size):
            raise WrongCheckpoint(
                f"Medusa's config.json has {found.num_heads} heads, hidden_size {found.hidden_size} and vocab_size "
                f"{found.vocab_size}; allowed: one head or more, and the target's {hidden_size} and {vocab_size}"
            )
        return found


class MedusaHead:
    """All heads. Its state is the target's hidden state."""

    name = "medusa"
    layers: tuple[LayerShape, ...] = ()
    mask = None

    def __init__(self, config: MedusaConfig, reader: HeadReader, target: TargetWeights) -> None:
        self.taps = target.taps([target.num_layers])
        self.hidden_size = config.hidden_size
        self.most_tokens = config.num_heads
        self.stages = config.num_heads - 1  # each depth has its own
        self._vocab_size = config.vocab_size
        self._blocks = [_layers(config, reader, head) for head in range(config.num_heads)]
        self._token_map = None  # [num_outputs]: the ids of the heads' outputs
        if config.num_outputs < config.vocab_size:
            self._token_map = reader.tensor((config.num_outputs,), "token_map").long()
            check_ids("token_map", self._token_map, config.vocab_size)
        outputs = [self._output(config, reader, target, head) for head in range(config.num_heads)]
        self._outputs = [reader.product(output) for output in outputs]

    def _output(self, config: MedusaConfig, reader: HeadReader, target: TargetWeights, head: int) -> Tensor:
        """[outputs, hidden]"""
        names = ("lm_head.weight", "lm_heads.0.weight") if config.shares_output else (f"lm_heads.{head}.weight",)
        names = (*names, f"{head}.{config.num_layers}.weight")
        if config.shares_output and not any(name in reader for name in names):
            return target.output if self._token_map is None else target.output[self._token_map]
        return reader.tensor((config.num_outputs, config.hidden_size), *names)

    def first(self, batch: Batch | StaticBatch, features: Tensor, cache: KVCache) -> tuple[Tensor, Tensor]:
        """Of the last hidden state alone. Shapes: `Head.first`."""
        return self.next(0, batch, features[batch.logit_rows, 0], cache)

    def fill(self, batch: Batch, features: Tensor, cache: KVCache) -> None:
        """Nothing: it looks at no row before."""

    def next(self, depth: int, batch: Batch | StaticBatch, state: Tensor, cache: KVCache) -> tuple[Tensor, Tensor]:
        """What is drafted before plays no part. Shapes: `Head.next`."""
        hidden = state
        for block in self._blocks[depth]:
            hidden = hidden + F.silu(block(hidden))
        logits = self._outputs[depth](hidden).float()  # [rows, outputs]
        if self._token_map is None:
            return logits, state
        whole = logits.new_full((len(logits), self._vocab_size), float("-inf"))
        return whole.index_copy_(1, self._token_map, logits), state


def _layers(config: MedusaConfig, reader: HeadReader, head: int) -> list[Product]:
    """Of one head: what every residual block adds, before its activation."""
    found: list[Product] = []
    for layer in range(config.num_layers):
        names = (f"blocks.{head}.layers.{layer}", f"{head}.{layer}.linear")
        biases = [f"{name}.bias" for name in names if f"{name}.bias" in reader]
        weight = reader.tensor((config.hidden_size, config.hidden_size), *(f"{name}.weight" for name in names))
        found.append(reader.product(weight, reader.tensor((config.hidden_size,), *biases) if biases else None))
    return found
