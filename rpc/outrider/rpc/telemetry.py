"""OpenTelemetry, set up once per process. Off is the default and installs nothing: the API's no-op tracer stays.

Names of spans, attributes and metrics. The gen_ai.* names follow OpenTelemetry's GenAI conventions, of the version
GEN_AI_VERSION, which are still in development: they are kept here, in one place, and not imported from a package that
may change them."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from io import FileIO
from pathlib import Path
from threading import Lock
from typing import Any, Final

from google.protobuf.json_format import MessageToDict
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import Decision, ParentBased, Sampler, SamplingResult
from opentelemetry.trace import Link, SpanKind, Tracer, TraceState
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import Attributes

from outrider.rpc.private_files import PRIVATE, warn_if_open

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
# A few hundred rounds a second, each with five children: the SDK's default of 2048 would drop spans silently.
MAX_QUEUE_SPANS = 65_536
MAX_BATCH_SPANS = 2_048
FLUSH_MS = 1_000
MAX_TRACE_FILE_BYTES = 256 << 20

_TRACEPARENT = "traceparent"
_PROPAGATOR = TraceContextTextMapPropagator()
_ID_FIELDS = frozenset({"traceId", "spanId", "parentSpanId"})


class TraceFileExporter(SpanExporter):
    """Writes one ExportTraceServiceRequest per line, as OTLP/JSON, into a file that its user alone may read, unless it
    was there before. Several processes may append to one file: every line is one unbuffered write. Where a line would
    make it larger than `max_bytes` the file begins anew; what it held is kept as `.1`, over what that was."""

    def __init__(self, path: Path, max_bytes: int = MAX_TRACE_FILE_BYTES) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._max_bytes, self._lock = path, max_bytes, Lock()
        self._file = self._open(PRIVATE)
        warn_if_open(path, "the traces")

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Appends a line at once, so that a killed process leaves whole lines."""
        line = otlp_json(spans).encode() + b"\n"
        with self._lock:
            if self._file.closed:
                return SpanExportResult.FAILURE
            self._make_room(len(line))
            self._file.write(line)
        return SpanExportResult.SUCCESS

    def _make_room(self, num_bytes: int) -> None:
        """Of several processes one moves a full file, and the others find the new one."""
        state = os.fstat(self._file.fileno())
        is_file = stat.S_ISREG(state.st_mode) and not self._path.is_symlink()  # and no pipe, device or /dev/stdout
        is_full = is_file and 0 < state.st_size > self._max_bytes - num_bytes
        if self._is_in_place(state) and not is_full:
            return
        with self._file as before:  # its lock ends with it
            fcntl.flock(before, fcntl.LOCK_EX)
            if self._is_in_place(state):
                self._path.replace(self._path.with_name(f"{self._path.name}.1"))
        self._file = self._open(stat.S_IMODE(state.st_mode))

    def _is_in_place(self, state: os.stat_result) -> bool:
        """Whether what is open is what the path names."""
        try:
            return os.path.samestat(state, self._path.stat())
        except FileNotFoundError:
            return False

    def _open(self, mode: int) -> FileIO:
        return open(self._path, "ab", buffering=0, opener=partial(os.open, mode=mode))

    def shutdown(self) -> None:
        with self._lock:
            self._file.close()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Nothing is buffered here."""
        return True


def otlp_json(spans: Sequence[ReadableSpan]) -> str:
    """Spans as OTLP/JSON: protobuf's JSON, but with trace and span ids in hex and enums as numbers."""
    request = MessageToDict(encode_spans(spans), use_integers_for_enums=True)
    for resource in request.get("resourceSpans", ()):
        for scope in resource.get("scopeSpans", ()):
            for span in scope.get("spans", ()):
                _ids_to_hex(span)
                for link in span.get("links", ()):
                    _ids_to_hex(link)
    return json.dumps(request, separators=(",", ":"))


def _ids_to_hex(entry: dict[str, Any]) -> None:
    for name in _ID_FIELDS & entry.keys():
        entry[name] = base64.b64decode(entry[name]).hex()


class LinkedSampler(Sampler):
    """A sampler that follows parents follows links, too: a step is recorded if one of the requests in it is, so that
    the gateway alone decides. Any other sampler decides as it does."""

    def __init__(self, inner: Sampler) -> None:
        self._inner = inner

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        """The SDK's question for each new span."""
        if isinstance(self._inner, ParentBased) and any(link.context.trace_flags.sampled for link in links or ()):
            return SamplingResult(Decision.RECORD_AND_SAMPLE, attributes)
        return self._inner.should_sample(parent_context, trace_id, name, kind, attributes, links, trace_state)

    def get_description(self) -> str:
        return f"Linked({self._inner.get_description()})"


