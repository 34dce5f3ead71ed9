"""Spans from a file of traces: OTLP JSON lines, as --trace-file of the services writes them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_SHOWN = 60  # characters of a line that is wrong


@dataclass(frozen=True, slots=True)
class Span:
    """One span. Times are nanoseconds since 1970, by the clock of the machine that made it."""

    trace_id: str
    span_id: str
    parent_id: str  # empty: none
    name: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]

    def number(self, name: str) -> int:
        """A whole number among its attributes; 0 where it is absent or something else."""
        value = self.attributes.get(name)
        return value if isinstance(value, int) else 0


def read_trace(path: Path) -> tuple[list[Span], bool]:
    """The spans, and whether the last line is cut (a process was killed, or the disk was full), which is left out.
    Raises ValueError for a line that is no trace, and OSError for a file that cannot be read."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text: expected OTLP JSON lines, as --trace-file writes them") from error
    spans: list[Span] = []
    for number, line in enumerate(lines, 1):
        try:
            spans += _spans(json.loads(line)) if line.strip() else ()
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, json.JSONDecodeError):
                if number == len(lines) and spans:
                    return spans, True
                wrong = f"no JSON ({error.msg})"
            else:
                what = (
                    f"lacks {error}" if isinstance(error, KeyError) else f"has a value that it may not have ({error})"
                )
                wrong = f"no OTLP trace, {what}"
            raise ValueError(f"{path}, line {number}: {wrong}: {line[:MAX_SHOWN]!r}") from error
    if not spans:
        raise ValueError(f"{path} holds no spans: nothing was traced, or not yet written (services write every second)")
    return spans, False


def _spans(request: dict[str, Any]) -> Iterator[Span]:
    scopes = (scope for resource in request["resourceSpans"] for scope in resource.get("scopeSpans", ()))
    for span in (span for scope in scopes for span in scope.get("spans", ())):
        ids = str(span["traceId"]), str(span["spanId"]), str(span.get("parentSpanId", ""))
        times = int(span["startTimeUnixNano"]), int(span["endTimeUnixNano"])
        attributes = {entry["key"]: _value(entry["value"]) for entry in span.get("attributes", ())}
        yield Span(*ids, str(span["name"]), *times, attributes)


def _value(value: dict[str, Any]) -> Any:
    """A plain value: OTLP says its type, and writes whole numbers as texts."""
    for kind, inner in value.items():
        if kind == "arrayValue":
            return [_value(item) for item in inner.get("values", ())]
        return int(inner) if kind == "intValue" else inner
    return None
