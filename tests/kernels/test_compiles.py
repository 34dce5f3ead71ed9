"""The kernels compile for GPUs that are not here: into the shared memory that there is, and with tensor cores for
half types. The interpreter accepts much that the compiler does not."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SHARED_MEMORY = {90: 227 << 10, 89: 99 << 10}  # bytes that one program may use


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize("capability", [90, pytest.param(89, marks=pytest.mark.slow)])
def test_every_launch_compiles(capability: int, tmp_path: Path, prove: bool) -> None:
    environment = os.environ | {
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, __file__, str(capability), str(int(prove))]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert child.returncode == 0, child.stderr[-4000:]
    kernels = [json.loads(line) for line in child.stdout.splitlines()]
    assert {kernel["name"] for kernel in kernels} >= {
        "attend_kernel", "merge_kernel", "_tree_mask_kernel", "_store_kernel", "_turn_kernel", "_norm_kernel",
        "_gate_kernel",
    }  # fmt: skip
    for kernel in kernels:
        assert kernel["shared"] <= SHARED_MEMORY[capability], kernel
        assert kernel["tensor_cores"] == (kernel["name"] == "attend_kernel"), kernel


def test_the_cpu_path_needs_no_triton() -> None:
    """Every operation is imported where Triton cannot be."""
    rooms = "attention", "kv_store", "layers", "random", "sampling", "verify"
    modules = "attention.plan", "attention.tree_mask", *(f"{room}.reference" for room in rooms)
    script = "import sys; sys.modules['triton'] = None\n" + "\n".join(f"import outrider.kernels.{m}" for m in modules)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    child = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60)
    assert child.returncode == 0, child.stderr


class NoDevice:
    """Stands in for the driver, which compiling does not need."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)


def compile_only(capability: int) -> None:
    """From now on a launch compiles, prints what came of it, and runs nothing."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    driver.set_active(NoDevice(capability))
    run = JITFunction.run

    def compiled(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        tensor_cores = any(name in kernel.asm["ptx"] for name in ("mma.sync", "wgmma.mma_async"))
        print(json.dumps({"name": self.__name__, "shared": kernel.metadata.shared, "tensor_cores": tensor_cores}))

    JITFunction.run = compiled


def launch_all(prove: bool) -> None:
    """Every kernel once, in the long form over dtypes, head sizes and options."""
    import torch

    from outrider.kernels.kv_store import triton as kv_store_triton
    from outrider.kernels.layers import triton as layers_triton

    half, eight = torch.bfloat16, torch.float8_e4m3fn
    launch_attention(heads=32, kv_heads=8, dim=128, dtype=half, most_rows=6)
    launch_attention(heads=8, kv_heads=4, dim=256, dtype=half, most_rows=300, window=100, softcap=50.0, tree=True)
    launch_attention(heads=8, kv_heads=2, dim=256, dtype=torch.float32, most_rows=80)
    if prove:
        launch_attention(heads=32, kv_heads=8, dim=128, dtype=half, most_rows=300, invariant=True)
        launch_attention(heads=32, kv_heads=8, dim=128, dtype=half, cache=eight, most_rows=1)
        launch_attention(heads=71, kv_heads=1, dim=64, dtype=torch.float16, most_rows=64, sinks=True)
        for dim in (64, 128):
            launch_attention(heads=8, kv_heads=2, dim=dim, dtype=torch.float32, most_rows=80)
    x, weight = torch.zeros(4, 4096, dtype=half), torch.zeros(4096, dtype=half)
    layers_triton.rms_norm(x, weight, 1e-6)
    layers_triton.add_rms_norm(x, x, weight, 1e-6)
    for activation in ("silu", "gelu", "gelu_tanh"):
        layers_triton.gated(x, activation)
    cache, slots, scales = torch.zeros(2, 16, 8, 128), torch.arange(4), (torch.ones(1), torch.ones(1))
    qkv, turn = torch.zeros(4, 48, 128, dtype=half), torch.zeros(4, 1, 128, dtype=half)
    for dtype, scaling in ((half, None), (eight, scales)):
        caches = cache.to(dtype), cache.to(dtype)
        kv_store_triton.store_kv(qkv[:, :8], qkv[:, 8:16], *caches, slots, kv_scales=scaling)
        kv_store_triton.store_kv_rotary(
            qkv, (turn, turn), *caches, slots, qk_norm=torch.zeros(40, 128, dtype=half), kv_scales=scaling
        )


def launch_attention(
    *,
    heads: int,
    kv_heads: int,
    dim: int,
    dtype: Any,
    most_rows: int,
    cache: Any = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    tree: bool = False,
    invariant: bool = False,
) -> None:
    import torch

    from outrider.kernels.attention.plan import DevicePlan
    from outrider.kernels.attention.tree_mask_triton import launch_tree_mask
    from outrider.kernels.attention.triton import attention

    starts, tables = torch.zeros(5, dtype=torch.int32), torch.zeros(4, 256, dtype=torch.int64)
    mask = launch_tree_mask(torch.zeros(24, dtype=torch.int32), starts) if tree else None
    plan = DevicePlan(tables, starts, starts[1:], most_rows, 512, window, mask, invariant)
    slots = torch.zeros(4, 16, kv_heads, dim).to(cache or dtype)
    attention(
        plan, torch.zeros(24, heads, dim, dtype=dtype), slots, slots, scale=0.1, softcap=softcap,
        sinks=torch.zeros(heads) if sinks else None, kv_scales=(torch.ones(1), torch.ones(1)) if cache else None,
    )  # fmt: skip


SAMPLING = {
    "_advance_kernel", "_copy_kernel", "_draw_kernel", "_greedy_kernel", "_accept_kernel", "_leave_kernel",
    "_linear_kernel", "_mask_kernel", "_pack_kernel", "_penalise_kernel", "_probs_kernel", "_race_kernel",
    "_sample_kernel", "_scatter_kernel", "_settle_kernel", "_truncate_kernel", "_vocabulary_kernel", "_walk_kernel",
    "_words_kernel",
}  # fmt: skip


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
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


if __name__ == "__main__":
    compile_only(int(sys.argv[1]))
    launch_all(bool(int(sys.argv[2])))
