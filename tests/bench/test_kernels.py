"""The kernel bench runs, has a row for every public function of the kernels, and writes no number that it did not
measure. Nothing here judges a speed.

What waits for a GPU says so without one; the measurement of whole steps runs here with the kernels interpreted."""

from __future__ import annotations

import ast
import dataclasses
import io
import math
import sys
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from support.bench import Measured, only_result
from support.devices import Replayed, pretended_device
from support.kernels import INTERPRETED, interpreter

from outrider.bench import gpu, gpu_batches, gpu_quantized, kernels
from outrider.bench.kernels_cases import CUDA, QUICK, K, KernelWork, cases
from outrider.kernels import dispatch
from outrider.llm import LLM
from outrider.pairs import pair_path

TIMES = {"us", "against_us", "floor_us", "share_of_floor", "times_as_fast"}
NUMBERS = TIMES | {"copy_gb_s", "read_gb_s", "product_gflop_s"}


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """What --quick prints, and its result."""
    folder = tmp_path_factory.mktemp("kernels")
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as text:
        patch.setattr(sys, "argv", ["kernels.py", "--quick", "--output", "result.json"])
        patch.chdir(folder)
        assert kernels.main() == 0
    return text.getvalue(), only_result(folder)


def public_functions(folder: Path) -> set[str]:
    """room.name of what the reference modules offer: functions, and classes whose objects can be called."""
    found = set()
    for path in folder.rglob("*.py"):
        if path.stem.endswith("triton"):
            continue  # launched by a reference
        room = path.stem if path.parent == folder else path.parent.name
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
                continue
            if isinstance(node, ast.FunctionDef) or any(
                isinstance(part, ast.FunctionDef) and part.name == "__call__" for part in node.body
            ):
                found.add(f"{room}.{node.name}")
    return found


def test_every_public_function_has_a_row_on_both_devices(quick: Measured, repository: Path) -> None:
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


def test_the_cpu_is_measured(quick: Measured) -> None:
    _, result = quick
    rows = [row for row in result["rows"] if row["device"] == "cpu"]
    assert rows and not any("not_measured" in row for row in rows)
    for row in rows:
        assert row.keys() >= NUMBERS and row["bytes"] > 0 and row["bound"] in ("memory", "product")
        assert all(row[name]["median"] > 0 for name in ("us", "against_us", "times_as_fast"))
        assert all(math.isfinite(row[name]["max"]) and len(row[name]["values"]) == 2 for name in NUMBERS)


def test_what_was_not_measured_has_no_number(quick: Measured) -> None:
    text, result = quick
    rows = [row for row in result["rows"] if row["device"] == "cuda"]
    reason = "run it with --device cuda" if torch.cuda.is_available() else "no GPU"
    assert rows and all(row["not_measured"] == reason and not row.keys() & (NUMBERS | {"bytes"}) for row in rows)
    lines = [line for line in text.splitlines() if "| cuda |" in line]
    assert len(lines) == len(rows) and all(f"not measured: {reason}" in line for line in lines)
    shapes = " ".join(row["shape"] for row in rows)
    for part in ("1B-like", "8B-like", "batch 32", "context 8192", "vocabulary 151936"):
        assert part in shapes


