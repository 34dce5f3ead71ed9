"""The covering design of the identity proof: which circumstances occur together.

Every pair of levels of any two factors stands in at least one cell, so a defect that needs two circumstances at once
meets them. In the short form batch sizes are not crossed with k and pipelining: nine times all batches would be 1143
prompts."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

Level = tuple[str, Any]  # a factor and its value
Pair = frozenset[Level]

LEVELS: dict[str, tuple[Any, ...]] = {
    "batch": (1, 2, 4, 8, 16, 32, 64),
    "k": (0, 1, 2, 3, 4, 5, 6, 7, 8),
    "ahead": ("sequential", "chains", "branches"),
    "chunked": (False, True),
    "warm": (False, True),
    "preempted": (False, True),
    "killed": (False, True),
    "coupled": (False, True),
    "ngram": (False, True),
    "cut": (False, True),
}
NOT_CROSSED = {frozenset({"batch", "k"}), frozenset({"batch", "ahead"})}  # in the short form


@dataclass(frozen=True, slots=True)
class Cell:
    """Circumstances in which `batch` prompts are decoded at once."""

    batch: int
    k: int  # most drafted tokens of a window; 0: plain decoding
    ahead: str  # what is drafted during a verification: nothing, more of the chain, or other chains as well
    chunked: bool  # a step has room for a part of a prompt only
    warm: bool  # the first blocks of every prompt are in the prefix cache
    preempted: bool  # too few cache blocks: sequences lose theirs and are computed again
    killed: bool  # the draft service ends in mid-stream
    coupled: bool  # sampled under coupling, else greedy
    ngram: bool  # drafts are looked up in the text, else a model's
    cut: bool  # the target verifies fewer drafted tokens where several sequences share a step and that pays

    @property
    def name(self) -> str:
        """For test ids."""
        words = [
            f"k{self.k}",
            f"b{self.batch}",
            self.ahead,
            "chunked" if self.chunked else "whole",
            "warm" if self.warm else "cold",
            "preempted" if self.preempted else "roomy",
            "killed" if self.killed else "alive",
            "coupled" if self.coupled else "greedy",
            "ngram" if self.ngram else "model",
            "cut" if self.cut else "uncut",
        ]
        return "-".join(words)


def cells(crossed: bool, levels: Mapping[str, Sequence[Any]] = LEVELS) -> list[Cell]:
    """The design; always the same one."""
    return [Cell(**row) for row in covering(levels, () if crossed else NOT_CROSSED)]


def pairs_of(row: Mapping[str, Any]) -> Iterator[Pair]:
    """All pairs of levels that a row, or a part of one, holds."""
    return map(frozenset, combinations(row.items(), 2))


def wanted_pairs(levels: Mapping[str, Sequence[Any]], apart: Collection[frozenset[str]] = ()) -> list[Pair]:
    """Every pair of levels of two factors, except of factors that are kept apart; in a fixed order."""
    return [
        frozenset({(one, a), (other, b)})
        for one, other in combinations(levels, 2)
        if frozenset({one, other}) not in apart
        for a in levels[one]
        for b in levels[other]
    ]


def covering(levels: Mapping[str, Sequence[Any]], apart: Collection[frozenset[str]] = ()) -> list[dict[str, Any]]:
    """Rows that hold every wanted pair. Greedy: a row starts from a pair still missing and takes, factor by factor, the
    level that adds the most missing pairs, of several the one that misses most. Where none adds any, that is the
    smallest batch, and else the level that is rarest in rows like this one, so that triples vary, too."""
    missing = dict.fromkeys(wanted_pairs(levels, apart))
    rows: list[dict[str, Any]] = []
    while missing:
        row = dict(next(iter(missing)))
        for factor in levels:
            if factor not in row:
                row[factor] = max(levels[factor], key=lambda level: _gain(missing, rows, row, (factor, level)))
        for pair in pairs_of(row):
            missing.pop(pair, None)
        rows.append({factor: row[factor] for factor in levels})
    return rows


def _gain(
    missing: Collection[Pair], rows: Sequence[Mapping[str, Any]], row: Mapping[str, Any], level: Level
) -> tuple[int, int]:
    added = sum(frozenset({level, fixed}) in missing for fixed in row.items())
    if added:
        return added, sum(level in pair for pair in missing)
    factor, value = level
    if factor == "batch":
        return 0, -value
    alike = (sum(other[name] == value for name, value in row.items()) for other in rows if other[factor] == value)
    return 0, -sum(4**count for count in alike)
