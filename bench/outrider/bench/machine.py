"""What a result says of the machine: enough to know whether two results may be compared, and no names.

How busy other programs keep the machine meanwhile: OpenMP's products suffer from them beyond their share.

Keeps the cores out of their idle state while something is measured.

A thread that waits on an idle core of a virtual machine wakes 0.15-0.2 ms late, and a round has about ten such waits;
on a core that runs anything else it wakes in 5 microseconds. So one process a core spins in the scheduler's idle class,
which yields to all others at once. It costs power, and a stacked thread is moved to another core later than else."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from outrider.rpc.settings import usable_cores

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


PROC = Path("/proc")
IDLE_FIELDS = (3, 4)  # of the line "cpu": idle, and idle that waits for a disk
NUM_FIELDS = 8  # those after it are counted in the first ones already
PARENT, USER, SYSTEM = 1, 11, 12  # of a process's stat, after its name


class ForeignLoad:
    """From its making on: the processors that this process and what it started did not keep busy, but somebody did."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._before = _foreign_ticks()

    def cpus(self) -> float | None:
        """The mean number of processors; None where the system does not tell."""
        now = _foreign_ticks()
        if now is None or self._before is None:
            return None
        seconds = (now - self._before) / os.sysconf("SC_CLK_TCK")
        return round(max(0.0, seconds / (time.monotonic() - self._started)), 2)


def _foreign_ticks() -> int | None:
    try:
        fields = [int(field) for field in (PROC / "stat").read_text().splitlines()[0].split()[1 : NUM_FIELDS + 1]]
    except OSError:
        return None
    busy = sum(ticks for index, ticks in enumerate(fields) if index not in IDLE_FIELDS)
    processes = {int(path.parent.name): stat for path in PROC.glob("[0-9]*/stat") if (stat := _stat(path))}
    own = {os.getpid()}
    while found := {number for number, of in processes.items() if int(of[PARENT]) in own} - own:
        own |= found  # peers start processes of their own
    return busy - sum(int(processes[number][USER]) + int(processes[number][SYSTEM]) for number in own)


def _stat(path: Path) -> list[str]:
    """Of a process's stat, after its name; none if it has ended meanwhile."""
    try:
        return path.read_text().rpartition(")")[2].split()
    except OSError:
        return []


SPIN = """
import os, sys
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
os.sched_setaffinity(0, {int(sys.argv[1])})
parent = int(sys.argv[2])
while os.getppid() == parent:
    for _ in range(1_000_000):
        pass
"""


class CoreSpinner:
    """`with CoreSpinner(wanted):`; where the system cannot do it, or it is not wanted, nothing happens."""

    def __init__(self, wanted: bool = True) -> None:
        self._wanted = wanted and hasattr(os, "SCHED_IDLE")
        self._spinners: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> CoreSpinner:
        for core in sorted(os.sched_getaffinity(0)) if self._wanted else ():
            command = [sys.executable, "-S", "-E", "-c", SPIN, str(core), str(os.getpid())]
            self._spinners.append(subprocess.Popen(command, start_new_session=True))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for spinner in self._spinners:
            spinner.kill()
        for spinner in self._spinners:
            spinner.wait()
        self._spinners.clear()
