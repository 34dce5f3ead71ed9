"""Running means, and acceptance by position."""

from __future__ import annotations

from dataclasses import dataclass, field

PRIOR_ACCEPTANCE, PRIOR_WEIGHT = 0.7, 4.0
WINDOW = 64.0  # verifications that an estimate looks back on


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
    accepted: list[float] = field(default_factory=list)
    tested: list[float] = field(default_factory=list)

    def add(self, num_drafted: int, num_accepted: int) -> None:
        """Counts one verification."""
        for position in range(min(num_accepted + 1, num_drafted)):
            if position == len(self.tested):
                self.tested.append(0.0)
                self.accepted.append(0.0)
            fade = 1 - 1 / WINDOW
            self.tested[position] = fade * self.tested[position] + 1
            self.accepted[position] = fade * self.accepted[position] + (position < num_accepted)

    def at(self, position: int) -> float:
        """One position's."""
        prior = self._mean() if self.others is None else self.others.at(position)
        if position >= len(self.tested):
            return prior
        return (self.accepted[position] + PRIOR_WEIGHT * prior) / (self.tested[position] + PRIOR_WEIGHT)

    def survival(self, num_drafted: int) -> float:
        """Chance that a whole window is accepted."""
        chance = 1.0
        for position in range(num_drafted):
            chance *= self.at(position)
        return chance

    def tokens(self, num_drafted: int) -> float:
        """Expected tokens of a round: those accepted and the target's own."""
        total = reaches = 1.0
        for position in range(num_drafted):
            reaches *= self.at(position)
            total += reaches
        return total

    def _mean(self) -> float:
        tested, accepted = sum(self.tested), sum(self.accepted)
        return (accepted + PRIOR_WEIGHT * PRIOR_ACCEPTANCE) / (tested + PRIOR_WEIGHT)
