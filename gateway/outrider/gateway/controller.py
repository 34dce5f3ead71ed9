"""The controller of one request: off, sequential, chains ahead, or chains with branches, and how many tokens a round.

Predicted time per token, with O(k) tokens a round, verification v, draft pass d, and r for what a round spends between
the services (Leviathan et al., arXiv 2211.17192, section 3.3, with the network in it):

    off         v(1)
    sequential  (r + k d + v(k)) / O(k)
    ahead       (h max(v(k), r + k d) + (1 - h) (r + k d + v(k))) / O(k)

where h is the share of rounds whose window was at the target when the round before ended: for a chain alone the chance
that all of it holds and the target's own token too, for branches as measured. What a mode was measured at corrects
its prediction, so that what the formulas leave out (cores that both services share) counts too. The choice is made
anew every few rounds, and changes only for a gain above the noise; off is left for a while now and then, to look.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum

from outrider.gateway.core import Policy
from outrider.gateway.estimates import Acceptance, Mean, VerifyCosts
from outrider.gateway.rounds import Round

DECIDE_EVERY = 16  # rounds
FIRST_DECISION = 8
HYSTERESIS = 0.95  # a change must promise at most this share of the present time
PROBE_ROUNDS = 12
FIRST_REST, MAX_REST = 32, 512  # tokens decoded without speculation before the next look
PRIOR_HITS = 0.7
UNKNOWN_ROUND_TRIP_US = 1500.0


class Mode(Enum):
    """How a request is decoded."""

    OFF = "off"
    SEQUENTIAL = "sequential"
    CHAINS = "chains"
    BRANCHES = "branches"


AHEAD = (Mode.CHAINS, Mode.BRANCHES)


@dataclass(frozen=True, slots=True)
class Plan:
    """One choice."""

    mode: Mode
    num_draft_tokens: int

    def policy(self, base: Policy, max_branches: int) -> Policy:
        """As credit and patience."""
        return replace(
            base,
            num_draft_tokens=self.num_draft_tokens,
            windows_ahead=int(self.mode in AHEAD),
            max_branches=max_branches if self.mode is Mode.BRANCHES else 0,
        )


OFF = Plan(Mode.OFF, 0)


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request lets the controller choose."""

    base: Policy
    most: int  # tokens drafted a round, at most
    fixed: bool = False  # exactly so many: the request says so
    modes: tuple[Mode, ...] = (Mode.OFF, Mode.SEQUENTIAL, Mode.CHAINS, Mode.BRANCHES)
    max_branches: int = 6
    weighs: bool = False  # rejection with weights: no token of the target's own where the chain goes on

    def plans(self) -> Iterator[Plan]:
        """Everything allowed."""
        if Mode.OFF in self.modes:
            yield OFF
        for mode in self.modes:
            if mode is not Mode.OFF:
                yield from (Plan(mode, k) for k in ([self.most] if self.fixed else range(1, self.most + 1)))


