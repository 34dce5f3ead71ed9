"""What a token would take under a plan: from acceptance, step costs and the times between the services, which the
requests of a gateway learn together, by clocks and counts alone.

With O(k) tokens a round, verification v, draft pass d, and r for what a round spends between the services (Leviathan et
al., arXiv 2211.17192, section 3.3, with the network in it):

    off                    v(0)
    sequential             (r + k d + v(k)) / O(k)
    ahead, waiting         (h max(v(k), r + k d) + (1 - h) (r + k d + v(k))) / O(k)
    ahead, never waiting   (v(k) + n v(0)) / (O(k) + n)

where h is the share of rounds whose window was at the target when the round before ended (for a chain alone the chance
that all of it holds and the target's own token too, for branches as measured), and n the mean number of plain tokens
decoded until a chain is there that agrees with them: as seen lately, else guessed from r and d. v counts the rows of
all sequences in a step, as many as run now and as if all did the same. Where sequences share steps, a window that comes
late has missed the step that the others make meanwhile: r + k d is then rounded up to whole verifications."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field, replace
from math import ceil

from outrider.planner.estimates import Acceptance, RunningMean, StepTime, surprise
from outrider.planner.formulas import ahead_plain, ahead_waiting, in_turn
from outrider.planner.policy import AHEAD, OFF, Mode, Plan
from outrider.planner.woken import woken_experts
from outrider.rpc.messages import StepTimings
from outrider.rpc.words.expert_costs import ExpertCosts

FORGETTING = 0.01  # a decision
PLAIN_MEMORY, LEAST_SEEN = 64.0, 8.0  # rounds that tell how many of them are plain


class VerifyCosts:
    """Steps of the target as a gateway hears of them: alone, and beside a draft that works at the same time. On one
    machine these differ."""

    def __init__(self, profile: Iterable[tuple[int, float]] = (), experts: ExpertCosts | None = None) -> None:
        self._alone = StepTime(profile, experts=woken_experts(experts))
        self._beside = RunningMean(1.0, 1.0)  # times beside a draft over those alone

    def add(
        self,
        num_rows: int,
        step_us: float,
        beside_draft: bool,
        weight: float = 1.0,
        sequences: int = 1,
        num_woken: int = 0,  # experts; 0: the step does not say
    ) -> None:
        """Counts a step, or the part of it that one of its sequences is."""
        expected = self.at(num_rows, beside_draft, sequences)
        if beside_draft and expected and step_us > 0:
            self._beside.add(self._beside.value * surprise(step_us, expected), weight)
        alone_us = step_us / (self._beside.value if beside_draft else 1.0)
        self._alone.add(num_rows, alone_us, weight, sequences=sequences, num_woken=num_woken)

    def at(self, num_rows: int, beside_draft: bool, sequences: float = 1.0) -> float:
        """The estimate; 0 while nothing is known."""
        return (self._beside.value if beside_draft else 1.0) * self._alone.at(num_rows, sequences=sequences)


@dataclass(slots=True)
class SharedStats:
    """What all requests of a gateway learn together, since it says more of the machines than of a request."""

    costs: VerifyCosts
    draft_costs: StepTime = field(default_factory=StepTime)  # of a drafted token, by sequences, as the draft says
    apart: bool = True  # draft and target have machines of their own
    acceptance: Acceptance = field(default_factory=Acceptance)
    hits: RunningMean = field(default_factory=RunningMean)
    between: RunningMean = field(default_factory=RunningMean)  # of a round that waits, outside both models
    draft_pass: RunningMean = field(default_factory=RunningMean)
    share: RunningMean = field(default_factory=lambda: RunningMean(1.0))  # sequences of a step over those that run here
    plain: dict[Hashable, RunningMean] = field(default_factory=dict)  # share of plain rounds where none waits, by mode
    _last_step: tuple[int, int, int, int] = (0, 0, 0, 0)

    def of_other_acceptance(self) -> SharedStats:
        """Of requests whose drafts are accepted more or less often: what things take is learned together with these."""
        return replace(self, acceptance=Acceptance(), hits=RunningMean(), plain={})

    def add_step(self, timings: StepTimings, beside_draft: bool, num_running: int) -> None:
        """A step of the target's: all its sequences tell of it, one after another, and the first of them counts."""
        step = timings.verify_us, timings.sample_us, timings.num_rows, timings.num_sequences
        if step == self._last_step and timings.num_sequences > 1:
            return
        self._last_step = step
        step_us, sequences = timings.verify_us + timings.sample_us, timings.num_sequences
        woken = {"sequences": sequences, "num_woken": timings.num_woken}
        self.costs.add(timings.num_rows, step_us, beside_draft, **woken)
        self.share.add(timings.num_sequences / max(1, num_running))

    def add_plain(self, mode: Hashable, plain: bool) -> None:
        """A round where none waits had a window, or only the target's own token."""
        self.plain.setdefault(mode, RunningMean(memory=PLAIN_MEMORY)).add(float(plain))

    def plain_tokens(self, mode: Hashable) -> float | None:
        """How many are decoded between two windows where none waits; None if that was not seen lately."""
        share = self.plain.get(mode)
        if share is None or share.weight < LEAST_SEEN:
            return None
        return share.value / max(1 - share.value, 0.01)

    def decay(self) -> None:
        """What was seen long ago counts less and less."""
        for share in self.plain.values():
            share.weight *= 1 - FORGETTING


