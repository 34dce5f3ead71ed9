"""`outrider plan`: from numbers, from services that run, and what it refuses."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.services import Trio

from outrider.cli.plan import main

NUMBERS = ("--target-ms", "1:25,64:30,512:80", "--draft-ms", "1:2,512:8", "--rtt-ms", "1", "--acceptance", "0.75")


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main([*arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_numbers_make_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    memory = ("--kv-gb", "40", "--target-kv-kb", "128", "--draft-kv-kb", "16", "--draft-gb", "2")
    report = planned(capsys, *NUMBERS, "--streams", "1000", "--max-ms", "22", "--seconds", "0", *memory)
    apart, beside = report["separate"], report["colocated"]
    assert apart["targets"] * apart["streams_per_target"] >= 1000 and apart["drafts"] > 0 == beside["drafts"]
    assert max(apart["foreseen_ms"], beside["foreseen_ms"]) <= 22
    assert (apart["cache_tokens_per_target"], beside["cache_tokens_per_target"]) == (312_500, 263_889)
    assert report["draft_cache_share"] == pytest.approx(0.1556, abs=1e-4)
    modes = {row["mode"]: row["foreseen_ms"] for row in report["one_stream"]}
    assert modes["off"] == 25 and modes["branches"] < modes["chains"] < modes["sequential"]


def test_the_text_has_closed_forms_beside_what_was_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*NUMBERS, "--streams", "4", "--seconds", "0.5"]) == 0
    text = capsys.readouterr().out
    (off,) = [line.split() for line in text.splitlines() if line.startswith("off")]
    assert off[1:3] == ["0", "25.00"] and float(off[3]) == pytest.approx(25, rel=0.06)
    for words in ("best mode", "simulated, auto", "targets", "gateways", "give --kv-gb"):
        assert words in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--target-ms", "25"), "give --draft-ms, --rtt-ms, --acceptance, or --target and --draft"),
        ((*NUMBERS, "--target-ms", "25,3"), "--target-ms: must be milliseconds, as 25, or ROWS:MS points"),
        ((*NUMBERS, "--draft-ms", "0:2"), "--draft-ms: must have rows of 1 or more"),
        ((*NUMBERS, "--acceptance", "1"), "--acceptance: input should be less than 1"),
        ((*NUMBERS, "--corrections", "0.8,0.5"), "--corrections sum up to more than 1"),
        ((*NUMBERS, "--target", "127.0.0.1:1"), "--target and --draft are measured together"),
        (("--target", "127.0.0.1:1", "--draft", "127.0.0.1:2"), "give --tokenizer"),
        ((*NUMBERS, "--peer-ca", "ca.pem"), "are for --target and --draft that run"),
    ],
)
def test_settings_that_make_no_plan_are_named(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2 and said in capsys.readouterr().err


def test_what_cannot_be_kept_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*NUMBERS, "--max-ms", "1", "--seconds", "0"]) == 1
    assert "no plan keeps to 1 ms a token" in capsys.readouterr().err


def test_services_that_run_are_measured(trio: Trio, capsys: pytest.CaptureFixture[str]) -> None:
    services = ("--target", trio.target, "--draft", trio.draft, "--tokenizer", str(trio.pair.target))
    report = planned(capsys, *services, "--rtt-ms", "2", "--seconds", "0", "--max-ms", "1000")
    pair = report["pair"]
    assert pair["rtt_ms"] == 2 and 0.3 < pair["acceptance"] < 0.99
    rows = [point[0] for point in pair["target_ms"]]
    assert len(rows) > 2 and rows == sorted(rows) and all(step_ms > 0 for _, step_ms in pair["target_ms"])
    assert 0 < pair["draft_ms"][0][1] < 1000
