"""The load that `outrider bench serve` makes: its figures against toy servers whose answers and times are known.

`outrider bench serve` over both protocols against a running gateway, and what it refuses."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support.bench import texts_of
from support.environment import START_S
from support.services import Trio, outrider, succeed

from outrider.bench.load.clients import HttpClient
from outrider.bench.load.report import distribution, render, summarise
from outrider.bench.load.requests import (
    BenchRequest,
    BenchServeSettings,
    Delivery,
    Record,
    arrivals,
    closed_loop,
    measure,
    open_loop,
)
from outrider.bench.prompts import choose, read_texts
from outrider.bench.results import percentile
from outrider.cli.__main__ import main
from outrider.cli.local_services import Services, wait_for_draft
from outrider.cli.terminal import parse
from outrider.rpc.errors import Unavailable

ASK = BenchRequest("x", chat=False, max_tokens=4, ignore_eos=False, temperature=0.0, seed=0)
MODELS = b'{"data": [{"id": "toy"}]}'


def settings(*argv: str) -> BenchServeSettings:
    return parse(BenchServeSettings, argv, "outrider bench serve", "")


@asynccontextmanager
async def toy_server(answer: bytes, models: bytes = MODELS) -> AsyncGenerator[str, None]:
    """An HTTP server that says the same to everybody."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if length := re.search(rb"(?i)content-length: (\d+)", head):
            await reader.readexactly(int(length[1]))
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + models if head.startswith(b"GET /v1/models ") else answer)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        yield f"http://{host}:{port}"


STREAM = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
    b'data: {"choices":[{"text":"a","finish_reason":null}]}\n\n'
    b'data: {"choices":[{"text":"b","finish_reason":"stop"}]}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":5}}\n\ndata: [DONE]\n\n'
)


async def test_a_foreign_server_without_token_ids_or_speculation(capsys: pytest.CaptureFixture[str]) -> None:
    async with toy_server(STREAM) as url:
        common = ("bench", "serve", "--base-url", url)
        assert await asyncio.to_thread(main, [*common, "--requests", "3"]) == 0
        said = capsys.readouterr().out
        assert "3 of 3 requests" in said and "acceptance   not known" in said
        assert await asyncio.to_thread(main, [*common, "--no-speculation"]) == 1
        assert "says nothing of speculation" in capsys.readouterr().err
        assert await asyncio.to_thread(main, [*common, "--model", "other"]) == 1
        assert "there is no model 'other'; there are: toy" in capsys.readouterr().err


async def test_a_load_that_fails_has_its_reasons_and_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    busy = b'HTTP/1.1 429 Busy\r\n\r\n{"error": {"message": "come back"}}'
    async with toy_server(busy) as url:
        common = ("bench", "serve", "--base-url", url, "--requests", "2")
        assert await asyncio.to_thread(main, [*common, "--warmup", "0", "--slo-ttft-ms", "1"]) == 1
        said = capsys.readouterr().out
        assert "0 of 2 requests" in said and "2 x HTTP 429: come back" in said
        assert await asyncio.to_thread(main, list(common)) == 1
        assert "a request to warm up failed: HTTP 429: come back" in capsys.readouterr().err


HEAD, BODY = STREAM[: STREAM.index(b"data:")], STREAM[STREAM.index(b"data:") :]
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (STREAM, ""),
        (CHUNKED + b"".join(b"%x\r\n%b\r\n" % (len(half), half) for half in (BODY[:30], BODY[30:], b"")), ""),
        (b"HTTP/1.1 500 Oh\r\n\r\n<html>", "HTTP 500: <html>"),
        (STREAM.partition(b'data: {"choices":[{"text":"b"')[0], "the stream ended without a finish reason"),
        (HEAD + b'data: {"error": {"message": "it broke"}}\n\n', "it broke"),
        (HEAD + b"data: {\n\n", "an event is no JSON: b'{'"),
        (HEAD + b"data: 1\n\n", "an event is no object: b'1'"),
        (CHUNKED + b"99\r\nabc", "the server broke off in the middle of its answer"),
        (b"\x00\x00\r\n", "this is no HTTP server: "),
    ],
)
async def test_what_a_server_may_answer(answer: bytes, error: str) -> None:
    async with toy_server(answer) as url:
        server = HttpClient(settings("--base-url", url))
        assert await server.describe() == "toy"
        found = await measure(server, ASK, Record(0, 0.0), 5.0, nobody)
    assert found.error.startswith(error) and bool(found.error) == bool(error)
    assert bool(error) or (found.num_tokens, found.prompt_tokens, found.finish, len(found.times)) == (5, 3, "stop", 2)