def test_the_comparisons_meant_for_a_gpu_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here in bfloat16 on the CPU, in the shapes of --quick: measuring compares the results first."""
    monkeypatch.setattr(kernels, "WARM_UP", 0)
    place = dataclasses.replace(QUICK, name="cuda", dtype=torch.bfloat16, batches=(2,))
    probe = kernels.Probe(place, quick=True)
    rows = list(cases(place))
    assert {row.function for row in rows} == {row.function for row in cases(CUDA)}
    for row in rows:
        assert kernels.measure(place, probe, row.make, 1, 0)["us"]["median"] > 0


@pytest.mark.parametrize("error", [0.01, math.nan])
def test_a_kernel_that_differs_gets_no_time(error: float) -> None:
    probe = kernels.Probe(QUICK, quick=True)
    x = torch.ones(8)
    spoilt = x.clone()
    spoilt[3] += error
    with pytest.raises(kernels.Differs, match="differs by"):
        kernels.measure(QUICK, probe, lambda: KernelWork(lambda: spoilt, lambda: x, 64), 1, 0)


def test_the_floor_is_the_slower_of_memory_and_products() -> None:
    rates = kernels.Rates(copy_gb_s=100.0, read_gb_s=125.0, product_gflop_s=1000.0)
    for flops, floor_us in ((0, 8.0), (40_000_000, 40.0)):
        assert rates.floor_us(KernelWork(int, int, num_bytes=1_000_000, flops=flops)) == pytest.approx(floor_us)


__all__ = ["interpreter"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    assert gpu.main() == 2
    assert capsys.readouterr() == ("", "there is no GPU here, and nothing was checked\n")


def test_an_llm_is_measured_from_end_to_end() -> None:
    named = {name: options for name, options in gpu.ways().items() if name != "auto"}
    with ExitStack() as stack:
        llms = {
            name: stack.enter_context(LLM(model=str(pair_path().target), device="cpu", max_model_len=256, **options))
            for name, options in named.items()
        }
        row = gpu.measure_llms(llms, batch=2, temperature=1.0, repeats=1, num_tokens=3)
    assert row["ways"]["plain"]["times"]["median"] == 1.0
    setup = {"tokens": 3, "k": K}
    page = list(gpu.render_llms({"device": {"name": "some device"}, "setup": setup, "rows": [row]}))
    assert "some device" in page[0] and "in turn, times plain" in page[2] and len(page) == 5


def test_batches_are_measured_by_ways_that_are_switched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_batches, "NUM_TOKENS", 6)
    monkeypatch.setattr(gpu_batches, "FIRST_TOKENS", 4)
    head = {"method": "eagle3", "model": str(pair_path().head_by("eagle3")), "num_speculative_tokens": K}
    common: dict[str, Any] = {"model": str(pair_path().target), "device": "cpu", "max_model_len": 128}
    with ExitStack() as stack:
        named = gpu.ways() | {"head": {"speculative_config": head}}
        llms = {name: stack.enter_context(LLM(**common, **options)) for name, options in named.items()}
        in_turn_backend: Any = llms["in turn"]._backend
        hold = in_turn_backend.target.engine._cohort.hold
        rows = [gpu_batches.measure(gpu_batches.ways_of(llms), 2, 0.0, 1)]
        rows.append(gpu_batches.measure(gpu_batches.ways_of_head(llms), 2, 0.0, 1))
        assert in_turn_backend.target.engine._cohort.hold == hold
    plain, in_turn = rows[0]["ways"]["plain"], rows[0]["ways"]["in turn"]
    assert plain["times"]["median"] == plain["tokens_a_step"]["median"] == 1.0
    assert in_turn["tokens_a_step"]["median"] > 1.0 and 1.0 <= in_turn["streams_a_step"]["median"] <= 2.0
    assert rows[1]["ways"]["EAGLE-3, launched"]["tokens_a_step"] == rows[1]["ways"]["EAGLE-3"]["tokens_a_step"]
    assert len(list(gpu_batches.render(rows))) == 2 + 7 + 3


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
def test_whole_steps_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = dataclasses.replace(gpu.QUICK, batches=(1,), context=8, vocab_size=101)
    monkeypatch.setattr(gpu, "WARM_UP", 0)
    monkeypatch.setattr(gpu, "QUICK", shape)
    monkeypatch.setattr(dispatch, "runs_triton", lambda x: True)
    device = Replayed()
    runner, _ = gpu.captured_runner(shape, QUICK, device)
    result = gpu.measure_steps(shape, QUICK, runner, repeats=1) | {"device": {"name": "some device"}}
    (row,) = result["rows"]
    assert device.replayed == 2  # of the one repeat: timed by the host, then by the device
    assert row["batch"] == 1 and row["bytes"] > 0
    assert all(math.isfinite(row[name]["median"]) and row[name]["median"] > 0 for name in ("replayed_us", "floor_us"))
    assert "some device" in "\n".join(gpu.render(result))


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
def test_quantised_weights_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (gpu, kernels):
        monkeypatch.setattr(module, "WARM_UP", 0)
    monkeypatch.setattr(gpu_quantized, "ROWS", (2,))
    monkeypatch.setattr(dispatch, "runs_triton", lambda x: True)
    shape = dataclasses.replace(gpu.QUICK, batches=(1,), context=8, vocab_size=101)
    steps = gpu_quantized.measure_both(shape, QUICK, Replayed(), 1)
    assert steps["plain"]["rows"][0]["bytes"] > 2 * steps["4 bits"]["rows"][0]["bytes"]
    products = list(gpu_quantized.measure_products(QUICK, kernels.Probe(QUICK, quick=True), [(70, 256)], 1))
    assert [row["form"] for row in products] == list(gpu_quantized.FORMS)
    result = {"device": {"name": "some device"}, "products": products, "steps": steps, "setup": {"model": "tiny"}}
    assert "some device" in (page := list(gpu_quantized.render(result)))[0] and len(page) == 18


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
def test_what_follows_a_pass_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "WARM_UP", 0)
    shape = dataclasses.replace(gpu.QUICK, batches=(1,), context=8, vocab_size=101)
    with pretended_device() as device:
        place, graphs = dataclasses.replace(QUICK, device="cuda"), device.new_graphs(torch.device("cuda"))
        runner, _ = gpu.captured_runner(shape, place, graphs)
        result = gpu.measure_rounds(shape, runner, repeats=1)
    assert [row["rule"] for row in result["judging"]] == ["greedy", "coupled", "rejection", "block"]
    assert [row["rule"] for row in result["drafting"]] == ["argmax", "rejection", "coupled"]
    assert len("\n".join(gpu.render_rounds(result)).splitlines()) == 14
