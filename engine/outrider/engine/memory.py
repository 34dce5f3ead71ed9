"""How much memory is left, of a device, this machine or its container."""

from __future__ import annotations

from pathlib import Path

import torch

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")


def free_bytes(device: torch.device) -> int:
    """Memory that can be taken now: a device's, or this machine's, or what its container is allowed of it."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    lines = MEMINFO.read_text().splitlines() if MEMINFO.is_file() else []
    free = [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    limit = CGROUP / "memory.max"
    allowed = limit.read_text().strip() if limit.is_file() else "max"
    if allowed != "max":
        stat = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        used = int((CGROUP / "memory.current").read_text()) - int(stat.get("inactive_file", 0))
        free.append(int(allowed) - used)
    return min(free, default=1 << 62)  # where nobody says, trying tells
