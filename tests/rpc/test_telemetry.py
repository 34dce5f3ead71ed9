"""Traces: OTLP/JSON lines, an OTLP sink over gRPC, trace contexts in messages, and nothing when off."""

from __future__ import annotations

import asyncio
import json
import stat
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from support.collector import collecting

from outrider.rpc import telemetry
from outrider.rpc import telemetry as names
from outrider.rpc.telemetry import (
    MAX_TRACED_STEPS,
    StepTracer,
    TraceFileExporter,
    build_provider,
    context_from_traceparent,
    inject_traceparent,
)


def record(provider: Any) -> tuple[str, str]:
    """A request with one round, linked to itself; (trace id, round's span id) in hex."""
    tracer = provider.get_tracer("test")
    with tracer.start_as_current_span("chat tiny") as root:
        link = trace.Link(root.get_span_context())
        with tracer.start_as_current_span(names.SPAN_ROUND, links=[link]) as span:
            span.set_attribute(names.ROUND_DRAFTED, 4)
            context = span.get_span_context()
    return f"{context.trace_id:032x}", f"{context.span_id:016x}"


def test_a_trace_file_holds_otlp_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "trace.jsonl"
    provider = build_provider("outrider-test", [TraceFileExporter(path)])
    trace_id, span_id = record(provider)
    provider.force_flush()
    record(provider)
    provider.shutdown()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 2
    resource = lines[0]["resourceSpans"][0]
    attributes = {a["key"]: a["value"] for a in resource["resource"]["attributes"]}
    assert attributes["service.name"] == {"stringValue": "outrider-test"}
    spans = {span["name"]: span for span in resource["scopeSpans"][0]["spans"]}
    span, root = spans[names.SPAN_ROUND], spans["chat tiny"]
    assert (span["traceId"], span["spanId"]) == (trace_id, span_id)
    assert span["parentSpanId"] == root["spanId"] == span["links"][0]["spanId"]
    assert span["startTimeUnixNano"].isdigit() and span["kind"] == 1
    assert span["attributes"] == [{"key": "outrider.round.drafted", "value": {"intValue": "4"}}]


def one_span(exporter: TraceFileExporter) -> int:
    """Writes one; how many bytes that took."""
    provider = TracerProvider(shutdown_on_exit=False)
    spans = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    provider.get_tracer("test").start_span("chat").end()
    exporter.export(spans.get_finished_spans())
    return len(telemetry.otlp_json(spans.get_finished_spans())) + 1


def test_a_trace_file_is_its_users_alone(tmp_path: Path) -> None:
    """One that was there stays as it was made, for a collector of another user."""
    path, shared = tmp_path / "trace.jsonl", tmp_path / "shared.jsonl"
    shared.touch()
    shared.chmod(0o640)
    modes = []
    for file in (path, shared):
        exporter = TraceFileExporter(file, max_bytes=1)
        for _ in range(2):
            one_span(exporter)
        exporter.shutdown()
        modes += [stat.S_IMODE(found.stat().st_mode) for found in (file, file.with_name(f"{file.name}.1"))]
    assert modes == [0o600, 0o600, 0o640, 0o640]


def test_a_full_trace_file_begins_anew_and_no_line_is_lost(tmp_path: Path) -> None:
    """With two processes: one moves the file, and the other finds the new one."""
    path, older = tmp_path / "trace.jsonl", tmp_path / "trace.jsonl.1"
    both = [TraceFileExporter(path) for _ in range(2)]
    size = one_span(both[0])
    for each in both:
        each._max_bytes = 3 * size
    for number in range(7):
        one_span(both[number % 2])
        assert path.stat().st_size <= 3 * size
    assert len(path.read_text().splitlines()) == 2 and len(older.read_text().splitlines()) == 3
    path.unlink()  # as what turns logs over may
    for each in both:
        one_span(each)
        each.shutdown()
    assert len(path.read_text().splitlines()) == 2


