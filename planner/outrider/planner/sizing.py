"""How many machines a number of streams needs, with the draft on devices of its own or beside the target on one, in
closed form: what a token takes under a plan comes from the gateway's own forecast (forecast.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import ceil, inf

from outrider.planner.estimates import Acceptance, RunningMean, StepTime
from outrider.planner.forecast import Forecast, SharedStats, VerifyCosts
from outrider.planner.formulas import in_turn
from outrider.planner.policy import AHEAD, OFF, Mode, Plan, Policy, PolicyLimits
from outrider.planner.virtual_services import MAX_BRANCH_STEPS, MAX_ROWS, DraftQuality

CERTAIN = 1e9  # verifications: an acceptance that is given, not learned
MAX_SEQUENCES = 256  # of a target or a draft, as services are started by default
MAX_BRANCHES = 12  # of a sequence
GATEWAY_SHARE = 0.6  # of a core that a gateway's loop may use: beyond it events wait for one another
DRAFT_LOADS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # streams of a draft that are tried
DRAFT_PRICE = 0.2  # of a draft's device over a target's

StepCosts = tuple[tuple[int, float], ...]  # rows, and microseconds of a step with so many


@dataclass(frozen=True, slots=True)
class Pair:
    """What a target and a draft take, and how well they agree."""

    target_costs: StepCosts
    draft_costs: StepCosts
    quality: DraftQuality
    round_trip_ms: float  # between a gateway and a service
    max_draft_tokens: int = 8
    verify: StepTime = field(init=False)
    draw: StepTime = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "verify", StepTime(self.target_costs))
        object.__setattr__(self, "draw", StepTime(self.draft_costs))

    @property
    def acceptance(self) -> Acceptance:
        """Of every position, as if known for long."""
        positions = self.max_draft_tokens + 1
        return Acceptance(
            accepted=[self.quality.acceptance * CERTAIN] * positions, tested=[CERTAIN] * positions, memory=CERTAIN
        )

    def plans(self, modes: Iterable[Mode]) -> tuple[Plan, ...]:
        """All that a controller may choose from."""
        return PolicyLimits(Policy(4), self.max_draft_tokens, modes=tuple(modes)).plans


@dataclass(frozen=True, slots=True)
class Memory:
    """Of a target's device, in bytes; nothing is known of it where `cache_bytes` is 0."""

    context: int  # tokens of a stream, its prompt included
    cache_bytes: float = 0.0  # for keys and values, without a draft beside them
    target_token_bytes: float = 0.0
    draft_token_bytes: float = 0.0
    draft_weight_bytes: float = 0.0

    @property
    def is_known(self) -> bool:
        """Whether it says how many streams fit."""
        return self.cache_bytes > 0 and self.target_token_bytes > 0

    def tokens(self, with_draft: bool) -> float:
        """That fit on a device; with a draft beside the target its weights, and its keys and values of the same
        tokens, take their part. Infinite where nothing is known."""
        if not self.is_known:
            return inf
        room = self.cache_bytes - with_draft * self.draft_weight_bytes
        return max(0.0, room) / (self.target_token_bytes + with_draft * self.draft_token_bytes)

    def streams(self, with_draft: bool) -> int:
        """That a target holds at once."""
        return int(min(MAX_SEQUENCES, self.tokens(with_draft) // self.context))

    @property
    def draft_share(self) -> float:
        """Of the tokens that fit without a draft, those that one beside the target costs."""
        return 1 - self.tokens(with_draft=True) / self.tokens(with_draft=False) if self.is_known else 0.0


@dataclass(frozen=True, slots=True)
class Fleet:
    """Machines for a number of streams, and what a token of one takes on them."""

    plan: Plan
    ms_per_token: float
    targets: int
    drafts: int
    streams_per_target: int
    tokens_per_round: float
    bound: str  # what keeps more streams from a target: time, memory, sequences, or that there are no more

    def tokens_per_s(self, streams: int) -> float:
        """Of all streams."""
        return 1e3 * streams / self.ms_per_token

    def gateways(self, streams: int, round_us: float) -> int:
        """Processes of a core each, if a round takes a gateway so long."""
        return ceil(self.tokens_per_s(streams) / self.tokens_per_round * round_us * 1e-6 / GATEWAY_SHARE)


def ms_per_token(pair: Pair, plan: Plan, streams: int, draft_streams: int) -> float:
    """With the draft on a device of its own, which serves so many streams."""
    return _forecast(pair, plan, streams, draft_streams).us_per_token(plan) / 1e3


def ms_together(pair: Pair, plan: Plan, streams: int) -> float:
    """Both models on one device, in turn: the network is gone, and nothing is hidden."""
    k = plan.num_draft_tokens
    verify = pair.verify.at(streams * (k + 1))
    return in_turn(k * pair.draw.at(streams), verify, pair.acceptance.tokens(k)) / 1e3


def fastest(pair: Pair, modes: Iterable[Mode], streams: int = 1, draft_streams: int = 1) -> Plan:
    """Of the plans of these modes that target and draft have rows and time for."""
    fitting = [plan for plan in pair.plans(modes) if streams * (plan.num_draft_tokens + 1) <= MAX_ROWS]
    fitting = [plan for plan in fitting if _keeps_up(pair, plan, streams, draft_streams)]
    return min(fitting or [OFF], key=lambda plan: ms_per_token(pair, plan, streams, draft_streams))


def fastest_together(pair: Pair, streams: int = 1) -> Plan:
    """The same on one device."""
    plans = [
        plan for plan in pair.plans((Mode.OFF, Mode.SEQUENTIAL)) if streams * (plan.num_draft_tokens + 1) <= MAX_ROWS
    ]
    return min(plans or [OFF], key=lambda plan: ms_together(pair, plan, streams))


def separate(pair: Pair, streams: int, max_ms: float, memory: Memory, draft_price: float = DRAFT_PRICE) -> Fleet:
    """The cheapest targets and drafts with which no token takes longer than `max_ms`; `draft_price` is that of a
    draft's device over a target's. Raises ValueError where not even one stream on a target keeps to that, or fits."""
    fleets = []
    for per_draft in sorted({min(load, streams) for load in DRAFT_LOADS}):

        def at(count: int, load: int = per_draft) -> tuple[Plan, float]:
            plan = fastest(pair, Mode, count, load)
            return plan, ms_per_token(pair, plan, count, load)

        spread = _spread(streams, max_ms, memory.streams(with_draft=False), at)
        if spread is not None:
            fleets.append(_fleet(pair, *at(spread.each), spread, ceil(streams / per_draft)))
    if not fleets:
        raise _too_slow(max_ms, ms_per_token(pair, fastest(pair, Mode), 1, 1))
    return min(fleets, key=lambda fleet: (fleet.targets + draft_price * fleet.drafts, fleet.ms_per_token))


def together(pair: Pair, streams: int, max_ms: float, memory: Memory) -> Fleet:
    """The same with a draft beside every target, on its device. Raises ValueError as `separate`."""

    def at(count: int) -> tuple[Plan, float]:
        plan = fastest_together(pair, count)
        return plan, ms_together(pair, plan, count)

    spread = _spread(streams, max_ms, memory.streams(with_draft=True), at)
    if spread is None:
        raise _too_slow(max_ms, at(1)[1])
    return _fleet(pair, *at(spread.each), spread, 0)


@dataclass(frozen=True, slots=True)
class _Spread:
    """Streams over targets."""

    targets: int
    each: int
    bound: str


def _fleet(pair: Pair, plan: Plan, ms: float, spread: _Spread, drafts: int) -> Fleet:
    tokens = pair.acceptance.tokens(plan.num_draft_tokens)
    return Fleet(plan, ms, spread.targets, drafts if plan is not OFF else 0, spread.each, tokens, spread.bound)


def _too_slow(max_ms: float, alone_ms: float) -> ValueError:
    return ValueError(f"no plan keeps to {max_ms:.4g} ms a token: one stream alone takes {alone_ms:.4g}")


def _spread(streams: int, max_ms: float, fitting: int, at: Callable[[int], tuple[Plan, float]]) -> _Spread | None:
    """The fewest targets; None where one stream alone takes too long. Raises ValueError where none fits."""
    if fitting < 1:
        raise ValueError("no stream fits: keys and values of one take more than a target has for them")
    most = _most(min(streams, fitting), lambda count: at(count)[1] <= max_ms)
    if most < 1:
        return None
    targets = ceil(streams / most)
    if most == streams:
        bound = "no more streams"
    elif most < fitting:
        bound = "time"
    else:
        bound = "memory" if fitting < MAX_SEQUENCES else "sequences"
    return _Spread(targets, ceil(streams / targets), bound)


def _most(limit: int, holds: Callable[[int], bool]) -> int:
    """The largest number up to `limit` with which it holds, if it holds for all below it; else 0."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def _keeps_up(pair: Pair, plan: Plan, streams: int, draft_streams: int) -> bool:
    """Whether a draft of so many streams drafts a window of each in a round."""
    round_us = 1e3 * ms_per_token(pair, plan, streams, draft_streams) * pair.acceptance.tokens(plan.num_draft_tokens)
    passes = plan.num_draft_tokens + (plan.mode in AHEAD)
    return passes * pair.draw.at(_draft_rows(plan, draft_streams)) <= round_us


def _draft_rows(plan: Plan, draft_streams: int) -> int:
    """Of a pass: a row for each chain and branch."""
    return draft_streams + (min(MAX_BRANCH_STEPS, MAX_BRANCHES * draft_streams) if plan.mode is Mode.BRANCHES else 0)


def _forecast(pair: Pair, plan: Plan, streams: int, draft_streams: int) -> Forecast:
    """The gateway's, of requests about which all is known."""
    seen = 64.0
    hits = RunningMean(_foreseen(pair.quality, plan.num_draft_tokens, draft_streams), seen)
    away_us = 2e3 * pair.round_trip_ms  # to the draft, back, and the same to the target
    stats = SharedStats(
        VerifyCosts(pair.target_costs),
        acceptance=pair.acceptance,
        hits=hits,
        between=RunningMean(away_us, seen),
        draft_pass=RunningMean(pair.draw.at(_draft_rows(plan, draft_streams)), seen),
        share=RunningMean(1.0, seen),
    )
    return Forecast(stats, False, pair.acceptance, hits, lambda: away_us, lambda: streams)


def _foreseen(quality: DraftQuality, num_draft_tokens: int, draft_streams: int) -> float:
    """How often branches hold what follows a verification: the whole window and the token after it were right, or one
    of the likeliest other outcomes came, as many as a draft of so many streams has branches for each."""
    branches = min(MAX_BRANCHES, max(1, MAX_BRANCH_STEPS // draft_streams))
    outcomes = [chance for chance, offset, _ in quality.outcomes(num_draft_tokens) if offset <= num_draft_tokens]
    return float(quality.acceptance ** (num_draft_tokens + 1)) + sum(outcomes[:branches])
