"""The figures: every label is there as text, and equal results give equal bytes. Without matplotlib nothing else is
missing."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.bench import texts_of

from outrider.bench import figures
from outrider.bench.figures import draw_network, draw_pair, write_figure


def newest(folder: Path) -> dict[str, Any]:
    """A stored result."""
    result: dict[str, Any] = json.loads(max(folder.glob("*.json")).read_text())
    return result


def test_a_pair_has_a_bar_for_every_way(repository: Path, tmp_path: Path) -> None:
    result = newest(repository / "outrider-bench/results")
    for name in ("a.svg", "b.svg"):
        write_figure(tmp_path / name, lambda: draw_pair(result))
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    words = texts_of(tmp_path / "a.svg")
    for block in result["blocks"]:
        assert block["ways"].keys() <= words
        assert {f"{way['tokens_per_s']['median']:.1f}" for way in block["ways"].values()} <= words
    assert {"1 stream, greedy", f"tokens/s: {result['setup']['pair']}, k=4"} <= words


def test_a_network_has_a_line_for_every_mode(repository: Path, tmp_path: Path) -> None:
    result = newest(repository / "outrider-bench/results/network")
    write_figure(tmp_path / "a.svg", lambda: draw_network(result))
    words = texts_of(tmp_path / "a.svg")
    for block in result["blocks"]:
        assert {cell["mode"] for cell in block["cells"]} <= words
        assert f"verification {block['verify_ms']:.1f} ms, draft pass {block['pass_ms']:.1f} ms" in words
    assert {"round trip, ms", "floor (1 - a) t_verify"} <= words


def test_without_matplotlib_a_figure_is_named_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    write_figure(tmp_path / "a.svg", lambda: pytest.fail("nothing is drawn"))
    assert capsys.readouterr().err == "no a.svg: matplotlib is not installed: pip install 'outrider[bench]'\n"
    assert not list(tmp_path.iterdir())


def test_matplotlib_is_loaded_by_nothing_but_a_figure() -> None:
    others = [path for path in Path(figures.__file__).parent.glob("*.py") if path.name != "figures.py"]
    imports = re.compile(r"^\s*(from|import) matplotlib", re.MULTILINE)  # a text may name it
    assert others and not any(imports.search(path.read_text(encoding="utf-8")) for path in others)
    script = "import sys; from outrider.bench import pair, network, load; print('matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "False\n"
