"""The hidden states of chosen layers, as a pass leaves them: what heads that draft beside a model are trained on and
draft from.

Layers are numbered as transformers numbers `hidden_states`: i is what enters block i (0: the embeddings), and the
number of blocks is what the last norm hands to the language-model head."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def check_taps(layers: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """The layers of a model with so many blocks, each once. Raises ValueError."""
    wrong = [layer for layer in layers if not 0 <= layer <= num_layers]
    if wrong or len(set(layers)) < len(layers):
        raise ValueError(f"taps: {list(layers)}; allowed: layers from 0 to {num_layers}, each once")
    return tuple(layers)


class Taps:
    """Where passes of up to so many rows leave them."""

    def __init__(
        self, layers: Sequence[int], num_rows: int, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.layers = tuple(layers)
        self.states = torch.zeros(num_rows, len(self.layers), hidden_size, dtype=dtype, device=device)

    def put(self, layer: int, hidden: Tensor) -> None:  # [rows, hidden]
        """Keeps the states of a layer, if they are wanted."""
        if layer in self.layers:
            self.states[: len(hidden), self.layers.index(layer)] = hidden

    def wants(self, layer: int) -> bool:
        """Whether a layer's states are to be kept."""
        return layer in self.layers