def setup_tracing(
    service_name: str,
    trace_file: Path | None = None,
    max_file_bytes: int = MAX_TRACE_FILE_BYTES,
    *,
    follows_links: bool = False,
) -> Callable[[], None]:
    """Installs exporters: to a collector if OTEL_EXPORTER_OTLP_(TRACES_)ENDPOINT is set, to a file if one is given,
    else nothing. Returns what flushes and stops them. OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES and
    OTEL_TRACES_SAMPLER hold as the SDK defines them; a service behind a gateway `follows_links` (LinkedSampler). Once
    per process: OpenTelemetry keeps its first provider."""
    exporters: list[SpanExporter] = []
    if any(os.environ.get(name) for name in ENDPOINT_VARIABLES):
        # Imported only here: it brings a second gRPC user into the process.
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        exporters.append(OTLPSpanExporter())
    if trace_file is not None:
        exporters.append(TraceFileExporter(trace_file, max_file_bytes))
    if not exporters:
        return lambda: None
    provider = build_provider(service_name, exporters)
    if follows_links:
        provider.sampler = LinkedSampler(provider.sampler)
    trace.set_tracer_provider(provider)
    return provider.shutdown


def build_provider(service_name: str, exporters: Sequence[SpanExporter]) -> TracerProvider:
    """A provider of its own, not installed: two engines of one process may each have theirs."""
    name = os.environ.get("OTEL_SERVICE_NAME") or service_name
    provider = TracerProvider(resource=Resource.create({"service.name": name}), shutdown_on_exit=False)
    for exporter in exporters:
        provider.add_span_processor(
            BatchSpanProcessor(
                exporter,
                max_queue_size=MAX_QUEUE_SPANS,
                max_export_batch_size=MAX_BATCH_SPANS,
                schedule_delay_millis=FLUSH_MS,
            )
        )
    return provider


def inject_traceparent(context: Context | None = None) -> str:
    """The W3C trace context of the current (or given) span, for a message field; empty if nothing is traced."""
    if not trace.get_current_span(context).get_span_context().is_valid:
        return ""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, context)
    return carrier.get(_TRACEPARENT, "")


def context_from_traceparent(traceparent: str) -> Context:
    """A context whose current span is the remote one; an empty context for an empty or broken header."""
    if not traceparent:
        return Context()
    return _PROPAGATOR.extract({_TRACEPARENT: traceparent}, Context())


MAX_TRACED_STEPS = 256  # of a request: its trace holds the first rounds alone, too
_MAX_KNOWN = 4096  # requests whose steps are counted


class StepTracer:
    """Writes a span for every step of an engine that holds a traced request, linked to those requests; a request is
    linked to its first `MAX_TRACED_STEPS` alone."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._num_steps: dict[str, int] = {}  # by header, the latest last

    @classmethod
    def if_enabled(cls, name: str) -> StepTracer | None:
        """None unless a real provider was installed: then steps cost nothing."""
        provider = trace.get_tracer_provider()
        return cls(provider.get_tracer(name)) if isinstance(provider, TracerProvider) else None

    def record(
        self, name: str, traceparents: Iterable[str], started_ns: int, attributes: Callable[[], Mapping[str, int]]
    ) -> None:
        """The span of a step that ends now; `started_ns` is the wall clock's."""
        headers = [header for header in dict.fromkeys(traceparents) if header and self._is_early(header)]
        spans = [trace.get_current_span(context_from_traceparent(header)) for header in headers]
        contexts = [span.get_span_context() for span in spans]
        links = [Link(context) for context in contexts if context.is_valid and context.trace_flags.sampled]
        if links:
            self._tracer.start_span(name, links=links, attributes=attributes(), start_time=started_ns).end()

    def _is_early(self, header: str) -> bool:
        """Counts one more step of a request."""
        number = self._num_steps.pop(header, 0) + 1
        self._num_steps[header] = number
        if len(self._num_steps) > _MAX_KNOWN:
            del self._num_steps[next(iter(self._num_steps))]
        return number <= MAX_TRACED_STEPS