def test_what_is_no_file_of_its_own_is_not_moved(tmp_path: Path) -> None:
    """As /dev/stdout, which may lead to a file of somebody else's."""
    path = tmp_path / "link"
    path.symlink_to(tmp_path / "file")
    exporter = TraceFileExporter(path, max_bytes=1)
    for _ in range(3):
        one_span(exporter)
    assert path.is_symlink() and len((tmp_path / "file").read_text().splitlines()) == 3
    exporter.shutdown()


async def test_spans_reach_a_collector_over_grpc() -> None:
    async with collecting() as collector:
        provider = build_provider("t", [OTLPSpanExporter(endpoint=collector.endpoint, insecure=True)])
        record(provider)
        await asyncio.to_thread(provider.shutdown)
    assert sorted(span.name for span in collector.spans) == ["chat tiny", names.SPAN_ROUND]


def step_of(provider: TracerProvider, flags: str) -> bool:
    """Whether the step of one request is recorded, whose header ends so."""
    exporter = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    header = f"00-{'a' * 32}-{'b' * 16}-{flags}"
    StepTracer(provider.get_tracer("test")).record("step", [header], 0, lambda: {names.BATCH_ROWS: 1})
    return bool(exporter.get_finished_spans())


def test_a_long_request_is_in_the_spans_of_its_first_steps_alone() -> None:
    provider, exporter = TracerProvider(shutdown_on_exit=False), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = StepTracer(provider.get_tracer("test"))
    old, new = (f"00-{letter * 32}-{'b' * 16}-01" for letter in "ac")
    for _ in range(MAX_TRACED_STEPS + 3):
        tracer.record("step", [old, old], 0, dict)  # two completions
    assert len(exporter.get_finished_spans()) == MAX_TRACED_STEPS
    tracer.record("step", [old, new], 0, dict)
    (link,) = exporter.get_finished_spans()[-1].links
    assert f"{link.context.trace_id:032x}" == "c" * 32


@pytest.mark.parametrize(
    ("sampler", "recorded"),
    [
        (None, True),
        ("parentbased_traceidratio", True),  # of 0: the gateway has decided, and nobody decides again
        ("parentbased_always_off", True),
        ("always_off", False),
    ],
)
def test_a_step_follows_the_decision_of_its_requests(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sampler: str | None, recorded: bool
) -> None:
    """Head sampling: OTEL_TRACES_SAMPLER decides where a request comes in."""
    installed: list[TracerProvider] = []
    monkeypatch.setattr(trace, "set_tracer_provider", installed.append)
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0")
    if sampler is not None:
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    for follows in (True, False):
        telemetry.setup_tracing("t", tmp_path / "t.jsonl", follows_links=follows)
    behind, gateway = installed
    assert step_of(behind, "01") == recorded and not step_of(behind, "00")
    # A gateway's own spans have links to clients that it does not trust: those decide nothing.
    assert gateway.get_tracer("t").start_span("root").is_recording() == (sampler is None)
    for provider in installed:
        provider.shutdown()


def test_the_trace_context_travels_in_a_message(tmp_path: Path) -> None:
    assert inject_traceparent() == ""
    provider = build_provider("t", [])
    tracer = provider.get_tracer("test")
    with tracer.start_as_current_span("root") as root:
        header = inject_traceparent()
    context = root.get_span_context()
    assert header == f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
    child = tracer.start_span("child", context=context_from_traceparent(header))
    assert child.get_span_context().trace_id == context.trace_id
    for nonsense in ("", "garbage", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"):
        span = trace.get_current_span(context_from_traceparent(nonsense))
        assert not span.get_span_context().is_valid
    provider.shutdown()


def test_off_installs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    installed: list[Any] = []
    monkeypatch.setattr(trace, "set_tracer_provider", installed.append)
    for name in telemetry.ENDPOINT_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    telemetry.setup_tracing("t")()
    assert installed == []


def test_setup_installs_what_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    installed: list[Any] = []
    monkeypatch.setattr(trace, "set_tracer_provider", installed.append)
    monkeypatch.setenv("OTEL_SERVICE_NAME", "from-the-environment")
    shutdown = telemetry.setup_tracing("t", tmp_path / "t.jsonl")
    record(installed[0])
    shutdown()
    assert "from-the-environment" in (tmp_path / "t.jsonl").read_text()
