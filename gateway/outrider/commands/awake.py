"""Keeps the cores out of their idle state while something is measured.

A thread that waits on an idle core of a virtual machine wakes 0.15-0.2 ms late, and a round has about ten such waits;
on a core that runs anything else it wakes in 5 microseconds. So one process a core spins in the scheduler's idle class,
which yields to all others at once. It costs power, and a stacked thread is moved to another core later than else.
"""

from __future__ import annotations

import os
import subprocess
import sys
from types import TracebackType

SPIN = """
import os, sys
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
os.sched_setaffinity(0, {int(sys.argv[1])})
parent = int(sys.argv[2])
while os.getppid() == parent:
    for _ in range(1_000_000):
        pass
"""


class CoresAwake:
    """`with CoresAwake(wanted):`; where the system cannot do it, or it is not wanted, nothing happens."""

    def __init__(self, wanted: bool = True) -> None:
        self._wanted = wanted and hasattr(os, "SCHED_IDLE")
        self._spinners: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> CoresAwake:
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
