"""What a head is asked for, and the tensors that it is made of.

A head drafts right after the step that committed a token: from the hidden states at the last position that was
computed, and from that token, which stands one position further."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from outrider.engine.models.base import WrongCheckpoint


class Head(Protocol):
    """Drafts several tokens, one after the other or all at once. Every draft begins anew: nothing is kept."""

    @property
    def name(self) -> str:
        """The method's name, as in the protocol."""

    @property
    def taps(self) -> tuple[int, ...]:
        """The layers whose hidden states it reads, as hidden_states.py numbers them."""

    @property
    def most_tokens(self) -> int:
        """That it can draft in a row."""

    def start(self, features: Tensor) -> Tensor:  # [rows, taps, hidden] -> [rows, width]
        """The state before the first token: of the hidden states one position before the last token."""

    def step(
        self,
        depth: int,
        state: Tensor,
        token_ids: Tensor,  # [rows, width], [rows] int64
    ) -> tuple[Tensor, Tensor]:  # [rows, vocab] float32, [rows, width]
        """The logits of the token after `token_ids`, the `depth`-th that is drafted from 0 on, and the next state."""


@dataclass(frozen=True, slots=True)
class TargetWeights:
    """What a head shares with its target."""

    embeddings: Tensor  # [vocab, hidden]
    output: Tensor  # [vocab, hidden]: of the language-model head
    num_layers: int


class HeadReader:
    """A head's tensors by name, in the type that it computes in; each may be asked for more than once. Raises
    WrongCheckpoint."""

    def __init__(self, state: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device) -> None:
        self._state, self._dtype, self._device = state, dtype, device
        self._read: dict[str, Tensor] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._state

    def tensor(self, shape: tuple[int, ...], *names: str) -> Tensor:  # of that shape
        """By the first of the names that is there."""
        name = next((name for name in names if name in self._state), None)
        if name is None:
            raise WrongCheckpoint(f"the head has no tensor {' or '.join(names)}")
        found = self._state[name]
        if tuple(found.shape) != shape:
            raise WrongCheckpoint(f"{name} has shape {list(found.shape)}, its config.json asks for {list(shape)}")
        if name not in self._read:
            self._read[name] = found.to(device=self._device, dtype=self._dtype)
        return self._read[name]
