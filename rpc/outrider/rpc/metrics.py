"""The time series of a process, for Prometheus: what every service has, ways to declare its own, and the HTTP server
of `--metrics` with /metrics, /livez and /readyz, apart from the port that it serves on. Imported only where metrics are
asked for: a process without them spends nothing on them. Stems and meanings are vLLM's where it has them."""

from __future__ import annotations

import asyncio
import socket
import time
from bisect import bisect_left
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from itertools import accumulate
from threading import Thread
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, disable_created_metrics
from prometheus_client.core import (
    CounterMetricFamily,
    Exemplar,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from outrider.rpc.beats import next_beat
from outrider.rpc.messages import ModelInfo
from outrider.rpc.server import HealthMonitor, bind

PREFIX = "outrider"
SHOWN_DIGEST = 12  # characters that tell models apart
LAG_PERIOD_S = 0.1
LOOP_ANSWERS_S = 5.0  # an event loop that takes longer hangs
BACKLOG = 5  # connections that the system holds until they are accepted
IDLE_S = 60.0  # a connection that asks nothing for so long is closed
WAITS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
PARTS_S = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)

Readings = Mapping[str, float]  # by the value of one label
Samples = Iterable[tuple[tuple[str, ...], float]]  # the values of the labels, and the series'
ReadKind = type[CounterMetricFamily] | type[GaugeMetricFamily]


