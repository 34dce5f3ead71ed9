"""What a result says of the machine: enough to know whether two results may be compared, and no names."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

from outrider.wire.cores import usable_cores

FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve")
CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True)
class Machine:
    """A description; results are compared where it is the same."""

    cpu: str
    flags: tuple[str, ...]
    cores: int  # that this process may use
    memory_gib: int
    system: str
    python: str
    torch: str
    transformers: str


@dataclass(frozen=True, slots=True)
class Cores:
    """Which cores run what; empty: all of them."""

    target: tuple[int, ...]
    draft: tuple[int, ...]
    num_all: int

    @property
    def target_threads(self) -> int:
        """Threads of the target's products."""
        return len(self.target) or self.num_all


def share_cores() -> Cores:
    """The last core is the draft's, all others are the target's."""
    usable = tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()
    if len(usable) < 2:
        return Cores((), (), len(usable) or os.cpu_count() or 1)
    return Cores(usable[:-1], usable[-1:], len(usable))


def describe() -> Machine:
    """This machine."""
    from importlib import metadata

    info = CPUINFO.read_text() if CPUINFO.is_file() else ""
    name = re.search(r"^(?:model name|Processor)\s*:\s*(.+)$", info, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", info, re.MULTILINE)
    known = set(flags[1].split()) if flags else set()
    return Machine(
        cpu=name[1].strip() if name else platform.processor() or platform.machine(),
        flags=tuple(flag for flag in FLAGS if flag in known),
        cores=usable_cores(),
        memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        system=platform.system(),
        python=platform.python_version(),
        torch=metadata.version("torch"),
        transformers=metadata.version("transformers"),
    )
