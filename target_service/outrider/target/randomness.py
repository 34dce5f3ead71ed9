"""Random numbers of a sequence by absolute position, computed before they are needed: they depend on no logits, so they
belong off the critical path, in the time that the target waits for a draft."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outrider.kernels.philox import Purpose, as_int64, exponential_noise, words

PURPOSES = (Purpose.ACCEPT, Purpose.RECOVERED, Purpose.BONUS)  # the order of the word rows


@dataclass(slots=True)
class RandomRows:
    """The rows of consecutive positions. Coupled: exponential noise, [positions, vocab] float32. Else words by purpose,
    [positions, 3, 4] int64. A greedy sequence needs neither."""

    seed: int
    completion: int
    coupled: bool
    start: int = 0
    rows: Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def end(self) -> int:
        """The position after the last row held."""
        return self.start + len(self.rows)

    def take(self, start: int, count: int) -> Tensor:
        """The rows of `count` positions from `start` on; they were prepared."""
        return self.rows[start - self.start : start - self.start + count]

    def missing(self, start: int, count: int) -> range:
        """Which of the positions are not held; what lies before `start` is forgotten."""
        if not self.start <= start <= self.end:
            self.start, self.rows = start, self.rows[:0]
        elif start > self.start:
            self.start, self.rows = start, self.rows[start - self.start :]
        return range(self.end, start + count)


def prepare(wanted: Iterable[tuple[RandomRows, int, int]], vocab_size: int) -> bool:
    """Computes what is missing of (rows, start, count), all sequences of a kind in one call. Returns whether
    anything was."""
    gaps = [(rows, gap) for rows, start, count in wanted if (gap := rows.missing(start, count))]
    for coupled in (False, True):
        chosen = [(rows, gap) for rows, gap in gaps if rows.coupled == coupled]
        if chosen:
            fresh = _noise(chosen, vocab_size) if coupled else _words(chosen)
            parts = torch.split(fresh, [len(gap) for _, gap in chosen])
            for (rows, _), part in zip(chosen, parts, strict=True):
                rows.rows = torch.cat((rows.rows, part)) if len(rows.rows) else part
    return bool(gaps)


Gaps = list[tuple[RandomRows, range]]


def _noise(gaps: Gaps, vocab_size: int) -> Tensor:  # [positions, vocab] float32
    seeds, positions, completions = _counters(gaps)
    return exponential_noise(seeds, positions, completions, vocab_size)


def _words(gaps: Gaps) -> Tensor:  # [positions, 3, 4] int64
    seeds, positions, completions = (column.repeat_interleave(len(PURPOSES)) for column in _counters(gaps))
    purposes = torch.tensor([int(purpose) for purpose in PURPOSES]).repeat(len(positions) // len(PURPOSES))
    return words(seeds, positions, purposes, completions).view(-1, len(PURPOSES), 4)


def _counters(gaps: Gaps) -> tuple[Tensor, Tensor, Tensor]:
    """Seeds, positions and completions, [positions] int64 each."""
    seeds = [as_int64(rows.seed) for rows, gap in gaps for _ in gap]
    positions = [position for _, gap in gaps for position in gap]
    completions = [rows.completion for rows, gap in gaps for _ in gap]
    columns = torch.tensor([seeds, positions, completions], dtype=torch.int64)
    return columns[0], columns[1], columns[2]
