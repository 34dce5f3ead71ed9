"""How busy other programs keep the machine meanwhile: OpenMP's products suffer from them beyond their share."""

from __future__ import annotations

import os
import time
from pathlib import Path

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
