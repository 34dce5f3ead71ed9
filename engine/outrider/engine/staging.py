"""Columns of numbers for a device, side by side in one buffer, so that one copy takes them all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

WORD = 4  # bytes of a number of the buffers, which are int32
ALIGNMENT = 16  # bytes: kernels are compiled for pointers to so many, or else anew


@dataclass(frozen=True, slots=True)
class Column:
    """A column of numbers of one type."""

    name: str
    dtype: torch.dtype
    length: int

    @property
    def words(self) -> int:
        """Its size in the buffers, with the gap after it."""
        return -(-self.length * self.dtype.itemsize // ALIGNMENT) * (ALIGNMENT // WORD)


def words_of(columns: Sequence[Column]) -> int:
    """The size of buffers that hold all columns."""
    return sum(column.words for column in columns)


class StagedColumns:
    """One layout's view of two buffers, which other layouts may use, too: of a step, everything is written anew."""

    def __init__(
        self,
        columns: Sequence[Column],
        host: Tensor,  # [at least words_of(columns)] int32
        device: Tensor,  # the same
    ) -> None:
        self._host: dict[str, NDArray[Any]] = {}
        self._device: dict[str, Tensor] = {}
        self._starts: dict[str, int] = {}
        start = 0
        for column in columns:
            end = start + column.length * column.dtype.itemsize // WORD
            self._host[column.name] = host[start:end].view(column.dtype).numpy()
            self._device[column.name] = device[start:end].view(column.dtype)
            self._starts[column.name] = start
            start += column.words

    def __getitem__(self, name: str) -> Tensor:
        """A column on the device."""
        return self._device[name]

    def write(self, name: str, values: Any, padding: float | None = None) -> None:
        """Writes the head of a column on the host, and the padding after it."""
        column, count = self._host[name], len(values)
        column[:count] = values
        if padding is not None:
            column[count:] = padding

    def words_up_to(self, name: str, length: int) -> int:
        """How many words of the buffers hold what is before a column, and its first numbers."""
        return self._starts[name] + -(-length * self._device[name].dtype.itemsize // WORD)


def index_on(values: Sequence[int], device: torch.device) -> Tensor:  # [values] int64
    """Places in a tensor of a device."""
    return put_on(torch.tensor(values, dtype=torch.int64), device)


def on_host(source: Tensor) -> Callable[[], Tensor]:
    """What gives a copy of what a device has computed by now; nobody waits for it before, and it holds once that has
    ended."""
    if source.device.type == "cpu":
        kept = source.clone()
    else:
        kept = torch.empty_like(source, device="cpu", pin_memory=True).copy_(source, non_blocking=True)
    return lambda: kept


def put_on(values: Tensor, device: torch.device) -> Tensor:
    """A host's tensor on a device, behind what was launched there: the host waits for nothing."""
    if device.type == "cpu" or values.device.type != "cpu":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)
