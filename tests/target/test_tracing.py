"""Step spans: one a step, linked to every traced request in it; nothing for untraced ones."""

from __future__ import annotations

from dataclasses import replace

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from target_harness import Harness, opened, tiny_model

from outrider.rpc.messages import Credit
from outrider.target_service.outputs import StepTracer


def test_steps_link_to_their_requests() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = StepTracer(provider.get_tracer("test"))
    harness = Harness.of(tiny_model()[1], on_step=tracer.on_step)
    parents = [f"00-{n:032x}-{n:016x}-01" for n in (7, 8)]
    for number, parent in enumerate(parents, start=1):
        request = opened(number, [5, 6, 7], max_tokens=3)
        harness.send(replace(request, traceparent=parent), Credit(number, 100, 0))
    harness.send(opened(3, [5, 6, 7], max_tokens=9), Credit(3, 100, 0))
    harness.run()
    spans = exporter.get_finished_spans()
    assert {link.context.trace_id for link in spans[0].links} == {7, 8}
    assert spans[0].attributes is not None and spans[0].attributes["outrider.step.sequences"] == 3
    assert len(spans) == 3 and all(span.end_time >= span.start_time for span in spans)