class Metrics:
    """The series of one process. `part` goes between the prefix and their names: a draft's and a target's differ. Where
    one of several of a process is not `alone`, what is the process's is another's."""

    def __init__(self, service: str, part: str = "", alone: bool = True) -> None:
        without_created: Callable[[], None] = disable_created_metrics  # the library has no type for it
        without_created()  # a time beside every counter, which nobody reads
        self.registry = CollectorRegistry()
        self._start = f"{PREFIX}_{part}_" if part else f"{PREFIX}_"
        self._model: Info | None = None
        of_process = self.registry if alone else None
        if alone:
            ProcessCollector(registry=self.registry)
            build = Info(f"{PREFIX}_build", "What runs", registry=self.registry)
            build.info({"service": service, "version": metadata.version("outrider")})
        self.loop_lag = Histogram(
            f"{PREFIX}_loop_lag_seconds", "How late the event loop wakes", registry=of_process, buckets=PARTS_S
        )

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        """A sum that is counted where it happens."""
        return Counter(self._start + name, text, labels, registry=self.registry)

    def histogram(self, name: str, text: str, buckets: Iterable[float], *labels: str) -> Histogram:
        """Values that are observed where they happen, by bucket."""
        return Histogram(self._start + name, text, labels, registry=self.registry, buckets=tuple(buckets))

    def local_histogram(self, name: str, text: str, buckets: Iterable[float]) -> LocalHistogram:
        """Values that one thread alone observes, many times a second."""
        return self.local_histograms(name, text, buckets, "", ("",))[0]

    def local_histograms(
        self, name: str, text: str, buckets: Iterable[float], label: str, values: Sequence[str]
    ) -> list[LocalHistogram]:
        """The same by the values of one label, in their order."""
        bounds = tuple(buckets)
        found = {value: LocalHistogram(bounds) for value in values}
        self.registry.register(_HistogramCollector(self._start + name, text, label, found))
        return list(found.values())

    def gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        """A value of the moment of the scrape, which may be read from any thread."""
        Gauge(self._start + name, text, registry=self.registry).set_function(read)

    def read_counter(self, name: str, text: str, read: Callable[[], float]) -> None:
        """A sum that something else counts anyway, read at the scrape, from any thread."""
        self.read_labelled(CounterMetricFamily, name, text, (), lambda: [((), read())])

    def read_counters(self, name: str, text: str, label: str, read: Callable[[], Readings]) -> None:
        """The same, by one label, which is bounded."""
        self.read_labelled(CounterMetricFamily, name, text, (label,), lambda: _by_label(read()))

    def read_gauges(self, name: str, text: str, label: str, read: Callable[[], Readings]) -> None:
        """Values of the moment of the scrape by one label, which is bounded; read from any thread."""
        self.read_labelled(GaugeMetricFamily, name, text, (label,), lambda: _by_label(read()))

    def read_labelled(
        self, kind: ReadKind, name: str, text: str, labels: tuple[str, ...], read: Callable[[], Samples]
    ) -> None:
        """Any of these, by any number of labels."""
        self.registry.register(ReadSeries(kind, self._start + name, text, labels, read))

    def model_info(self, model: ModelInfo) -> None:
        """What computes here, from now on."""
        if self._model is None:
            self._model = Info(f"{self._start}model", "What computes here", registry=self.registry)
        self._model.info(model_labels(model))

    def render(self, accept: str) -> tuple[bytes, str]:
        """The series as text, and its content type: Prometheus' own format, or OpenMetrics for who asks for it."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type


def model_labels(model: ModelInfo) -> dict[str, str]:
    """A model and what computes it, as labels."""
    shown = {"engine": model.engine, "kernels": model.kernels, "dtype": model.dtype, "model": model.name}
    return {**shown, "digest": model.digest[:SHOWN_DIGEST]}


def exemplar_of(traceparent: str) -> dict[str, str] | None:
    """The trace of a W3C header (version-trace-span-flags) as an exemplar, where it is sampled."""
    sampled = len(traceparent) >= 55 and traceparent[54] in "13579bdf"
    return {"trace_id": traceparent[3:35]} if sampled else None


class LocalHistogram:
    """What one thread observes, read at the scrape: the library's own, which any thread may observe, takes a lock each
    time, and ten times as long."""

    __slots__ = ("_bounds", "_counts", "_exemplars", "_sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)  # by bucket, not summed up
        self._exemplars: dict[int, Exemplar] = {}
        self._sum = 0.0

    def observe(self, value: float, exemplar: dict[str, str] | None = None) -> None:
        bucket = bisect_left(self._bounds, value)
        self._counts[bucket] += 1
        self._sum += value
        if exemplar is not None:
            self._exemplars[bucket] = Exemplar(exemplar, value, time.time())

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        """Its buckets at this moment; from any thread."""
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        sums = accumulate(list(self._counts))
        exemplars = dict(self._exemplars)
        buckets: list[Any] = [
            (name, total, exemplars.get(place)) for place, (name, total) in enumerate(zip(names, sums, strict=True))
        ]
        family.add_metric(labels, buckets, self._sum)


class _HistogramCollector(Collector):
    """Histograms of one name."""

    def __init__(self, name: str, text: str, label: str, found: Mapping[str, LocalHistogram]) -> None:
        self._name, self._text, self._label, self._found = name, text, label, found

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=(self._label,) if self._label else ())
        for value, histogram in self._found.items():
            histogram.add_to(family, (value,) if self._label else ())
        yield family


@dataclass(frozen=True, slots=True, eq=False)
class ReadSeries(Collector):
    """A series that is read at the scrape, from any thread."""

    kind: ReadKind
    name: str
    text: str
    labels: tuple[str, ...]
    read: Callable[[], Samples]

    def collect(self) -> Iterator[Metric]:
        family = self.kind(self.name, self.text, labels=self.labels)
        for values, number in self.read():
            family.add_metric(values, number)
        yield family


def _by_label(readings: Readings) -> Samples:
    return [((value,), number) for value, number in readings.items()]


@dataclass(frozen=True, slots=True)
class EngineState:
    """What vLLM's names stand for, at one moment."""

    model_name: str
    num_running: int
    num_waiting: int
    cache_usage: float  # 0 to 1
    block_size: int  # tokens
    num_blocks: int


