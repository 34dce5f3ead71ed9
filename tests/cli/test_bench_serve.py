"""`outrider bench serve` over both protocols against a running gateway, and what it refuses."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli.command import outrider, succeed
from cli.conftest import START_S, Trio

from outrider.bench.load_report import arrivals
from outrider.cli.__main__ import main
from outrider.cli.local_services import Services, wait_for_draft

MODE = ("--mode", "sequential")


@pytest.fixture(scope="module")
def http(trio: Trio) -> Iterator[str]:
    """The URL of a second gateway before the same services."""
    with Services() as services:
        peers = ["--draft", trio.draft, "--target", trio.target, "--tokenizer", str(trio.pair.target)]
        listen = ["--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--grace-s", "1"]
        gateway = services.start("gateway", ["gateway", *listen, *peers])
        wait_for_draft(services.wait(gateway, START_S), START_S, services.check)
        (line,) = [line for line in gateway.tail().splitlines() if "gateway http on" in line]
        yield f"http://{line.split()[-1]}"


def bench(tmp_path: Path, *arguments: str) -> tuple[str, Any, ET.Element]:
    """What it printed, its JSON, and its picture. A mode of its own: by itself a gateway may find that drafts do not
    pay on this machine."""
    files = ("--json", str(tmp_path / "result.json"), f"--plot={tmp_path / 'plot.svg'}")
    out = succeed("bench", "serve", "--requests", "6", "--max-tokens", "8", "--ignore-eos", *files, *MODE, *arguments)
    return out, json.loads((tmp_path / "result.json").read_text()), ET.parse(tmp_path / "plot.svg").getroot()


def test_a_closed_loop_over_grpc(trio: Trio, tmp_path: Path) -> None:
    objectives = ("--slo-ttft-ms", "60000", "--slo-itl-ms", "0.001")
    out, result, plot = bench(tmp_path, "--gateway", trio.gateway, "--concurrency", "2", *objectives)
    assert "6 of 6 requests" in out and "closed loop, 2 at once" in out and "target with draft" in out
    assert result["completed"] == 6 and result["failed"] == {} and result["output_tokens"] == 48
    assert [row["output_tokens"] for row in result["records"]] == [8] * 6
    speculation = result["speculation"]
    assert speculation["num_accepted_tokens"] == sum(speculation["accepted_per_position"]) > 0
    assert f"{speculation['num_accepted_tokens']}/{speculation['num_draft_tokens']}" in out
    assert result["goodput"]["good"] == 0 and "goodput      0.00 requests/s: 0 of 6" in out
    for name in ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms"):
        times = result["times"][name]
        assert 0 < times["p50"] <= times["p90"] <= times["p99"] <= times["max"]
    assert plot.tag.endswith("svg") and len(plot.findall("{*}path")) > 20


def test_an_open_loop_over_http_with_the_same_prompts(trio: Trio, http: str, tmp_path: Path) -> None:
    out, result, _ = bench(
        tmp_path, "--base-url", f"{http}/v1/", "--rate", "20", "--seed", "3", "--slo-ttft-ms", "60000"
    )
    assert "open loop, 20 requests/s (Poisson)" in out and result["server"] == "target"
    assert result["completed"] == 6 and result["output_tokens"] == 48 and result["goodput"]["good"] == 6
    dues = [row["due_ms"] / 1e3 for row in result["records"]]
    assert dues == pytest.approx(arrivals(6, 20, 3), abs=0.002)
    _, other, _ = bench(tmp_path, "--gateway", trio.gateway, "--seed", "3", "--concurrency", "1", "--warmup", "0")
    assert other["prompt_tokens"] == result["prompt_tokens"]  # the same prompts, counted alike
    assert result["speculation"]["num_rounds"] > 0 and result["speculation"]["num_accepted_tokens"] > 0


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
        (("--gateway", "a:1", "--rate", "0"), "--rate: input should be greater than 0"),
    ],
)
def test_settings_that_do_not_fit(
    arguments: tuple[str, ...], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "serve", *arguments])
    shown = capsys.readouterr().err
    assert ended.value.code == 2 and shown.startswith("outrider bench serve: error: ") and complaint in shown


@pytest.mark.parametrize(
    ("arguments", "status", "complaint"),
    [
        (("--gateway", "a:1", "--rat", "2"), 2, "unknown flag --rat: did you mean --rate?"),
        (("--gateway", "127.0.0.1:1"), 1, "onnect"),
        (("--base-url", "http://127.0.0.1:1"), 1, "onnect"),
        (("--gateway", "127.0.0.1:1", "--prompts", "nowhere"), 1, "nowhere"),
        (("--gateway", "127.0.0.1:1", "--json", "no/such/folder.json"), 1, "no/such/folder.json"),
    ],
)
def test_what_cannot_be_done_is_one_line(arguments: tuple[str, ...], status: int, complaint: str) -> None:
    done = outrider("bench", "serve", *arguments)
    assert done.returncode == status and done.stdout == "" and complaint in done.stderr
    assert done.stderr.startswith("outrider bench serve: error: ") and "Traceback" not in done.stderr


def test_bench_stays_a_command_of_its_own() -> None:
    assert succeed("bench", "--help").startswith("usage: outrider bench [-h]")
    text = succeed("bench", "serve", "--help")
    assert text.startswith("usage: outrider bench serve ") and "OUTRIDER_BENCH_SERVE__" in text
    done = outrider("bench", "sevre", "--rate", "1")
    assert done.returncode == 2 and "unknown command bench sevre: did you mean bench serve?" in done.stderr
    done = outrider("bench", "--bathces", "1")
    assert done.returncode == 2 and "did you mean --batches?" in done.stderr
