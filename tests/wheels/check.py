"""Run by a Python that has the wheel of `outrider` installed and finds no compiler: the wheel has the kernels of every
kind of processor, this one's are taken, and their threads are torch's. Prints which they are."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from outrider.kernels.cpu import build
from outrider.kernels.cpu.library import cpu_library_name
from outrider.kernels.cpu.linear import CpuLinear

NUM_THREADS = 3


def main() -> None:
    """Ends with an error where that is not so."""
    require(build.find_compiler() is None, "a compiler is on the path")
    lacking = [variant.name for variant in build.variants() if not (build.SOURCES / variant.file_name).is_file()]
    require(not lacking, f"the wheel lacks {', '.join(lacking)}")
    require(cpu_library_name() is not None, "the kernels cannot be loaded")
    torch.set_num_threads(NUM_THREADS)
    multiply = CpuLinear(torch.ones(1024, 1024))
    torch.ones(1 << 20).add_(1)  # starts torch's threads
    before = num_threads()
    require(bool((multiply(torch.ones(8, 1024)) == 1024).all()), "a product of ones is wrong")
    require(num_threads() == before, f"the kernels have threads of their own: {before}, then {num_threads()}")
    runtimes = openmp_runtimes()
    require(len(runtimes) == 1, f"several OpenMP runtimes are loaded: {', '.join(sorted(runtimes))}")
    print(cpu_library_name())


def require(holds: bool, problem: str) -> None:
    """Ends the process with the problem unless that holds."""
    if not holds:
        raise SystemExit(f"check.py: {problem}")


def num_threads() -> int:
    """Those of this process."""
    return len(os.listdir("/proc/self/task"))


def openmp_runtimes() -> set[str]:
    """The files of libgomp that are in this process."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {path for line in lines if "libgomp" in (path := line.split()[-1])}


if __name__ == "__main__":
    main()
