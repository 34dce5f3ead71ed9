"""A gateway's time series, for Prometheus: what rounds and requests come to, what its queue and its replicas are now,
and the bytes on its wires. Stems and meanings are vLLM's, the prefix is `outrider_`. Imported only where
metrics are served: a gateway without them spends nothing on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any

import grpc.aio
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from outrider.gateway.engine import GenerationEngine
from outrider.gateway.peers.remote import RemoteDrafts, RemoteTargets
from outrider.gateway.peers.replicas import Replica
from outrider.gateway.processes import END, join_series
from outrider.gateway.speculation.schedule import ScheduledDrafter
from outrider.planner.policy import Round
from outrider.rpc.errors import Unavailable
from outrider.rpc.messages import Commit, DraftTrial
from outrider.rpc.metrics import (
    PARTS_S,
    PREFIX,
    WAITS_S,
    EngineState,
    Metrics,
    ReadKind,
    Samples,
    VllmCollector,
    model_labels,
)
from outrider.rpc.stream import FrameCall, StreamConfig

PARTS = ("draft", "wire", "queue", "verify", "sample")
MAX_ADAPTERS = 64  # that have series of their own, the first that were asked for
OTHER_ADAPTERS = "*"  # all others together
WINDOWS = ("hit", "late", "stale", "miss")
_TOKENS_S = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5)
_DRAFT_TOKENS = (0, 1, 2, 3, 4, 5, 6, 8, 12, 16, 32, 64, 128)

Exemplar = dict[str, str] | None  # the trace of a request, where it is sampled


class ModelsMetrics(Metrics):
    """The time series of several models' gateways in one process, each with the label `served_model`; the default's is
    empty."""

    def __init__(self, by_model: Mapping[str, GatewayMetrics]) -> None:
        super().__init__("gateway")
        self._by_model = by_model

    def render(self, accept: str) -> tuple[bytes, str]:
        """The process's own, then those of all models."""
        own, content_type = super().render(accept)
        texts = {name: metrics.render(accept)[0].decode() for name, metrics in self._by_model.items()}
        return (own.decode().removesuffix(END) + join_series(texts, "served_model")).encode(), content_type


