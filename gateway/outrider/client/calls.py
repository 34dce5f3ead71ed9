"""What the calls of both clients share: metadata."""

from __future__ import annotations

_TRACEPARENT = "traceparent"


def request_metadata(traceparent: str) -> tuple[tuple[str, str], ...]:
    """What goes with a request: its trace's context."""
    return ((_TRACEPARENT, traceparent),) if traceparent else ()
