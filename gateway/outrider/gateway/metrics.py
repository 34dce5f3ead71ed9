"""What a gateway counts and times, for Prometheus. Stems and meanings are vLLM's, the prefix is `outrider_`. Imported
only where metrics are served: a gateway without them spends nothing on them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.core import InfoMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from outrider.gateway.admission import Admission, AdmissionCost, AdmissionGroup
from outrider.gateway.engine import GenerationEngine
from outrider.gateway.peers.remote import RemoteDrafts, RemoteTargets
from outrider.gateway.request import GenerationDelta, GenerationRequest
from outrider.planner.policy import Round
from outrider.rpc.errors import OutriderError
from outrider.rpc.messages import ModelInfo

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
        self.refused = self._counter("request_refused", "Requests that got an error and nothing else", "reason")
        self.failure = self._counter("request_failure", "Requests that failed after their first delivery", "code")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of ended completions, once a request")
        self.cached_tokens = self._counter("prompt_tokens_cached", "Of them, found in the target's prefix cache")
        self.generation_tokens = self._counter("generation_tokens", "Tokens returned")
        self.first_token = self._histogram("time_to_first_token_seconds", "From request to first token", _WAITS_S)
        self.inter_token = self._histogram(
            "inter_token_latency_seconds", "From one commit with tokens to the next", _TOKENS_S
        )
        self.per_token = self._histogram(
            "request_time_per_output_token_seconds", "Of a completion, after its first delivery, a token", _TOKENS_S
        )
        self.end_to_end = self._histogram(
            "e2e_request_latency_seconds", "From request to its end, without refused ones", _WAITS_S
        )
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
            "num_requests_running": ("Sequences that run", lambda: engine.admission.num_active),
            "num_requests_waiting": ("Sequences that wait to run", lambda: engine.admission.num_waiting),
            "num_tokens_admitted": ("Prompt and max_tokens of both", lambda: engine.admission.num_tokens),
            "draft_connected": ("1 where a draft can be used", lambda: _has_draft(engine)),
            "draft_round_trip_seconds": ("Round trip to the draft, smoothed", lambda: _round_trip_s(engine)),
        }
        for name, (text, read) in gauges.items():
            Gauge(f"{PREFIX}_{name}", text, registry=self.registry).set_function(read)
        self.registry.register(_ReplicaCollector(engine))

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


class _ReplicaCollector(Collector):
    """What computes at each replica that can be used, as it says itself."""

    def __init__(self, engine: GenerationEngine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[InfoMetricFamily]:
        """Called for every scrape."""
        replicas = InfoMetricFamily(f"{PREFIX}_replica", "What computes at a replica; kernels torch-*: the slow way")
        for role, model, address in self._models():
            shown = {"engine": model.engine, "kernels": model.kernels, "dtype": model.dtype, "model": model.name}
            replicas.add_metric((), {"role": role, "address": address, **shown})
        yield replicas

    def _models(self) -> Iterator[tuple[str, ModelInfo, str]]:
        for role, service in (("target", self._engine.verifier), ("draft", self._engine.drafter)):
            if isinstance(service, RemoteTargets | RemoteDrafts):
                usable = (replica for replica in service.replicas if replica.usable)
                yield from (
                    (role, replica.info.model, replica.address) for replica in usable if replica.info is not None
                )
            elif service is not None and service.info is not None:
                yield role, service.info.model, ""


class MeteredEngine(GenerationEngine):
    """A GenerationEngine that counts and times what it does, whoever asks."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.metrics = GatewayMetrics()
        limits = self.config.max_active, self.config.max_waiting, self._max_admitted_tokens
        self.admission = _MeteredAdmission(*limits, self.metrics.queue_time)
        self.metrics.attach(self)

    async def generate(
        self, request: GenerationRequest, group: AdmissionGroup | None = None
    ) -> AsyncGenerator[GenerationDelta, None]:
        """As the base's."""
        watch = _Watch(self.metrics, request.n)
        try:
            async with aclosing(super().generate(request, group)) as deltas:
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
            watch.end()


class _Watch:
    """One request on its way. Times are those of commits: how fast the caller takes them is not the service's time."""

    def __init__(self, metrics: GatewayMetrics, n: int) -> None:
        self._metrics = metrics
        self._num_left = n
        self._num_first: dict[int, int] = {}  # by completion the tokens that its first commit brought
        self._decoding_s: dict[int, float] = {}  # ... and the time of the commits after that
        self._modes: dict[int, str] = {}  # by completion, its last round's
        self._began = time.monotonic()
        self._delivered = self._refused = False

    def add(self, delta: GenerationDelta) -> None:
        """What a commit gave."""
        self._delivered = True
        if delta.round is not None:
            self._add_round(delta, delta.round)
        if delta.finish_reason is not None:
            self._finish(delta)

    def _add_round(self, delta: GenerationDelta, closed: Round) -> None:
        metrics, index, num_tokens = self._metrics, delta.index, len(delta.token_ids)
        metrics.add_round(closed)
        if self._modes.setdefault(index, closed.mode) != closed.mode:
            self._modes[index] = closed.mode
            metrics.mode_changes.labels(closed.mode).inc()
        metrics.generation_tokens.inc(num_tokens)
        if index in self._num_first:
            seconds = closed.total_us * 1e-6
            self._decoding_s[index] += seconds
            if num_tokens:
                metrics.inter_token.observe(seconds)
        elif num_tokens:
            self._num_first[index], self._decoding_s[index] = num_tokens, 0.0
            metrics.first_token.observe(closed.ended - self._began)

    def _finish(self, delta: GenerationDelta) -> None:
        metrics = self._metrics
        self._num_left -= 1
        metrics.success.labels(delta.finish_reason.name.lower() if delta.finish_reason else "").inc()
        if delta.usage is None:
            return
        if delta.index == 0:
            metrics.prompt_tokens.inc(delta.usage.prompt_tokens)
            metrics.cached_tokens.inc(delta.usage.cached_tokens)
        after = delta.usage.completion_tokens - self._num_first.get(delta.index, delta.usage.completion_tokens)
        if after > 0:
            metrics.per_token.observe(self._decoding_s[delta.index] / after)

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
            self._metrics.end_to_end.observe(time.monotonic() - self._began)

    def abort(self) -> None:
        """The caller went away."""
        if self._num_left:
            self._metrics.success.labels("abort").inc(self._num_left)


class _MeteredAdmission(Admission):
    """Times the wait."""

    def __init__(self, max_active: int, max_waiting: int, max_tokens: Callable[[], int], queue_time: Histogram) -> None:
        super().__init__(max_active, max_waiting, max_tokens)
        self._queue_time = queue_time

    async def wait_turn(self, work: AdmissionCost, priority: int = 0) -> None:
        """As the base's."""
        began = time.monotonic()
        await super().wait_turn(work, priority)
        self._queue_time.observe(time.monotonic() - began)


def _has_draft(engine: GenerationEngine) -> float:
    return float(engine.drafter is not None and engine.drafter.info is not None)


def _round_trip_s(engine: GenerationEngine) -> float:
    return 0.0 if engine.drafter is None else engine.drafter.round_trip_us * 1e-6
