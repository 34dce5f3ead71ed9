"""Step spans of the target: one span a batch step, linked to the requests in it. Nothing is installed when tracing
is off."""

from __future__ import annotations

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import Link, SpanKind, Tracer

from outrider.target.step_report import StepReport
from outrider.wire.tracing import context_from_traceparent


class StepTracer:
    """Writes a span for every step that holds a traced request."""

    def __init__(self, tracer: Tracer | None = None) -> None:
        self._tracer = tracer or trace.get_tracer("outrider.target")

    @classmethod
    def if_enabled(cls) -> StepTracer | None:
        """None unless a real provider was installed: then steps cost nothing."""
        return cls() if isinstance(trace.get_tracer_provider(), TracerProvider) else None

    def on_step(self, report: StepReport) -> None:
        """Called on the device thread after each step."""
        if not report.traceparents:
            return
        contexts = (trace.get_current_span(context_from_traceparent(header)) for header in report.traceparents)
        links = [Link(span.get_span_context()) for span in contexts]
        attributes = {
            "outrider.step.rows": report.num_rows,
            "outrider.step.sequences": report.num_sequences,
            "outrider.step.drafted": report.num_drafted,
            "outrider.step.accepted": report.num_accepted,
        }
        span = self._tracer.start_span(
            "outrider.verify_step",
            kind=SpanKind.INTERNAL,
            links=links,
            attributes=attributes,
            start_time=report.started_ns,
        )
        span.end(end_time=report.ended_ns)
