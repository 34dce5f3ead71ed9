"""DSpark (arXiv 2607.05147): DFlash's block, drawn from left to right.

A Markov head adds to a place's logits what the token before it says: `markov_w2` of a gate times `markov_w1`'s row of
that token, or of a state that runs along the block. A confidence head tells how likely a place's token is taken if
those before it are; it reads the place's hidden state and the token before, never the token itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from outrider.engine.models.base import UnsupportedModel
from outrider.proposers.heads.block import BlockChains, BlockGuess, BlockHead
from outrider.proposers.heads.head import HeadReader, TargetWeights

KINDS = ("vanilla", "gated", "rnn")
CONFIDENCE, LEVEL = "confidence_head.proj.weight", "confidence_head.proj.bias"


class DSparkHead(BlockHead):
    """A block whose places follow one another."""

    name = "dspark"
    anchor_first = True
    is_independent = False

    def __init__(self, config: Mapping[str, Any], reader: HeadReader, target: TargetWeights) -> None:
        super().__init__(config, reader, target)
        hidden, rank = self.config.layer.hidden_size, int(config.get("markov_rank") or 0)
        self._kind, self._rank = config.get("markov_head_type") or "vanilla", rank
        if self._kind not in KINDS:
            raise UnsupportedModel(f"markov_head_type: is {self._kind!r:.100}; allowed: {', '.join(KINDS)}")
        self._has_markov = rank > 0
        if self._has_markov:
            names = "markov_head.markov_w1.weight", "markov_head.markov_w1"
            self._rows = reader.tensor((self._vocab_size, rank), *names)
            names = "markov_head.markov_w2.weight", "markov_head.markov_w2"
            self._bias = reader.product(reader.tensor((self.config.num_outputs, rank), *names))
            self._mix = self._read_mix(reader, hidden)
            self.memory_width = rank if self._kind == "rnn" else 0
        self._confidence: Tensor | None = None  # [hidden, and perhaps rank]
        if CONFIDENCE in reader and config.get("enable_confidence_head", True):
            with_markov = config.get("confidence_head_with_markov", reader.size_of(CONFIDENCE) > hidden)
            self._with_markov = self._has_markov and bool(with_markov)
            self._confidence = reader.vector(hidden + (rank if self._with_markov else 0), CONFIDENCE)
            self._level = reader.vector(1, LEVEL) if LEVEL in reader else 0.0

    @property
    def tells_confidence(self) -> bool:
        """Whether the checkpoint has a confidence head."""
        return self._confidence is not None

    def at(self, guess: BlockGuess, chains: BlockChains) -> tuple[Tensor, Tensor | None]:
        """Shapes: `BlockHead.at`."""
        logits, memory = guess.logits[chains.places], None
        if self._has_markov:
            given, memory = self._given(guess.hidden[chains.places], chains)
            logits = logits + self._bias(given).float()
        return self.of_target(logits), memory

    def confidence(self, guess: BlockGuess, chains: BlockChains) -> Tensor | None:
        """Shapes: `BlockHead.confidence`."""
        if self._confidence is None:
            return None
        known = guess.hidden[chains.places]  # [chains, hidden]
        if self._with_markov:
            known = torch.cat([known, self._rows[chains.before]], dim=-1)
        return torch.sigmoid(known.float() @ self._confidence.float() + self._level)

    def _read_mix(self, reader: HeadReader, hidden: int) -> Any:
        """What joins a token's row with what else is known."""
        if self._kind == "vanilla":
            return None
        name, rows, columns = "gate_proj", self._rank, hidden + self._rank
        if self._kind == "rnn":
            name, rows, columns = "joint_proj", 3 * self._rank, hidden + 2 * self._rank
        weight = reader.tensor((rows, columns), f"markov_head.{name}.weight")
        return reader.product(weight, reader.vector(rows, f"markov_head.{name}.bias"))

    def _given(self, hidden: Tensor, chains: BlockChains) -> tuple[Tensor, Tensor | None]:  # [chains, rank] each
        """What the bias is made of, of [chains, hidden], and the state that runs along."""
        row = self._rows[chains.before]  # [chains, rank]
        if self._kind == "vanilla":
            return row, None
        if self._kind == "gated":
            return torch.sigmoid(self._mix(torch.cat([hidden, row], dim=-1))) * row, None
        state = torch.zeros_like(row) if chains.memory is None else chains.memory
        gate, candidate, output = self._mix(torch.cat([state, row, hidden], dim=-1)).chunk(3, dim=-1)
        gate = torch.sigmoid(gate)
        return torch.tanh(output), gate * state + (1.0 - gate) * torch.tanh(candidate)
