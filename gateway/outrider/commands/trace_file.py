"""Reads OTLP JSON lines, as --trace-file of the services writes them: a line is one ExportTraceServiceRequest."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MAX_SHOWN = 60  # characters of a line that is wrong


class BadTrace(ValueError):
    """The file holds something else than traces; the message names the line."""


@dataclass(frozen=True, slots=True)
class Span:
    """One span. Times are nanoseconds since 1970, by the clock of the machine that made it."""

    trace_id: str
    span_id: str
    parent_id: str  # empty: none
    name: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any] = field(default_factory=dict)
    links: tuple[str, ...] = ()  # span ids
    service: str = ""

    @property
    def ms(self) -> float:
        """Its duration."""
        return (self.end_ns - self.start_ns) / 1e6

    def number(self, name: str) -> int:
        """A whole number; 0 where it is absent or something else."""
        value = self.attributes.get(name)
        return value if isinstance(value, int) else 0


@dataclass(frozen=True, slots=True)
class Trace:
    """All spans of a file."""

    spans: tuple[Span, ...]
    cut: bool  # the last line has no end: a process was killed, or the disk was full


def read_trace(path: Path) -> Trace:
    """Raises BadTrace, and OSError for a file that cannot be read. A last line that was cut is left out."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise BadTrace(f"{path} is no text: expected OTLP JSON lines, as --trace-file writes them") from error
    spans: list[Span] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            spans += _spans(json.loads(line))
        except json.JSONDecodeError as error:
            if number == len(lines) and spans:
                return Trace(tuple(spans), cut=True)
            raise BadTrace(f"{path}, line {number}: no JSON ({error.msg}): {_start_of(line)}") from error
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            wrong = f"lacks {error}" if isinstance(error, KeyError) else f"has a value that it may not have ({error})"
            raise BadTrace(f"{path}, line {number}: no OTLP trace, {wrong}: {_start_of(line)}") from error
    if not spans:
        raise BadTrace(f"{path} holds no spans: nothing was traced, or not yet written (services write every second)")
    return Trace(tuple(spans), cut=False)


def _spans(request: dict[str, Any]) -> Iterator[Span]:
    for resource in request["resourceSpans"]:
        named = _attributes(resource.get("resource", {}).get("attributes", ()))
        service = str(named.get("service.name", ""))
        for scope in resource.get("scopeSpans", ()):
            for span in scope.get("spans", ()):
                yield _span(span, service)


def _span(span: dict[str, Any], service: str) -> Span:
    return Span(
        trace_id=str(span["traceId"]),
        span_id=str(span["spanId"]),
        parent_id=str(span.get("parentSpanId", "")),
        name=str(span["name"]),
        start_ns=int(span["startTimeUnixNano"]),
        end_ns=int(span["endTimeUnixNano"]),
        attributes=_attributes(span.get("attributes", ())),
        links=tuple(str(link["spanId"]) for link in span.get("links", ())),
        service=service,
    )


def _attributes(entries: Iterable[dict[str, Any]]) -> dict[str, Any]:
    return {entry["key"]: _value(entry["value"]) for entry in entries}


def _value(value: dict[str, Any]) -> Any:
    """A plain value: OTLP says its type, and writes whole numbers as texts."""
    for kind, inner in value.items():
        if kind == "intValue":
            return int(inner)
        if kind == "doubleValue":
            return float(inner)
        if kind == "arrayValue":
            return [_value(item) for item in inner.get("values", ())]
        return inner
    return None


def _start_of(line: str) -> str:
    return repr(line if len(line) <= MAX_SHOWN else line[:MAX_SHOWN] + "...")
