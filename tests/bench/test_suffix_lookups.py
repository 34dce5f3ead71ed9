"""The script on suffix decoding's lookups, in small; what it measures is not judged."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from outrider.bench import suffix_lookups


def test_lookups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix_lookups, "NUM_PHRASES", 50)
    file = tmp_path / "result.json"
    monkeypatch.setattr(sys, "argv", ["suffix_lookups", "--tokens", "5000", "--rounds", "50", "--json", str(file)])
    suffix_lookups.main()
    result = json.loads(file.read_text())
    assert result["stored_tokens"] == 5000 and result["us_a_round"] > 0 and result["committed_a_round"] > 1