async def test_a_list_of_models_that_is_none() -> None:
    async with toy_server(b"", models=b"[]") as url:
        with pytest.raises(ValueError, match="is no list of models"):
            await HttpClient(settings("--base-url", url)).describe()


class Toy:
    """Delivers twice: after `wait` seconds and at once again; says how many were under way at most."""

    def __init__(self, wait: float, error: Exception | None = None) -> None:
        self.wait, self.error = wait, error
        self.now = self.most = 0

    async def send(self, request: BenchRequest) -> AsyncGenerator[Delivery, None]:
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await asyncio.sleep(self.wait)
            if self.error is not None:
                raise self.error
            yield Delivery(num_tokens=1, text=True)
            yield Delivery(num_tokens=3, text=True, finish="length", usage=(2, 4))
        finally:
            self.now -= 1


def nobody(record: Record) -> None:
    """Nobody watches."""


async def test_a_closed_loop_never_has_more_under_way() -> None:
    toy = Toy(0.01)
    records = await closed_loop(toy, [ASK] * 9, 3, 10.0, nobody)
    assert toy.most == 3 and [record.index for record in records] == list(range(9))
    assert all(record.num_tokens == 4 and not record.error for record in records)


async def test_an_open_loop_does_not_wait_for_answers() -> None:
    """All arrive while the first is still under way, and a late start counts from when it was due."""
    toy = Toy(0.3)
    records = await open_loop(toy, [ASK] * 8, 1000.0, 1, 10.0, nobody)
    assert toy.most == 8
    assert [record.due - records[0].due for record in records] == pytest.approx(arrivals(8, 1000.0, 1))
    assert all(record.ttft is not None and record.ttft >= 0.29 for record in records)


async def test_a_request_that_fails_or_takes_too_long_says_so() -> None:
    failed = await measure(Toy(0.0, Unavailable("gone")), ASK, Record(0, 0.0), 5.0, nobody)
    assert failed.error == "gone" and failed.num_tokens == 0
    assert (await measure(Toy(5.0), ASK, Record(0, 0.0), 0.01, nobody)).error == "no end within 0.01 s"


