"""What metrics are told of requests: each is counted and timed from its arrival to its end, with when its drafted
tokens came, and what the draft would be asked for if it were fast."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import replace
from math import inf

from outrider.gateway.engine import GenerationEngine
from outrider.gateway.gen_ai_metrics import GenAiMetrics
from outrider.gateway.goals import outcomes
from outrider.gateway.metrics import Exemplar, GatewayMetrics
from outrider.gateway.request_record import RequestObserver, RequestRecord
from outrider.gateway.speculation.core import MAX_PIECES
from outrider.planner.estimates import RunningMean
from outrider.planner.forecast import SharedStats
from outrider.planner.policy import OFF, Policy, PolicyLimits, Round
from outrider.rpc.errors import OutriderError
from outrider.rpc.messages import DraftTokens
from outrider.rpc.metrics import exemplar_of
from outrider.rpc.token_times import TokenTimes
from outrider.rpc.words.answer import GenerationDelta
from outrider.rpc.words.sampling_params import FinishReason

DEMAND_EVERY_S = 0.5  # how often it is asked whether drafting would pay
LEAST_GAIN = 0.97  # of plain decoding's time a token may take to pay
# Those that wait for the draft: to the others, which decode on meanwhile, a slow one costs nothing on paper.
_PLANS = [plan for plan in PolicyLimits(Policy(0), 8).plans if plan != OFF and plan.waits]


def measure(
    engine: GenerationEngine,
    metrics: GatewayMetrics | None = None,
    vllm_names: bool = False,
    gen_ai_names: bool = False,
) -> GatewayMetrics:
    """Has an engine's requests counted and timed, whoever makes them, also under the names of vLLM, and of
    OpenTelemetry's GenAI conventions, where these are asked for; returns what holds the numbers."""
    metrics = metrics or GatewayMetrics()
    metrics.attach(engine, vllm_names)
    demand = DraftDemand(engine)
    engine.watch_with(lambda: RequestMetrics(metrics, demand))
    if gen_ai_names:
        of_all = GenAiMetrics(metrics, engine)
        engine.watch_with(lambda: of_all)
    return metrics


class DraftArrivals:
    """When the drafted tokens of one completion came. Seconds on the gateway's monotonic clock."""

    def __init__(self) -> None:
        # Chain, the position after its last token, arrival; bounded, since nothing is judged yet when it is noted.
        self._held: deque[tuple[int, int, float]] = deque(maxlen=MAX_PIECES)

    def add(self, piece: DraftTokens) -> None:
        if piece.ids:
            self._held.append((piece.chain, piece.position + len(piece.ids), time.monotonic()))

    def window_of(self, closed: Round) -> str | None:
        """How a round came by its window: it was at hand when the round began (hit), came while the target waited
        (late), had parted from what was committed (stale), or there was none (miss). None for a round that drafts
        nothing. Pieces that the round has passed are forgotten."""
        commit, window = closed.commit, None
        if commit.num_drafted:
            came = [at for chain, end, at in self._held if chain == commit.chain and end > commit.position]
            window = "hit" if came and min(came) <= closed.started else "late"
        elif closed.mode != "off":
            is_stale = any(end > commit.position and at <= closed.ended for _, end, at in self._held)
            window = "stale" if is_stale else "miss"
        committed = commit.position + len(commit.ids)
        self._held = deque((piece for piece in self._held if piece[1] > committed), MAX_PIECES)
        return window if closed.index else None  # the prompt's round waits for no window


class DraftDemand:
    """What the draft would be asked for if it had no other load. A draft that is busy answers late, so that drafting
    pays less and is asked for less: by what is drafted it would seem to have time."""

    def __init__(self, engine: GenerationEngine) -> None:
        self._engine = engine
        self._of: RunningMean | None = None  # what a pass takes, of the model that is served
        self._pass_us = self._between_us = inf  # the least that was seen with it
        self._pays, self._asked_at = False, -inf

    def wants(self, closed: Round) -> bool:
        """Whether a round drafted, or would have. One that nothing was chosen for wants nothing."""
        now = time.monotonic()
        if now - self._asked_at >= DEMAND_EVERY_S:  # while it drafts, too: what it takes then is the least
            self._asked_at, self._pays = now, self._would_pay()
        return closed.mode != "off" or (closed.chosen and self._pays)

    def _would_pay(self) -> bool:
        learned = self._engine.learned
        if learned is None:
            return False
        kinds = learned.of_default  # which share what drafts take
        if kinds[0].draft_pass is not self._of:
            self._of, self._pass_us, self._between_us = kinds[0].draft_pass, inf, inf
        self._pass_us = min(self._pass_us, kinds[0].draft_pass.or_else(inf))
        self._between_us = min(self._between_us, kinds[0].between.or_else(inf))
        return any(map(self._would_pay_for, kinds))

    def _would_pay_for(self, stats: SharedStats) -> bool:
        unloaded = replace(stats, draft_pass=_known(self._pass_us), between=_known(self._between_us), plain={})
        forecast = self._engine.forecast(unloaded)
        plain_us = forecast.us_per_token(OFF)
        return any(0 < forecast.us_per_token(plan) < LEAST_GAIN * plain_us for plan in _PLANS)


