"""What a gateway counts and times, for Prometheus. Stems and meanings are vLLM's, the prefix is `outrider_`. Imported
only where metrics are served: a gateway without them spends nothing on them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.exposition import choose_encoder
from prometheus_client.process_collector import ProcessCollector

from outrider.gateway.admission import Admission
from outrider.gateway.generation import GenerationDelta, GenerationRequest
from outrider.gateway.rounds import Round
from outrider.gateway.service import GenerationEngine
from outrider.wire.errors import OutriderError

PREFIX = "outrider"
PARTS = ("draft", "wire", "queue", "verify", "sample")
_WAITS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_TOKENS_S = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5)
_PARTS_S = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)


class GatewayMetrics:
    """The gateway's time series."""

    def __init__(self) -> None:
        without_created: Callable[[], None] = disable_created_metrics  # the library has no type for it
        without_created()  # a time beside every counter, which nobody reads
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.success = self._counter("request_success", "Completions that ended, by why", "finished_reason")
        self.failure = self._counter("request_failure", "Requests that were refused or failed, by code", "code")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of ended completions, once a request")
        self.cached_tokens = self._counter("prompt_tokens_cached", "Of them, found in the target's prefix cache")
        self.generation_tokens = self._counter("generation_tokens", "Tokens returned")
        self.first_token = self._histogram("time_to_first_token_seconds", "From request to first token", _WAITS_S)
        self.inter_token = self._histogram("inter_token_latency_seconds", "Between two deliveries", _TOKENS_S)
        self.per_token = self._histogram(
            "request_time_per_output_token_seconds", "Of a completion, after its first delivery, a token", _TOKENS_S
        )
        self.end_to_end = self._histogram("e2e_request_latency_seconds", "From request to its end", _WAITS_S)
        self.queue_time = self._histogram("request_queue_time_seconds", "Waiting to be let in", _WAITS_S)
        self.num_drafts = self._counter("spec_decode_num_drafts", "Verifications with at least one drafted token")
        self.num_draft_tokens = self._counter("spec_decode_num_draft_tokens", "Drafted tokens verified")
        self.num_accepted = self._counter("spec_decode_num_accepted_tokens", "Drafted tokens accepted")
        self._per_position = self._counter(
            "spec_decode_num_accepted_tokens_per_pos", "Drafted tokens accepted, by place in the window", "position"
        )
        self._positions: list[Counter] = []  # a series appears with its first accepted token
        self.num_plain = self._counter("plain_steps", "Verifications without a drafted token")
        self.rounds = self._counter("rounds", "Verifications, by how the controller had them drafted", "mode")
        self.mode_changes = self._counter("mode_changes", "Changes of a completion's mode, by the new one", "mode")
        self.failovers = self._counter(
            "target_failovers", "Completions that went on at another target; near_ties: of other arithmetic", "output"
        )
        self.round_time = self._histogram("round_seconds", "From one commit of a completion to its next", _PARTS_S)
        self.overhead = self._histogram(
            "round_overhead_seconds", "Of a round, what is neither draft nor verification", _PARTS_S
        )
        parts = self._histogram("round_part_seconds", "What a round's time went to", _PARTS_S, "part")
        self._parts = [parts.labels(part) for part in PARTS]

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"{PREFIX}_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(f"{PREFIX}_{name}", text, labels, registry=self.registry, buckets=buckets)

    def attach(self, engine: GenerationEngine) -> None:
        """Gauges that are read when they are asked for."""
        gauges = {
            "num_requests_running": ("Requests that run", lambda: engine.admission.num_active),
            "num_requests_waiting": ("Requests that wait to be let in", lambda: engine.admission.num_waiting),
            "draft_connected": ("1 where a draft can be used", lambda: _has_draft(engine)),
            "draft_round_trip_seconds": ("Round trip to the draft, smoothed", lambda: _round_trip_s(engine)),
        }
        for name, (text, read) in gauges.items():
            Gauge(f"{PREFIX}_{name}", text, registry=self.registry).set_function(read)

    def add_round(self, closed: Round) -> None:
        """One verification. The first round of a completion holds its prompt and is no round of decoding."""
        commit, timings = closed.commit, closed.commit.timings
        self.rounds.labels(closed.mode).inc()
        if closed.moved:
            self.failovers.labels("near_ties" if closed.near_ties else "equal").inc()
        if commit.num_drafted:
            self.num_drafts.inc()
            self.num_draft_tokens.inc(commit.num_drafted)
            self.num_accepted.inc(commit.num_accepted)
            while len(self._positions) < commit.num_accepted:
                self._positions.append(self._per_position.labels(str(len(self._positions))))
            for position in self._positions[: commit.num_accepted]:
                position.inc()
        else:
            self.num_plain.inc()
        if closed.index == 0:
            return
        self.round_time.observe(closed.total_us * 1e-6)
        self.overhead.observe(closed.overhead_us * 1e-6)
        times = (closed.draft_us, closed.wire_us, timings.queue_us, timings.verify_us, timings.sample_us)
        for part, duration_us in zip(self._parts, times, strict=True):
            part.observe(duration_us * 1e-6)

    def render(self, accept: str) -> tuple[bytes, str]:
        """The series as text, and its content type: Prometheus' own format, or OpenMetrics for who asks for it."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type


class MeteredEngine(GenerationEngine):
    """A GenerationEngine that counts and times what it does, whoever asks."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.metrics = GatewayMetrics()
        self.admission = _MeteredAdmission(self.config.max_active, self.config.max_waiting, self.metrics.queue_time)
        self.metrics.attach(self)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationDelta, None]:
        """As the base's."""
        watch = _Watch(self.metrics, request.n)
        try:
            async with aclosing(super().generate(request)) as deltas:
                async for delta in deltas:
                    watch.add(delta)
                    yield delta
        except OutriderError as error:
            self.metrics.failure.labels(error.code.name.lower()).inc()
            raise
        except (asyncio.CancelledError, GeneratorExit):
            watch.abort()
            raise
        except Exception:
            self.metrics.failure.labels("internal").inc()
            raise
        finally:
            self.metrics.end_to_end.observe(time.monotonic() - watch.began)


