"""A checkpoint's tensors by name, which need not lie in memory: they may be made when they are asked for, and some may
be stored as codes of few bits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Protocol, runtime_checkable

from torch import Tensor

from outrider.kernels.quantized.form import QuantizedMatrix


@runtime_checkable
class LazyState(Protocol):
    """A mapping of tensors that are made when they are asked for."""

    @property
    def meta(self) -> Mapping[str, Tensor]:
        """The shape and type of each, without its numbers."""


@runtime_checkable
class QuantizedState(Protocol):
    """A mapping of tensors of which some are stored as codes of few bits."""

    def packed(self, name: str) -> QuantizedMatrix | None:
        """A matrix as it is stored; None for one of plain numbers."""


class RenamedTensors(Mapping[str, Tensor]):
    """The tensors of a quantised checkpoint by other names (a LazyState): what is packed stays so."""

    def __init__(self, state: Mapping[str, Tensor], names: Mapping[str, str]) -> None:
        """`names` are the state's by the new ones."""
        self._state, self._names = state, names

    def __getitem__(self, name: str) -> Tensor:
        return self._state[self._names[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def packed(self, name: str) -> QuantizedMatrix | None:
        """A matrix as it is stored; None for one of plain numbers."""
        return self._state.packed(self._names[name]) if isinstance(self._state, QuantizedState) else None

    @cached_property
    def meta(self) -> Mapping[str, Tensor]:
        """The shape and type of each, without its numbers."""
        meta = meta_of(self._state)
        return {name: meta[stored] for name, stored in self._names.items()}


def meta_of(state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """A checkpoint's tensors, at least with the shape and type of each."""
    return state.meta if isinstance(state, LazyState) else state


def renamed(state: Mapping[str, Tensor], names: Mapping[str, str]) -> Mapping[str, Tensor]:
    """Those of a state's tensors that `names` names, by its keys."""
    if isinstance(state, QuantizedState):
        return RenamedTensors(state, names)
    return {name: state[stored] for name, stored in names.items()}
