"""The kernels compile for GPUs that are not here: into the shared memory that there is, and with tensor cores for
half types. The interpreter accepts much that the compiler does not."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.compilers

SHARED_MEMORY = {90: 227 << 10, 89: 99 << 10, 80: 163 << 10, 75: 64 << 10}  # bytes that one program may use
ATTENTION = {  # what serves models, on GPUs that we know
    "attend_kernel", "merge_kernel", "_tree_mask_kernel", "_store_kernel", "_turn_kernel", "_norm_kernel",
    "_gate_kernel", "_route_kernel", "_grouped_kernel", "_join_ways_kernel",
}  # fmt: skip
MULTIPLIES = {"attend_kernel", "_grouped_kernel"}
SAMPLING = {
    "_advance_kernel", "_copy_kernel", "_scan_kernel", "_best_kernel", "_kept_kernel", "_probs_kernel",
    "_survey_kernel", "_gather_kernel", "_threshold_kernel", "_keep_kernel", "_mask_kernel", "_penalise_kernel",
    "_scatter_kernel", "_sample_kernel", "_pack_kernel", "_accept_kernel", "_block_kernel", "_leave_kernel",
    "_restore_kernel", "_sum_kernel", "_draw_kernel", "_race_kernel", "_settle_kernel", "_walk_kernel",
    "_vocabulary_kernel", "_words_kernel", "_linear_kernel", "_down_kernel", "_up_kernel",
}  # fmt: skip
QUANTIZED = {"_product_kernel", "_join_kernel", "_rows_kernel"}
ONE_ROUNDING = {  # whose lanes must round alike: on their bits hang ties, cuts and draws
    "_scan_kernel", "_kept_kernel", "_probs_kernel", "_survey_kernel", "_gather_kernel", "_threshold_kernel",
    "_keep_kernel", "_sample_kernel", "_accept_kernel", "_block_kernel", "_leave_kernel", "_restore_kernel",
    "_sum_kernel", "_draw_kernel", "attend_kernel", "merge_kernel",
}  # fmt: skip


COMPILE_S = 1200  # of the long form beside another one, on a slow processor


@pytest.mark.timeout(COMPILE_S + 60)
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize("capability", [90, *(pytest.param(older, marks=pytest.mark.slow) for older in (89, 80, 75))])
def test_every_launch_compiles(capability: int, tmp_path: Path, prove: bool) -> None:
    environment = os.environ | {
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, str(Path(__file__).with_name("compile_all.py")), str(capability), str(int(prove))]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=COMPILE_S)
    assert child.returncode == 0, child.stderr[-4000:]
    kernels = [json.loads(line) for line in child.stdout.splitlines()]
    expected = SAMPLING | (QUANTIZED if capability >= 80 else set()) | (ATTENTION if capability >= 89 else set())
    assert {kernel["name"] for kernel in kernels} == expected
    for kernel in kernels:
        assert not (kernel["fuses"] and kernel["name"] in ONE_ROUNDING), kernel
        assert kernel["shared"] <= SHARED_MEMORY[capability], kernel
        if kernel["name"] in ATTENTION:
            assert kernel["tensor_cores"] == (kernel["name"] in MULTIPLIES), kernel
        if kernel["name"] in QUANTIZED and not prove:  # which has rows of float32, too
            assert kernel["tensor_cores"] == (kernel["name"] == "_product_kernel"), kernel


def test_the_cpu_path_needs_no_triton() -> None:
    """Every operation is imported where Triton cannot be."""
    rooms = "attention", "kv_store", "layers", "lora", "random", "sampling", "verify"
    modules = "attention.plan", "attention.tree_mask", "quantized.linear", *(f"{room}.reference" for room in rooms)
    script = "import sys; sys.modules['triton'] = None\n" + "\n".join(f"import outrider.kernels.{m}" for m in modules)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    child = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60)
    assert child.returncode == 0, child.stderr
