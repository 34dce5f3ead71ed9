"""What a verification step costs, as a gateway sees it: the target's profile, corrected by the steps that run."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

from outrider.planner.acceptance import RunningMean

MAX_BUCKETS = 64
PROFILE_WEIGHT, MEMORY = 16.0, 64.0  # steps that a profiled time counts as, and that an estimate looks back on
REDRAWN_EVERY = 8  # measurements: no single one moves the curve much
PACE_RATE = 0.1
MAX_SURPRISE = 2.0  # no step is believed to be slower or faster than expected by more


class StepCosts:
    """Time of a verification step by its rows: measured where steps ran, in between by straight lines. It rises with
    the rows, so measurements that say otherwise are averaged."""

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
        above = bisect_left(rows, num_rows)
        if above == 0:
            return times[0]
        if above == len(rows):
            return times[-1] * max(1.0, num_rows / (2 * rows[-1]))  # beyond all that was seen: careful, not linear
        share = (num_rows - rows[above - 1]) / (rows[above] - rows[above - 1])
        return times[above - 1] + share * (times[above] - times[above - 1])


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
            surprise = min(MAX_SURPRISE, max(1 / MAX_SURPRISE, step_us / expected))
            self._pace *= surprise ** (PACE_RATE * weight)
            if beside_draft:
                self._beside.add(self._beside.value * surprise, weight)
        self._steps.add(num_rows, step_us / self._factor(beside_draft), weight)

    def at(self, num_rows: int, beside_draft: bool) -> float:
        """The estimate; 0 while nothing is known."""
        return self._factor(beside_draft) * self._steps.at(num_rows)

    def _factor(self, beside_draft: bool) -> float:
        return self._pace * (self._beside.value if beside_draft else 1.0)


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
