"""Which plan is fastest where it is tried. A forecast knows neither which cores draft and target share nor how windows
of many sequences fall into steps; so the requests of a gateway try the promising plans together, one after another,
and each is compared with the latest rounds of the leader: what happens to the whole machine hits both alike.

A plan is known by the time of its rounds and by what they verified. What a token takes under it follows with the
acceptance of the request at hand.

The trials of a gateway's requests: by their choices, and by the order of the number of sequences."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf, sqrt
from typing import Self

from outrider.planner.estimates import RunningMean
from outrider.planner.forecast import Forecast
from outrider.planner.policy import OFF, Mode, Plan, PolicyLimits

GAIN = 0.97  # a new leader takes at most this share of the leader's time
GUESSED_GAIN = 0.9  # for one request to leave the leader for a plan that was not tried
FAR_OFF = 2.0  # of the leader's time: where off takes more, it gets no look of its own
PROMISING = 1.2  # of the leader's time: what is thought to take more is not tried
PREFERENCE = 0.985  # for off: the draft has other work
LEAST_PREFERENCE = 0.96  # however many share steps
TRIAL_ROUNDS, SHARED_ROUNDS = 6, 3  # of a sequence alone, or of each of those that share steps
STAKE, INTEREST = 4.0, 0.005  # tokens of a sequence that trials may lose to begin with, and for each that is decoded
GAIN_SHARE = 0.05  # and of what the leader makes more than off
MOST_SAVED = 8.0  # tokens of a sequence that the account holds, or owes
FAR = 3  # times as many rounds for a plan that has had no window yet
PROBE_EVERY = 16.0  # rounds of a sequence
FIRST_BACKOFF, MAX_BACKOFF = 96.0, 4096.0  # rounds of a sequence between trials, once what is promising was tried
SILENT, SILENT_BACKOFF = 2, 16384.0  # rounds of a trial that waited for a draft in vain, and what follows these
USUAL_WINDOW, LIKENESS_TOLERANCE = 4, 0.1  # tokens of a window that compares requests, and what is no difference
RARELY = 0.05  # of the rounds
OUTLIER_RATIO = 1.3  # a trial that says so much more or less than those before takes their place
TRIAL_MEMORY = 3.0  # that a measurement looks back on
MAX_IDLE_TURNS = 64  # rounds of every sequence: the number of sequences may go up and down
MAX_LIMITS = 32  # that requests may name, of which what was measured is kept


@dataclass(slots=True)
class MeasuredRounds:
    """Rounds under one plan."""

    us: RunningMean  # of a round
    step_us: RunningMean  # of the target's step in it
    windows: dict[int, float] = field(default_factory=dict)  # how often so many drafted tokens were verified

    @classmethod
    def none(cls, memory: float = 16.0) -> Self:
        """None yet; each counts for so many."""
        return cls(RunningMean(memory=memory), RunningMean(memory=memory))

    @property
    def drafts_nothing(self) -> bool:
        """Whether hardly any round had a drafted token."""
        return sum(count for drafted, count in self.windows.items() if drafted) < RARELY * sum(self.windows.values())

    def add(self, us: float, step_us: float, num_drafted: int) -> None:
        """Counts a round."""
        self.us.add(us)
        self.step_us.add(step_us)
        for drafted in self.windows:
            self.windows[drafted] *= 1 - 1 / self.us.memory
        self.windows[num_drafted] = self.windows.get(num_drafted, 0.0) + 1.0

    def token_us(self, plan: Plan, forecast: Forecast) -> float:
        """With the acceptance of the forecast's requests."""
        tokens = sum(count * forecast.tokens(plan.mode, drafted) for drafted, count in self.windows.items())
        return self.us.value * sum(self.windows.values()) / tokens


