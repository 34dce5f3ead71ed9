"""Every kernel of a decoder's step compiles for GPUs that are not here, and few times: a step that waits for a compiler
takes seconds."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

KERNELS = {"attend_kernel", "merge_kernel", "_turn_kernel", "_norm_kernel", "_gate_kernel"}
MOST_CAPTURED = 3  # of one kernel: steps of one row a sequence, windows, and a window that needs no split
MOST = 6  # with prompts, whose ids are of another type


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize(
    ("capability", "batch_invariant"),
    [(90, 0), pytest.param(90, 1, marks=pytest.mark.slow), pytest.param(89, 0, marks=pytest.mark.slow)],
)
def test_steps_need_few_binaries(capability: int, batch_invariant: int, tmp_path: Path) -> None:
    environment = os.environ | {
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    script = Path(__file__).with_name("compile_decoder.py")
    command = [sys.executable, str(script), str(capability), str(batch_invariant)]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert child.returncode == 0, child.stderr[-4000:]
    found = json.loads(child.stdout)
    expected = KERNELS | ({"_linear_kernel"} if batch_invariant else set())
    assert found["captured"].keys() == found["all"].keys() == expected
    assert max(found["captured"].values()) <= MOST_CAPTURED, found
    assert max(found["all"].values()) <= MOST, found
