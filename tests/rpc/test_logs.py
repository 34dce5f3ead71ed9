"""Lines of logs: JSON that a collector can read, with the ids of what they are about."""

from __future__ import annotations

import io
import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider

from outrider.rpc.logs import MAX_MESSAGE_CHARS, MAX_REASON_CHARS, OnceWarnings, about, setup_logging

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
log = logging.getLogger("outrider.test")


@contextmanager
def lines(monkeypatch: pytest.MonkeyPatch, log_format: Any, **options: bool) -> Iterator[list[str]]:
    """What is logged by a process that was set up so."""
    root, written, found = logging.getLogger(), io.StringIO(), list[str]()
    monkeypatch.setattr(sys, "stderr", written)
    before, level = root.handlers[:], root.level
    root.handlers.clear()
    try:
        setup_logging(log_format, "outrider-target", **options)
        yield found
    finally:
        root.handlers[:] = before
        root.setLevel(level)
        found += written.getvalue().splitlines()


def test_a_line_is_an_object(monkeypatch: pytest.MonkeyPatch) -> None:
    header = f"00-{TRACE}-{SPAN}-01"
    with lines(monkeypatch, "json") as found:
        log.warning("a message of %d\nlines", 2, extra=about(traceparent=header, request_id="r1", tokens=3, n=None))
        log.debug("not shown")
    (entry,) = map(json.loads, found)
    time = entry.pop("time")
    assert len(time) == len("2026-01-01T00:00:00.000+00:00") and time.endswith("+00:00")
    assert entry == {
        "level": "WARNING", "logger": "outrider.test", "message": "a message of 2\nlines", "service": "outrider-target",
        "trace_id": TRACE, "span_id": SPAN, "request_id": "r1", "tokens": 3,
    }  # fmt: skip


def test_the_current_span_counts_where_no_other_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    tracer = TracerProvider(shutdown_on_exit=False).get_tracer("test")
    with lines(monkeypatch, "json") as found, tracer.start_as_current_span("one") as span:
        log.info("inside")
    context = span.get_span_context()
    (entry,) = map(json.loads, found)
    assert (entry["trace_id"], entry["span_id"]) == (f"{context.trace_id:032x}", f"{context.span_id:016x}")


@pytest.mark.parametrize("header", ["", "nonsense"])
def test_without_a_trace_there_are_no_ids(monkeypatch: pytest.MonkeyPatch, header: str) -> None:
    with lines(monkeypatch, "json") as found:
        log.info("plain", extra=about(traceparent=header))
    assert not {"trace_id", "span_id", "traceparent"} & json.loads(found[0]).keys()


def test_an_exception_is_part_of_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with lines(monkeypatch, "json") as found:
        try:
            raise ValueError("what was wrong")
        except ValueError:
            log.exception("it failed")
    (entry,) = map(json.loads, found)
    assert entry["exception"].startswith("Traceback") and entry["exception"].endswith("ValueError: what was wrong")


def test_lines_for_people_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    with lines(monkeypatch, "text") as found:
        log.info("hello", extra=about(request_id="r1"))
    assert len(found) == 1 and found[0].endswith(" INFO outrider.test: hello")


def test_processes_of_one_name_show_their_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    for log_format in ("json", "text"):
        with lines(monkeypatch, log_format, shows_pid=True) as found:
            log.warning("hello")
        (line,) = found
        assert json.loads(line)["pid"] == os.getpid() if log_format == "json" else f" {os.getpid()} WARNING " in line


def test_a_warning_is_said_once_whatever_its_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    with lines(monkeypatch, "json") as found:
        warnings = OnceWarnings("no draft: %s")
        for reason in ("10.0.0.1:5 is gone", "10.0.0.2:7 is gone", "it is slow", "it is slow"):
            warnings.warn(reason)
    said = [json.loads(line)["message"] for line in found]
    assert said == ["no draft: 10.0.0.1:5 is gone (not said again)", "no draft: it is slow (not said again)"]


FORGED = "gone\n2026-01-01 00:00:00,000 INFO outrider: all is well\x1b[2J\x9b2J\r\u2028\u202e\ud800\x00"
SHOWN = r"gone\n2026-01-01 00:00:00,000 INFO outrider: all is well\u001b[2J\u009b2J\r\u2028\u202e\ud800\u0000"


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_what_others_say_makes_no_line_of_its_own(log_format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it reach a terminal's controls, or end the log's stream by what no file can hold."""
    with lines(monkeypatch, log_format) as found:
        log.warning("a client says %s", FORGED, extra=about(request_id=FORGED))
        OnceWarnings("no draft: %s").warn(FORGED)
        try:
            raise ValueError(FORGED)
        except ValueError:
            log.exception("it failed")
    assert all(line.isprintable() and line.isascii() for line in found)
    if log_format == "json":
        assert [json.loads(line)["message"] for line in found[:1]] == [f"a client says {FORGED}"]
        assert len(found) == 3 and json.loads(found[0])["request_id"] == FORGED
    else:
        assert found[0].endswith(f" WARNING outrider.test: a client says {SHOWN}")
        assert [line for line in found if not line.startswith("  ")] == found[:3]


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_what_others_say_is_cut(log_format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with lines(monkeypatch, log_format) as found:
        log.warning("a client says %s", "x" * (4 << 20))
        warnings = OnceWarnings("no draft: %s")
        warnings.warn("y" * (4 << 20))
    assert len(found[0]) < MAX_MESSAGE_CHARS + 500 and "characters more)" in found[0]
    assert len(found[1]) < MAX_REASON_CHARS + 500 and "characters more)" in found[1]
    assert sum(map(len, warnings._seen)) < MAX_REASON_CHARS + 100