class GatewayMetrics(Metrics):
    """The gateway's time series."""

    def __init__(self, alone: bool = True) -> None:
        """`alone`: of the process's only model."""
        super().__init__("gateway", alone=alone)
        self._wires: dict[str, WireBytes] = {}
        self.success = self.counter("request_success", "Completions that ended, by why", "finished_reason")
        self.refused = self.counter("request_refused", "Requests that got an error and nothing else", "reason")
        self.failure = self.counter("request_failure", "Requests that failed after their first delivery", "code")
        self.prompt_tokens = self.counter("prompt_tokens", "Prompt tokens of ended completions, once a request")
        self.cached_tokens = self.counter("prompt_tokens_cached", "Of them, found in the target's prefix cache")
        self.num_generation_tokens = self.num_reasoning_tokens = 0
        self.read_counter("generation_tokens", "Tokens returned", lambda: self.num_generation_tokens)
        self.read_counter("reasoning_tokens", "Of them, those of reasoning", lambda: self.num_reasoning_tokens)
        self.first_token = self.histogram("time_to_first_token_seconds", "From request to first token", WAITS_S)
        self.inter_token = self.local_histogram(
            "inter_token_latency_seconds", "From one commit with tokens to the next", _TOKENS_S
        )
        self.per_token = self.histogram(
            "request_time_per_output_token_seconds", "Of a completion, after its first delivery, a token", _TOKENS_S
        )
        self.end_to_end = self.histogram(
            "e2e_request_latency_seconds", "From request to its end, without refused ones", WAITS_S
        )
        self.queue_time = self.histogram("request_queue_time_seconds", "Waiting to be let in", WAITS_S)
        self.goals = self.counter("request_goals", "Goals for a request's times, by outcome", "goal", "outcome")
        self.unreachable_goals = self.counter(
            "request_goals_unreachable", "Goals that were foreseen to be missed", "goal"
        )
        self.drafts = DraftCounts()
        self._declare_drafts(self.drafts)
        self.adapters: dict[str, AdapterCounts] = {}  # by name
        self._declare_adapters(self.adapters)
        self.mode_changes = self.counter("mode_changes", "Changes of a completion's mode, by the new one", "mode")
        self.failovers = self.counter(
            "target_failovers", "Completions that went on at another target; near_ties: of other arithmetic", "output"
        )
        self._draft_tokens = self.local_histogram("round_draft_tokens", "Tokens that a round drafts", _DRAFT_TOKENS)
        self.round_time = self.local_histogram("round_seconds", "From one commit of a completion to its next", PARTS_S)
        self.overhead = self.local_histogram(
            "round_overhead_seconds", "Of a round, what is neither draft nor verification", PARTS_S
        )
        text = "What a round's time went to"
        self._parts = self.local_histograms("round_part_seconds", text, PARTS_S, "part", PARTS)

    def _declare_drafts(self, drafts: DraftCounts) -> None:
        self.read_counters(
            "rounds", "Verifications, by how the controller had them drafted", "mode", lambda: dict(drafts.rounds)
        )
        self.read_counter("plain_steps", "Verifications without a drafted token", lambda: drafts.num_plain)
        self.read_counter(
            "spec_decode_num_drafts", "Verifications with at least one drafted token", lambda: drafts.num_drafts
        )
        self.read_counter("spec_decode_num_draft_tokens", "Drafted tokens verified", lambda: drafts.num_draft_tokens)
        self.read_counter("spec_decode_num_accepted_tokens", "Drafted tokens accepted", lambda: sum(drafts.accepted))
        self.read_counters(
            "spec_decode_num_accepted_tokens_per_pos",
            "Drafted tokens accepted, by place in the window",
            "position",
            lambda: _by_place(drafts.accepted),
        )
        self.read_counters(
            "spec_decode_num_tested_tokens_per_pos",
            "Drafted tokens whose place was reached: all before them were accepted",
            "position",
            lambda: _by_place(drafts.tested),
        )
        self.read_counter("forced_tokens", "Tokens verified that constraints forced", lambda: drafts.num_forced)
        self.read_counter("forced_tokens_accepted", "Of them, accepted", lambda: drafts.num_accepted_forced)
        self.read_counters(
            "spec_decode_windows",
            "Rounds with a draft, by when the window came that they verified",
            "window",
            lambda: dict(drafts.windows),
        )
        self.read_counter(
            "draft_wanted_rounds",
            "Rounds that drafted, or would have at the speed of a draft without load",
            lambda: drafts.num_wanted,
        )

    def _declare_adapters(self, adapters: dict[str, AdapterCounts]) -> None:
        of_adapter = "Of requests with an adapter: "
        for name, text in (
            ("rounds", "verifications"),
            ("draft_tokens", "drafted tokens verified"),
            ("accepted_tokens", "drafted tokens accepted"),
            ("generation_tokens", "tokens committed"),
        ):
            read = partial(_by_adapter, adapters, attrgetter(f"num_{name}"))
            self.read_counters(f"adapter_{name}", of_adapter + text, "adapter", read)

    def attach(self, engine: GenerationEngine, vllm_names: bool = False) -> None:
        """The series that are read from an engine when they are asked for, and how long its requests wait."""
        admission = engine.admission
        admission.on_turn = self.queue_time.observe
        self.gauge("num_requests_running", "Sequences that run", lambda: admission.num_active)
        self.gauge("num_requests_waiting", "Sequences that wait to run", lambda: admission.num_waiting)
        self.gauge("num_tokens_admitted", "Prompt and max_tokens of both", lambda: admission.num_tokens)
        self.gauge("draft_connected", "1 where a draft can be used", lambda: _has_draft(engine))
        self.gauge(
            "draft_round_trip_seconds", "Round trip to the draft, smoothed", lambda: engine.round_trip_us() * 1e-6
        )
        self.read_labelled(CounterMetricFamily, "wire_bytes", "Of frames", ("role", "direction"), self._wire_bytes)
        for kind, name, text, read in _OF_REPLICAS:
            by_replica = partial(_by_replica, engine, read)
            self.read_labelled(kind, f"replica_{name}", text, ("role", "address"), by_replica)
        self.registry.register(_ReplicaInfos(engine))
        self.read_labelled(
            GaugeMetricFamily,
            "draft_trial_acceptance",
            "Share of tested tokens that the target kept when it met the draft, by position",
            ("method", "position"),
            partial(_trial_acceptance, engine),
        )
        self.read_gauges(
            "draft_trial_refused",
            "1 where a draft or head is not used, since it is no better than a guess",
            "method",
            lambda: {method: float(trial.refused) for method, trial in _trials(engine).items()},
        )
        if vllm_names:
            self.registry.register(VllmCollector(lambda: _state(engine)))

    def stream_config(self, role: str) -> StreamConfig:
        """How the streams to the replicas of a role are opened: their frames' bytes are counted."""
        return StreamConfig(wrap=self._wires.setdefault(role, WireBytes()).wrap)

    def _wire_bytes(self) -> Samples:
        for role, counts in self._wires.items():
            yield (role, "sent"), counts.num_sent
            yield (role, "received"), counts.num_received

    def add_round(self, closed: Round, exemplar: Exemplar = None, adapter: str = "") -> None:
        """Counts one verification. The first round of a completion holds its prompt and is no round of decoding."""
        timings = closed.commit.timings
        self.drafts.add(closed)
        if adapter:
            self._add_adapter(adapter, closed.commit)
        self._draft_tokens.observe(closed.num_draft_tokens)
        if closed.moved:
            self.failovers.labels("near_ties" if closed.near_ties else "equal").inc()
        if closed.index == 0:
            return
        self.round_time.observe(closed.total_us * 1e-6, exemplar)
        self.overhead.observe(closed.overhead_us * 1e-6, exemplar)
        times = (closed.draft_us, closed.wire_us, timings.queue_us, timings.verify_us, timings.sample_us)
        for part, duration_us in zip(self._parts, times, strict=True):
            part.observe(duration_us * 1e-6)

    def adapter_label(self, name: str) -> str:
        """What an adapter is called in labels: by its name, unless there are too many."""
        return name if name in self.adapters or len(self.adapters) < MAX_ADAPTERS else OTHER_ADAPTERS

    def _add_adapter(self, name: str, commit: Commit) -> None:
        counts = self.adapters.setdefault(self.adapter_label(name), AdapterCounts())
        counts.num_rounds += 1
        counts.num_draft_tokens += commit.num_drafted
        counts.num_accepted_tokens += commit.num_accepted
        counts.num_generation_tokens += len(commit.ids)


