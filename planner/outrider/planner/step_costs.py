"""What a verification step costs by its rows, in microseconds: the target's profile, corrected by the steps that run.

Two look at the same steps. The target runs them all and has measured a profile before: `StepTime` forgets what held up
a few. A gateway hears of those that its own sequences were in, alone or beside a draft on the same machine, perhaps
without a profile: `VerifyCosts`, over `StepCosts`."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate

from outrider.planner.acceptance import RunningMean

MAX_SURPRISE = 2.0  # no step is believed to be slower or faster than expected by more

LEARNING_RATE, SHARED_RATE = 0.1, 0.02  # of the step's own number of rows, and of all
FORGETTING = 0.003  # of what was learned of one number of rows, with every step
MOST_ROWS = 1 << 16

MAX_BUCKETS = 64
PROFILE_WEIGHT, MEMORY = 16.0, 64.0  # steps that a profiled time counts as, and that an estimate looks back on
REDRAWN_EVERY = 8  # measurements: no single one moves the curve much
PACE_RATE = 0.1


class StepTime:
    """As the target sees it, which has a profile of its own: straight lines between its points and beyond, corrected by
    the steps that run. A step of more rows never counts as faster."""

    def __init__(self, profile: Iterable[tuple[int, float]]) -> None:
        known = sorted(profile) or [(1, 1)]
        self._rows = [rows for rows, _ in known]
        self._profile = [float(max(1, us)) for _, us in known]
        while self._rows[-1] < MOST_ROWS:
            last, rows = self._profile[-1], self._rows[-1]
            slope = (last - self._profile[-2]) / (rows - self._rows[-2]) if len(self._rows) > 1 else 0.0
            self._profile.append(last + rows * max(0.0, slope))
            self._rows.append(2 * rows)
        self._scale, self._factors = 1.0, [1.0] * len(self._rows)
        self._times = list(accumulate(self._profile, max))

    def at(self, num_rows: int) -> float:
        """Microseconds."""
        low, high, share = _between(self._rows, num_rows)
        return self._times[low] + share * (self._times[high] - self._times[low])

    def rows_beside(self, num_rows: int, added_us: float) -> int:
        """How many more rows a step of `num_rows` can take in so much more time."""
        limit_us = self.at(num_rows) + added_us
        return bisect_right(range(MOST_ROWS), limit_us, lo=num_rows, key=self.at) - 1 - num_rows

    def add(self, num_rows: int, step_us: float) -> None:
        """A step ran. The points next to it learn most; what they learned fades while others run."""
        if step_us <= 0:
            return
        low, high, share = _between(self._rows, num_rows)
        ratio = _surprise(step_us, self.at(num_rows))
        self._scale *= ratio**SHARED_RATE
        for index, factor in enumerate(self._factors):
            near = (1 - share) * (index == low) + share * (index == high)
            self._factors[index] = factor ** (1 - FORGETTING) * ratio ** (LEARNING_RATE * near)
        times = (self._scale * factor * us for factor, us in zip(self._factors, self._profile, strict=True))
        self._times = list(accumulate(times, max))


class StepCosts:
    """Measured where steps ran, in between by straight lines. Time rises with the rows, so measurements that say
    otherwise are averaged."""

    def __init__(self, profile: Iterable[tuple[int, float]] = ()) -> None:
        self._means = {_bucket(num_rows): RunningMean(step_us, PROFILE_WEIGHT, MEMORY) for num_rows, step_us in profile}
        self._curve: tuple[list[int], list[float]] | None = None  # rows, times
        self._num_added = 0

    def add(self, num_rows: int, step_us: float, weight: float = 1.0) -> None:
        """Counts a step."""
        bucket = _bucket(num_rows)
        if bucket not in self._means and len(self._means) >= MAX_BUCKETS:
            return
        if bucket not in self._means:
            self._curve = None
        self._means.setdefault(bucket, RunningMean(memory=MEMORY)).add(step_us, weight)
        self._num_added += 1
        if self._num_added % REDRAWN_EVERY == 0:
            self._curve = None

    def at(self, num_rows: int) -> float:
        """The estimate for a number of rows; 0 while nothing is known."""
        if not self._means:
            return 0.0
        if self._curve is None:
            known = sorted(self._means)
            self._curve = known, _rising([self._means[bucket] for bucket in known])
        rows, times = self._curve
        low, high, share = _between(rows, num_rows)
        beyond = max(1.0, num_rows / (2 * rows[-1]))  # all that was seen: careful, not linear
        return beyond * (times[low] + share * (times[high] - times[low]))


class VerifyCosts:
    """Verification alone, and beside a draft that works at the same time: on one machine these differ. What happens to
    all steps alike, steps of every size tell of: so those that nobody tries any more are not judged by an hour that has
    gone."""

    def __init__(self, profile: Iterable[tuple[int, float]] = ()) -> None:
        self._steps = StepCosts(profile)  # alone
        self._pace = 1.0  # present times over those
        self._beside = RunningMean(1.0, 1.0)  # times beside a draft over those alone

    def add(self, num_rows: int, step_us: float, beside_draft: bool, weight: float = 1.0) -> None:
        """Counts a step, or the part of it that one of its sequences is."""
        expected = self.at(num_rows, beside_draft)
        if step_us <= 0:
            return
        if expected:
            surprise = _surprise(step_us, expected)
            self._pace *= surprise ** (PACE_RATE * weight)
            if beside_draft:
                self._beside.add(self._beside.value * surprise, weight)
        self._steps.add(num_rows, step_us / self._factor(beside_draft), weight)

    def at(self, num_rows: int, beside_draft: bool) -> float:
        """The estimate; 0 while nothing is known."""
        return self._factor(beside_draft) * self._steps.at(num_rows)

    def _factor(self, beside_draft: bool) -> float:
        return self._pace * (self._beside.value if beside_draft else 1.0)


def _surprise(measured_us: float, expected_us: float) -> float:
    """How many times as long as expected a step took, as far as it is believed."""
    return min(MAX_SURPRISE, max(1 / MAX_SURPRISE, measured_us / expected_us))


def _between(points: Sequence[int], num_rows: int) -> tuple[int, int, float]:
    """Index of the point below a number of rows and of the one above, and how far it is from the one to the other."""
    high = min(bisect_left(points, num_rows), len(points) - 1)
    if points[high] <= num_rows or high == 0:
        return high, high, 0.0
    low = high - 1
    return low, high, (num_rows - points[low]) / (points[high] - points[low])


def _bucket(num_rows: int) -> int:
    """Small numbers are told apart, large ones to one part in eight."""
    if num_rows <= 16:
        return num_rows
    step = 1 << (num_rows.bit_length() - 4)
    return num_rows // step * step


def _rising(means: Iterable[RunningMean]) -> list[float]:
    """The closest values that never fall: neighbours that do are pooled (isotonic regression; Barlow et al. 1972)."""
    pools: list[tuple[float, float, int]] = []  # value, weight, how many
    for mean in means:
        value, weight, count = mean.value, mean.weight, 1
        while pools and pools[-1][0] > value:
            before, heavy, many = pools.pop()
            value = (before * heavy + value * weight) / (heavy + weight)
            weight, count = weight + heavy, count + many
        pools.append((value, weight, count))
    return [value for value, _, count in pools for _ in range(count)]