@dataclass(slots=True)
class Controller:
    """`costs` are shared by all requests of a gateway; `round_trips_us` says what the streams measure now."""

    limits: Limits
    costs: VerifyCosts
    round_trips_us: Callable[[], float]
    plan: Plan = field(init=False)
    acceptance: Acceptance = field(default_factory=Acceptance)
    hits: Mean = field(default_factory=Mean)
    _between: Mean = field(default_factory=Mean)  # r of sequential rounds, in microseconds
    _draft_pass: Mean = field(default_factory=Mean)
    _other_rows: Mean = field(default_factory=Mean)  # of other sequences in the same steps
    _corrections: dict[Mode, Mean] = field(default_factory=dict)
    _until_decision: int = FIRST_DECISION
    _rest: int = FIRST_REST
    _resting: int = 0  # tokens still to be decoded without speculation

    def __post_init__(self) -> None:
        known = [plan for plan in self.limits.plans() if plan is not OFF]
        wanted = [plan for plan in known if plan.num_draft_tokens == self.limits.base.num_draft_tokens] or known
        self.plan = wanted[-1] if wanted else OFF

    @property
    def policy(self) -> Policy:
        """The present choice."""
        return self.plan.policy(self.limits.base, self.limits.max_branches)

    def inputs(self) -> dict[str, float]:
        """What the choice rests on."""
        return {
            "acceptance": self.acceptance.at(0),
            "hits": self.hits.or_else(PRIOR_HITS),
            "between_us": self._between.value,
            "draft_pass_us": self._draft_pass.value,
            "verify_us": self.costs.at(
                round(self._other_rows.value) + self.plan.num_draft_tokens + 1, self.plan.mode in AHEAD
            ),
        }

    def on_piece(self, num_ids: int, draft_us: int) -> None:
        """A piece arrived: `draft_us` of device time since the last one."""
        if num_ids and draft_us:
            self._draft_pass.add(draft_us / num_ids)

    def on_round(self, closed: Round) -> bool:
        """A round ended. Returns whether the choice changed."""
        self._learn(closed)
        if self._resting:
            self._resting = max(0, self._resting - len(closed.commit.ids))
            return not self._resting and self._wake()
        self._until_decision -= 1
        if self._until_decision > 0:
            return False
        self._until_decision = DECIDE_EVERY
        return self._decide()

    def predicted_us(self, plan: Plan) -> float:
        """Time per token; 0 while verification times are unknown."""
        k, others = plan.num_draft_tokens, round(self._other_rows.value)
        verify = self.costs.at(others + k + 1, plan.mode in AHEAD)
        if plan.mode is Mode.OFF:
            return verify * self._correction(plan.mode)
        away, drafting = self._away_us, k * self._draft_pass.value
        late = away + drafting + verify
        if plan.mode is Mode.SEQUENTIAL:
            time = late
        else:
            branches = plan.mode is Mode.BRANCHES
            alone = self.acceptance.survival(k if self.limits.weighs else k + 1)
            hits = self.hits.or_else(PRIOR_HITS) if branches else alone
            ahead = max(verify, away + drafting)
            time = hits * ahead + (1 - hits) * late
        return time * self._correction(plan.mode) / self._tokens(plan)

    def _tokens(self, plan: Plan) -> float:
        """Of a round."""
        k = plan.num_draft_tokens
        lost = self.acceptance.survival(k) if self.limits.weighs and plan.mode is Mode.CHAINS else 0.0
        return self.acceptance.tokens(k) - lost

    @property
    def _away_us(self) -> float:
        """What a round that waits for its draft spends between the services."""
        return self._between.or_else(max(self.round_trips_us(), UNKNOWN_ROUND_TRIP_US))

    def _learn(self, closed: Round) -> None:
        commit, timings = closed.commit, closed.commit.timings
        if closed.index == 0 or not timings.num_rows:
            return  # the first round holds the prompt
        computed = timings.verify_us + timings.sample_us
        own_rows = commit.num_drafted + 1
        self.costs.add(timings.num_rows, computed, self.plan.mode in AHEAD)
        self._other_rows.add(max(0, timings.num_rows - own_rows))
        if not commit.num_drafted:
            if self.plan is OFF:
                self._correct(closed, self.costs.at(timings.num_rows, False))
            return
        self.acceptance.add(commit.num_drafted, commit.num_accepted)
        waited = max(0, closed.total_us - computed - timings.queue_us)
        drafting = commit.num_drafted * self._draft_pass.value
        hit = self.plan.mode in AHEAD and waited < 0.5 * (self._away_us + drafting)
        if self.plan.mode is Mode.BRANCHES:
            self.hits.add(float(hit))
        if not hit:
            self._between.add(max(0.0, waited - drafting))
        self._correct(closed, self.predicted_us(self.plan) * self._tokens(self.plan))

    def _correct(self, closed: Round, predicted: float) -> None:
        """`predicted` holds the correction so far; what is added is measured over predicted without it."""
        if predicted <= 0:
            return
        known = self._corrections.setdefault(self.plan.mode, Mean(1.0, 1.0, 32.0))
        known.add(min(4.0, closed.total_us / (predicted / known.value if self.plan is not OFF else predicted)))

    def _correction(self, mode: Mode) -> float:
        known = self._corrections.get(mode)
        return known.value if known is not None else 1.0

    def _decide(self) -> bool:
        times = {plan: self.predicted_us(plan) for plan in self.limits.plans()}
        if not times or not min(times.values()):
            return False
        best = min(times, key=lambda plan: times[plan])
        if best == self.plan or times[best] > HYSTERESIS * times[self.plan]:
            if self.plan is not OFF:
                self._rest = FIRST_REST
            return False
        self.plan = best
        if best is OFF:
            self._resting, self._rest = self._rest, min(2 * self._rest, MAX_REST)
        return True

    def _wake(self) -> bool:
        """Speculates for a few rounds, as well as it can be, to see whether it pays by now."""
        plans = [plan for plan in self.limits.plans() if plan is not OFF]
        if not plans:
            self._resting = self._rest
            return False
        self.plan = min(plans, key=self.predicted_us)
        self._until_decision = PROBE_ROUNDS
        return True
