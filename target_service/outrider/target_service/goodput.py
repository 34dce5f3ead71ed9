"""Which drafted tokens a step verifies when several sequences share it: those that make most tokens per time.

A row for a drafted token pays if the chance that it is of use exceeds goodput x what one more row costs. The chance
falls with the position in a window, so the rows of all sequences are sorted by it, and of the steps that take the first
0, 1, 2, ... of them the one with most expected tokens per time is chosen (goodput: arXiv 2406.14066). The time is the
step's and the pause before the next one, in which windows come: the longer that is, the more a step shall verify.

It looks at clocks, counts and earlier verdicts alone, never at drafted tokens or what they were drawn from. And a cut
refuses nothing: the tokens past it stay held, and each meets the same random numbers whenever it is verified."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from operator import mul

PRIOR_ACCEPTANCE, PRIOR_WEIGHT = 0.7, 4.0
SEQUENCE_MEMORY, TARGET_MEMORY = 64.0, 1024.0  # verifications that an estimate looks back on
MARGIN = 1.1  # a cut must promise so much more than whole windows do: what is put off makes the next window short
PROBE_SHARE = 0.03  # of the time goes to whole windows where cut ones seem better: what is never tried is never learned
LEARNING_RATE, SHARED_RATE = 0.1, 0.02  # of the step's own number of rows, and of all
PAUSE_RATE = 0.1
FORGETTING = 0.003  # of what was learned of one number of rows, with every step
MAX_SURPRISE = 2.0  # one step is not believed to be slower or faster than expected by more
MOST_ROWS = 1 << 16


@dataclass(slots=True)
class WindowAcceptance:
    """Chance that a drafted token holds if those before it do, by its position in the window."""

    memory: float = SEQUENCE_MEMORY
    accepted: list[float] = field(default_factory=list)
    tested: list[float] = field(default_factory=list)

    def add(self, num_drafted: int, num_accepted: int) -> None:
        """Counts one verdict."""
        fade = 1 - 1 / self.memory
        num_tested = min(num_accepted + 1, num_drafted)
        longer = [0.0] * (num_tested - len(self.tested))
        self.tested = [fade * n + (j < num_tested) for j, n in enumerate(self.tested + longer)]
        self.accepted = [fade * n + (j < num_accepted) for j, n in enumerate(self.accepted + longer)]

    def at(self, position: int, prior: float) -> float:
        """One position's, under a Beta prior with this mean."""
        if position >= len(self.tested):
            return prior
        return (self.accepted[position] + PRIOR_WEIGHT * prior) / (self.tested[position] + PRIOR_WEIGHT)

    def all(self, num_positions: int) -> list[float]:
        """The first positions'; the mean of all is their prior."""
        accepted, tested = sum(self.accepted), sum(self.tested)
        mean = (accepted + PRIOR_WEIGHT * PRIOR_ACCEPTANCE) / (tested + PRIOR_WEIGHT)
        return [self.at(position, mean) for position in range(num_positions)]


class StepTime:
    """Time of a step by its rows: the profile of the start, with straight lines in between and beyond, corrected by
    the steps that run. A step of more rows never counts as faster."""

    def __init__(self, profile: Iterable[tuple[int, int]]) -> None:
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
        low, high, share = self._between(num_rows)
        return self._times[low] + share * (self._times[high] - self._times[low])

    def rows_beside(self, num_rows: int, added_us: float) -> int:
        """How many more rows a step of `num_rows` can take in so much more time."""
        limit_us = self.at(num_rows) + added_us
        return bisect_right(range(MOST_ROWS), limit_us, lo=num_rows, key=self.at) - 1 - num_rows

    def add(self, num_rows: int, step_us: float) -> None:
        """A step ran. The points next to it learn most; what they learned fades while others run."""
        if step_us <= 0:
            return
        low, high, share = self._between(num_rows)
        ratio = min(MAX_SURPRISE, max(1 / MAX_SURPRISE, step_us / self.at(num_rows)))
        self._scale *= ratio**SHARED_RATE
        for index, factor in enumerate(self._factors):
            near = (1 - share) * (index == low) + share * (index == high)
            self._factors[index] = factor ** (1 - FORGETTING) * ratio ** (LEARNING_RATE * near)
        times = (self._scale * factor * us for factor, us in zip(self._factors, self._profile, strict=True))
        self._times = list(accumulate(times, max))

    def _between(self, num_rows: int) -> tuple[int, int, float]:
        """The points below and above, and how far it is from the one to the other."""
        high = min(bisect_left(self._rows, num_rows), len(self._rows) - 1)
        if self._rows[high] <= num_rows or high == 0:
            return high, high, 0.0
        low = high - 1
        return low, high, (num_rows - self._rows[low]) / (self._rows[high] - self._rows[low])


