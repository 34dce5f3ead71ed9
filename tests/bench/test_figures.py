"""The figures: every label is there as text, and equal results give equal bytes. Without matplotlib nothing else is
missing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.bench import texts_of

from outrider.bench import figures
from outrider.bench.figures import draw_load, draw_network, draw_pair, write_figure
from outrider.bench.load.report import summarise, times_ms
from outrider.bench.load.requests import BenchServeSettings, Record
from outrider.bench.results import store


def newest(folder: Path) -> dict[str, Any]:
    """A stored result."""
    result: dict[str, Any] = json.loads(max(folder.glob("*.json")).read_text())
    return result


def test_a_pair_has_a_bar_for_every_way(repository: Path, tmp_path: Path) -> None:
    result = newest(repository / "bench/results")
    assert write_figure(tmp_path / "a.svg", lambda: draw_pair(result))
    words = texts_of(tmp_path / "a.svg")
    for block in result["blocks"]:
        assert block["ways"].keys() <= words
        assert {f"{way['tokens_per_s']['median']:.1f}" for way in block["ways"].values()} <= words
    assert {"1 stream, greedy", f"tokens/s: {result['setup']['pair']}, k=4"} <= words


def test_a_network_has_a_line_for_every_mode(repository: Path, tmp_path: Path) -> None:
    result = newest(repository / "bench/results/network")
    assert write_figure(tmp_path / "a.svg", lambda: draw_network(result))
    words = texts_of(tmp_path / "a.svg")
    for block in result["blocks"]:
        assert {cell["mode"] for cell in block["cells"]} <= words
        assert f"verification {block['verify_ms']:.1f} ms, draft pass {block['pass_ms']:.1f} ms" in words
    assert {"round trip, ms", "floor (1 - a) t_verify"} <= words


def load() -> tuple[dict[str, Any], dict[str, list[float]]]:
    """Two requests of three tokens."""
    settings = BenchServeSettings(gateway="a:1", slo_ttft_ms=600)
    records = [
        Record(index, 0.0, 0.0, 2.0, [0.5 + 0.2 * index, 1.0, 1.5], [1, 1, 1], 1, 3, "stop") for index in range(2)
    ]
    return summarise(settings, "toy", records), times_ms(records)


def test_a_load_has_a_curve_for_every_time(tmp_path: Path) -> None:
    result, times = load()
    assert write_figure(tmp_path / "a.svg", lambda: draw_load(result, times))
    words = texts_of(tmp_path / "a.svg")
    assert {"time to first token, ms", "inter-token latency, ms", "end to end, ms", "objective 600", "100%"} <= words
    assert "p50 600.0, p99 698.0" in words and any("2 of 2 requests" in word for word in words)
    only_first = {**times, "itl_ms": [], "tpot_ms": [], "e2e_ms": []}
    assert write_figure(tmp_path / "a.svg", lambda: draw_load(result, only_first))
    assert "end to end, ms" not in texts_of(tmp_path / "a.svg")


def test_equal_results_give_equal_bytes(tmp_path: Path) -> None:
    result, times = load()
    for name in ("a.svg", "b.svg"):
        assert write_figure(tmp_path / name, lambda: draw_load(result, times))
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_without_matplotlib_the_result_is_stored_all_the_same(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(figures, "can_draw", lambda: False)
    result = newest(repository / "bench/results")
    path = store(tmp_path, result)
    assert not write_figure(path.with_suffix(".svg"), lambda: draw_pair(result))
    complaint = f"no {path.stem}.svg: matplotlib is not installed: pip install 'outrider[bench]'\n"
    assert capsys.readouterr().err == complaint
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name] and json.loads(path.read_text()) == result


def test_matplotlib_is_loaded_by_nothing_but_a_figure() -> None:
    others = [path for path in Path(figures.__file__).parent.glob("*.py") if path.name != "figures.py"]
    assert others and not any("matplotlib" in path.read_text(encoding="utf-8") for path in others)
    script = "import sys; from outrider.bench import pair, network, load; print('matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "False\n"
