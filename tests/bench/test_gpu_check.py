"""What waits for a GPU says so without one; the measurement of whole steps runs here with the kernels interpreted."""

from __future__ import annotations

import dataclasses
import math
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from interpreted import INTERPRETED, interpreter
from pretended import pretended_device
from replayed import Replayed

from outrider.kernels import dispatch

__all__ = ["interpreter"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_line(repository: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "outrider.bench.gpu"],
        env=os.environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.splitlines() == ["there is no GPU here, and nothing was checked"]


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
