"""Running means, and acceptance by position."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, repeat
from math import prod
from operator import mul

PRIOR_ACCEPTANCE, PRIOR_WEIGHT = 0.7, 4.0
MEMORY = 64.0  # verifications that an estimate looks back on


@dataclass(slots=True)
class RunningMean:
    """A running mean whose weights fall with age; its first values count in full."""

    value: float = 0.0
    weight: float = 0.0
    memory: float = 16.0

    def add(self, sample: float, weight: float = 1.0) -> None:
        """Counts one sample, or a part of one that others tell of, too."""
        self.weight = min(self.weight + weight, self.memory)
        self.value += (sample - self.value) * weight / self.weight

    def or_else(self, default: float) -> float:
        """The mean, or a default before the first sample."""
        return self.value if self.weight else default


@dataclass(slots=True)
class Acceptance:
    """Chance that a drafted token is accepted if those before it are, by position in the window, under a Beta prior:
    what is known of other requests, or else the mean of all positions."""

    others: Acceptance | None = None
    memory: float = MEMORY  # verifications that it looks back on
    forgets_untested: bool = False  # with every verification; else a position forgets only where it is tested anew
    accepted: list[float] = field(default_factory=list)
    tested: list[float] = field(default_factory=list)

    def add(self, num_drafted: int, num_accepted: int) -> None:
        """Counts one verification; one without drafted tokens says nothing."""
        if not num_drafted:
            return
        num_tested = min(num_accepted + 1, num_drafted)
        unknown = [0.0] * (num_tested - len(self.tested))
        self.tested += unknown
        self.accepted += unknown
        fade = 1 - 1 / self.memory
        for position in range(len(self.tested) if self.forgets_untested else num_tested):
            self.tested[position] = fade * self.tested[position] + (position < num_tested)
            self.accepted[position] = fade * self.accepted[position] + (position < num_accepted)

    def at(self, position: int) -> float:
        """One position's."""
        return self.first(position + 1)[position]

    def first(self, num_positions: int, priors: Sequence[float] | None = None) -> list[float]:
        """The first positions', under these means of the prior, or those that the class says."""
        if priors is None:
            priors = [self._mean()] * num_positions if self.others is None else self.others.first(num_positions)
        accepted, tested = chain(self.accepted, repeat(0.0)), chain(self.tested, repeat(0.0))
        return [
            (held + PRIOR_WEIGHT * prior) / (count + PRIOR_WEIGHT)
            for prior, held, count in zip(priors[:num_positions], accepted, tested, strict=False)
        ]

    def survival(self, num_drafted: int) -> float:
        """Chance that a whole window is accepted."""
        return float(prod(self.first(num_drafted)))

    def tokens(self, num_drafted: int) -> float:
        """Expected tokens of a round: those accepted and the target's own."""
        survivals: Iterator[float] = accumulate(self.first(num_drafted), mul)
        return 1.0 + sum(survivals)

    def _mean(self) -> float:
        tested, accepted = sum(self.tested), sum(self.accepted)
        return (accepted + PRIOR_WEIGHT * PRIOR_ACCEPTANCE) / (tested + PRIOR_WEIGHT)
