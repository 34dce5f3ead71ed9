"""The MLP speculator (Wertheimer et al., arXiv 2404.19124): each head takes the state of the one before and the token
that was drawn from it.

state' = gelu(norm(proj(state) + a * emb(token))), logits = head(state'), where `a` weighs the token against the state
so that neither drowns the other, however many heads follow; the first state is the target's last hidden state. With
`tie_weights` all heads share their weights, but for the first projection. Layout: ibm-ai-platform's accelerators."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.engine.batch import Batch, StaticBatch
from outrider.engine.kv_cache import KVCache, LayerShape
from outrider.engine.models.base import WrongCheckpoint
from outrider.engine.models.products import Product
from outrider.proposers.heads.head import HeadReader, TargetWeights

NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class MlpConfig:
    """What config.json says."""

    num_heads: int
    hidden_size: int  # of the target
    inner_dim: int
    vocab_size: int
    tie_weights: bool
    scale_input: bool

    @classmethod
    def parse(cls, config: Mapping[str, Any], target: TargetWeights) -> Self:
        """Raises WrongCheckpoint."""
        vocab_size, hidden_size = target.output.shape
        found = cls(
            num_heads=int(config.get("n_predict", 0)),
            hidden_size=int(config.get("emb_dim", 0)),
            inner_dim=int(config.get("inner_dim") or config.get("emb_dim", 0)),
            vocab_size=int(config.get("vocab_size", 0)),
            tie_weights=bool(config.get("tie_weights", False)),
            scale_input=bool(config.get("scale_input", False)),
        )
        if found.num_heads < 1 or (found.hidden_size, found.vocab_size) != (hidden_size, vocab_size):
            raise WrongCheckpoint(
                f"the MLP speculator's config.json has n_predict {found.num_heads}, emb_dim {found.hidden_size} and "
                f"vocab_size {found.vocab_size}; allowed: 1 or more, and the target's {hidden_size} and {vocab_size}"
            )
        return found

    @property
    def token_weight(self) -> float:
        """Of the token's embedding beside the projected state."""
        state_weight = math.sqrt(0.5 ** (1 / self.num_heads))
        token_weight = math.sqrt((1 - state_weight**2) * (self.inner_dim / 2))
        return token_weight / state_weight  # the norm takes care of the rest


@dataclass(frozen=True, slots=True)
class _Stage:
    """One head."""

    embeddings: Tensor  # [vocab, inner]
    projection: Product  # [inner, hidden or inner]
    norm: Tensor  # [inner]
    norm_bias: Tensor  # [inner]
    output: Product  # [vocab, inner]


class MlpSpeculatorHead:
    """All heads. Its state is the one that the next head takes."""

    name = "mlp_speculator"
    layers: tuple[LayerShape, ...] = ()
    mask = None

    def __init__(self, config: MlpConfig, reader: HeadReader, target: TargetWeights) -> None:
        self.taps = target.taps([target.num_layers])
        self.hidden_size = config.hidden_size
        self.most_tokens = config.num_heads
        self.stages = config.num_heads - 1  # each depth has its own
        self._scale_input = config.scale_input
        self._token_weight = config.token_weight
        self._stages = [_stage(config, reader, index) for index in range(config.num_heads)]

    def first(self, batch: Batch | StaticBatch, features: Tensor, cache: KVCache) -> tuple[Tensor, Tensor]:
        """Of the last hidden state, scaled if the heads were trained so. Shapes: `Head.first`."""
        state = features[batch.logit_rows, 0]
        state = normed(state) / math.sqrt(2) if self._scale_input else state
        return self._stage(0, batch.token_ids[batch.logit_rows], state)

    def fill(self, batch: Batch, features: Tensor, cache: KVCache) -> None:
        """Nothing: it looks at no row before."""

    def next(self, depth: int, batch: Batch | StaticBatch, state: Tensor, cache: KVCache) -> tuple[Tensor, Tensor]:
        """Shapes: `Head.next`."""
        return self._stage(depth, batch.token_ids, state)

    def _stage(self, depth: int, token_ids: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        stage = self._stages[depth]
        mixed = stage.projection(state) + self._token_weight * F.embedding(token_ids, stage.embeddings)
        state = F.gelu(normed(mixed) * stage.norm + stage.norm_bias)  # [rows, inner]
        return stage.output(state).float(), state


def _stage(config: MlpConfig, reader: HeadReader, index: int) -> _Stage:
    inner, vocab = config.inner_dim, config.vocab_size

    def read(shape: tuple[int, ...], part: str, kind: str, first: int = 0) -> Tensor:
        """With shared weights those of the first stage that has them, by whichever name they were saved."""
        indices = range(first, config.num_heads) if config.tie_weights else (index,)
        return reader.tensor(shape, *(f"{prefix}{part}.{at}.{kind}" for prefix in PREFIXES for at in indices))

    projection = (
        reader.tensor((inner, config.hidden_size), *(f"{prefix}proj.0.weight" for prefix in PREFIXES))
        if index == 0
        else read((inner, inner), "proj", "weight", first=1)
    )
    return _Stage(
        read((vocab, inner), "emb", "weight"),
        reader.product(projection),
        read((inner,), "ln", "weight"),
        read((inner,), "ln", "bias"),
        reader.product(read((vocab, inner), "head", "weight")),
    )


PREFIXES = ("speculator.", "")


def normed(x: Tensor) -> Tensor:  # [..., width] -> the same
    """By its root mean square."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + NORM_EPS)
