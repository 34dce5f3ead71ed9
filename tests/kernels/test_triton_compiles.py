"""The kernels compile, which the interpreter does not show, with no GPU at hand."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SAMPLING = {
    "_advance_kernel", "_copy_kernel", "_draw_kernel", "_greedy_kernel", "_judge_kernel", "_leave_kernel",
    "_linear_kernel", "_mask_kernel", "_pack_kernel", "_penalise_kernel", "_probs_kernel", "_race_kernel",
    "_sample_kernel", "_scatter_kernel", "_settle_kernel", "_truncate_kernel", "_vocabulary_kernel", "_walk_kernel",
    "_words_kernel",
}  # fmt: skip


@pytest.mark.parametrize(
    "capability", [90, pytest.param(80, marks=pytest.mark.slow), pytest.param(75, marks=pytest.mark.slow)]
)
def test_the_kernels_of_sampling_compile(repository: Path, tmp_path: Path, capability: int) -> None:
    script = repository / "tests/kernels/compile_sampling.py"
    variables = {
        **os.environ,
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([str(repository / "tests"), str(repository / "kernels")]),
    }
    done = subprocess.run(
        [sys.executable, str(script), str(capability)], env=variables, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert set(done.stdout.split()) == SAMPLING