class VllmCollector(Collector):
    """The series that routers of vLLM's replicas read, under vLLM's names; none while nothing is known."""

    def __init__(self, read: Callable[[], EngineState | None]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        state = self._read()
        if state is None:
            return
        for name, text, value in (
            ("num_requests_running", "Number of requests in model execution batches.", state.num_running),
            ("num_requests_waiting", "Number of requests waiting to be processed.", state.num_waiting),
            ("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", state.cache_usage),
        ):
            gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=("model_name", "engine"))
            gauge.add_metric((state.model_name, "0"), value)
            yield gauge
        cache = InfoMetricFamily("vllm:cache_config", "Information of the LLMEngine CacheConfig")
        shown = {"block_size": str(state.block_size), "num_gpu_blocks": str(state.num_blocks)}
        cache.add_metric((), {**shown, "model_name": state.model_name, "engine": "0"})
        yield cache


class Series(Protocol):
    """Whose series are told."""

    def render(self, accept: str) -> tuple[bytes, str]:
        """As Metrics does; not for the event loop."""


class MetricsServer:
    """/metrics, /livez and /readyz over HTTP, on a thread of its own: a scrape does not hold the event loop up. It is
    bound when it is made, to "host:port", ":port" or "unix:path": `address` holds the port. Raises Unavailable where
    it cannot be bound."""

    def __init__(self, listen: str, series: Series, health: HealthMonitor) -> None:
        self._series, self._health = series, health
        self._loop = asyncio.get_running_loop()
        bound, self.address = bind(listen, BACKLOG)
        self._server = _Server(bound, self._answer)
        self._thread = Thread(target=self._server.serve_forever, name="metrics", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Accepts no more, and returns when the thread has ended. Not for the event loop."""
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, path: str, accept: str) -> tuple[int, bytes, str]:
        """Status, body and content type; on a thread of the server's."""
        if path == "/metrics":
            return (200, *self._series.render(accept))
        asked = {"/livez": lambda: self._health.alive, "/readyz": lambda: self._health.ready}.get(path)
        if asked is None:
            return 404, b"there are /metrics, /livez and /readyz\n", "text/plain"
        good = self._ask_loop(asked)
        return (200, b"ok\n", "text/plain") if good else (503, f"not {path[1:-1]}\n".encode(), "text/plain")

    def _ask_loop(self, ask: Callable[[], bool]) -> bool:
        """An event loop that hangs is not alive, whatever it said before."""
        answer: Future[bool] = Future()
        try:
            self._loop.call_soon_threadsafe(lambda: answer.set_result(ask()))
            return answer.result(LOOP_ANSWERS_S)
        except (TimeoutError, RuntimeError):  # RuntimeError: the loop is closed
            return False


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, bound: socket.socket, answer: Callable[[str, str], tuple[int, bytes, str]]) -> None:
        super().__init__(bound.getsockname(), _Handler, bind_and_activate=False)
        self.answer = answer
        self.socket.close()  # the base has made one of its own
        self.socket = bound


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = IDLE_S
    server: _Server

    def do_GET(self) -> None:
        """One request of a connection."""
        status, body, content_type = self.server.answer(
            self.path.partition("?")[0], self.headers.get("accept", "") or ""
        )
        self.send_response(status)
        self.send_header("content-type", content_type)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        with suppress(ConnectionError):  # who asked has gone
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """A scrape is no news."""


@asynccontextmanager
async def exported(metrics: Metrics, listen: str, health: HealthMonitor, name: str) -> AsyncIterator[None]:
    """While in it, the loop's lag is measured, and the series are served where `listen` says, if it does; the address
    is printed."""
    lag = asyncio.create_task(_measure_lag(metrics.loop_lag))
    server = MetricsServer(listen, metrics, health) if listen else None
    try:
        if server is not None:
            server.start()
            print(f"{name} metrics on {server.address}", flush=True)
        yield
    finally:
        lag.cancel()
        if server is not None:
            await asyncio.to_thread(server.stop)


async def _measure_lag(lag: Histogram) -> None:
    loop = asyncio.get_running_loop()
    while True:
        due = await next_beat(LAG_PERIOD_S)
        lag.observe(max(0.0, loop.time() - due))
