"""The controller of one request: off, sequential, chains ahead, or chains with branches, and how many tokens a round.

Predicted time per token, with O(k) tokens a round, verification v, draft pass d, and r for what a round spends between
the services (Leviathan et al., arXiv 2211.17192, section 3.3, with the network in it):

    off                    v(0)
    sequential             (r + k d + v(k)) / O(k)
    ahead, waiting         (h max(v(k), r + k d) + (1 - h) (r + k d + v(k))) / O(k)
    ahead, never waiting   (v(k) + n v(0)) / (O(k) + n)

where h is the share of rounds whose window was at the target when the round before ended (for a chain alone the chance
that all of it holds and the target's own token too, for branches as measured), and n the mean number of plain tokens
decoded until a chain is there that agrees with them: as seen lately, else guessed from r and d. v counts the rows of
all sequences in a step, as many as run now and as if all did the same: what pays for one while the others hold back
need not pay for all. Where sequences share steps, a window that comes late has missed the step that the others make
meanwhile: r + k d is then rounded up to whole verifications. What a way was measured at corrects its prediction, so
that what the formulas leave out (cores that both services share) counts too; it is compared with what its steps' own
rows cost, or every request would hold the others' windows against off. The choice is made anew every few rounds, and
changes only for a gain above the noise; off is left for a while now and then, by one request for all, to look.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import ceil

from outrider.gateway.estimates import Acceptance, Mean
from outrider.gateway.experience import Experience
from outrider.gateway.plans import AHEAD, OFF, Limits, Mode, Plan
from outrider.gateway.policy import Policy
from outrider.gateway.rounds import Round

DECIDE_EVERY = 16  # rounds
LEAST_ROUNDS = 8  # of all requests together before the first choice
HYSTERESIS = 0.97  # a change must promise at most this share of the present time
PREFERENCE = 0.97  # off, where speculation gains next to nothing: the draft has other work
CROWD_PREFERENCE = 0.88  # more so where others share the steps: they wait for each row, and the luckless end last
PROBE_ROUNDS = 12
FIRST_REST, MAX_REST = 32, 2048  # tokens decoded without speculation before the next look
SHARED = 1.5  # sequences in a step, from which on the others make the steps
MAX_PLAIN = 8  # tokens between two chains
PRIOR_HITS = 0.7
UNKNOWN_ROUND_TRIP_US = 1500.0
SETTLING = 2  # rounds after a change that say nothing of what it changed to
LATE, IN_TIME = 1.5, 1.2  # verifications that a branch takes to come, above and below which branches go deep or not
MAX_RATIO = 4.0  # of a measured round to its prediction; more is an accident


@dataclass(slots=True)
class Controller:
    """`known` is shared by all requests of a gateway; `round_trips_us` says what the streams measure now, `num_running`
    how many sequences the gateway decodes."""

    limits: Limits
    known: Experience
    round_trips_us: Callable[[], float]
    num_running: Callable[[], int] = lambda: 1
    plan: Plan = field(init=False)
    acceptance: Acceptance = field(init=False)
    hits: Mean = field(init=False)
    deep: bool = False  # branches come so late that those of the verification after this one are prepared, too
    _after_window: bool = False  # the round before verified drafted tokens
    _until_decision: int = 1
    _since_change: int = 0  # rounds
    _spent_us: float = 0.0
    _expected_us: float = 0.0

    def __post_init__(self) -> None:
        self.acceptance = Acceptance(self.known.acceptance)
        self.hits = Mean(self.known.hits.value, min(4.0, self.known.hits.weight))
        waiting = [plan for plan in self.limits.plans() if plan is not OFF and plan.waits]
        wanted = [plan for plan in waiting if plan.num_draft_tokens == self.limits.base.num_draft_tokens] or waiting
        self.plan = wanted[-1] if wanted else OFF
        if self.known.num_rounds >= LEAST_ROUNDS:  # and again at the first round: others may come at the same time
            self._decide()

    @property
    def policy(self) -> Policy:
        """The present choice."""
        return self.plan.policy(self.limits.base, self.limits.max_branches, self.deep)

    def inputs(self) -> dict[str, float]:
        """What the choice rests on."""
        return {
            "acceptance": self.acceptance.at(0),
            "hits": self.hits.or_else(PRIOR_HITS),
            "between_us": self._away_us,
            "draft_pass_us": self.known.draft_pass.value,
            "verify_us": self._verify_us(self.plan),
            "correction": self.known.correction(self.plan.way),
            "deep": float(self.deep),
        }

    def on_piece(self, num_ids: int, draft_us: int) -> None:
        """A piece arrived: `draft_us` of device time since the last one."""
        if num_ids and draft_us:
            self.known.draft_pass.add(draft_us / num_ids)

    def on_round(self, closed: Round) -> bool:
        """A round ended. Returns whether the choice changed."""
        self._learn(closed)
        if self.plan is OFF and self.known.resting:
            self.known.resting = max(0, self.known.resting - len(closed.commit.ids))
            return not self.known.resting and self._look()
        self._until_decision -= 1
        if self._until_decision > 0 or self.known.num_rounds < LEAST_ROUNDS:
            return False
        self._until_decision = DECIDE_EVERY
        return self._decide()

    def predicted_us(self, plan: Plan) -> float:
        """Time per token; 0 while verification times are unknown."""
        return self._formula_us(plan) * self.known.correction(plan.way)

    def _formula_us(self, plan: Plan, step_us: float | None = None) -> float:
        """Time per token where all do as this one does, or where every step takes so long."""
        verify = self._verify_us(plan) if step_us is None else step_us
        if plan.mode is Mode.OFF:
            return verify
        late = self._away_us + plan.num_draft_tokens * self.known.draft_pass.value
        tokens = self._tokens(plan)
        if plan.mode is Mode.SEQUENTIAL:
            return (late + verify) / tokens
        misses = 1 - self._hits(plan)
        if plan.waits:
            missed = ceil(late / max(1.0, verify)) * verify if self._sequences > SHARED else late
            return ((1 - misses) * max(verify, late) + misses * (verify + missed)) / tokens
        plain_us = self._verify_us(OFF) if step_us is None else step_us
        seen = self.known.plain_tokens(plan.mode)
        guess = (1 - misses) * self._plain(late - verify, plain_us) + misses * self._plain(late, plain_us)
        plain = guess if seen is None else min(MAX_PLAIN, seen)
        return (verify + plain * plain_us) / (tokens + plain)

    def _plain(self, late_us: float, plain_us: float) -> float:
        """Tokens decoded until a chain is there that agrees with them."""
        apart = min(MAX_PLAIN, ceil(max(0.0, late_us) / max(1.0, plain_us)))
        return min(MAX_PLAIN, apart / max(0.1, self.acceptance.survival(apart)))

    def _verify_us(self, plan: Plan) -> float:
        rows = round(self._sequences * (plan.num_draft_tokens + 1))
        return self.known.costs.at(rows, plan.mode in AHEAD)

    @property
    def _sequences(self) -> float:
        """Of a step. As many as there are now, not as there were: requests come and go together."""
        return max(1.0, self.known.share.value * self.num_running())

    def _hits(self, plan: Plan) -> float:
        if plan.mode is Mode.BRANCHES:
            return self.hits.or_else(PRIOR_HITS)
        return self.acceptance.survival(plan.num_draft_tokens + (not self.limits.weighs))

    def _tokens(self, plan: Plan) -> float:
        """Of a round that verifies drafted tokens."""
        k = plan.num_draft_tokens
        lost = self.acceptance.survival(k) if self.limits.weighs and plan.mode is Mode.CHAINS else 0.0
        return self.acceptance.tokens(k) - lost

    @property
    def _away_us(self) -> float:
        """What a round that waits for its draft spends between the services."""
        return self.known.between.or_else(max(self.round_trips_us(), UNKNOWN_ROUND_TRIP_US))

    def _learn(self, closed: Round) -> None:
        commit, timings, known = closed.commit, closed.commit.timings, self.known
        if closed.index == 0 or not timings.num_rows:
            return  # the first round holds the prompt
        computed = timings.verify_us + timings.sample_us
        known.num_rounds += 1
        part = 1 / max(1, timings.num_sequences)  # the others tell of the same step
        known.costs.add(timings.num_rows, computed, self.plan.mode in AHEAD, part)
        known.share.add(timings.num_sequences / max(1, self.num_running()), part)
        waited = max(0, closed.total_us - computed - timings.queue_us)
        late = self._away_us + commit.num_drafted * known.draft_pass.value
        hit = commit.num_drafted > 0 and waited < 0.5 * late
        if self._after_window and self.plan.mode is Mode.BRANCHES:
            self.hits.add(float(hit))
            known.hits.add(float(hit))
        self._after_window = commit.num_drafted > 0
        if commit.num_drafted:
            self.acceptance.add(commit.num_drafted, commit.num_accepted)
            known.acceptance.add(commit.num_drafted, commit.num_accepted)
            if not hit or self.plan.mode is Mode.SEQUENTIAL:
                known.between.add(max(0.0, waited - commit.num_drafted * known.draft_pass.value))
        self._since_change += 1
        if self._since_change > SETTLING and not self.plan.waits:
            known.saw(self.plan.mode, plain=not commit.num_drafted)
        if self._since_change > SETTLING:
            self._compare(closed)

    def _compare(self, closed: Round) -> None:
        """Adds a round's time and what was predicted for it."""
        tokens = float(len(closed.commit.ids))
        if self.plan is not OFF and self.plan.waits:
            if not closed.commit.num_drafted:
                return  # a wait that ran out
            # The luck of one round is none of the machine's; a target that cut the window verified fewer tokens.
            tokens = self._tokens(replace(self.plan, num_draft_tokens=closed.commit.num_drafted))
        step_us = None
        if self._sequences > SHARED:  # what the others' windows cost is no matter of this one's way
            step_us = self.known.costs.at(closed.commit.timings.num_rows, self.plan.mode in AHEAD)
        self._spent_us += closed.total_us
        self._expected_us += self._formula_us(self.plan, step_us) * tokens

    def _correct(self) -> None:
        """Once a decision: measured over predicted. Sums, since rounds of one token and of five have unlike ratios."""
        if self._expected_us > 0:
            self.known.correct(self.plan.way, min(MAX_RATIO, self._spent_us / self._expected_us))
        self._spent_us = self._expected_us = 0.0

    def _decide(self) -> bool:
        """Chooses a plan, and whether its branches go deep. Returns whether that changed the policy."""
        before = self.policy
        self._choose()
        coming = self._away_us + (self.plan.num_draft_tokens + 1) * self.known.draft_pass.value
        self.deep = coming > (IN_TIME if self.deep else LATE) * self._verify_us(self.plan)
        return self.policy != before

    def _choose(self) -> None:
        self._correct()
        times = {plan: self.predicted_us(plan) for plan in self.limits.plans()}
        if OFF in times:
            times[OFF] *= PREFERENCE if self._sequences < SHARED else CROWD_PREFERENCE
        self.known.forget_others(self.plan.way)
        if not times or not min(times.values()):
            return
        best = min(times, key=lambda plan: times[plan])
        if best == self.plan or times[best] > HYSTERESIS * times[self.plan]:
            if self.plan is not OFF:
                self.known.rest //= 2
            return
        self._change(best)
        if best is OFF and not self.known.resting:
            self.known.rest = min(2 * self.known.rest, MAX_REST) or FIRST_REST
            self.known.resting = self.known.rest

    def _look(self) -> bool:
        """Speculates for a few rounds, as well as it can be, to see whether it pays by now."""
        plans = [plan for plan in self.limits.plans() if plan is not OFF]
        if not plans:
            self.known.resting = self.known.rest
            return False
        self._correct()
        self._change(min(plans, key=self.predicted_us))
        self._until_decision = PROBE_ROUNDS
        return True

    def _change(self, plan: Plan) -> None:
        self.plan, self._since_change = plan, 0
