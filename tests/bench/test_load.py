"""`outrider bench serve` beside a load of somebody else's: here a client of ours, run as a command."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path

import pytest
from support.services import Trio, outrider

from outrider.bench.load import described, render

ASK = "from outrider.client import SyncClient\nwith SyncClient({!r}) as c:\n  list(c.generate('def f(', {}))"


def test_what_was_drafted_meanwhile_is_told(trio: Trio, tmp_path: Path) -> None:
    gateway = trio.start_gateway("--metrics", "127.0.0.1:0")
    address = trio.wait(gateway)
    metrics = gateway.find(re.compile(r"^gateway metrics on (\S+)$", re.MULTILINE))
    output = tmp_path / "result.json"
    code = ASK.format(address, "max_tokens=24, temperature=0.0, ignore_eos=True, mode='sequential', num_draft_tokens=4")
    flags = ("--metrics", metrics, "--output", str(output))
    done = outrider("bench", "serve", *flags, "--", sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr
    result = json.loads(output.read_text())
    assert result["tokens"] == 24 and result["rounds"].keys() <= {"sequential", "off"}
    assert result["draft_tokens"] >= result["tested"][0] > 0 and sum(result["accepted"]) == result["accepted_tokens"]
    assert f"({result['accepted_tokens']}/{result['draft_tokens']} drafted tokens)" in done.stdout
    failed = outrider("bench", "serve", *flags, "--", sys.executable, "-c", "raise SystemExit(3)")
    assert failed.returncode == 3 and "0 tokens in 0 rounds" in failed.stdout


@pytest.mark.parametrize(
    ("arguments", "status", "complaint"),
    [
        (("--metrics", "127.0.0.1:1"), 1, "give the command of a load behind --"),
        (("--metrics", "127.0.0.1:1", "--", "true"), 1, "Connection refused"),
        ((), 2, "--metrics"),
    ],
)
def test_a_wrong_call_is_one_line(arguments: tuple[str, ...], status: int, complaint: str) -> None:
    done = outrider("bench", "serve", *arguments)
    assert done.returncode == status and complaint in done.stderr and "Traceback" not in done.stderr


def test_what_rose_between_two_readings() -> None:
    before = Counter({("tokens", ""): 5, ("rounds", "off"): 5})
    after = Counter({
        ("tokens", ""): 15, ("rounds", "off"): 5, ("rounds", "chains"): 4, ("drafts", ""): 4, ("draft_tokens", ""): 8,
        ("accepted_tokens", ""): 6, ("accepted", "0"): 4, ("accepted", "1"): 2, ("tested", "0"): 4, ("tested", "1"): 4,
        ("tested", "2"): 0, ("accepted", "2"): 0,
    })  # fmt: skip
    result = described(before, after, 2.0)
    assert result["rounds"] == {"chains": 4} and (result["accepted"], result["tested"]) == ([4, 2], [4, 4])
    text = "\n".join(render(result))
    assert "10 tokens in 4 rounds" in text and "75.0% (6/8" in text and "1.00 0.50" in text and "2.50 with" in text
