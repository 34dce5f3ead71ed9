"""Random numbers ahead of the logits that they meet.

They depend on seed, position and completion alone, and a call for many positions costs little more than for one: so a
sequence draws those of its whole credit window at once and keeps them, and draws those of the next window while it
waits for the target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.kernels.random.reference import Purpose, as_int64, exponential_noise, words

MAX_WORD_ROWS = 64  # rows of four words that a sequence keeps
MAX_NOISE_VALUES = 1 << 17  # that a sequence keeps, over its rows
Generate = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # of seeds, positions, completions and draws, [n] each


@dataclass(frozen=True, slots=True)
class RandomKey:
    """What a sequence's random numbers are a function of, beside the position."""

    seed: int  # unsigned 64-bit
    completion: int
    draw: int = 0  # tells apart what is decided anew at a position, below 2^60


class RandomAhead:
    """The rows that one sequence has drawn: of consecutive positions, and of one draw."""

    def __init__(self) -> None:
        self._draw = 0
        self._first = 0
        self._rows: tuple[Tensor, ...] = ()

    def get(self, position: int, draw: int = 0) -> Tensor | None:
        """The row of a position, if it was drawn."""
        index = position - self._first
        return self._rows[index] if draw == self._draw and 0 <= index < len(self._rows) else None

    def first_missing(self, position: int, draw: int = 0) -> int:
        """The first position from `position` on that was not drawn."""
        return position if self.get(position, draw) is None else self._first + len(self._rows)

    def put(self, first: int, rows: Sequence[Tensor], most: int, draw: int = 0) -> None:
        """Keeps rows from position `first` on, and earlier ones up to `most` if they join."""
        joins = first == self._first + len(self._rows) and draw == self._draw
        self._rows = ((*self._rows, *rows) if joins else tuple(rows))[-most:]
        self._first = first + len(rows) - len(self._rows)
        self._draw = draw


@dataclass(frozen=True, slots=True)
class RandomRange:
    """`count` positions of a sequence from `first` on, and up to where more will be wanted."""

    key: RandomKey
    ahead: RandomAhead
    first: int
    count: int
    limit: int


@dataclass(frozen=True, slots=True)
class RandomSource:
    """One kind of random rows, and how many of them a sequence keeps."""

    generate: Generate
    most: int
    device: torch.device

    def rows(self, spans: Sequence[RandomRange]) -> Tensor:  # [sum of counts, ...]
        """The rows of every position of the spans. Those that were not drawn before are drawn in one call, with those
        up to the limits as far as they are kept. Spans of one sequence may overlap: its branches do."""
        known: dict[tuple[RandomKey, int], Tensor | None] = {}  # None: is drawn in this call
        gaps: list[tuple[RandomRange, range]] = []
        for span in spans:
            for position in range(span.first, span.first + span.count):
                row = span.ahead.get(position, span.key.draw)
                if row is not None:
                    known[span.key, position] = row
                elif (span.key, position) not in known:
                    end = max(span.first + span.count, min(span.limit, span.first + self.most))
                    gaps.append((span, range(position, end)))
                    known |= {(span.key, at): None for at in gaps[-1][1] if (span.key, at) not in known}
        for (span, gap), fresh in zip(gaps, self._draw(gaps), strict=True):
            known |= {(span.key, gap.start + index): row for index, row in enumerate(fresh)}
            span.ahead.put(gap.start, fresh, self.most, span.key.draw)
        found = [known[span.key, span.first + offset] for span in spans for offset in range(span.count)]
        return torch.stack([row for row in found if row is not None])

    def prepare(self, span: RandomRange) -> bool:
        """Draws what is missing up to the limit, unless that is more than is kept; whether anything was drawn."""
        start = span.ahead.first_missing(span.first, span.key.draw)
        if start >= span.limit or span.limit - span.first > self.most:
            return False
        (fresh,) = self._draw([(span, range(start, span.limit))])
        span.ahead.put(start, fresh, self.most, span.key.draw)
        return True

    def _draw(self, gaps: Sequence[tuple[RandomRange, range]]) -> list[tuple[Tensor, ...]]:
        """The rows of every gap, all in one call."""
        if not gaps:
            return []
        counters = [
            (as_int64(span.key.seed), position, span.key.completion, span.key.draw)
            for span, gap in gaps
            for position in gap
        ]
        columns = torch.tensor(counters, dtype=torch.int64, device=self.device).unbind(1)  # [n] each
        parts = torch.split(self.generate(*columns), [len(gap) for _, gap in gaps])
        return [part.unbind(0) for part in parts]


def word_source(device: torch.device) -> RandomSource:
    """The words under `draft`: rows are [4] int64."""

    def generate(seeds: Tensor, positions: Tensor, completions: Tensor, draws: Tensor) -> Tensor:
        return words(seeds, positions, Purpose.DRAFT, completions, draws)

    return RandomSource(generate, MAX_WORD_ROWS, device)


def noise_source(vocab_size: int, device: torch.device) -> RandomSource:
    """Exponential noise under `bonus`, which both sides of coupling use: rows are [vocab] float32."""

    def generate(seeds: Tensor, positions: Tensor, completions: Tensor, draws: Tensor) -> Tensor:
        return exponential_noise(seeds, positions, completions, vocab_size, Purpose.BONUS)

    return RandomSource(generate, max(1, MAX_NOISE_VALUES // vocab_size), device)