def test_arrivals_are_poisson() -> None:
    times = arrivals(20_000, 5.0, 0)
    gaps = [after - before for before, after in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    deviation = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert mean == pytest.approx(0.2, rel=0.03) and deviation == pytest.approx(0.2, rel=0.05)  # exponential: alike
    assert times == arrivals(20_000, 5.0, 0) != arrivals(20_000, 5.0, 1)


def record(index: int, *times: float, counts: tuple[int, ...], due: float = 0.0, error: str = "") -> Record:
    """A request that was due at `due`, was sent 0.1 s late, and ended with its last delivery."""
    ended = times[-1] if times else due
    return Record(index, due, due + 0.1, ended, list(times), list(counts), 1, sum(counts), "stop", error=error)


def test_the_figures() -> None:
    """Two requests in 2 s and one that failed: 4 and 2 tokens."""
    asked = settings("--gateway", "a:1", "--slo-ttft-ms", "600", "--slo-itl-ms", "250")
    records = [
        record(0, 0.5, 0.7, 1.1, counts=(1, 1, 2)),
        record(1, 1.5, 2.0, counts=(1, 1), due=1.0),
        record(2, due=1.0, counts=(), error="gone"),
    ]
    result = summarise(asked, "toy", records)
    assert result["most_late_ms"] == pytest.approx(100)
    assert result["seconds"] == 2.0 and result["output_tokens_per_s"] == 3.0 and result["requests_per_s"] == 1.0
    times = result["times"]
    assert times["ttft_ms"]["p50"] == 500.0 and times["e2e_ms"]["max"] == 1100.0
    assert times["itl_ms"]["count"] == 3 and times["itl_ms"]["mean"] == pytest.approx(1100 / 3, abs=0.001)
    assert times["tpot_ms"]["max"] == 500.0 and times["tpot_ms"]["p50"] == 350.0  # 200 and 500
    assert [row["good"] for row in result["records"]] == [True, False, False]
    assert result["goodput"] == {"slo_ttft_ms": 600.0, "slo_itl_ms": 250.0, "good": 1, "requests_per_s": 0.5}
    text = "\n".join(render(result))
    assert "2 of 3 requests in 2.00 s, 1 failed" in text and "1 x gone" in text
    assert "0.50 requests/s: 1 of 3 requests with a first token within 600 ms and 250 ms a token after it" in text


def test_percentiles() -> None:
    assert [percentile([1.0, 2.0, 3.0, 4.0], percent) for percent in (0, 50, 90, 100)] == pytest.approx(
        [1, 2.5, 3.7, 4]
    )
    assert percentile([5.0], 99) == 5.0 and distribution([]) is None


def test_prompts(tmp_path: Path) -> None:
    texts = {"a.json": '["x", "y"]', "b.jsonl": '"x"\n{"prompt": "y"}\n', "c.txt": "x\n\ny\n"}
    for name, content in texts.items():
        (tmp_path / name).write_text(content)
        assert read_texts(tmp_path / name) == ["x", "y"]
    wrong = {"d.json": "[1]", "e.jsonl": "{", "f.txt": "\n", "g.json": '[""]', "h.jsonl": '{"promt": "x"}'}
    for name, content in wrong.items():
        (tmp_path / name).write_text(content)
        with pytest.raises(ValueError, match=name):
            read_texts(tmp_path / name)
    chosen = choose(read_texts(None), 40, 1)
    assert chosen == choose(read_texts(None), 40, 1) != choose(read_texts(None), 40, 2)
    assert set(chosen) == set(read_texts(None)) and chosen[:16] == chosen[16:32]


MODE = ("--mode", "sequential")


@pytest.fixture(scope="module")
def http(trio: Trio) -> Iterator[str]:
    """The URL of a second gateway before the same services."""
    with Services() as services:
        gateway = services.start("gateway", [*trio.gateway_arguments(), "--http", "127.0.0.1:0"])
        wait_for_draft(services.wait(gateway, START_S), START_S, services.check)
        (line,) = [line for line in gateway.tail().splitlines() if "gateway http on" in line]
        yield f"http://{line.split()[-1]}"


def bench(folder: Path, *arguments: str) -> tuple[str, Any, set[str]]:
    """What it printed, its JSON, and the texts of its picture. A mode of its own: by itself a gateway may find that
    drafts do not pay on this machine."""
    files = ("--json", str(folder / "result.json"), f"--plot={folder / 'plot.svg'}")
    out = succeed("bench", "serve", "--requests", "6", "--max-tokens", "8", "--ignore-eos", *files, *MODE, *arguments)
    return out, json.loads((folder / "result.json").read_text()), texts_of(folder / "plot.svg")


def test_a_load_over_both_protocols_with_the_same_prompts(trio: Trio, http: str, tmp_path: Path) -> None:
    """A closed loop over gRPC, an open one over HTTP."""
    objectives = ("--slo-ttft-ms", "60000", "--slo-itl-ms", "0.001")
    out, result, plot = bench(
        tmp_path, "--gateway", trio.gateway, "--seed", "3", "--concurrency", "2", "--warmup", "0", *objectives
    )
    assert "6 of 6 requests" in out and "closed loop, 2 at once" in out and "python with python/draft" in out
    assert result["completed"] == 6 and result["failed"] == {} and result["output_tokens"] == 48
    assert [row["output_tokens"] for row in result["records"]] == [8] * 6
    speculation = result["speculation"]
    assert speculation["num_accepted_tokens"] == sum(speculation["accepted_per_position"]) > 0
    assert f"{speculation['num_accepted_tokens']}/{speculation['num_draft_tokens']}" in out
    assert result["goodput"]["good"] == 0 and "goodput      0.00 requests/s: 0 of 6" in out
    for name in ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms"):
        times = result["times"][name]
        assert 0 < times["p50"] <= times["p90"] <= times["p99"] <= times["max"]
    assert {"time to first token, ms", "end to end, ms", "objective 60000", "objective 0.001"} <= plot

    flags = ("--rate", "20", "--seed", "3", "--slo-ttft-ms", "60000")
    out, other, _ = bench(tmp_path, "--base-url", f"{http}/v1/", *flags)
    assert "open loop, 20 requests/s (Poisson)" in out and other["server"] == "python"
    assert other["completed"] == 6 and other["output_tokens"] == 48 and other["goodput"]["good"] == 6
    assert [row["due_ms"] / 1e3 for row in other["records"]] == pytest.approx(arrivals(6, 20, 3), abs=0.002)
    assert other["prompt_tokens"] == result["prompt_tokens"]  # the same prompts, counted alike
    assert other["speculation"]["num_rounds"] > 0 and other["speculation"]["num_accepted_tokens"] > 0


def test_chat_without_speculation_with_prompts_of_a_file(http: str, trio: Trio, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "def f():"}\n"hello"\n')
    common = ("--chat", "--no-speculation", "--prompts", str(prompts), "--warmup", "0")
    for place in (("--base-url", http), ("--gateway", trio.gateway)):
        out, result, _ = bench(tmp_path, *place, *common)
        assert result["completed"] == 6 and "nothing was drafted; 1.00 tokens a round" in out


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((), "give one of --base-url http://HOST:PORT and --gateway HOST:PORT"),
        (("--gateway", "a:1", "--rate", "1", "--concurrency", "1"), "not both"),
        (("--gateway", "a:1", "--model", "m"), "--model and --api-key go with --base-url"),
        (("--base-url", "127.0.0.1:8000"), "must be as http://HOST:PORT"),
        (("--base-url", "http://a", "--peer-ca", "ca.pem"), "must be as https://HOST:PORT"),
        (("--base-url", "https://a", "--peer-name", "b"), "--peer-name goes with --gateway"),
        (("--base-url", "http://a", "--api-key", "k", "--token-file", "f"), "give one of --api-key and --token-file"),
        (("--gateway", "a:1", "--rate", "0"), "--rate: input should be greater than 0"),
        (("--gateway", "a:1", "--rat", "2"), "unknown flag --rat: did you mean --rate?"),
    ],
)
def test_settings_that_do_not_fit(arguments: tuple[str, ...], complaint: str) -> None:
    done = outrider("bench", "serve", *arguments)
    assert done.returncode == 2 and complaint in done.stderr
    assert done.stderr.startswith("outrider bench serve: error: ")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--gateway", "127.0.0.1:1"), "onnect"),
        (("--base-url", "http://127.0.0.1:1"), "onnect"),
        (("--gateway", "127.0.0.1:1", "--prompts", "nowhere"), "nowhere"),
        (("--gateway", "127.0.0.1:1", "--json", "no/such/folder.json"), "no/such/folder.json"),
    ],
)
def test_what_cannot_be_done_is_one_line(arguments: tuple[str, ...], complaint: str) -> None:
    done = outrider("bench", "serve", *arguments)
    assert done.returncode == 1 and done.stdout == "" and complaint in done.stderr
    assert done.stderr.startswith("outrider bench serve: error: ") and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (("--help",), 0, r"usage: outrider bench \[-h\]"),
        (("serve", "--help"), 0, r"(?s)usage: outrider bench serve .*OUTRIDER_BENCH_SERVE__"),
        (("sevre", "--rate", "1"), 2, r".*unknown command bench sevre: did you mean bench serve\?"),
        (("--bathces", "1"), 2, r".*did you mean --batches\?"),
    ],
)
def test_bench_stays_a_command_of_its_own(arguments: tuple[str, ...], status: int, said: str) -> None:
    done = outrider("bench", *arguments)
    assert done.returncode == status and re.match(said, done.stderr if status else done.stdout)
