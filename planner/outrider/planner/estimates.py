"""What is learned of rounds by counting and timing them: running means, acceptance by position, and what a step of the
target takes by its rows."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, pairwise, repeat
from math import inf, prod
from operator import mul

from outrider.planner.woken import WokenExperts
from outrider.rpc.errors import ResourceExhausted

PRIOR_ACCEPTANCE, PRIOR_WEIGHT = 0.7, 4.0
MEMORY = 64.0  # verifications, or steps of as many rows, that an estimate looks back on


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


LAGS = 16  # windows that what is usual looks back on
LATE = 0.9  # share of them that came before


@dataclass(slots=True)
class Lag:
    """How long after a sequence's commits its next windows came, where none was at hand: in seconds, of late. Until one
    came it is that of the others; an unknown one is endless."""

    others: Lag | None = None
    _usual_s: float = inf
    _late_s: float = inf
    _recent: deque[float] = field(default_factory=lambda: deque(maxlen=LAGS))

    @property
    def usual_s(self) -> float:
        """The median."""
        return self._usual_s if self._recent or self.others is None else self.others.usual_s

    @property
    def late_s(self) -> float:
        """The 90th percentile."""
        return self._late_s if self._recent or self.others is None else self.others.late_s

    def add(self, seconds: float) -> None:
        """A window came, so long after the commit before."""
        self._recent.append(seconds)
        known = sorted(self._recent)
        self._usual_s = known[len(known) // 2]
        self._late_s = known[min(len(known) - 1, int(LATE * len(known)))]
        if self.others is not None:
            self.others.add(seconds)


WAIT_MS, LEAST_WAIT_MS, MOST_WAIT_MS = 1000, 50, 60_000


@dataclass(slots=True)
class Departures:
    """How fast work leaves what is busy: the time that the last ones took, by sequences and by tokens. Who is told to
    come back counts until as many have left: of those refused at a time each is told a later one."""

    seconds: float = 0.0
    num_sequences: float = 0.0
    num_tokens: float = 0.0
    since: float = 0.0  # the last one, or that it became busy
    num_refused: int = 0

    def add(self, num_sequences: int, num_tokens: int, now: float) -> None:
        """So much has left."""
        fade = 1 - 1 / MEMORY
        self.seconds, self.since = fade * self.seconds + now - self.since, now
        self.num_sequences = fade * self.num_sequences + num_sequences
        self.num_tokens = fade * self.num_tokens + num_tokens
        self.num_refused = max(0, self.num_refused - num_sequences)

    def wait_ms(self, num_sequences: int, num_tokens: int, now: float) -> int:
        """When to come back, who is refused because so much is to leave before."""
        self.num_refused += 1
        wait_s = self.seconds_until(num_sequences, num_tokens, now)
        wait_s += self.seconds_until(self.num_refused - 1, 0, now)
        return WAIT_MS if not self.num_sequences else round(min(max(1000 * wait_s, LEAST_WAIT_MS), MOST_WAIT_MS))

    def seconds_until(self, num_sequences: int, num_tokens: int, now: float) -> float:
        """How long until so much has left, by what has of late; 0 while nothing has."""
        seconds = self.seconds + now - self.since
        by_sequences, by_tokens = num_sequences / max(self.num_sequences, 1e-9), num_tokens / max(self.num_tokens, 1e-9)
        return seconds * max(by_sequences, by_tokens) if self.num_sequences else 0.0


class OpenWork:
    """Sequences that are open by their keys, of at most `max_sequences` and together `max_tokens` (0: any number)."""

    def __init__(self, max_sequences: int, max_tokens: int = 0) -> None:
        self._max_sequences, self._max_tokens = max_sequences, max_tokens
        self._tokens: dict[Hashable, int] = {}
        self._departures = Departures()

    def check(self, num_tokens: int, now: float, was_promised: bool = False) -> None:
        """Raises ResourceExhausted, which says when to come back, where one more of so many tokens is not let in. One
        alone is; one that was promised its room elsewhere is let in beyond the bound of tokens."""
        is_full, missing = self._missing(num_tokens)
        if is_full:
            problem = f"{len(self._tokens)} sequences are open already"
        elif missing and not was_promised:
            total = self._max_tokens + missing
            problem = f"with it {total} tokens would be open, of prompts and max_tokens; allowed: {self._max_tokens}"
        else:
            return
        raise self.refusal(problem, int(is_full), missing, now)

    def has_room(self, num_tokens: int, leaving: Collection[Hashable] = ()) -> bool:
        """Whether one more of so many tokens is let in once these have left."""
        return self._missing(num_tokens, leaving) == (False, 0)

    def refusal(self, problem: str, num_sequences: int, num_tokens: int, now: float) -> ResourceExhausted:
        """What one is told that is to come back once so much has left."""
        wait_ms = self._departures.wait_ms(num_sequences, num_tokens, now)
        return ResourceExhausted(problem, reason="BUSY", retry_after_ms=wait_ms)

    def _missing(self, num_tokens: int, leaving: Collection[Hashable] = ()) -> tuple[bool, int]:
        """Whether there are as many sequences as may be, and how many tokens too many one more would be."""
        count = len(self._tokens) - len(leaving)
        total = sum(self._tokens.values()) - sum(self._tokens[key] for key in leaving) + num_tokens
        beyond = max(0, total - self._max_tokens) if self._max_tokens and count else 0
        return count >= self._max_sequences, beyond

    def add(self, key: Hashable, num_tokens: int, now: float) -> None:
        """One is open."""
        if not self._tokens:
            self._departures.since = now
        self._tokens[key] = num_tokens

    def remove(self, key: Hashable, now: float) -> None:
        """It is no more, if it was."""
        if (num_tokens := self._tokens.pop(key, None)) is not None:
            self._departures.add(1, num_tokens, now)


@dataclass(slots=True)
class Acceptance:
    """Chance that a drafted token is accepted if those before it are, by position in the window, under a Beta prior:
    what is known of other requests, or else the mean of all positions."""

    others: Acceptance | None = None
    memory: float = MEMORY  # verifications that it looks back on
    forgets_untested: bool = False  # with every verification; else a position forgets only where it is tested anew
    accepted: list[float] = field(default_factory=list)
    tested: list[float] = field(default_factory=list)

    @classmethod
    def certain(cls, chance: float) -> Acceptance:
        """Known beforehand, of every position."""
        return cls(accepted=[chance * 1e9], tested=[1e9])

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

    @property
    def num_tested(self) -> float:
        """Verifications of late that tested the first position, each the less the longer ago it was."""
        return self.tested[0] if self.tested else 0.0

    def fade(self, share: float) -> None:
        """Keeps this share of what is known."""
        self.tested = [share * count for count in self.tested]
        self.accepted = [share * count for count in self.accepted]

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


PROFILE_WEIGHT = 16.0  # steps that a profiled time counts as
FADING = 0.002  # of what was learned of a number of rows, with every step
PACE_RATE = 0.1
MAX_SURPRISE = 2.0  # no step is believed to be slower or faster than expected by more
MAX_POINTS = 64
LEAST_LEFT = 0.1  # of the time of the rows: no step is foreseen to wake so few experts that less is left
REDRAWN_EVERY = 8  # steps: no single one moves the curve much
MOST_ROWS = 1 << 16


class StepTime:
    """What a step takes by its rows, in microseconds: a profile, if there is one, corrected by the steps that run.
    Between the numbers of rows that are known lie straight lines. More rows never take less: where measurements say
    otherwise they are averaged.

    Of the tokens that a step looks back on (`context`) each adds the same (`context_us`), whatever the rows. Where the
    model is a mixture, the rows count as if they woke as many experts as the profile's did, and what they wake more or
    less is foreseen by `experts`.

    What happens to all steps alike, steps of every size tell of (`pace`), so that those that nobody tries any more are
    not judged by an hour that has gone; and what held up a few is forgotten while others run."""

    def __init__(
        self,
        profile: Iterable[tuple[int, float]] = (),
        context_us: float = 0.0,
        experts: WokenExperts | None = None,
    ) -> None:
        self.context_us, self.experts = context_us, experts
        self._profile = {num_rows: float(max(1, step_us)) for num_rows, step_us in profile}
        self._means = {
            num_rows: RunningMean(step_us, PROFILE_WEIGHT, MEMORY) for num_rows, step_us in self._profile.items()
        }  # at a pace of 1
        self._pace = 1.0
        self._curve: tuple[list[int], list[float]] | None = None  # rows and times at a pace of 1; None: to be redrawn
        self._num_added = 0

    def at(self, num_rows: int, context: int = 0, sequences: float = 1.0) -> float:
        """The estimate for rows of so many sequences; 0 while nothing is known."""
        extra_us = 0.0 if self.experts is None else self.experts.extra_us(num_rows, sequences)
        return self._of(num_rows, self.context_us * context + extra_us)

    def _of(self, num_rows: int, beside_us: float) -> float:
        """Of the rows, and what a step takes beside them at a pace of 1."""
        if not self._means:
            return 0.0
        rows, times = self._curve or self._redrawn()
        high = min(bisect_left(rows, num_rows), len(rows) - 1)
        low = max(0, high - 1)
        if num_rows <= rows[0] or low == high:
            between = times[low]
        else:
            between = times[low] + (times[high] - times[low]) * (num_rows - rows[low]) / (rows[high] - rows[low])
        # From twice the rows that were seen on, a row costs at least half of what those did.
        least = times[-1] * num_rows / (2 * rows[-1]) if num_rows > rows[-1] else 0.0
        alone = max(between, least)
        return self._pace * max(alone + beside_us, LEAST_LEFT * alone)

    def between(self, first: int, last: int, context: int = 0, sequences: float = 1.0) -> list[float]:
        """The estimates for all numbers of rows from `first` to `last`."""
        if self.experts is not None:
            return [self.at(rows, context, sequences) for rows in range(first, last + 1)]
        rows, _ = self._curve or self._redrawn()
        bends = {first, last, *(point for point in rows if first < point < last)}
        bends.update(range(max(first, rows[-1]) if rows else last, last))  # what is not known is no straight line
        ends = [(point, self.at(point, context)) for point in sorted(bends)]
        found = [us for _, us in ends[:1]]
        for (low, low_us), (high, high_us) in pairwise(ends):
            step_us = (high_us - low_us) / (high - low)
            found += [low_us + step_us * count for count in range(1, high - low + 1)]
        return found

    def _redrawn(self) -> tuple[list[int], list[float]]:
        known = sorted(self._means)
        self._curve = known, _rising([self._means[point] for point in known])
        return self._curve

    def rows_beside(self, num_rows: int, added_us: float) -> int:
        """How many more rows a step of `num_rows` can take in so much more time."""

        def alone(rows: int) -> float:
            return self._of(rows, 0.0)

        limit_us = alone(num_rows) + added_us
        return bisect_right(range(MOST_ROWS), limit_us, lo=num_rows, key=alone) - 1 - num_rows

    def add(
        self,
        num_rows: int,
        step_us: float,
        weight: float = 1.0,
        context: int = 0,
        sequences: int = 1,
        num_woken: int = 0,  # experts; 0: the step does not say
    ) -> None:
        """A step ran; or the part of one (`weight`) that one of its sequences tells of."""
        extra_us = 0.0
        if self.experts is not None and num_woken:
            self.experts.add(num_rows, sequences, num_woken)
            extra_us = self.experts.us_of(num_woken, num_rows)
        point = num_rows if num_rows in self._means else _rounded(num_rows)
        if step_us <= 0 or (point not in self._means and len(self._means) >= MAX_POINTS):
            return
        rows_us = self._of(num_rows, 0.0)
        expected_us = self._of(num_rows, self.context_us * context + extra_us)
        if point not in self._means:
            self._means[point], self._curve = RunningMean(memory=MEMORY), None
            if self._profile:  # as if it had been profiled, too
                self._profile[point] = rows_us / self._pace
        if rows_us:
            ratio = surprise(step_us, expected_us)
            self._pace *= ratio ** (PACE_RATE * weight)
            step_us = ratio * rows_us
        for known, profiled in self._profile.items():
            mean = self._means[known]
            mean.value += FADING * weight * (profiled - mean.value)
            mean.weight *= 1 - FADING * weight
        self._means[point].add(step_us / self._pace, weight)
        self._num_added += 1
        if self._num_added % REDRAWN_EVERY == 0:
            self._curve = None


def surprise(measured_us: float, expected_us: float) -> float:
    """How many times as long as expected a step took, as far as it is believed."""
    return min(MAX_SURPRISE, max(1 / MAX_SURPRISE, measured_us / expected_us))


def _rounded(num_rows: int) -> int:
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