GEN_AI_VERSION: Final = "0.1.0"  # of open-telemetry/semantic-conventions-genai
GEN_AI_OPERATION_NAME: Final = "gen_ai.operation.name"
GEN_AI_PROVIDER_NAME: Final = "gen_ai.provider.name"
GEN_AI_REQUEST_MODEL: Final = "gen_ai.request.model"
GEN_AI_REQUEST_MAX_TOKENS: Final = "gen_ai.request.max_tokens"
GEN_AI_REQUEST_TEMPERATURE: Final = "gen_ai.request.temperature"
GEN_AI_REQUEST_TOP_P: Final = "gen_ai.request.top_p"
GEN_AI_REQUEST_TOP_K: Final = "gen_ai.request.top_k"
GEN_AI_REQUEST_STREAM: Final = "gen_ai.request.stream"
GEN_AI_RESPONSE_MODEL: Final = "gen_ai.response.model"
GEN_AI_RESPONSE_FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK: Final = "gen_ai.response.time_to_first_chunk"
GEN_AI_USAGE_INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
GEN_AI_USAGE_OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
GEN_AI_USAGE_CACHED_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"
GEN_AI_USAGE_REASONING_TOKENS: Final = "gen_ai.usage.reasoning.output_tokens"
GEN_AI_SERVER_REQUEST_DURATION: Final = "gen_ai.server.request.duration"  # seconds, as the two below
GEN_AI_SERVER_TIME_TO_FIRST_TOKEN: Final = "gen_ai.server.time_to_first_token"
GEN_AI_SERVER_TIME_PER_OUTPUT_TOKEN: Final = "gen_ai.server.time_per_output_token"
ERROR_TYPE: Final = "error.type"
RPC_SYSTEM_NAME: Final = "rpc.system.name"
RPC_METHOD: Final = "rpc.method"
RPC_RESPONSE_STATUS_CODE: Final = "rpc.response.status_code"
HTTP_REQUEST_METHOD: Final = "http.request.method"
HTTP_ROUTE: Final = "http.route"
HTTP_RESPONSE_STATUS_CODE: Final = "http.response.status_code"
URL_PATH: Final = "url.path"
URL_SCHEME: Final = "url.scheme"

OPERATION_CHAT: Final = "chat"
OPERATION_TEXT_COMPLETION: Final = "text_completion"
PROVIDER: Final = "outrider"

SPAN_ROUND: Final = "outrider.round"
SPAN_ROUNDS: Final = "outrider.rounds"  # many as one, with the sums of their attributes
SPAN_DRAFT: Final = "outrider.draft"
SPAN_WIRE: Final = "outrider.wire"
SPAN_QUEUE: Final = "outrider.queue"
SPAN_VERIFY: Final = "outrider.verify"
SPAN_SAMPLE: Final = "outrider.sample"
SPAN_DRAFT_BATCH: Final = "outrider.draft_batch"

ROUNDS_COUNT: Final = "outrider.rounds.count"
ROUNDS_DRAFT_US: Final = "outrider.rounds.draft_us"
ROUNDS_WIRE_US: Final = "outrider.rounds.wire_us"
ROUNDS_QUEUE_US: Final = "outrider.rounds.queue_us"
ROUNDS_VERIFY_US: Final = "outrider.rounds.verify_us"
ROUNDS_SAMPLE_US: Final = "outrider.rounds.sample_us"
ROUND_INDEX: Final = "outrider.round.index"
ROUND_K: Final = "outrider.round.k"
ROUND_CHAIN: Final = "outrider.round.chain"
ROUND_POSITION: Final = "outrider.round.position"
ROUND_DRAFTED: Final = "outrider.round.drafted"
ROUND_ACCEPTED: Final = "outrider.round.accepted"
ROUND_FORCED: Final = "outrider.round.forced"  # by a constraint; drafted and accepted ones do not count them
ROUND_FORCED_ACCEPTED: Final = "outrider.round.forced_accepted"
ROUND_MASK_US: Final = "outrider.round.mask_us"  # of sampling, the step's wait for masks
ROUND_EMITTED: Final = "outrider.round.emitted"
ROUND_BONUS: Final = "outrider.round.bonus"
ROUND_POLICY: Final = "outrider.round.policy"
ROUND_METHODS: Final = "outrider.round.methods"
ROUND_OVERHEAD_US: Final = "outrider.round.overhead_us"
CONTROLLER: Final = "outrider.controller"  # what a round's policy was chosen by: acceptance, hits, times
BATCH_ROWS: Final = "outrider.batch.rows"
BATCH_SEQUENCES: Final = "outrider.batch.sequences"
REQUEST_ID: Final = "outrider.request.id"
REQUEST_COMPLETION: Final = "outrider.request.completion"
REQUEST_ACCEPTANCE: Final = "outrider.request.acceptance"
REQUEST_METHOD: Final = "outrider.request.method"
REQUEST_ADAPTER: Final = "outrider.request.adapter"
REQUEST_CONSTRAINT: Final = "outrider.request.constraint"
REQUEST_COMPILE_US: Final = "outrider.request.compile_us"  # of its constraint, at all targets
