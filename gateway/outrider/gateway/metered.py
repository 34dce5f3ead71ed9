"""A GenerationEngine that counts and times what it does: each request is watched from its arrival to its end, each
completion's drafted tokens as they come, and what the draft would be asked for if it were fast."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from math import inf
from typing import Any

from outrider.gateway.admission import AdmissionGate
from outrider.gateway.engine import GenerationEngine, RequestRun
from outrider.gateway.metrics import Exemplar, GatewayMetrics
from outrider.gateway.request import Prepared
from outrider.gateway.speculation.backends import Drafter, DrafterLink, Lost
from outrider.gateway.speculation.core import MAX_PIECES
from outrider.gateway.tracing import RequestTrace
from outrider.planner.estimates import RunningMean
from outrider.planner.forecast import Forecast, SharedStats
from outrider.planner.policy import OFF, Policy, PolicyLimits, Round
from outrider.rpc.errors import OutriderError
from outrider.rpc.messages import DraftEvent, DraftInfo, DraftTokens, Open
from outrider.rpc.metrics import exemplar_of
from outrider.rpc.words.answer import GenerationDelta
from outrider.rpc.words.request import GenerationRequest

DEMAND_EVERY_S = 0.5  # how often it is asked whether drafting would pay
LEAST_GAIN = 0.97  # of plain decoding's time a token may take to pay
# Those that wait for the draft: to the others, which decode on meanwhile, a slow one costs nothing on paper.
_PLANS = [plan for plan in PolicyLimits(Policy(0), 8).plans if plan != OFF and plan.waits]


class MeteredEngine(GenerationEngine):
    """A GenerationEngine that counts and times what it does, whoever asks."""

    def __init__(
        self,
        *arguments: Any,
        metrics: GatewayMetrics | None = None,
        vllm_names: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self.metrics = metrics or GatewayMetrics()
        self.admission.on_turn = self.metrics.queue_time.observe
        self.metrics.attach(self, vllm_names)
        self._demand = _DraftDemand(lambda: None if self._known is None else self._known.stats, self._forecast)
        self._watches: dict[int, _Watch] = {}  # of requests under way, by the identity of each

    async def generate(
        self, request: GenerationRequest, gate: AdmissionGate | None = None
    ) -> AsyncGenerator[GenerationDelta, None]:
        """As the base's."""
        watch = self._watches[id(request)] = _Watch(self.metrics, self._demand, request)
        try:
            async with aclosing(super().generate(request, gate)) as deltas:
                async for delta in deltas:
                    watch.add(delta)
                    yield delta
        except OutriderError as error:
            watch.fail(error.reason, error.code.name)
            raise
        except (asyncio.CancelledError, GeneratorExit):
            watch.abort()
            raise
        except Exception:
            watch.fail("internal", "internal")
            raise
        finally:
            self._watches.pop(id(request), None)
            watch.end()

    def _new_trace(self, prepared: Prepared) -> RequestTrace | None:
        root, watch = super()._new_trace(prepared), self._watches.get(id(prepared.request))
        if root is not None and watch is not None:
            watch.exemplar = exemplar_of(root.traceparent)
        return root

    def _new_run(self, prepared: Prepared, root: RequestTrace | None, timeout_ms: int) -> RequestRun:
        run, watch = super()._new_run(prepared, root, timeout_ms), self._watches.get(id(prepared.request))
        if watch is not None:
            watch.at_target, watch.num_left = run.prepared.at_target, prepared.request.n
        if run.drafter is not None and watch is not None:
            run.drafter = _MeteredDrafter(run.drafter, watch.pieces_of)
        return run

    def _forecast(self, stats: SharedStats) -> Forecast:
        return Forecast(stats, False, stats.acceptance, stats.hits, self._round_trips_us, lambda: self._num_running)


class _Pieces:
    """When the drafted tokens of one completion came. Seconds on the gateway's monotonic clock."""

    def __init__(self) -> None:
        # Chain, the position after its last token, arrival; bounded, since nothing is judged yet when it is noted.
        self._held: deque[tuple[int, int, float]] = deque(maxlen=MAX_PIECES)

    def add(self, piece: DraftTokens) -> None:
        """A piece has come."""
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


class _MeteredDrafter:
    """A Drafter whose pieces are noted as they come."""

    def __init__(self, inner: Drafter, pieces_of: Callable[[int], _Pieces]) -> None:
        self._inner, self._pieces_of = inner, pieces_of

    @property
    def info(self) -> DraftInfo | None:
        """That of the drafter within."""
        return self._inner.info

    @property
    def round_trip_us(self) -> float:
        """That of the drafter within."""
        return self._inner.round_trip_us

    def open(self, request: Open, on_event: Callable[[DraftEvent | Lost], None]) -> DrafterLink | None:
        """As the drafter within does."""
        pieces = self._pieces_of(request.completion)

        def noted(event: DraftEvent | Lost) -> None:
            if isinstance(event, DraftTokens):
                pieces.add(event)
            on_event(event)

        return self._inner.open(request, noted)


