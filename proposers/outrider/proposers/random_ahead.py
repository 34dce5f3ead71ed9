"""Random numbers ahead of the logits that they meet.

They depend on seed, position and completion alone, and a call for many positions costs little more than for one: so a
sequence draws those of its whole credit window at once and keeps them, and draws those of the next window while it
waits for the target.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.kernels.philox import Purpose, as_int64, exponential_noise, words

MAX_WORD_ROWS = 64  # rows of four words that a sequence keeps
MAX_NOISE_VALUES = 1 << 17  # that a sequence keeps, over its rows


@dataclass(frozen=True, slots=True)
class RandomKey:
    """What a sequence's random numbers are a function of, beside the position."""

    seed: int  # unsigned 64-bit
    completion: int


class RandomAhead:
    """The rows that one sequence has drawn: of consecutive positions."""

    def __init__(self) -> None:
        self._first = 0
        self._rows: tuple[Tensor, ...] = ()

    def get(self, position: int) -> Tensor | None:
        """The row of a position, if it was drawn."""
        index = position - self._first
        return self._rows[index] if 0 <= index < len(self._rows) else None

    def first_missing(self, position: int) -> int:
        """The first position from `position` on that was not drawn."""
        return position if self.get(position) is None else self._first + len(self._rows)

    def put(self, first: int, rows: Tensor, most: int) -> None:
        """Keeps rows from position `first` on, and earlier ones up to `most` if they join."""
        joins = first == self._first + len(self._rows)
        self._rows = ((*self._rows, *rows.unbind(0)) if joins else rows.unbind(0))[-most:]
        self._first = first + len(rows) - len(self._rows)


Place = tuple[RandomKey, RandomAhead, int, int]  # the position of the row, and up to where more will be wanted
Generate = Callable[[Tensor, Tensor, Tensor], Tensor]  # of seeds, positions and completions, [n] each


@dataclass(frozen=True, slots=True)
class RandomSource:
    """One kind of random rows, and how many of them a sequence keeps."""

    generate: Generate
    most: int
    device: torch.device

    def rows(self, places: Sequence[Place]) -> Tensor:  # [places, ...]
        """The row of each place. Those that were not drawn before are drawn in one call, with those after them."""
        lacking = [
            (key, ahead, position, max(1, min(limit - position, self.most)))
            for key, ahead, position, limit in places
            if ahead.get(position) is None
        ]
        if lacking:
            self._draw(lacking)
        found = [ahead.get(position) for _, ahead, position, _ in places]
        return torch.stack([row for row in found if row is not None])

    def prepare(self, place: Place) -> bool:
        """Draws what is missing of a place's rows, unless they are more than are kept; whether anything was drawn."""
        key, ahead, first, limit = place
        start = ahead.first_missing(first)
        if start >= limit or limit - first > self.most:
            return False
        self._draw([(key, ahead, start, limit - start)])
        return True

    def _draw(self, wanted: Sequence[Place]) -> None:
        """The last of a place is a count here."""
        columns = [
            (as_int64(key.seed), first + offset, key.completion)
            for key, _, first, count in wanted
            for offset in range(count)
        ]
        seeds, positions, completions = torch.tensor(columns, dtype=torch.int64, device=self.device).unbind(1)  # [n]
        drawn = torch.split(self.generate(seeds, positions, completions), [count for *_, count in wanted])
        for (_, ahead, first, _), rows in zip(wanted, drawn, strict=True):
            ahead.put(first, rows, self.most)


def word_source(device: torch.device) -> RandomSource:
    """The words under `draft`: rows are [4] int64."""

    def generate(seeds: Tensor, positions: Tensor, completions: Tensor) -> Tensor:
        return words(seeds, positions, Purpose.DRAFT, completions)

    return RandomSource(generate, MAX_WORD_ROWS, device)


def noise_source(vocab_size: int, device: torch.device) -> RandomSource:
    """Exponential noise under `bonus`, which both sides of coupling use: rows are [vocab] float32."""

    def generate(seeds: Tensor, positions: Tensor, completions: Tensor) -> Tensor:
        return exponential_noise(seeds, positions, completions, vocab_size, Purpose.BONUS)

    return RandomSource(generate, max(1, MAX_NOISE_VALUES // vocab_size), device)
