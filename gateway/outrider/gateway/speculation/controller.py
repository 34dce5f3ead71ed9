"""The controller of one request: off, sequential, chains ahead, or chains with branches, and how many tokens a round.

What is foreseen (forecast.py) says which plans are worth a trial; what was measured (contest.py) decides, for all
requests together. A request whose drafts are accepted more or less often than those of most may choose another plan,
every few rounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from outrider.gateway.speculation.contest import PlanTrials, SharedTrials, TrialsByConcurrency
from outrider.planner.estimates import Acceptance, RunningMean
from outrider.planner.forecast import Forecast, SharedStats
from outrider.planner.policy import AHEAD, OFF, Mode, Plan, Policy, PolicyLimits, Round

DECIDE_EVERY = 16  # rounds of a sequence, while at most
MOST_DECIDING = 8  # ... so many run: of more all together decide as often as these
MOST_APART = 4  # decisions: then a look at the leader's plan, which is measured only where it is played
SETTLING = 2  # rounds after a change that say nothing of what it changed to
HELD_UP = 3.0  # times its step that a plain token may take
EASE = 0.8  # of a goal's pace: what is foreseen to take less keeps it
LATE, IN_TIME = 1.5, 1.2  # verifications that a branch takes to come, above and below which branches go deep or not


@dataclass(slots=True)
class Controller:
    """`stats` and `shared_trials` are shared by all requests of a gateway; `round_trips_us` says what the streams
    measure now, `num_running` how many sequences the gateway decodes."""

    limits: PolicyLimits
    stats: SharedStats
    shared_trials: SharedTrials
    round_trips_us: Callable[[], float]
    num_running: Callable[[], int] = lambda: 1
    explains: bool = False  # keeps what its decisions rest on, which takes time
    goal_us: float = 0.0  # that a token may take, on the mean of the completion; 0: there is no such goal
    plan: Plan = field(init=False)
    forecast: Forecast = field(init=False)  # of this request
    common: Forecast = field(init=False)  # of all
    trials: TrialsByConcurrency = field(init=False)
    deep: bool = False  # branches come so late that those of the verification after this one are prepared, too
    policy: Policy = field(init=False)  # the present choice
    _after_window: bool = False  # the round before verified drafted tokens
    _until_decision: int = 1
    _away_us: float = 0.0  # as the forecast said at the last decision: it may have to ask every stream
    _since_change: int = 0  # rounds, but for those that had been computed before
    _inputs: dict[str, float] = field(default_factory=dict)
    _spent_us: int = 0  # since the first delivery, and the tokens that came
    _num_tokens: int = 0
    _apart: int = 0  # decisions in a row for another plan than the leader's

    def __post_init__(self) -> None:
        stats = self.stats
        hits = RunningMean(stats.hits.value, min(4.0, stats.hits.weight))
        self.forecast = self._forecast(Acceptance(stats.acceptance), hits)
        self.common = self._forecast(stats.acceptance, stats.hits)
        self.trials = self.shared_trials.of(self.limits)
        self.plan = self.trials.at(self.common).plan  # and again at the first round: others may come
        self.policy = self._present_policy()
        self._away_us = self.forecast.away_us

    def _forecast(self, acceptance: Acceptance, hits: RunningMean) -> Forecast:
        return Forecast(self.stats, self.limits.weighs, acceptance, hits, self.round_trips_us, self.num_running)

    def _present_policy(self) -> Policy:
        return self.plan.policy(self.limits.base, self.limits.max_branches, self.deep)

    def inputs(self) -> dict[str, float]:
        """What the last decision rests on; nothing unless it `explains`."""
        return self._inputs

    def _inputs_now(self) -> dict[str, float]:
        return {
            "acceptance": self.forecast.acceptance.at(0),
            "hits": self.forecast.hit_rate(self.plan),
            "between_us": self.forecast.away_us,
            "draft_pass_us": self.stats.draft_pass.value,
            "verify_us": self.forecast.verify_us(self.plan),
            "us_per_token": self.trials.at(self.common).us_per_token(self.plan, self.forecast),
            "deep": float(self.deep),
        }

    def on_piece(self, num_ids: int, draft_us: int) -> None:
        """A piece arrived: `draft_us` of device time since the last one."""
        if num_ids and draft_us:
            self.stats.draft_pass.add(draft_us / num_ids)

    def on_round(self, closed: Round) -> bool:
        """A round ended. Returns whether the choice changed."""
        trials = self.trials.at(self.common)
        self._since_change += not _was_waiting(closed)
        if closed.index > 0:
            self._spent_us += closed.total_us
            self._num_tokens += len(closed.commit.ids)
        if closed.index > 0 and closed.commit.timings.num_rows:  # the first round holds the prompt
            self._learn(closed)
            in_vain = self._waited_in_vain(closed)
            if not in_vain:  # of which a trial has a bound of its own
                trials.spend(self.plan, closed.total_us, len(closed.commit.ids), self.common)
            if (self._since_change > SETTLING or in_vain) and not closed.at_end:  # cut short by no fault of the plan
                trials.add(self.plan, *_us(closed, self.plan), closed.commit.num_drafted, self.common, in_vain)
        before = self.policy
        self._until_decision -= 1
        if trials.trial is not None:
            if trials.trial != self.plan:
                self._follow(trials.trial)
            self._until_decision = 0
        elif self._until_decision <= 0 or (not self._apart and trials.leader != self.plan):
            self._until_decision = DECIDE_EVERY * max(1, self.num_running() // MOST_DECIDING)
            self._away_us = self.forecast.away_us
            self.stats.decay()
            best = self._enough(trials) or trials.best(self.forecast, self.common, self.plan)
            self._apart = (self._apart + 1) % MOST_APART if best != trials.leader else 0
            self._follow(best if self._apart else trials.leader)
        return self.policy is not before

    def _enough(self, trials: PlanTrials) -> Plan | None:
        """The plan of the fewest drafted tokens that keeps the goal's pace: what others who share the steps can use is
        left to them. None without a goal, alone, or behind it, where the fastest is right."""
        if not self.goal_us or self.num_running() == 1 or self._spent_us > self.goal_us * self._num_tokens:
            return None
        times = {plan: trials.us_per_token(plan, self.forecast) for plan in trials.plans}
        kept = [plan for plan, us in times.items() if 0 < us <= EASE * self.goal_us]
        return min(kept, key=lambda plan: (plan.num_draft_tokens, times[plan]), default=None)

    def _waited_in_vain(self, closed: Round) -> bool:
        """Whether the target has had all its patience, and decoded plainly."""
        waits = self.plan.waits and self.plan is not OFF
        return waits and not closed.commit.num_drafted and 0 < 1000 * self.policy.patience_ms <= closed.total_us

    def _follow(self, plan: Plan) -> None:
        before = self.plan, self.deep
        if plan != self.plan:
            self.plan, self._since_change = plan, 0
        coming = self.forecast.away_us + (plan.num_draft_tokens + 1) * self.forecast.draft_us
        self.deep = coming > (IN_TIME if self.deep else LATE) * self.forecast.verify_us(plan)
        if (self.plan, self.deep) != before:
            self.policy = self._present_policy()
        if self.explains:
            self._inputs = self._inputs_now()

    def _learn(self, closed: Round) -> None:
        commit, timings, stats = closed.commit, closed.commit.timings, self.stats
        computed = timings.verify_us + timings.sample_us
        stats.add_step(timings, self.plan.mode in AHEAD, self.num_running())
        waited = max(0, closed.total_us - computed - timings.queue_us)
        late = self._away_us + commit.num_drafted * stats.draft_pass.value
        hit = commit.num_drafted > 0 and waited < 0.5 * late
        if self._after_window and self.plan.mode is Mode.BRANCHES:
            self.forecast.hits.add(float(hit))
            stats.hits.add(float(hit))
        self._after_window = commit.num_drafted > 0
        if commit.num_drafted:
            self.forecast.acceptance.add(commit.num_drafted, commit.num_accepted)
            stats.acceptance.add(commit.num_drafted, commit.num_accepted)
            if self.plan.waits and (not hit or self.plan.mode is Mode.SEQUENTIAL):
                stats.between.add(max(0.0, waited - commit.num_drafted * stats.draft_pass.value))
        if self._since_change > SETTLING and not self.plan.waits:
            stats.add_plain(self.plan.mode, plain=not commit.num_drafted)


def _us(closed: Round, plan: Plan) -> tuple[float, float]:
    """What a round and its step took. A plain token waits for no draft: if it took far longer than its step, all was
    held up, and that is not held against off."""
    timings = closed.commit.timings
    step_us = timings.verify_us + timings.sample_us
    most = HELD_UP * (step_us + timings.queue_us) if plan is OFF else inf
    return min(closed.total_us, most), step_us


def _was_waiting(closed: Round) -> bool:
    """Whether the commit was there when the one before was read, as after this process was held up: the target had
    computed it under the plan of that time."""
    timings = closed.commit.timings
    return 2 * closed.total_us < timings.verify_us + timings.sample_us
