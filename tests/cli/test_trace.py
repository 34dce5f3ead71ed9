"""`outrider trace`: files that the services wrote, and files that nobody should have."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from support.services import Trio, outrider, succeed

from outrider.cli.otlp_file import Span, read_trace
from outrider.cli.trace import find_requests, sums

MS = 1_000_000


def attribute(name: str, value: Any) -> dict[str, Any]:
    kind = {int: "intValue", str: "stringValue", float: "doubleValue"}.get(type(value), "arrayValue")
    if kind == "arrayValue":
        return {"key": name, "value": {kind: {"values": [{"stringValue": item} for item in value]}}}
    return {"key": name, "value": {kind: str(value) if kind == "intValue" else value}}


def span(name: str, span_id: str, start: float, end: float, parent: str = "", **more: Any) -> Any:
    """A span as OTLP writes it; times in ms."""
    made: dict[str, Any] = {
        "traceId": "t" * 32, "spanId": span_id, "name": name, "startTimeUnixNano": str(round(start * MS)),
        "endTimeUnixNano": str(round(end * MS)), "status": {},
    }  # fmt: skip
    if parent:
        made["parentSpanId"] = parent
    return made | {
        "attributes": [attribute(f"outrider.{key.replace('__', '.')}", value) for key, value in more.items()]
    }


def line(*spans: Any, service: str = "gateway") -> str:
    resource = {"attributes": [attribute("service.name", f"outrider-{service}")]}
    return json.dumps({"resourceSpans": [{"resource": resource, "scopeSpans": [{"spans": list(spans)}]}]}) + "\n"


def two_rounds(root: str = "r1", name: str = "mine", at: float = 100.0) -> str:
    """A request of two rounds of 8 ms: the first plain, the second with every part, 1 or 2 ms each."""
    first = {"round__index": 0, "round__k": 4, "round__drafted": 0, "round__accepted": 0, "round__emitted": 1}
    second = {"round__index": 1, "round__k": 4, "round__drafted": 4, "round__accepted": 3, "round__emitted": 4}
    one, two = f"{root}-1", f"{root}-2"
    return line(
        span("outrider.verify", f"{root}a", at, at + 8, one),
        span("outrider.round", one, at, at + 8, root, **first),
        span("outrider.draft", f"{root}b", at + 8, at + 10, two),
        span("outrider.wire", f"{root}c", at + 10, at + 11, two),
        span("outrider.queue", f"{root}d", at + 11, at + 12, two),
        span("outrider.verify", f"{root}e", at + 12, at + 14, two),
        span("outrider.sample", f"{root}f", at + 14, at + 16, two),
        span("outrider.round", two, at + 8, at + 16, root, round__chain=7, round__policy="chains", **second),
    ) + line(span("text_completion toy", root, at, at + 16, request__id=name, request__acceptance="coupled"))


def written(tmp_path: Path, *texts: str) -> str:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(texts))
    return str(path)


def test_the_sums_line_by_line(tmp_path: Path) -> None:
    """The first round counts in the sums, and not in the percentiles."""
    out = succeed("trace", written(tmp_path, two_rounds()))
    assert out.splitlines() == [
        "request mine, 1970-01-01 00:00:00.100, 16.0 ms",
        "  text_completion toy: 0 prompt tokens (0 cached), 0 tokens, then no end",
        "  2 rounds, 2.50 tokens a round, accepted 75% (3/4), coupled acceptance, mode chains",
        "",
        "stage           ms  share       p50      p90      p99      max",
        "draft         2.00    12%      2.00     2.00     2.00     2.00",
        "wire          1.00     6%      1.00     1.00     1.00     1.00",
        "queue         1.00     6%      1.00     1.00     1.00     1.00",
        "verify       10.00    62%      2.00     2.00     2.00     2.00",
        "sample        2.00    12%      2.00     2.00     2.00     2.00",
        "round        16.00   100%      8.00     8.00     8.00     8.00",
    ]


def test_percentiles_are_of_the_rounds_by_nearest_rank() -> None:
    rounds = [(index, {"ms": float(index), "verify_ms": 1.0}) for index in range(201)]
    rows = [row.split() for row in sums(rounds)]
    assert rows[-1] == ["round", "20100.00", "100%", "100.00", "180.00", "198.00", "200.00"]
    assert rows[4] == ["verify", "201.00", "1%", *["1.00"] * 4] and list(sums([])) == []


def test_what_a_constraint_did(tmp_path: Path) -> None:
    told: Any = {"request__constraint": "json_schema", "request__compile_us": 2500}
    numbers = {"round__emitted": 6, "round__forced": 5, "round__forced_accepted": 4, "round__mask_us": 300}
    text = line(
        span("outrider.round", "r-1", 100, 108, "r", **numbers, round__drafted=2, round__accepted=1),
        span("outrider.round", "r-2", 108, 116, "r", round__emitted=1),
    ) + line(span("chat toy", "r", 100, 116, request__id="mine", request__acceptance="coupled", **told))
    out = succeed("trace", written(tmp_path, text))
    assert "\n  constraint json_schema, compiled in 2.5 ms; steps waited 0.3 ms for masks\n" in out
    assert "2 rounds, 3.50 tokens a round, accepted 50% (1/2), forced 4/5, coupled acceptance" in out


def test_one_of_several_requests(tmp_path: Path) -> None:
    file = written(tmp_path, two_rounds("r1", "gen-abc", 500.0), two_rounds("r2", "gen-xyz", 100.0))
    listed = succeed("trace", file).splitlines()
    assert [row.split()[0] for row in listed[1:3]] == ["gen-xyz", "gen-abc"]  # by their beginnings
    assert "75% (3/4)" in listed[1] and "show one with --request ID" in listed[-1]
    assert ["round", "32.00", "100%", "8.00", "8.00", "8.00", "8.00"] in map(str.split, listed)  # of both
    assert succeed("trace", file, "--request", "gen-x").startswith("request gen-xyz,")
    assert succeed("trace", file, "--last").startswith("request gen-abc,")
    assert succeed("trace", file, env={"OUTRIDER_TRACE__REQUEST": "gen-xyz"}).startswith("request gen-xyz,")
    for wanted, complaint in [
        ("gen-abd", "no request gen-abd: did you mean gen-abc?"),
        ("gen", "2 requests are called gen: gen-xyz, gen-abc"),
        ("9", "no request 9: the last one is gen-abc, of 2"),
    ]:
        done = outrider("trace", file, "--request", wanted)
        assert done.returncode == 1 and done.stderr == f"outrider trace: error: {complaint}\n"


def test_a_request_without_its_end(tmp_path: Path) -> None:
    out = succeed("trace", written(tmp_path, two_rounds().split("\n")[0] + "\n"))
    assert f"request {'t' * 32}," in out and "its end is not in the file" in out and "\ndraft " in out


def test_a_request_without_rounds(tmp_path: Path) -> None:
    out = succeed("trace", written(tmp_path, line(span("chat toy", "r", 0, 1, request__id="x")), "\n"))
    assert "no rounds: it ended before its first token" in out


def test_several_completions_are_summed_up_together(tmp_path: Path) -> None:
    spans = [
        span("outrider.round", f"{n}", n, n + 1, "r", round__index=n // 2, request__completion=n % 2) for n in range(50)
    ]
    out = succeed("trace", written(tmp_path, line(*spans, span("x", "r", 0, 50, request__id="n2"))))
    assert "  50 rounds, 0.00 tokens a round, nothing drafted, " in out and "\nround        50.00   100% " in out


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "holds no spans: nothing was traced, or not yet written"),
        ("{}\n", "line 1: no OTLP trace, lacks 'resourceSpans': '{}'"),
        ("[1]\n", "line 1: no OTLP trace, has a value that it may not have"),
        ("hello\n", "line 1: no JSON (Expecting value): 'hello'"),
        (two_rounds() + '{"resour\n' + two_rounds(), "line 3: no JSON"),
        ('{"resourceSpans":[{"scopeSpans":[{"spans":[{"traceId":"a"}]}]}]}', "line 1: no OTLP trace, lacks 'spanId'"),
        (line(span("a", "b", 0, 1)).replace('"0"', '"x"'), "line 1: no OTLP trace, has a value"),
        (line(span("outrider.draft_batch", "s", 0, 1), service="draft"), "has no request: the gateway writes them"),
    ],
)
def test_what_is_no_trace_is_one_line(tmp_path: Path, text: str, complaint: str) -> None:
    file = written(tmp_path, text)
    done = outrider("trace", file)
    assert done.returncode == 1 and done.stdout == "" and done.stderr.count("\n") == 1
    assert done.stderr.startswith("outrider trace: error: ") and complaint in done.stderr and file in done.stderr


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\x1f\x8b\xff\x00")
    for path, complaint in [
        ("nowhere", "nowhere: no such file or directory\n"),
        (".", ".: is a directory\n"),
        ("binary", "is no text"),
    ]:
        done = outrider("trace", path, cwd=tmp_path)
        assert done.returncode == 1 and done.stderr.count("\n") == 1
        assert done.stderr.startswith("outrider trace: error: ") and complaint in done.stderr
    done = outrider("trace")
    assert done.returncode == 2 and "give the file, as in outrider trace FILE" in done.stderr
    done = outrider("trace", "a", "--requst", "b")
    assert done.returncode == 2 and "unknown flag --requst: did you mean --request?" in done.stderr


def test_a_cut_last_line_is_left_out(tmp_path: Path) -> None:
    done = outrider("trace", written(tmp_path, two_rounds(), two_rounds("r2")[:400]))
    assert done.returncode == 0 and "the last line of" in done.stderr and done.stdout.startswith("request mine,")


def test_what_the_services_wrote(trio: Trio) -> None:
    """A request by its name; its rounds add up to what the client was told."""
    name = "traced-by-name"
    told = succeed(
        "generate", "--gateway", trio.gateway, "def main():", "--max-tokens", "24", "--temperature", "0",
        "--request-id", name, "--json",
    )  # fmt: skip
    stats = json.loads(told)["speculation"]
    end = time.monotonic() + 60  # the exporter writes every second
    while (done := outrider("trace", str(trio.trace_file), "--request", name)).returncode and time.monotonic() < end:
        time.sleep(0.1)
    assert done.returncode == 0, done.stderr
    accepted = f"({stats['num_accepted_tokens']}/{stats['num_draft_tokens']})"
    assert f"  {stats['num_rounds']} rounds, {24 / stats['num_rounds']:.2f} tokens a round, accepted " in done.stdout
    assert accepted in done.stdout and "24 tokens, the first after" in done.stdout
    times = {name: float(ms) for name, ms, *_ in map(str.split, done.stdout.splitlines()[-6:])}
    assert 0 < times["verify"] < times["round"]


def test_spans_as_they_are_read(tmp_path: Path) -> None:
    file = Path(written(tmp_path, line(span("a", "b", 1, 2, "c", x=3, y=["z"]), service="draft")))
    (found,), is_cut = read_trace(file)
    attributes = {"outrider.x": 3, "outrider.y": ["z"]}
    assert found == Span("t" * 32, "b", "c", "a", MS, 2 * MS, attributes)
    assert not is_cut and find_requests([found]) == []
    with pytest.raises(ValueError, match="line 1: no OTLP trace"):
        read_trace(Path(written(tmp_path, "1")))


def test_rounds_that_are_summed_up_count(tmp_path: Path) -> None:
    more = {"round__drafted": 8, "round__accepted": 4, "round__emitted": 6, "rounds__count": 2}
    text = two_rounds() + line(span("outrider.rounds", "r1-3", 116, 130, "r1", **more))
    out = succeed("trace", written(tmp_path, text))
    assert "4 rounds, 2.75 tokens a round, accepted 58% (7/12)" in out
    assert out.splitlines()[-1].startswith("2 more rounds are in the trace as one span")
    assert "more rounds" not in succeed("trace", written(tmp_path, two_rounds()))