class _DraftDemand:
    """What the draft would be asked for if it had no other load. A draft that is busy answers late, so that drafting
    pays less and is asked for less: by what is drafted it would seem to have time."""

    def __init__(self, stats: Callable[[], SharedStats | None], forecast: Callable[[SharedStats], Forecast]) -> None:
        self._stats, self._forecast = stats, forecast
        self._of: SharedStats | None = None  # the model's that is served
        self._pass_us = self._between_us = inf  # the least that was seen with it
        self._pays, self._asked_at = False, -inf

    def wants(self, closed: Round) -> bool:
        """Whether a round drafted, or would have. One that nothing was chosen for wants nothing."""
        now = time.monotonic()
        if now - self._asked_at >= DEMAND_EVERY_S:  # while it drafts, too: what it takes then is the least
            self._asked_at, self._pays = now, self._would_pay()
        return closed.mode != "off" or (closed.chosen and self._pays)

    def _would_pay(self) -> bool:
        stats = self._stats()
        if stats is None:
            return False
        if stats is not self._of:
            self._of, self._pass_us, self._between_us = stats, inf, inf
        self._pass_us = min(self._pass_us, stats.draft_pass.or_else(inf))
        self._between_us = min(self._between_us, stats.between.or_else(inf))
        unloaded = replace(stats, draft_pass=_known(self._pass_us), between=_known(self._between_us), plain={})
        forecast = self._forecast(unloaded)
        plain_us = forecast.us_per_token(OFF)
        return any(0 < forecast.us_per_token(plan) < LEAST_GAIN * plain_us for plan in _PLANS)


def _known(us: float) -> RunningMean:
    return RunningMean() if us == inf else RunningMean(us, 1.0)


class _Watch:
    """One request on its way. Times are those of commits: how fast the caller takes them is not the service's time."""

    def __init__(self, metrics: GatewayMetrics, demand: _DraftDemand, request: GenerationRequest) -> None:
        self._metrics, self._demand = metrics, demand
        self.exemplar: Exemplar = None
        self.at_target = False  # nothing is asked of a draft
        self._pieces: dict[int, _Pieces] = {}  # by completion
        self.num_left, self._adapter = 1, request.adapter  # completions, once it is known that so many can be made
        self._num_first: dict[int, int] = {}  # by completion the tokens that its first commit brought
        self._decoding_s: dict[int, float] = {}  # ... and the time of the commits after that
        self._modes: dict[int, str] = {}  # by completion, its last round's
        self._began = time.monotonic()
        self._delivered = self._refused = False

    def pieces_of(self, completion: int) -> _Pieces:
        """Where the drafted tokens of a completion are noted."""
        return self._pieces.setdefault(completion, _Pieces())

    def add(self, delta: GenerationDelta) -> None:
        """What a commit gave."""
        self._delivered = True
        if delta.round is not None:
            self._add_round(delta, delta.round)
        if delta.finish_reason is not None:
            self._finish(delta)

    def _add_round(self, delta: GenerationDelta, closed: Round) -> None:
        metrics, index, num_tokens = self._metrics, delta.index, len(delta.token_ids)
        metrics.add_round(closed, self.exemplar, self._adapter)
        if not self.at_target:
            self._add_window(closed, index)
        if self._modes.setdefault(index, closed.mode) != closed.mode:
            self._modes[index] = closed.mode
            metrics.mode_changes.labels(closed.mode).inc()
        metrics.num_generation_tokens += num_tokens
        metrics.num_reasoning_tokens += delta.num_reasoning
        if index in self._num_first:
            seconds = closed.total_us * 1e-6
            self._decoding_s[index] += seconds
            if num_tokens:
                metrics.inter_token.observe(seconds, self.exemplar)
        elif num_tokens:
            self._num_first[index], self._decoding_s[index] = num_tokens, 0.0
            metrics.first_token.observe(closed.ended - self._began, self.exemplar)

    def _add_window(self, closed: Round, index: int) -> None:
        drafts, window = self._metrics.drafts, self.pieces_of(index).window_of(closed)
        if window is not None:
            drafts.windows[window] += 1
        drafts.num_wanted += self._demand.wants(closed)

    def _finish(self, delta: GenerationDelta) -> None:
        metrics = self._metrics
        self.num_left -= 1
        metrics.success.labels(delta.finish_reason.name.lower() if delta.finish_reason else "").inc()
        if delta.usage is None:
            return
        if delta.index == 0:
            metrics.prompt_tokens.inc(delta.usage.prompt_tokens)
            metrics.cached_tokens.inc(delta.usage.cached_tokens)
        after = delta.usage.completion_tokens - self._num_first.get(delta.index, delta.usage.completion_tokens)
        if after > 0:
            metrics.per_token.observe(self._decoding_s[delta.index] / after, self.exemplar)

    def fail(self, reason: str, code: str) -> None:
        """An error ended it. One that came before all else is a refusal."""
        self._refused = not self._delivered
        if self._refused:
            self._metrics.refused.labels(reason.lower()).inc()
        else:
            self._metrics.failure.labels(code.lower()).inc()

    def end(self) -> None:
        """It is over, however it ended."""
        if not self._refused:
            self._metrics.end_to_end.observe(time.monotonic() - self._began, self.exemplar)

    def abort(self) -> None:
        """The caller went away."""
        if self.num_left:
            self._metrics.success.labels("abort").inc(self.num_left)
