"""What a head is asked for, and the tensors that it is made of.

A head drafts right after the step that committed a token. A row of it is a token and the target's hidden states one
position before: what the target knew when it said that token. From there on it goes on with a state of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from outrider.engine.batch import Batch, StaticBatch
from outrider.engine.kv_cache import KVCache, LayerShape, bytes_per_block
from outrider.engine.kv_cache_manager import BLOCK_SIZE
from outrider.engine.models.base import WrongCheckpoint
from outrider.engine.models.products import Product
from outrider.kernels.cpu.linear import CpuLinear, can_multiply
from outrider.kernels.layers.reference import Linear


@dataclass(frozen=True, slots=True)
class MaskRow:
    """What stands in the place of a row that is not known yet, where a head drafts all tokens in one pass."""

    token_id: int
    features: Tensor  # [taps, hidden]


class HeadShape(Protocol):
    """What all heads say of themselves."""

    @property
    def name(self) -> str:
        """The method's name, as in the protocol."""

    @property
    def taps(self) -> tuple[int, ...]:
        """The layers whose hidden states it reads, as hidden_states.py numbers them."""

    @property
    def hidden_size(self) -> int:
        """How many channels of them it reads, from the first on."""

    @property
    def most_tokens(self) -> int:
        """That it can draft in a row."""

    @property
    def layers(self) -> tuple[LayerShape, ...]:
        """What it stores of every row, at the place of the row's token; nothing if it looks at no row before."""

    def fill(self, batch: Batch, features: Tensor, cache: KVCache) -> None:
        """Stores what later rows need of those of committed tokens; features: [rows, taps, hidden]. Nothing is drafted
        yet."""


class Head(HeadShape, Protocol):
    """Drafts several tokens, one after the other or all at once, for many sequences."""

    @property
    def stages(self) -> int:
        """How many passes of `next` differ: 1 where every depth is computed alike."""

    @property
    def mask(self) -> MaskRow | None:
        """Of a head that drafts all tokens in one pass, by `first` alone: behind the committed rows stand rows of this
        kind, and each gives the token behind it."""

    def first(self, batch: Batch | StaticBatch, features: Tensor, cache: KVCache) -> tuple[Tensor, Tensor]:
        """The rows of tokens that are committed; features: [rows, taps, hidden]. Returns of the batch's logit rows the
        logits of the token behind, [logit rows, vocab] float32, and the state, [logit rows, width]. A static batch may
        be captured."""

    def next(self, depth: int, batch: Batch | StaticBatch, state: Tensor, cache: KVCache) -> tuple[Tensor, Tensor]:
        """The rows of drafted tokens: the `depth`-th drafted one from 1 on; state: [rows, width], of the row before.
        Behind a tree's nodes that are computed again stand those of that depth, which want logits. Returns the same of
        the token behind."""


def bytes_beside_block(head: HeadShape | None, dtype: torch.dtype, block_size: int = BLOCK_SIZE) -> int:
    """What a head keeps of each block of its target's cache: its own layers, and the states at the block's end."""
    if head is None or not head.layers:
        return 0
    states = len(head.taps) * head.hidden_size * dtype.itemsize
    return bytes_per_block(head.layers, dtype, block_size) + states


@dataclass(frozen=True, slots=True)
class TargetWeights:
    """What a head shares with its target."""

    embeddings: Tensor  # [vocab, hidden]
    output: Tensor  # [vocab, hidden]: of the language-model head
    num_layers: int  # of the checkpoint
    max_model_len: int
    expanded_layers: int | None = None  # of the model, where that is an expansion of the checkpoint

    def taps(self, layers: Sequence[int]) -> tuple[int, ...]:
        """As the model numbers the checkpoint's layers: what the last norm gives is behind the last layer of either."""
        last = self.num_layers if self.expanded_layers is None else self.expanded_layers
        return tuple(last if layer == self.num_layers else layer for layer in layers)


def check_ids(name: str, ids: Tensor, vocab_size: int) -> None:  # [outputs]
    """That what a tensor maps a head's outputs to are ids of the target. Raises WrongCheckpoint."""
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise WrongCheckpoint(f"{name} names id {int(ids.max())}; allowed: ids of the target, 0 to {vocab_size - 1}")


class HeadReader:
    """A head's tensors by name, in the type that it computes in; each may be asked for more than once. Raises
    WrongCheckpoint."""

    def __init__(self, state: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device) -> None:
        self._state, self.dtype, self.device = state, dtype, device
        self._read: dict[str, Tensor] = {}
        self._products: dict[int, tuple[Tensor, Product]] = {}  # by what was told apart while it lives

    def product(self, weight: Tensor, bias: Tensor | None = None) -> Product:  # [out, in] and [out]
        """By the C kernels where they take it, which read bfloat16 numbers as such; one for each weight."""
        if id(weight) not in self._products:
            made: Product = CpuLinear(weight, bias) if can_multiply(weight) else Linear(weight, bias)
            self._products[id(weight)] = weight, made
        return self._products[id(weight)][1]

    def __contains__(self, name: str) -> bool:
        return name in self._state

    def size_of(self, name: str) -> int:
        """How many numbers a tensor has that is there."""
        return self._state[name].numel()

    def unread(self) -> list[str]:
        """The tensors that were not asked for."""
        return sorted(self._state.keys() - self._read.keys())

    def tensor(self, shape: tuple[int, ...], *names: str) -> Tensor:  # of that shape
        """By the first of the names that is there."""
        name = next((name for name in names if name in self._state), None)
        if name is None:
            raise WrongCheckpoint(f"the head has no tensor {' or '.join(names)}")
        found = self._state[name]
        if tuple(found.shape) != shape:
            raise WrongCheckpoint(f"{name} has shape {list(found.shape)}, its config.json asks for {list(shape)}")
        return self._computed(name)

    def vector(self, size: int, name: str) -> Tensor:  # [size]
        """However many axes of length one it is saved with."""
        if name not in self._state:
            raise WrongCheckpoint(f"the head has no tensor {name}")
        if self._state[name].numel() != size:
            raise WrongCheckpoint(
                f"{name} has shape {list(self._state[name].shape)}, its config.json asks for [{size}]"
            )
        return self._computed(name).flatten()

    def _computed(self, name: str) -> Tensor:
        found = self._state[name]
        if name not in self._read:
            self._read[name] = found.to(device=self.device, dtype=self.dtype if found.is_floating_point() else None)
        return self._read[name]