class _Watch:
    """One request on its way."""

    def __init__(self, metrics: GatewayMetrics, n: int) -> None:
        self._metrics = metrics
        self._num_left = n
        self._last: dict[int, float] = {}  # by completion the time of its last delivery
        self._first: dict[int, tuple[float, int]] = {}  # ... and its first one's, with the tokens that it brought
        self._modes: dict[int, str] = {}  # by completion, its last round's
        self.began = time.monotonic()

    def add(self, delta: GenerationDelta) -> None:
        """What a commit gave."""
        metrics, now = self._metrics, time.monotonic()
        if delta.round is not None:
            metrics.add_round(delta.round)
            if self._modes.setdefault(delta.index, delta.round.mode) != delta.round.mode:
                self._modes[delta.index] = delta.round.mode
                metrics.mode_changes.labels(delta.round.mode).inc()
        if delta.token_ids:
            metrics.generation_tokens.inc(len(delta.token_ids))
            last = self._last.get(delta.index)
            if last is None:
                self._first[delta.index] = now, len(delta.token_ids)
                metrics.first_token.observe(now - self.began)
            else:
                metrics.inter_token.observe(now - last)
            self._last[delta.index] = now
        if delta.finish_reason is not None:
            self._finish(delta)

    def _finish(self, delta: GenerationDelta) -> None:
        metrics = self._metrics
        self._num_left -= 1
        metrics.success.labels(delta.finish_reason.name.lower() if delta.finish_reason else "").inc()
        if delta.usage is None:
            return
        if delta.index == 0:
            metrics.prompt_tokens.inc(delta.usage.prompt_tokens)
            metrics.cached_tokens.inc(delta.usage.cached_tokens)
        first = self._first.get(delta.index)
        if first is not None and delta.usage.completion_tokens > first[1]:
            after = delta.usage.completion_tokens - first[1]
            metrics.per_token.observe((self._last[delta.index] - first[0]) / after)

    def abort(self) -> None:
        """The caller went away."""
        if self._num_left:
            self._metrics.success.labels("abort").inc(self._num_left)


class _MeteredAdmission(Admission):
    """Times the wait."""

    def __init__(self, max_active: int, max_waiting: int, queue_time: Histogram) -> None:
        super().__init__(max_active, max_waiting)
        self._queue_time = queue_time

    async def enter(self, priority: int = 0) -> None:
        """As the base's."""
        began = time.monotonic()
        await super().enter(priority)
        self._queue_time.observe(time.monotonic() - began)


def _has_draft(engine: GenerationEngine) -> float:
    return float(engine.drafter is not None and engine.drafter.info is not None)


def _round_trip_s(engine: GenerationEngine) -> float:
    return 0.0 if engine.drafter is None else engine.drafter.round_trip_us * 1e-6