@dataclass(slots=True)
class Account:
    """What trials may lose, in tokens of a sequence as the leader makes them: a stake to begin with, and an interest on
    all that is decoded. A trial that is faster than the leader earns."""

    tokens: float = 0.0
    staked: int = 0  # sequences

    def open(self, sequences: int) -> None:
        """So many decode together, each with a stake."""
        self.tokens += STAKE * max(0, sequences - self.staked)
        self.staked = max(self.staked, sequences)

    def add(self, tokens: float, sequences: int) -> None:
        """So many more, or less."""
        most = MOST_SAVED * sequences
        self.tokens = max(-most, min(most, self.tokens + tokens))


@dataclass(slots=True)
class PlanTrials:
    """Of requests with the same choices, at one number of sequences. Rounds are kept as they would be at that number,
    by what their steps would take."""

    plans: tuple[Plan, ...]
    leader: Plan
    sequences: int = 1
    account: Account = field(default_factory=Account)
    prior: PlanTrials | None = None  # at another number of sequences, which knew more when this one began
    trial: Plan | None = None
    _tried: dict[Plan, MeasuredRounds] = field(default_factory=dict)  # at the pace of the first; the oldest trial first
    _ratios: dict[Plan, float] = field(default_factory=dict)  # measured over foreseen
    _recent: MeasuredRounds = field(default_factory=MeasuredRounds.none)  # the leader's
    _trial: MeasuredRounds = field(default_factory=MeasuredRounds.none)
    _until_probe: float = 0.0  # rounds of a sequence until it is asked whether anything promises to beat the leader
    _in_vain: int = 0  # rounds of the trial that waited for a draft which said nothing
    _backoff: float = 0.0  # and until something is tried that does not
    _last_backoff: float = 0.0
    _interest: float = INTEREST  # for a token
    _least: float = 0.0  # on the account: the trial ends below it
    _looks_at_off: bool = False  # the last trial after a backoff was off

    @property
    def plan(self) -> Plan:
        """What all play now."""
        return self.trial or self.leader

    @property
    def knows(self) -> bool:
        """Whether anything was tried."""
        return bool(self._tried)

    def restart(self) -> None:
        """The number of sequences was another one meanwhile: what was measured before is no comparison."""
        self.trial = None
        self._recent, self._trial = MeasuredRounds.none(), MeasuredRounds.none()

    def spend(self, plan: Plan, us: float, num_tokens: int, forecast: Forecast) -> None:
        """A round of one of the sequences took its time, whether or not it tells of the plan."""
        earned, sequences = self._interest * num_tokens, max(1, forecast.num_running())
        leader_us = self._leader_us(forecast) if plan == self.trial else 0.0
        if leader_us:
            earned += num_tokens - us / leader_us
        self.account.add(earned, sequences)
        if leader_us and self.account.tokens < self._least:
            self._end_trial(plan, forecast)

    def _leader_us(self, forecast: Forecast) -> float:
        """What a token takes, also where the leader is off."""
        us = self.us_per_token(self.leader, forecast)
        return us / self._preference(forecast) if self.leader is OFF else us

    def add(
        self, plan: Plan, us: float, step_us: float, num_drafted: int, forecast: Forecast, in_vain: bool = False
    ) -> None:
        """Counts a round of one of the sequences, which may have waited for a draft `in_vain`."""
        sequences = max(1, forecast.num_running())
        enough = max(TRIAL_ROUNDS, SHARED_ROUNDS * sequences)
        scale = self._scale(plan, forecast)
        if plan == self.trial:
            self._trial.us.memory = 4.0 * enough
            self._trial.add(us / scale, step_us / scale, num_drafted)
            self._in_vain += in_vain
            if not plan.waits and self._trial.drafts_nothing:  # which costs nothing; its first window may be far
                enough *= FAR
            if self._in_vain >= SILENT or self._trial.us.weight >= enough:
                self._end_trial(plan, forecast)
        elif plan == self.leader and self.trial is None:
            self._recent.us.memory = 4.0 * enough
            self._recent.add(us / scale, step_us / scale, num_drafted)
            self._backoff -= 1 / sequences
            self._until_probe -= 1 / sequences
            if self._until_probe <= 0 and self._recent.us.weight >= enough:
                self._begin_trial(forecast)

    def _scale(self, plan: Plan, forecast: Forecast) -> float:
        """What a step takes at present over one of as many sequences as this is for."""
        if forecast.num_running() == self.sequences:
            return 1.0
        there = forecast.verify_us(plan, self.sequences)
        return forecast.verify_us(plan) / there if there else 1.0

    def best(self, own: Forecast, common: Forecast, present: Plan) -> Plan:
        """For one request: the leader, unless the request's own acceptance makes another plan better for it than that
        plan is for most. What is better for most, or for one that is alone, is for a trial to show."""
        likeness = own.tokens(Mode.SEQUENTIAL, USUAL_WINDOW) / common.tokens(Mode.SEQUENTIAL, USUAL_WINDOW)
        if own.num_running() == 1 or self.leader not in self._tried or abs(likeness - 1) < LIKENESS_TOLERANCE:
            return self.leader
        own_us, common_us = self.us_per_token(self.leader, own), self.us_per_token(self.leader, common)
        shares = {plan: self.us_per_token(plan, own) / own_us if own_us else 1.0 for plan in self.plans}
        found = {
            plan: share
            for plan, share in shares.items()
            if plan == self.leader
            or (share < self._gain(plan) and share * common_us < self.us_per_token(plan, common) * self._gain(plan))
        }
        best = min(found, key=lambda plan: found[plan])
        return present if present in found and found[present] * GAIN <= found[best] else best

    def _share(self, plan: Plan, forecast: Forecast) -> float:
        """Of the leader's time."""
        leader = self.us_per_token(self.leader, forecast)
        return self.us_per_token(plan, forecast) / leader if leader else 1.0

    def _gain(self, plan: Plan) -> float:
        return GAIN if plan in self._tried or plan is OFF else GUESSED_GAIN

    def us_per_token(self, plan: Plan, forecast: Forecast) -> float:
        """At present: as measured, or as foreseen with what was measured of plans like it; off at its preference."""
        if plan == self.leader and self._recent.us.weight:
            us = self._recent.token_us(plan, forecast) * self._scale(plan, forecast)
        elif plan in self._tried:
            us = self._pace * self._tried[plan].token_us(plan, forecast) * self._scale(plan, forecast)
        else:
            us = forecast.us_per_token(plan) * self._ratio(plan)
        return us * self._preference(forecast) if plan is OFF else us

    def _preference(self, forecast: Forecast) -> float:
        """A burst ends with its slowest stream, so off's margin grows with their number."""
        return max(LEAST_PREFERENCE, float(PREFERENCE ** sqrt(forecast.sequences)))

    @property
    def _pace(self) -> float:
        """The leader's steps at the target now over those when it was first measured: how fast the machines are. Whole
        rounds would not do: a leader by accident would make all others look as slow as it then proves to be."""
        known = self._tried.get(self.leader)
        return self._recent.step_us.value / known.step_us.value if known and self._recent.step_us.value else 1.0

    def _ratio(self, plan: Plan) -> float:
        """Measured over foreseen, of what is most like this plan."""
        like = [tried for tried in self._ratios if tried.style == plan.style]
        if like:
            return self._ratios[min(like, key=lambda tried: abs(tried.num_draft_tokens - plan.num_draft_tokens))]
        return 1.0 if self.prior is None else self.prior._ratio(plan)

    def _begin_trial(self, forecast: Forecast) -> None:
        if self.leader not in self._tried:
            self._keep(self.leader, self._recent, forecast)
        leader_us = self._leader_us(forecast)
        gain = self.us_per_token(OFF, forecast) / leader_us - 1 if leader_us else 0.0
        self._interest = INTEREST + GAIN_SHARE * max(0.0, gain)
        self.trial = self._challenger(forecast.cautious())
        self._until_probe = 0.0 if self.trial else PROBE_EVERY
        self._trial, self._in_vain = MeasuredRounds.none(), 0
        self._least = min(0.0, self.account.tokens - forecast.num_running())

    def _challenger(self, forecast: Forecast) -> Plan | None:
        """Of off and every way that was not tried the one that promises most, with its best number of tokens; then what
        drafted and promises to beat the leader, with the acceptance seen since it was tried. Once these were tried,
        off, if it is near, and the oldest trial in turns, after a backoff each. None may lose what is not there."""
        times = {plan: self.us_per_token(plan, forecast) for plan in self.plans if plan != self.leader}
        limit = self.us_per_token(self.leader, forecast)
        styles = {plan.style for plan in self._tried}
        idle = {plan.style for plan, rounds in self._tried.items() if rounds.drafts_nothing}
        if OFF in times and self._recent.drafts_nothing:
            return OFF
        fresh = [
            plan
            for plan, us in times.items()
            if plan not in self._tried
            and plan.style not in idle
            and us < limit * (GAIN if plan.style in styles else PROMISING)
            and self._can_lose(plan, us, forecast)
        ]
        if fresh:
            return min(fresh, key=lambda plan: times[plan])
        drafting = [plan for plan in times if plan is OFF or plan.style not in idle]
        best = min(drafting, key=lambda plan: times[plan], default=None)
        if best in self._tried and times[best] < GAIN * limit and self._can_lose(best, times[best], forecast):
            return best
        if self._backoff > 0:
            return None
        self._backoff = self._last_backoff = min(MAX_BACKOFF, 2 * self._last_backoff) or FIRST_BACKOFF
        self._looks_at_off = not self._looks_at_off and OFF in times and times[OFF] < FAR_OFF * limit
        if self._looks_at_off:
            return OFF
        for plan, rounds in self._tried.items():
            once = rounds.us.weight <= 1.0  # it may have met an accident
            if plan in times and (once or times[plan] < PROMISING * limit):
                return plan if self._can_lose(plan, times[plan], forecast) else None
        return None

    def _can_lose(self, plan: Plan, us: float, forecast: Forecast) -> bool:
        """Whether the account bears a look at a plan, if half of the drafted tokens hold that are thought to, and the
        rounds that are under way at its end. A full one bears any."""
        leader_us, tokens = self._leader_us(forecast), forecast.tokens(plan.mode, plan.num_draft_tokens)
        if plan is OFF or not leader_us:
            return True
        round_us = us * tokens if plan.waits else forecast.verify_us(plan)
        rounds = SHARED_ROUNDS + forecast.round_trips_us() / max(1.0, round_us)
        lost = rounds * (round_us / leader_us - (1 + tokens) / 2)
        return min(MOST_SAVED, lost) * max(1, forecast.num_running()) <= self.account.tokens

    def _end_trial(self, plan: Plan, forecast: Forecast) -> None:
        self.trial = None
        if not self._trial.us.weight:
            return
        self._keep(plan, self._trial, forecast)
        if self._wins(plan, forecast):
            self._keep(self.leader, self._recent, forecast)  # what is known best is known of it
            self.leader, self._recent, self._last_backoff = plan, self._trial, 0.0
        elif self._in_vain >= SILENT:  # each look at it takes all the target's patience
            self._backoff = self._last_backoff = SILENT_BACKOFF
        self._recent.us.weight /= 2  # some of its rounds are measured anew before the next trial

    def _wins(self, plan: Plan, forecast: Forecast) -> bool:
        """Under a plan that drafts nothing plain tokens are decoded, with more to do: whatever was measured, off is no
        slower."""
        if plan is OFF and self._recent.drafts_nothing:
            return True
        if OFF in self.plans and self._trial.drafts_nothing and plan is not OFF:
            return False
        return self._share(plan, forecast) < (1.0 if plan is OFF else GAIN)  # off has its preference

    def _keep(self, plan: Plan, rounds: MeasuredRounds, forecast: Forecast) -> None:
        """Adds a measurement to those of earlier trials."""
        known, pace = self._tried.pop(plan, None), self._pace
        us = rounds.us.value / pace
        if known is None or not 1 / OUTLIER_RATIO < us / known.us.value < OUTLIER_RATIO:
            known = MeasuredRounds.none(TRIAL_MEMORY)
        known.us.add(us)
        known.step_us.add(rounds.step_us.value / pace)
        known.windows = dict(rounds.windows)
        self._tried[plan] = known
        if foreseen := forecast.us_per_token(plan):
            self._ratios[plan] = pace * known.token_us(plan, forecast) * self._scale(plan, forecast) / foreseen


