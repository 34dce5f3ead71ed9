"""Everything that waits for a GPU and needs nobody to look on, on a machine that has one:

    python bench/gpu_check.py [--only tests|kernels|steps] [--repeats N]

The tests marked `gpu`, the kernel bench, and a whole step replayed against the same step launched kernel by kernel,
with the judging and the drafting behind it, stored in bench/results/steps. Exits with 2 where there is no GPU."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import torch
from gpu_rounds import measure_rounds, render_rounds
from gpu_steps import REAL, captured_runner, measure_steps, render
from kernels_case import CUDA, K
from kernels_table import file_stem

from outrider.commands.bench_machine import describe
from outrider.commands.bench_store import dump
from outrider.engine.cuda_graphs import CudaGraphs

BENCH = Path(__file__).parent
RESULTS = BENCH / "results" / "steps"


def main() -> int:
    """0 if all went well, 1 if a part failed, 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=30, help="timed steps of each kind and batch")
    parser.add_argument("--only", choices=("tests", "kernels", "steps"), help="one part of it")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("there is no GPU here, and nothing was checked", file=sys.stderr)
        return 2
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    parts = {
        "tests": ("-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "tests"),
        "kernels": (str(BENCH / "kernels.py"), "--device", "cuda"),
    }
    codes = [
        subprocess.run([sys.executable, *part], cwd=BENCH.parent, env=environment, check=False).returncode
        for name, part in parts.items()
        if options.only in (None, name)
    ]
    if options.only in (None, "steps"):
        _steps(options.repeats)
    return int(any(codes))


def _steps(repeats: int) -> None:
    machine = describe()
    runner, capture = captured_runner(REAL, CUDA, CudaGraphs(torch.device("cuda")))
    result = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": asdict(machine) | {"flags": list(machine.flags)},
        "device": {"name": torch.cuda.get_device_name(), "cuda": torch.version.cuda, "dtype": "bfloat16"},
        "setup": {"repeats": repeats, "k": K, "model": REAL.model.name, "context": REAL.context},
        "capture": capture,
    }
    result |= measure_steps(REAL, CUDA, runner, repeats) | measure_rounds(REAL, runner, repeats)
    print("\n".join([*render(result), "", *render_rounds(result)]))
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{file_stem(result)}.json"
    path.write_text(dump(result), encoding="utf-8")
    print(f"\nstored in {path}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
