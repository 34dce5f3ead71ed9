"""The script on what constraints cost the device thread, in small; what it measures is not judged."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from outrider.bench import grammar_masks


def test_masks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "result.json"
    sizes = ["--vocab", "1000", "--sequences", "3", "--streams", "2", "--steps", "4", "--draft-tokens", "2"]
    monkeypatch.setattr(sys, "argv", ["grammar_masks", *sizes, "--json", str(file)])
    grammar_masks.main()
    result = json.loads(file.read_text())
    assert result["device_thread_ms"]["median"] > 0 and result["mask_threads_ms"]["median"] > 0
    assert result["kept"]["ratio"] > 0 and result["fought"]["ratio"] > 0
