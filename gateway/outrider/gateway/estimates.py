"""What the controller knows: acceptance by position, and running means of times. Clocks and counts alone."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

PRIOR_ACCEPTANCE, PRIOR_WEIGHT = 0.7, 4.0
WINDOW = 64.0  # verifications that an estimate looks back on
MAX_BUCKETS = 64
FORGETTING = 0.01  # a decision


@dataclass(slots=True)
class Mean:
    """A running mean whose weights fall with age; its first values count in full."""

    value: float = 0.0
    weight: float = 0.0
    memory: float = 16.0

    def add(self, sample: float) -> None:
        """Counts one sample."""
        self.weight = min(self.weight + 1, self.memory)
        self.value += (sample - self.value) / self.weight

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


class StepCosts:
    """Time of a verification step by its rows, in microseconds: measured where steps ran, in between by straight lines.
    A step of more rows never counts as cheaper."""

    def __init__(self) -> None:
        self._means: dict[int, Mean] = {}

    def add(self, num_rows: int, step_us: float) -> None:
        """Counts a step."""
        bucket = _bucket(num_rows)
        if bucket not in self._means and len(self._means) >= MAX_BUCKETS:
            return
        self._means.setdefault(bucket, Mean()).add(step_us)

    def at(self, num_rows: int) -> float:
        """The estimate for a number of rows; 0 while nothing is known."""
        known = sorted((rows, mean.value) for rows, mean in self._means.items())
        if not known:
            return 0.0
        rows, times = [entry[0] for entry in known], _rising([entry[1] for entry in known])
        above = bisect_left(rows, num_rows)
        if above == 0:
            return times[0]
        if above == len(rows):
            return times[-1] * max(1.0, num_rows / (2 * rows[-1]))  # beyond all that was seen: careful, not linear
        share = (num_rows - rows[above - 1]) / (rows[above] - rows[above - 1])
        return times[above - 1] + share * (times[above] - times[above - 1])


class VerifyCosts:
    """Verification alone, and beside a draft that works at the same time: on one machine these differ."""

    def __init__(self, profile: Iterable[tuple[int, float]] = ()) -> None:
        self._alone, self._beside = StepCosts(), StepCosts()
        for num_rows, step_us in profile:
            self._alone.add(num_rows, step_us)

    def add(self, num_rows: int, step_us: float, beside_draft: bool) -> None:
        """Counts a step."""
        (self._beside if beside_draft else self._alone).add(num_rows, step_us)

    def at(self, num_rows: int, beside_draft: bool) -> float:
        """The estimate; of the other kind where nothing is known of this one."""
        tables = (self._beside, self._alone) if beside_draft else (self._alone, self._beside)
        return tables[0].at(num_rows) or tables[1].at(num_rows)


@dataclass(slots=True)
class Experience:
    """What all requests of a gateway learn together, since it says more of the machines than of a request."""

    costs: VerifyCosts
    acceptance: Acceptance = field(default_factory=Acceptance)
    hits: Mean = field(default_factory=Mean)
    between: Mean = field(default_factory=Mean)  # what a round that waits for its draft spends outside both models
    draft_pass: Mean = field(default_factory=Mean)
    sequences: Mean = field(default_factory=lambda: Mean(1.0))  # of a step
    corrections: dict[Hashable, Mean] = field(default_factory=dict)  # measured over predicted, by way of decoding
    rest: int = 0  # tokens between two looks at speculation while it does not pay
    resting: int = 0  # of these still to go, all requests together

    def correct(self, way: Hashable, ratio: float) -> None:
        """Some rounds took `ratio` times what the formula says."""
        self.corrections.setdefault(way, Mean(1.0, 1.0, 6.0)).add(ratio)

    def correction(self, way: Hashable) -> float:
        """What the formula's result is to be multiplied by."""
        known = self.corrections.get(way)
        return 1.0 if known is None else known.value

    def forget_others(self, way: Hashable) -> None:
        """What was measured long ago counts less and less: another way becomes worth a try."""
        for other, known in self.corrections.items():
            if other != way:
                known.value += FORGETTING * (1 - known.value)


def _bucket(num_rows: int) -> int:
    """Small numbers are told apart, large ones to one part in eight."""
    if num_rows <= 16:
        return num_rows
    step = 1 << (num_rows.bit_length() - 4)
    return num_rows // step * step


def _rising(times: list[float]) -> list[float]:
    highest, rising = 0.0, []
    for time in times:
        highest = max(highest, time)
        rising.append(highest)
    return rising
