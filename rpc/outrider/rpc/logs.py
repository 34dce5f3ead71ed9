"""Logs, set up once per process: lines for people, or one JSON object a line for a collector.

What a line is about travels beside its message: `log.info("...", extra=about(request_id=...))`. Lines for people show
the message alone; JSON has every field, and the ids of the trace that the line belongs to. Nothing here holds a prompt:
who logs one says so by a flag of its own. A message may hold what clients or peers have said: it is one line, in which
nothing moves a terminal's cursor, and of bounded length."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Literal

from opentelemetry import trace

from outrider.rpc.messages import Open
from outrider.rpc.telemetry import context_from_traceparent

LogFormat = Literal["text", "json"]
TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
PID_FORMAT = TEXT_FORMAT.replace("%(levelname)s", "%(process)d %(levelname)s")
MAX_REASONS = 256
MAX_REASON_CHARS = 512
# Far above a client's name or a peer's complaint; a prompt that is asked for may be longer.
MAX_MESSAGE_CHARS = 64 * 1024
# Controls, and what turns a line about.
_UNSEEN = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_FIELDS = "outrider_fields"
log = logging.getLogger(__name__)


def about(traceparent: str = "", **fields: object) -> Mapping[str, object]:
    """What a line is about, for the `extra` of a logging call. Values are what JSON holds; None is left out. The trace
    of a W3C header stands as its ids; without one, the current span's."""
    return {_FIELDS: {"traceparent": traceparent, **fields}}


def of(sequence: Open) -> Mapping[str, object]:
    """The same for a line about a sequence of a stream, by its Open."""
    return about(sequence.traceparent, sequence_id=sequence.sequence_id)


def cut(text: str, most: int) -> str:
    """A text, or its beginning and how much is missing."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text) - most} characters more)"


def _plain(text: str) -> str:
    """With what is not seen in JSON's notation."""
    return _UNSEEN.sub(lambda found: json.dumps(found[0])[1:-1], text)


class LineFormatter(logging.Formatter):
    """A record as a line for people. Lines of a traceback are set in, so that none begins as a record does."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line, whatever the message holds."""
        record.message = _plain(cut(record.message, MAX_MESSAGE_CHARS))
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:
        """The traceback."""
        lines = cut(super().formatException(ei), MAX_MESSAGE_CHARS).splitlines()
        return "\n".join(f"  {_plain(line)}" for line in lines)


class JsonFormatter(logging.Formatter):
    """A record as one line of JSON: time (UTC, RFC 3339), level, logger, message, service, trace_id and span_id where
    there is a trace, what the line is about, and an exception with its traceback."""

    def __init__(self, service: str, shows_pid: bool = False) -> None:
        super().__init__()
        self._service, self._shows_pid = service, shows_pid

    def format(self, record: logging.LogRecord) -> str:
        """Without line ends, whatever the message holds."""
        fields = dict(getattr(record, _FIELDS, {}))
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": cut(record.getMessage(), MAX_MESSAGE_CHARS),
            "service": self._service,
            **({"pid": record.process} if self._shows_pid else {}),
            **_trace_ids(fields.pop("traceparent", "")),
            **{name: value for name, value in fields.items() if value is not None},
        }
        if record.exc_info and record.exc_info[0] is not None:
            entry["exception"] = self.formatException(record.exc_info)
        return _plain(json.dumps(entry, ensure_ascii=False, default=str))


class OnceWarnings:
    """Warns of each reason once, whatever numbers it holds. `text` has a place for the reason."""

    def __init__(self, text: str) -> None:
        self._text = f"{text} (not said again)"
        self._seen: set[str] = set()

    def warn(self, reason: str) -> None:
        """Says it, unless it was said before."""
        reason = cut(reason, MAX_REASON_CHARS)
        key = re.sub(r"\d+", "#", reason)
        if key in self._seen or len(self._seen) >= MAX_REASONS:
            return
        self._seen.add(key)
        log.warning(self._text, reason)


def setup_logging(log_format: LogFormat, service: str, shows_pid: bool = False) -> None:
    """Lines of level INFO and above go to standard error, of this process as `service`; with its id where several
    write there under one name."""
    handler = logging.StreamHandler(sys.stderr)
    text = LineFormatter(PID_FORMAT if shows_pid else TEXT_FORMAT)
    handler.setFormatter(JsonFormatter(service, shows_pid) if log_format == "json" else text)
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def _trace_ids(traceparent: str) -> dict[str, str]:
    context = context_from_traceparent(traceparent) if traceparent else None
    span = trace.get_current_span(context).get_span_context()
    return {"trace_id": f"{span.trace_id:032x}", "span_id": f"{span.span_id:016x}"} if span.is_valid else {}