@dataclass(slots=True)
class AdapterCounts:
    """What became of the rounds of one adapter: whether drafts for the model alone do for it, too."""

    num_rounds: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_generation_tokens: int = 0


@dataclass(slots=True)
class DraftCounts:
    """What became of rounds and of their drafts: counted on the event loop, read at the scrape."""

    rounds: dict[str, int] = field(default_factory=dict)  # by mode
    windows: dict[str, int] = field(default_factory=lambda: dict.fromkeys(WINDOWS, 0))
    num_plain: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_forced: int = 0  # by constraints; drafted ones do not count them
    num_accepted_forced: int = 0
    num_wanted: int = 0
    accepted: list[int] = field(default_factory=list)  # by place in the window: from its first accepted token on
    tested: list[int] = field(default_factory=list)  # ... and from the first window that reached it on

    def add(self, closed: Round) -> None:
        num_drafted, num_accepted = closed.commit.num_drafted, closed.commit.num_accepted
        self.rounds[closed.mode] = self.rounds.get(closed.mode, 0) + 1
        self.num_forced += closed.commit.num_forced
        self.num_accepted_forced += closed.commit.num_accepted_forced
        if not num_drafted:
            self.num_plain += 1
            return
        self.num_drafts += 1
        self.num_draft_tokens += num_drafted
        _count_first(self.accepted, num_accepted)
        _count_first(self.tested, min(num_accepted + 1, num_drafted))


def _count_first(counts: list[int], num: int) -> None:
    counts.extend([0] * (num - len(counts)))
    for place in range(num):
        counts[place] += 1


def _by_place(counts: list[int]) -> dict[str, float]:
    return {str(place): count for place, count in enumerate(list(counts))}


def _by_adapter(adapters: dict[str, AdapterCounts], count: Callable[[AdapterCounts], float]) -> dict[str, float]:
    return {name: count(counts) for name, counts in list(adapters.items())}


class WireBytes:
    """The bytes of frames to and from the replicas of one role, as protobuf; HTTP/2 adds about 14 a frame."""

    def __init__(self) -> None:
        self.num_sent = self.num_received = 0

    def wrap(self, call: FrameCall) -> FrameCall:
        return _CountedCall(call, self)


