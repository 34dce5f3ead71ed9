"""What the calls of both clients share: metadata."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

_TRACEPARENT = "traceparent"
_MODEL_DIGEST = "outrider-model-digest"


def request_metadata(traceparent: str) -> tuple[tuple[str, str], ...]:
    """What goes with a request: its trace's context."""
    return ((_TRACEPARENT, traceparent),) if traceparent else ()


def model_digest(initial_metadata: Iterable[Any] | None) -> str:
    """The digest of the model that answers, if the gateway names it."""
    return next((str(value) for key, value in initial_metadata or () if key == _MODEL_DIGEST), "")