def _known(us: float) -> RunningMean:
    return RunningMean() if us == inf else RunningMean(us, 1.0)


class RequestMetrics(RequestObserver):
    """Counts and times one request."""

    def __init__(self, metrics: GatewayMetrics, demand: DraftDemand) -> None:
        self._metrics, self._demand = metrics, demand
        self._exemplar: Exemplar = None
        self._at_target = False  # nothing is asked of a draft
        self._arrivals: dict[int, DraftArrivals] = {}  # by completion
        self._num_left = 1  # completions, once it is known that so many can be made
        self._modes: dict[int, str] = {}  # by completion, its last round's

    def began(self, record: RequestRecord) -> None:
        """Its completions are counted from here on."""
        self._exemplar = exemplar_of(record.traceparent)
        self._num_left = record.request.n
        self._at_target = record.prepared is not None and record.prepared.at_target

    def drafted(self, record: RequestRecord, completion: int, piece: DraftTokens) -> None:
        self._arrivals_of(completion).add(piece)

    def add(self, record: RequestRecord, delta: GenerationDelta) -> None:
        if delta.round is not None:
            self._add_round(record, delta, delta.round)
        if delta.finish_reason is not None:
            self._finish(record, delta, delta.finish_reason)

    def restarted(self, record: RequestRecord) -> None:
        """What was drafted is for places that come again."""
        self._arrivals.clear()

    def ended(self, record: RequestRecord, error: BaseException | None) -> None:
        """Counts how it ended. An error that came before all else is a refusal, and no latency."""
        metrics = self._metrics
        self._add_goals(record)
        if isinstance(error, asyncio.CancelledError | GeneratorExit):
            if self._num_left:
                metrics.success.labels("abort").inc(self._num_left)
        elif isinstance(error, Exception):
            known = error if isinstance(error, OutriderError) else None
            if not record.delivered:
                metrics.refused.labels("internal" if known is None else known.reason.lower()).inc()
                return
            metrics.failure.labels("internal" if known is None else known.code.name.lower()).inc()
        metrics.end_to_end.observe(time.monotonic() - record.arrived, self._exemplar)

    def _add_goals(self, record: RequestRecord) -> None:
        for goal in record.unreachable:
            self._metrics.unreachable_goals.labels(goal).inc()
        for goal, outcome in outcomes(record).items():
            self._metrics.goals.labels(goal, outcome).inc()

    def _arrivals_of(self, completion: int) -> DraftArrivals:
        return self._arrivals.setdefault(completion, DraftArrivals())

    def _add_round(self, record: RequestRecord, delta: GenerationDelta, closed: Round) -> None:
        metrics, index, num_tokens = self._metrics, delta.index, len(delta.token_ids)
        metrics.add_round(closed, self._exemplar, record.request.adapter)
        if not self._at_target:
            self._add_window(closed, index)
        if self._modes.setdefault(index, closed.mode) != closed.mode:
            self._modes[index] = closed.mode
            metrics.mode_changes.labels(closed.mode).inc()
        if not num_tokens:
            return
        metrics.num_generation_tokens += num_tokens
        metrics.num_reasoning_tokens += delta.num_reasoning
        times = record.times_of(index)
        if not times.is_first:
            metrics.inter_token.observe(times.gap_s, self._exemplar)
        elif not record.request.whole:  # which may begin anew until it ends
            self._add_first_token(record, times)

    def _add_first_token(self, record: RequestRecord, times: TokenTimes) -> None:
        self._metrics.first_token.observe(times.first - record.arrived, self._exemplar)

    def _add_window(self, closed: Round, index: int) -> None:
        drafts, window = self._metrics.drafts, self._arrivals_of(index).window_of(closed)
        if window is not None:
            drafts.windows[window] += 1
        drafts.num_wanted += self._demand.wants(closed)

    def _finish(self, record: RequestRecord, delta: GenerationDelta, reason: FinishReason) -> None:
        metrics, times = self._metrics, record.times_of(delta.index)
        self._num_left -= 1
        metrics.success.labels(reason.name.lower()).inc()
        if record.request.whole and times.num_first:
            self._add_first_token(record, times)
        if delta.usage is None:
            return
        if delta.index == 0:
            metrics.prompt_tokens.inc(delta.usage.prompt_tokens)
            metrics.cached_tokens.inc(delta.usage.cached_tokens)
        if (seconds := times.seconds_per_token) is not None:
            metrics.per_token.observe(seconds, self._exemplar)
