"""How many threads a process may keep busy. No torch."""

from __future__ import annotations

import math
import os
from pathlib import Path

QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of a container, as "200000 100000": microseconds in every so many


def usable_threads() -> int:
    """What `--threads` stands for unless it is given: OMP_NUM_THREADS, else the cores that this process may use."""
    given = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return int(given) if given.isdigit() and int(given) > 0 else usable_cores()


def usable_cores(quota: Path = QUOTA) -> int:
    """The cores of the affinity mask, or fewer where a container is allowed less time than they have."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on every system
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    allowed, _, period = quota.read_text().strip().partition(" ") if quota.is_file() else ("max", "", "")
    if allowed == "max":
        return cores
    return max(1, min(cores, math.ceil(int(allowed) / int(period))))
