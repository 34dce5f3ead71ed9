"""Random numbers ahead of the logits that they meet.

They depend on seed, position and completion alone, and a call for many positions costs little more than for one: so a
sequence draws those of its whole credit window at once and keeps them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.kernels.philox import Purpose, as_int64, exponential_noise, words

MAX_WORD_ROWS = 64  # rows of four words
MAX_NOISE_VALUES = 1 << 16  # of a sequence, over its rows


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

    def put(self, first: int, rows: Tensor) -> None:
        """Keeps rows from position `first` on; earlier ones are forgotten."""
        self._first, self._rows = first, rows.unbind(0)


Wanted = tuple[RandomKey, RandomAhead, int, int]  # the position of the row, and up to where more will be wanted
Generate = Callable[[Tensor, Tensor, Tensor], Tensor]  # of seeds, positions and completions, [n] each


def word_rows(wanted: Sequence[Wanted], device: torch.device) -> Tensor:  # [rows, 4] int64
    """The words under `draft`, one row per entry."""

    def generate(seeds: Tensor, positions: Tensor, completions: Tensor) -> Tensor:
        return words(seeds, positions, Purpose.DRAFT, completions)

    return _rows(wanted, generate, MAX_WORD_ROWS, device)


def noise_rows(wanted: Sequence[Wanted], like: Tensor) -> Tensor:  # [rows, vocab] float32
    """Exponential noise under `bonus`, which both sides of coupling use, for probabilities [rows, vocab]."""
    vocab_size = like.shape[1]

    def generate(seeds: Tensor, positions: Tensor, completions: Tensor) -> Tensor:
        return exponential_noise(seeds, positions, completions, vocab_size, Purpose.BONUS)

    return _rows(wanted, generate, max(1, MAX_NOISE_VALUES // vocab_size), like.device)


def _rows(wanted: Sequence[Wanted], generate: Generate, most: int, device: torch.device) -> Tensor:
    """The wanted rows; those of all sequences that lack theirs are drawn in one call, `most` of each at the most."""
    lacking = [
        (key, ahead, position, max(1, min(limit - position, most)))
        for key, ahead, position, limit in wanted
        if ahead.get(position) is None
    ]
    if lacking:
        columns = [
            (as_int64(key.seed), position + offset, key.completion)
            for key, _, position, count in lacking
            for offset in range(count)
        ]
        seeds, positions, completions = torch.tensor(columns, dtype=torch.int64, device=device).unbind(1)  # [n] each
        drawn = torch.split(generate(seeds, positions, completions), [count for *_, count in lacking])
        for (_, ahead, position, _), rows in zip(lacking, drawn, strict=True):
            ahead.put(position, rows)
    found = [ahead.get(position) for _, ahead, position, _ in wanted]
    return torch.stack([row for row in found if row is not None])
