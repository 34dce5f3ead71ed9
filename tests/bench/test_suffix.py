"""The two scripts on suffix decoding, in small; what they measure is not judged."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from outrider.bench import repeats, suffix_lookups


def test_repeats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(repeats, "NUM_PROMPTS", 1)
    file = tmp_path / "result.json"
    monkeypatch.setattr(sys, "argv", ["repeats", "--max-tokens", "24", "--repeats", "1", "--json", str(file)])
    repeats.main()
    changes = json.loads(file.read_text())["changes"]
    assert changes.keys() == repeats.CHANGES.keys()
    assert all(change["tokens_a_round"]["median"] >= 1 for change in changes.values())
    assert max(change["tokens_a_round"]["median"] for change in changes.values()) > 1.5  # of a fixed mode: no clock
    assert capsys.readouterr().out.count("\n|") == 1 + len(changes)


def test_lookups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix_lookups, "NUM_PHRASES", 50)
    file = tmp_path / "result.json"
    monkeypatch.setattr(sys, "argv", ["suffix_lookups", "--tokens", "5000", "--rounds", "50", "--json", str(file)])
    suffix_lookups.main()
    result = json.loads(file.read_text())
    assert result["stored_tokens"] == 5000 and result["us_a_round"] > 0 and result["committed_a_round"] > 1
