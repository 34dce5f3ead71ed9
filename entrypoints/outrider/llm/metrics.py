"""`get_metrics()`: counters, gauges, histograms and vectors under vLLM's names, without `_total`; and the log line of
speculation, in vLLM's words, for whoever reads its logs."""

from __future__ import annotations

import bisect
import logging
import time
from collections import Counter as Tally
from collections.abc import Callable
from dataclasses import dataclass, field

from outrider.gateway.request_record import RequestObserver, RequestRecord, add_stats
from outrider.llm.outputs import finish_name
from outrider.rpc.words.answer import GenerationDelta, SpeculationStats

log = logging.getLogger(__name__)

Labels = dict[str, str]
INTERVAL_S = 10.0
FIRST_TOKEN, INTER_TOKEN = "time_to_first_token_seconds", "inter_token_latency_seconds"
PER_TOKEN, WHOLE = "request_time_per_output_token_seconds", "e2e_request_latency_seconds"
TIMES = (FIRST_TOKEN, INTER_TOKEN, PER_TOKEN, WHOLE)
BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)


class SpeculationLog:
    """Says every ten seconds, if something was drafted, what became of it: counted as completions end."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._reset()

    def add(self, stats: SpeculationStats) -> None:
        """One completion has ended."""
        add_stats(self._counts, stats)
        seconds = self._clock() - self._began
        if seconds >= INTERVAL_S:
            self._say(seconds)
            self._reset()

    def _reset(self) -> None:
        self._began = self._clock()
        self._counts = SpeculationStats()

    def _say(self, seconds: float) -> None:
        counts = self._counts
        if counts.num_drafts == 0 or counts.num_draft_tokens == 0:
            return
        log.info(
            "SpecDecoding metrics: Mean acceptance length: %.2f, Accepted throughput: %.2f tokens/s, "
            "Drafted throughput: %.2f tokens/s, Accepted: %d tokens, Drafted: %d tokens, "
            "Per-position acceptance rate: %s, Avg Draft acceptance rate: %.1f%%",
            1 + counts.num_accepted_tokens / counts.num_drafts,
            counts.num_accepted_tokens / seconds,
            counts.num_draft_tokens / seconds,
            counts.num_accepted_tokens,
            counts.num_draft_tokens,
            ", ".join(f"{count / counts.num_drafts:.3f}" for count in counts.num_accepted_per_position),
            100 * counts.num_accepted_tokens / counts.num_draft_tokens,
        )


@dataclass
class Metric:
    """A named value with labels."""

    name: str
    labels: Labels


@dataclass
class Counter(Metric):
    """A sum that only grows."""

    value: int


@dataclass
class Gauge(Metric):
    """A value of this moment."""

    value: float


@dataclass
class Histogram(Metric):
    """Counts of values up to each bucket's bound; the last bucket is "+Inf"."""

    count: int
    sum: float
    buckets: dict[str, int]


@dataclass
class Vector(Metric):
    """A counter for each position."""

    values: list[int]

    @property
    def value(self) -> list[int]:
        """The same as `values`: a loop over all metrics may print `.value`."""
        return self.values


@dataclass
class Samples:
    """Measured seconds, as a histogram keeps them."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS) + 1))
    total: float = 0.0

    def add(self, seconds: float) -> None:
        """Adds one measurement."""
        self.counts[bisect.bisect_left(BUCKETS, seconds)] += 1
        self.total += seconds

    def histogram(self, name: str, labels: Labels) -> Histogram:
        """The buckets, which are cumulative."""
        bounds = [*map(str, BUCKETS), "+Inf"]
        sums = [sum(self.counts[: index + 1]) for index in range(len(bounds))]
        return Histogram(name, labels, sums[-1], self.total, dict(zip(bounds, sums, strict=True)))


class Statistics(RequestObserver):
    """What the requests of one LLM came to. Written on the loop's thread, read from any."""

    def __init__(self, model_name: str, num_speculative_tokens: int, max_running: int) -> None:
        self._labels = {"model_name": model_name, "engine": "0"}
        self._k, self._max_running = num_speculative_tokens, max_running
        self._sums: Tally[str] = Tally()
        self._drafts = SpeculationStats(num_accepted_per_position=(0,) * num_speculative_tokens)
        self._finished: Tally[str] = Tally({"stop": 0, "length": 0, "abort": 0, "error": 0})
        self.times = {name: Samples() for name in TIMES}
        self._log = SpeculationLog()
        self.num_unfinished = 0

    @property
    def num_running(self) -> int:
        """Completions that are under way, of those submitted."""
        return min(self.num_unfinished, self._max_running)

    def add(self, record: RequestRecord, delta: GenerationDelta) -> None:
        """Counts what one commit gave."""
        times = record.times_of(delta.index)
        if delta.token_ids and times.is_first:
            self.times[FIRST_TOKEN].add(times.first - record.arrived)
        elif delta.token_ids:
            self.times[INTER_TOKEN].add(times.gap_s)
        if delta.finish_reason is not None:
            self.times[WHOLE].add(time.monotonic() - record.arrived)
            if times.num_tokens > 1:
                self.times[PER_TOKEN].add((times.last - times.first) / (times.num_tokens - 1))
            self._add_end(delta)

    def _add_end(self, delta: GenerationDelta) -> None:
        self.num_unfinished -= 1
        if delta.finish_reason is None or delta.usage is None:
            return
        self._finished[finish_name(delta.finish_reason)] += 1
        self._sums["generation_tokens"] += delta.usage.completion_tokens
        self._sums["prompt_tokens"] += delta.usage.prompt_tokens
        self._sums["prefix_cache_queries"] += delta.usage.prompt_tokens
        self._sums["prefix_cache_hits"] += delta.usage.cached_tokens
        if delta.speculation is not None:
            add_stats(self._drafts, delta.speculation)
            self._log.add(delta.speculation)

    def snapshot(self, cache_usage: float | None) -> list[Metric]:
        """All metrics of this moment."""
        labels = self._labels
        running = self.num_running
        out: list[Metric] = [
            Gauge("vllm:num_requests_running", labels, float(running)),
            Gauge("vllm:num_requests_waiting", labels, float(self.num_unfinished - running)),
        ]
        if cache_usage is not None:
            out.append(Gauge("vllm:kv_cache_usage_perc", labels, cache_usage))
        for name in ("prefix_cache_queries", "prefix_cache_hits", "prompt_tokens", "generation_tokens"):
            out.append(Counter(f"vllm:{name}", labels, self._sums[name]))
        for reason, count in self._finished.items():
            out.append(Counter("vllm:request_success", {**labels, "finished_reason": reason}, count))
        for name, samples in self.times.items():
            out.append(samples.histogram(f"vllm:{name}", labels))
        if self._k:
            for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
                out.append(Counter(f"vllm:spec_decode_{name}", labels, getattr(self._drafts, name)))
            positions = list(self._drafts.num_accepted_per_position)
            out.append(Vector("vllm:spec_decode_num_accepted_tokens_per_pos", labels, positions))
        return out
