"""Spans of batch steps, linked to the requests that they served. Without a tracer nothing is made."""

from __future__ import annotations

import time
from collections.abc import Sequence

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import Link, Tracer

from outrider.draft.state import DraftSequence
from outrider.wire import tracing_names as names
from outrider.wire.tracing import context_from_traceparent


def link_to(traceparent: str) -> Link | None:
    """A link to a request's span; None where the request is not traced."""
    if not traceparent:
        return None
    context = trace.get_current_span(context_from_traceparent(traceparent)).get_span_context()
    return Link(context) if context.is_valid and context.trace_flags.sampled else None


def installed_tracer() -> Tracer | None:
    """The tracer of the process, if one was set up."""
    provider = trace.get_tracer_provider()
    return provider.get_tracer("outrider.draft") if isinstance(provider, TracerProvider) else None


def record_step(tracer: Tracer, steps: Sequence[tuple[DraftSequence, int]], duration_us: int) -> None:
    """The span of a step that ends now, of sequences and their rows; none where no request is traced."""
    links = [draft.link for draft, _ in steps if draft.link is not None]
    if not links:
        return
    end = time.time_ns()
    attributes = {names.BATCH_ROWS: sum(rows for _, rows in steps), names.BATCH_SEQUENCES: len(steps)}
    span = tracer.start_span(
        names.SPAN_DRAFT_BATCH, links=links, attributes=attributes, start_time=end - duration_us * 1000
    )
    span.end(end)