@dataclass(frozen=True, slots=True)
class GoodputRequest:
    """What one sequence would do in a step, beside what is missing of its prompt: `num_rows` in any case, which test
    `num_sure` drafted tokens, and `further` rows, each of which lets one more drafted token count."""

    acceptance: WindowAcceptance
    num_rows: int
    num_sure: int = 0
    further: int = 0


class Goodput:
    """Chooses windows; knows what steps cost and which tokens hold."""

    def __init__(self, step_costs: Iterable[tuple[int, int]]) -> None:
        self.time = StepTime(step_costs)
        self._of_all = WindowAcceptance(TARGET_MEMORY)
        self._pause_us = 0.0  # between two steps
        self._cut_us = 0.0  # in steps with cut windows, since there were whole ones

    def add_verified(self, acceptance: WindowAcceptance, num_drafted: int, num_accepted: int) -> None:
        """A verdict on a window of the sequence that `acceptance` belongs to."""
        if num_drafted:
            acceptance.add(num_drafted, num_accepted)
            self._of_all.add(num_drafted, num_accepted)

    def add_step(self, num_rows: int, step_us: float, pause_us: float) -> None:
        """A step ran, so long after the one before. What is longer than a step was no pause: nobody was there."""
        self.time.add(num_rows, step_us)
        self._pause_us += PAUSE_RATE * (min(pause_us, step_us) - self._pause_us)

    def rows_beside(self, num_rows: int, share: float) -> int:
        """How many rows of prompts a step of `num_rows` can take if they add at most `share` of what is between its
        start and the next one's."""
        return self.time.rows_beside(num_rows, share * (self._pause_us + self.time.at(num_rows)))

    def choose(self, requests: Sequence[GoodputRequest], max_rows: int) -> list[int]:
        """How many further rows each gets, of at most `max_rows` for all. Chunks of prompts in the same step do not
        count: they take a share of the time that windows take, so that a row costs what it costs without them."""
        whole = [request.further for request in requests]
        if len(requests) < 2 or not any(whole):
            return whole
        priors = self._of_all.all(max(request.num_sure + request.further for request in requests))
        tokens, gains, rows = 0.0, [], 0
        for request in requests:
            chances = (request.acceptance.at(j, priors[j]) for j in range(request.num_sure + request.further))
            survival = list(accumulate(chances, mul))
            tokens += 1 + sum(survival[: request.num_sure])
            rows += request.num_rows
            gains.append(survival[request.num_sure :])

        def time_at(more: int) -> float:
            return self._pause_us + self.time.at(min(max_rows, rows + more))

        chosen = best_rows(gains, tokens, max_rows - rows, time_at)
        longest = best_rows(gains, tokens, max_rows - rows, lambda _: 1.0)  # whole, where there are rows for all
        self._cut_us = 0.0 if chosen == longest else self._cut_us + time_at(sum(chosen))
        if PROBE_SHARE * self._cut_us >= time_at(sum(longest)):
            self._cut_us = 0.0
            return longest
        return chosen


def best_rows(gains: Sequence[Sequence[float]], tokens: float, room: int, time_at: Callable[[int], float]) -> list[int]:
    """How many of its gains each sequence takes. `gains` are the tokens that each further row is expected to add,
    falling; `tokens` those of a step without further rows, and `time_at` the time of one with so many of them."""
    order = sorted(chain.from_iterable([(-gain, i, j) for j, gain in enumerate(row)] for i, row in enumerate(gains)))
    order = order[: max(0, room)]
    totals = accumulate((-loss for loss, _, _ in order), initial=tokens)
    goodputs = [total / time_at(count) for count, total in enumerate(totals)]
    best = max(range(len(goodputs)), key=lambda count: (goodputs[count], count))
    if goodputs[best] <= MARGIN * goodputs[-1]:
        best = len(order)
    taken = [0] * len(gains)
    for _, index, _ in order[:best]:
        taken[index] += 1
    return taken