@dataclass(slots=True)
class TrialsByConcurrency:
    """Of requests with the same choices."""

    limits: PolicyLimits
    account: Account = field(default_factory=Account)
    _by_bucket: dict[int, PlanTrials] = field(default_factory=dict)  # by the bits of the number of sequences
    _used: dict[int, int] = field(default_factory=dict)  # the turn when each was asked for last
    _turn: int = 0

    def at(self, forecast: Forecast) -> PlanTrials:
        """The one for the present number of sequences."""
        sequences = forecast.num_running()
        bucket = (sequences - 1).bit_length()
        trials = self._by_bucket.get(bucket)
        if trials is None:
            trials = self._by_bucket[bucket] = self._begin(bucket, forecast)
        self.account.open(sequences)
        self._turn += 1
        if self._turn - self._used.get(bucket, 0) > MAX_IDLE_TURNS * sequences:
            trials.restart()
        self._used[bucket] = self._turn
        return trials

    def _begin(self, bucket: int, forecast: Forecast) -> PlanTrials:
        """It starts from what was measured at the nearest number of sequences, else from what is known beforehand."""
        plans = self.limits.plans
        known = [number for number, found in self._by_bucket.items() if found.knows]
        if not known:
            return PlanTrials(plans, self._first(forecast), 1 << bucket, self.account)
        prior = self._by_bucket[min(known, key=lambda number: abs(number - bucket))]
        begun = PlanTrials(plans, OFF, 1 << bucket, self.account, prior)
        begun.leader = min(plans, key=lambda plan: begun.us_per_token(plan, forecast))
        return begun

    def _first(self, forecast: Forecast) -> Plan:
        """In turn with the draft, which shows what both sides and the way between them take, where it beats off though
        drafts are right no more often than a cautious guess. Else a chain that the target never waits for, where the
        draft takes nothing from it; else off, until a trial shows more."""
        usual = self.limits.base.num_draft_tokens
        drafting = [plan for plan in self.limits.plans if plan is not OFF]
        drafting.sort(key=lambda plan: plan.num_draft_tokens != usual)  # the usual number first
        waiting = [plan for plan in drafting if plan.waits and plan.mode is drafting[0].mode]
        cautious = forecast.cautious()
        plain_us = cautious.us_per_token(OFF) if OFF in self.limits.plans else inf
        if waiting and not plain_us:  # nothing is known
            return waiting[0]
        for plan in waiting[:1] + sorted(waiting[1:], key=cautious.us_per_token):
            if cautious.us_per_token(plan) < plain_us:
                return plan
        free = [plan for plan in drafting if not plan.waits] if forecast.stats.apart else []
        bearable = free and forecast.verify_us(free[0]) < PROMISING * plain_us
        return free[0] if bearable else OFF


@dataclass(slots=True)
class SharedTrials:
    """Shared by all requests."""

    _by_limits: dict[PolicyLimits, TrialsByConcurrency] = field(default_factory=dict)  # the latest is the last

    def of(self, limits: PolicyLimits) -> TrialsByConcurrency:
        """That of requests with these choices, of which those that were made longest ago are forgotten."""
        known = self._by_limits
        found = known[limits] = known.pop(limits) if limits in known else TrialsByConcurrency(limits)
        if len(known) > MAX_LIMITS:
            del known[next(iter(known))]
        return found