SHARED = 1.5  # sequences in a step, from which on the others make the steps
MAX_PLAIN = 8  # tokens between two chains
PRIOR_HITS = 0.7
CAUTIOUS = 0.5  # acceptance
UNKNOWN_ROUND_TRIP_US = 1500.0


@dataclass(slots=True)
class Forecast:
    """For requests of one acceptance. `round_trips_us` is what the streams measure now, `num_running` sequences that
    the gateway decodes."""

    stats: SharedStats
    weighs: bool  # rejection with weights: no token of the target's own where the chain goes on
    acceptance: Acceptance
    hits: RunningMean
    round_trips_us: Callable[[], float]
    num_running: Callable[[], int]

    def cautious(self) -> Forecast:
        """With an acceptance that most drafts have, unless this one's was seen."""
        seen = self.acceptance.num_tested
        return self if seen else replace(self, acceptance=Acceptance(Acceptance.certain(CAUTIOUS)))

    def us_per_token(self, plan: Plan) -> float:
        """Microseconds; 0 while verification times are unknown."""
        verify = self.verify_us(plan)
        if plan.mode is Mode.OFF:
            return verify
        late = self.away_us + plan.num_draft_tokens * self.draft_us
        tokens = self.tokens(plan.mode, plan.num_draft_tokens)
        if plan.mode is Mode.SEQUENTIAL:
            return in_turn(late, verify, tokens)
        hits = self.hit_rate(plan)
        if plan.waits:
            missed = ceil(late / max(1.0, verify)) * verify if self.sequences > SHARED else late
            return ahead_waiting(late, verify, missed, hits, tokens)
        plain_us = self.verify_us(OFF)
        seen = self.stats.plain_tokens(plan.mode)
        guess = hits * self._plain(late - verify, plain_us) + (1 - hits) * self._plain(late, plain_us)
        plain = guess if seen is None else min(MAX_PLAIN, seen)
        return ahead_plain(verify, tokens, plain_us, plain)

    def tokens(self, mode: Mode, num_drafted: int) -> float:
        """Of a round that verifies so many drafted tokens."""
        lost = self.acceptance.survival(num_drafted) if self.weighs and num_drafted and mode is Mode.CHAINS else 0.0
        return self.acceptance.tokens(num_drafted) - lost

    def verify_us(self, plan: Plan, num_running: int = 0) -> float:
        """A step in which every sequence has a window of this plan: of so many sequences that run, else of those that
        do."""
        sequences = max(1.0, self.stats.share.value * num_running) if num_running else self.sequences
        return self.stats.costs.at(round(sequences * (plan.num_draft_tokens + 1)), plan.mode in AHEAD, sequences)

    def hit_rate(self, plan: Plan) -> float:
        """How often the window after this one is at hand in time."""
        if plan.mode is Mode.BRANCHES:
            return self.hits.or_else(PRIOR_HITS)
        return self.acceptance.survival(plan.num_draft_tokens + (not self.weighs))

    @property
    def sequences(self) -> float:
        """Of a step. As many as there are now, not as there were: requests come and go together."""
        return max(1.0, self.stats.share.value * self.num_running())

    @property
    def draft_us(self) -> float:
        """Of a drafted token: as measured, else as the draft said at its start."""
        return self.stats.draft_pass.or_else(self.stats.draft_costs.at(round(self.sequences)))

    @property
    def away_us(self) -> float:
        """What a round that waits for its draft spends between the services."""
        between = self.stats.between
        return between.value if between.weight else max(self.round_trips_us(), UNKNOWN_ROUND_TRIP_US)

    def _plain(self, late_us: float, plain_us: float) -> float:
        """Tokens decoded until a chain is there that agrees with them."""
        apart = min(MAX_PLAIN, ceil(max(0.0, late_us) / max(1.0, plain_us)))
        return min(MAX_PLAIN, apart / max(0.1, self.acceptance.survival(apart)))