class _CountedCall:
    def __init__(self, call: FrameCall, counts: WireBytes) -> None:
        self._call, self._counts = call, counts

    async def read(self) -> Any:
        frame = await self._call.read()
        if frame is not grpc.aio.EOF:
            self._counts.num_received += frame.ByteSize()
        return frame

    async def write(self, frame: Any) -> None:
        self._counts.num_sent += frame.ByteSize()
        await self._call.write(frame)

    def cancel(self) -> object:
        return self._call.cancel()


# Of each replica: name, help and value.
_OF_REPLICAS: tuple[tuple[ReadKind, str, str, Callable[[Replica[Any]], float]], ...] = (
    (GaugeMetricFamily, "up", "1 where new sequences may go", lambda replica: replica.usable),
    (GaugeMetricFamily, "sequences", "This gateway's sequences there", lambda replica: replica.num_sequences),
    (GaugeMetricFamily, "load", "All sequences there, as it last said", lambda replica: replica.load),
    (GaugeMetricFamily, "breaker_open", "1 while it rests after failures", lambda replica: replica.breaker.open),
    (GaugeMetricFamily, "round_trip_seconds", "Smoothed", lambda replica: replica.round_trip_us * 1e-6),
    (CounterMetricFamily, "reopens", "Streams opened after the first", lambda replica: max(0, replica.num_streams - 1)),
    (GaugeMetricFamily, "disagrees", "1 where the canary found it to", lambda replica: replica.disagrees),
)


def _by_replica(engine: GenerationEngine, read: Callable[[Replica[Any]], float]) -> Samples:
    return [((role, replica.address), read(replica)) for role, replica in _replicas(engine)]


def _trials(engine: GenerationEngine) -> dict[str, DraftTrial]:
    """Of each method the worst one that was found."""
    try:
        found = engine.trials
    except Unavailable:  # no target has answered yet
        return {}
    ordered = sorted(found, key=lambda trial: trial.tokens_per_round, reverse=True)
    return {trial.method: trial for trial in ordered}


def _trial_acceptance(engine: GenerationEngine) -> Samples:
    return [
        ((method, str(position)), share)
        for method, trial in _trials(engine).items()
        for position, share in enumerate(trial.accepted)
    ]


class _ReplicaInfos(Collector):
    """What computes at the replicas that can be used, as they say themselves."""

    def __init__(self, engine: GenerationEngine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        infos = InfoMetricFamily(f"{PREFIX}_replica", "What computes at a replica; kernels torch-*: the slow way")
        told = [(role, replica.info, replica.address) for role, replica in _replicas(self._engine) if replica.usable]
        for role, service in (("target", self._engine.verifier), ("draft", _within(self._engine.drafter))):
            if service is not None and not isinstance(service, RemoteTargets | RemoteDrafts):
                told.append((role, service.info, ""))  # in this process
        for role, info, address in told:
            if info is not None:
                infos.add_metric((), {"role": role, "address": address, **model_labels(info.model)})
        yield infos


def _within(drafter: Any) -> Any:
    """The drafter that a schedule bounds."""
    return drafter.inner if isinstance(drafter, ScheduledDrafter) else drafter


def _replicas(engine: GenerationEngine) -> Iterator[tuple[str, Replica[Any]]]:
    for role, service in (("target", engine.verifier), ("draft", _within(engine.drafter))):
        if isinstance(service, RemoteTargets | RemoteDrafts):
            yield from ((role, replica) for replica in service.replicas)


def _state(engine: GenerationEngine) -> EngineState | None:
    """What routers read of a gateway: its own queue, and of its targets the blocks of all and the fullest cache."""
    targets = [replica for role, replica in _replicas(engine) if role == "target" and replica.usable]
    models = [(replica.info.model, replica.reported) for replica in targets if replica.info is not None]
    if not models:
        return None
    admission, model = engine.admission, models[0][0]
    usage = [1 - said.free_blocks / each.num_blocks for each, said in models if said is not None and each.num_blocks]
    return EngineState(
        engine.model_name,
        admission.num_active,
        admission.num_waiting,
        max(usage, default=0.0),
        model.block_size,
        sum(each.num_blocks for each, _ in models),
    )


def _has_draft(engine: GenerationEngine) -> float:
    return float(engine.drafter is not None and engine.drafter.info is not None)
