"""What the runner asks of a model, and how a model is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from outrider.engine.batch import Batch
from outrider.engine.hidden_states import Taps
from outrider.engine.kv_cache import KVCache, LayerShape


class UnsupportedModel(ValueError):
    """This model, or this setting of it, is not served; the message names it and the reason."""


class NotForDecoder(UnsupportedModel):
    """Our own decoder does not compute this configuration; transformers may. The message names the field."""


class WrongCheckpoint(UnsupportedModel):
    """The tensors are not those that the configuration asks for; the message names them."""


class CausalLM(Protocol):
    """A causal language model whose keys and values live in a paged cache that the caller owns."""

    @property
    def layers(self) -> tuple[LayerShape, ...]:
        """What each attention layer stores per token."""

    @property
    def vocab_size(self) -> int:
        """The width of the logits; ids below it are valid inputs."""

    @property
    def hidden_size(self) -> int:
        """The width of the hidden states."""

    @property
    def max_model_len(self) -> int:
        """No position at or past it is computed."""

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights, the activations and the cache."""

    @property
    def batch_invariant(self) -> bool:
        """Whether a row's bits depend on its own sequence alone."""

    @property
    def takes_trees(self) -> bool:
        """Whether rows of a drafted tree see their own ancestors alone."""

    @property
    def device(self) -> torch.device:
        """Where the weights live and the cache must."""

    def forward(
        self, batch: Batch, cache: KVCache, *, taps: Taps | None = None
    ) -> Tensor:  # [logit rows, vocab_size] float32
        """Stores the keys and values of all rows of `batch` in `cache`, and the hidden states that are asked for in
        `taps`; returns the logits of its `logit_rows`."""


@runtime_checkable
class ReadableWeights(Protocol):
    """A model whose embeddings and language-model head others may compute with, where they lie."""

    @property
    def embeddings(self) -> Tensor | None:  # [vocab, hidden]
        """The embeddings of the ids, not scaled; None where they are kept in a layout of the product's own alone."""

    @property
    def output(self) -> Tensor | None:  # [vocab, hidden]
        """The weight of the language-model head; None where it is kept in a layout of the product's own alone."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """What an adapter adds to one product: y += scaling * up (down x)."""

    down: Tensor  # [rank, in]
    up: Tensor  # [out, rank]
    scaling: float


class AdapterBank(Protocol):
    """The adapters of a model, in slots. Called from one thread, but for `prepare`."""

    @property
    def linears(self) -> Mapping[str, tuple[int, int]]:
        """The products that an adapter may change, by the names of their modules: outputs and inputs of each."""

    def make_room(self, num_slots: int, max_rank: int) -> None:
        """Takes the memory for so many adapters at once. Before all that follows, and once."""

    def prepare(self, modules: Mapping[str, LowRank]) -> Any:
        """An adapter as `put` takes it, on the host. From any thread."""

    def put(self, slot: int, prepared: Any) -> None:
        """Rows of this slot have this adapter from the next pass on; None takes it away."""


@runtime_checkable
class TakesAdapters(Protocol):
    """A model whose rows may have adapters: those that a batch's `adapter_slots` name."""

    @property
    def adapters(self) -> AdapterBank:
        """The adapters that the model has on its device."""
