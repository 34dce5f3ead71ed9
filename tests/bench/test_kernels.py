"""The kernel bench runs, has a row for every public function of the kernels, and writes no number that it did not
measure. Nothing here judges a speed.

What waits for a GPU says so without one; the measurement of whole steps runs here with the kernels interpreted."""

from __future__ import annotations

import ast
import dataclasses
import json
import math
import os
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from support.devices import Replayed, pretended_device
from support.kernels import INTERPRETED, interpreter

from outrider.kernels import dispatch

TIMEOUT_S = 120
TIMES = {"us", "against_us", "floor_us", "share_of_floor", "times_as_fast"}
NUMBERS = TIMES | {"copy_gb_s", "read_gb_s", "product_gflop_s"}


@pytest.fixture(scope="module")
def quick(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """What --quick prints, and its result."""
    path = tmp_path_factory.mktemp("kernels") / "result.json"
    done = subprocess.run(
        [sys.executable, "-m", "outrider.bench.kernels", "--quick", "--output", str(path)],
        cwd=path.parent,
        env=os.environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]  # nothing is stored
    return done.stdout, json.loads(path.read_text())


def public_functions(folder: Path) -> set[str]:
    """room.name of what the reference modules offer: functions, and classes whose objects can be called."""
    found = set()
    for path in folder.rglob("*.py"):
        if path.stem.endswith("triton"):
            continue  # launched by a reference
        room = path.stem if path.parent == folder else path.parent.name
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            is_call = isinstance(node, ast.ClassDef) and any(
                isinstance(part, ast.FunctionDef) and part.name == "__call__" for part in node.body
            )
            if (isinstance(node, ast.FunctionDef) or is_call) and not node.name.startswith("_"):
                found.add(f"{room}.{node.name}")
    return found


def test_every_public_function_has_a_row_on_both_devices(quick: tuple[str, dict[str, Any]], repository: Path) -> None:
    _, result = quick
    expected = public_functions(repository / "kernels/outrider/kernels")
    assert {"layers.Linear", "attention.planned_attention", "verify.accept"} <= expected
    without = result["without_row"].keys()
    for device in ("cpu", "cuda"):
        rows = {row["function"] for row in result["rows"] if row["device"] == device}
        assert not rows & without
        assert rows | without == expected  # a new one: a row in kernels_cases.py, or a reason in WITHOUT_ROW


def test_every_triton_file_stands_beside_a_reference(repository: Path) -> None:
    """Otherwise its functions would be missed above."""
    folder = repository / "kernels/outrider/kernels"
    texts = {path: path.read_text() for path in folder.rglob("*.py")}
    for path in (path for path in texts if path.stem.endswith("triton")):
        names = f"{path.parent.name} import triton", f"{path.parent.name} import {path.stem}", f".{path.stem} import"
        assert any(name in text for other, text in texts.items() for name in names if other != path), path


def test_the_cpu_is_measured(quick: tuple[str, dict[str, Any]]) -> None:
    _, result = quick
    rows = [row for row in result["rows"] if row["device"] == "cpu"]
    assert rows and not any("not_measured" in row for row in rows)
    for row in rows:
        assert row.keys() >= NUMBERS and row["bytes"] > 0 and row["bound"] in ("memory", "product")
        assert all(row[name]["median"] > 0 for name in ("us", "against_us", "times_as_fast"))
        assert all(math.isfinite(row[name]["max"]) and len(row[name]["values"]) == 2 for name in NUMBERS)


def test_what_was_not_measured_has_no_number(quick: tuple[str, dict[str, Any]]) -> None:
    text, result = quick
    rows = [row for row in result["rows"] if row["device"] == "cuda"]
    reason = "run it with --device cuda" if torch.cuda.is_available() else "no GPU"
    assert rows and all(row["not_measured"] == reason and not row.keys() & (NUMBERS | {"bytes"}) for row in rows)
    lines = [line for line in text.splitlines() if "| cuda |" in line]
    assert len(lines) == len(rows) and all(f"not measured: {reason}" in line for line in lines)
    shapes = " ".join(row["shape"] for row in rows)
    for part in ("1B-like", "8B-like", "batch 32", "context 8192", "vocabulary 151936"):
        assert part in shapes


def test_a_result_names_no_place(quick: tuple[str, dict[str, Any]]) -> None:
    text = json.dumps(quick[1])
    assert str(Path.home()) not in text and os.uname().nodename not in text and "/" + "tmp" not in text


def test_stored_under_the_name_of_the_device(quick: tuple[str, dict[str, Any]], tmp_path: Path) -> None:
    text, result = quick
    result = result | {"device": result["device"] | {"name": "Some(R) GPU 80GB"}}
    path = import_module("outrider.bench.kernels").store_with_page(tmp_path, result)
    assert path.stem.endswith("-some-gpu-80gb") and json.loads(path.read_text()) == result
    page = path.with_suffix(".md").read_text()
    assert page.splitlines()[0] == "# Kernels on Some(R) GPU 80GB" and page.splitlines()[1:] == text.splitlines()[1:]


def test_the_comparisons_meant_for_a_gpu_agree() -> None:
    """Here in bfloat16 on the CPU, in the shapes of --quick: measuring compares the results first."""
    case, kernels, measured = (
        import_module(name)
        for name in ("outrider.bench.kernels_cases", "outrider.bench.kernels", "outrider.bench.kernels")
    )
    place = dataclasses.replace(case.QUICK, name="cuda", dtype=torch.bfloat16)
    probe = measured.Probe(place, quick=True)
    cases = list(kernels.cases(place))
    assert {row.function for row in cases} == {row.function for row in kernels.cases(case.CUDA)}
    for row in cases:
        assert measured.measure(place, probe, row.make, 1, 0)["us"]["median"] > 0


@pytest.mark.parametrize("error", [0.01, math.nan])
def test_a_kernel_that_differs_gets_no_time(error: float) -> None:
    case, measured = import_module("outrider.bench.kernels_cases"), import_module("outrider.bench.kernels")
    probe = measured.Probe(case.QUICK, quick=True)
    x = torch.ones(8)
    spoilt = x.clone()
    spoilt[3] += error
    with pytest.raises(measured.Differs, match="differs by"):
        measured.measure(case.QUICK, probe, lambda: case.KernelWork(lambda: spoilt, lambda: x, 64), 1, 0)


def test_a_row_that_fails_takes_no_other_with_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    case, kernels = import_module("outrider.bench.kernels_cases"), import_module("outrider.bench.kernels")
    x = torch.ones(8)

    def made() -> Any:
        return case.KernelWork(lambda: x, lambda: x, 64)

    def fails() -> Any:
        raise RuntimeError("out of memory\nand more")

    rows = [case.Case("a.one", "", "", fails), case.Case("a.two", "", "", made)]
    monkeypatch.setattr(kernels, "cases", lambda place: rows if place is case.QUICK else [])
    monkeypatch.setattr(sys, "argv", ["kernels.py", "--quick"])
    assert kernels.main() == 1
    failed, measured = (line for line in capsys.readouterr().out.splitlines() if line.startswith("| `a."))
    assert "not measured: RuntimeError: out of memory |" in failed and "not measured" not in measured


@pytest.mark.parametrize("flags", [["--repeats", "9"], ["--device", "tpu"]])
def test_flags_are_checked(monkeypatch: pytest.MonkeyPatch, flags: list[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["kernels.py", *flags])
    with pytest.raises(SystemExit) as stopped:
        import_module("outrider.bench.kernels").main()
    assert stopped.value.code == 2


def test_the_floor_is_the_slower_of_memory_and_products() -> None:
    case, measured = import_module("outrider.bench.kernels_cases"), import_module("outrider.bench.kernels")
    rates = measured.Rates(copy_gb_s=100.0, read_gb_s=125.0, product_gflop_s=1000.0)
    assert rates.floor_us(case.KernelWork(int, int, num_bytes=1_000_000)) == pytest.approx(8.0)
    assert rates.floor_us(case.KernelWork(int, int, num_bytes=1_000_000, flops=40_000_000)) == pytest.approx(40.0)


__all__ = ["interpreter"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_line(repository: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "outrider.bench.gpu"],
        env=os.environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.splitlines() == ["there is no GPU here, and nothing was checked"]


def test_the_parts_for_a_gpu_are_there() -> None:
    parts = import_module("outrider.bench.gpu").PARTS
    assert parts.keys() == {"tests", "kernels"} and all(find_spec(module) for module, *_ in parts.values())


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
def test_whole_steps_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    steps, case = import_module("outrider.bench.gpu"), import_module("outrider.bench.kernels_cases")
    shape = dataclasses.replace(steps.QUICK, batches=(1,))
    monkeypatch.setattr(steps, "QUICK", shape)
    monkeypatch.setattr(dispatch, "runs_triton", lambda x: True)
    device = Replayed()
    runner, _ = steps.captured_runner(shape, case.QUICK, device)
    result = steps.measure_steps(shape, case.QUICK, runner, repeats=1) | {"device": {"name": "some device"}}
    (row,) = result["rows"]
    assert device.replayed == 2 * (steps.WARM_UP + 1)
    assert row["batch"] == 1 and row["bytes"] > 0
    assert all(math.isfinite(row[name]["median"]) and row[name]["median"] > 0 for name in ("replayed_us", "floor_us"))
    assert "some device" in "\n".join(steps.render(result))


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
def test_what_follows_a_pass_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    steps, rounds, case = (
        import_module(name) for name in ("outrider.bench.gpu", "outrider.bench.gpu", "outrider.bench.kernels_cases")
    )
    monkeypatch.setattr(rounds, "WARM_UP", 0)
    shape = dataclasses.replace(steps.QUICK, batches=(1,))
    with pretended_device() as device:
        place, graphs = dataclasses.replace(case.QUICK, device="cuda"), device.new_graphs(torch.device("cuda"))
        runner, _ = steps.captured_runner(shape, place, graphs)
        result = rounds.measure_rounds(shape, runner, repeats=1)
    assert [row["rule"] for row in result["judging"]] == ["greedy", "coupled", "rejection"]
    assert [row["rule"] for row in result["drafting"]] == ["argmax", "rejection", "coupled"]
    assert len("\n".join(rounds.render_rounds(result)).splitlines()) == 13
