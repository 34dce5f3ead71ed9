"""What a service holds while nobody asks anything of it: by its own metrics, and by the kernel's; and whether that is
what it held at first."""

from __future__ import annotations

import os
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

# What no service may hold at rest. Blocks of a cached prefix that no sequence uses count as free: whoever needs one
# takes it. What drafts have learned (`outrider_draft_learned`) is kept on purpose, up to a bound of its own.
HELD: dict[str, tuple[str, ...]] = {
    "target": (
        "outrider_target_num_requests_running",
        "outrider_target_num_requests_waiting",
        "outrider_target_num_requests_open",
        "outrider_target_kv_cache_usage_perc",
    ),
    "draft": ("outrider_draft_num_sequences", "outrider_draft_kv_cache_usage_perc", "outrider_draft_store_entries"),
    "gateway": (
        "outrider_num_requests_running",
        "outrider_num_requests_waiting",
        "outrider_num_tokens_admitted",
        "outrider_replica_sequences",  # the journal of a sequence lives and ends with it
    ),
}
# Connections and threads come and go by themselves: a peer connects again, pools fill. What is leaked with every
# request, or with every tenth, is soon more.
SPARE_DESCRIPTORS, SPARE_THREADS = 12, 24
# A completion of 64 tokens that is kept is over 4 KiB in any service: 36 bytes a token as a Python integer in a list,
# and the same again for its text, chains, journal or block keys. Half the requests of a fleet pass each service.
KEPT_BYTES = 2048  # a request, over the later half of the readings
MIB = 1 << 20
NOISE_BYTES = 8 * MIB  # by which a heap differs from one reading to the next, whatever was asked
LEAST_READINGS = 6  # of a process, for its memory to be judged


@dataclass(frozen=True)
class Reading:
    """One process at rest."""

    member: str
    process: int  # how many of this member there have been
    held: dict[str, float]  # of HELD, what is not 0
    descriptors: int
    threads: int
    resident_bytes: int
    num_requests: int  # that all services together had had by then


def held_by(role: str, text: str) -> dict[str, float]:
    """What a service's metrics say that it holds, by series and labels, without what is 0. ValueError where one of the
    series is not there."""
    found = dict.fromkeys(HELD[role], 0.0)
    seen = set()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name in found:
                seen.add(sample.name)
                found[sample.name] += sample.value
    if missing := found.keys() - seen:
        raise ValueError(f"the metrics of a {role} lack {', '.join(sorted(missing))}")
    return {name: value for name, value in found.items() if value}


def descriptors_of(pid: int) -> int:
    """Open files and sockets of a process."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def threads_of(pid: int) -> int:
    """Threads of a process."""
    return len(os.listdir(f"/proc/{pid}/task"))


def resident_bytes_of(pid: int) -> int:
    """Memory of a process that is in RAM."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def problems(readings: Iterable[Reading]) -> list[str]:
    """What is wrong with readings in the order in which they were taken; the first of a process is its baseline."""
    by_process: defaultdict[tuple[str, int], list[Reading]] = defaultdict(list)
    for reading in readings:
        by_process[reading.member, reading.process].append(reading)
    return [problem for group in by_process.values() for problem in _problems_of(group)]


def _problems_of(readings: Sequence[Reading]) -> list[str]:
    """Of one process."""
    first, last = readings[0], readings[-1]
    found = [
        f"{reading.member} holds {name} {value:g} at rest, after {reading.num_requests} requests"
        for reading in readings
        for name, value in reading.held.items()
    ]
    for what, spare in (("descriptors", SPARE_DESCRIPTORS), ("threads", SPARE_THREADS)):
        before, now = getattr(first, what), getattr(last, what)
        if now > before + spare:
            found.append(f"{last.member} has {now} {what}, and had {before} {_requests_between(first, last)} ago")
    kept, grown = growth(readings)
    if len(readings) >= LEAST_READINGS and kept > KEPT_BYTES and grown > NOISE_BYTES:
        found.append(
            f"{last.member} keeps {kept:.0f} bytes a request: {grown / MIB:.1f} MiB over the later half of "
            f"{_requests_between(first, last)}"
        )
    return found


def growth(readings: Sequence[Reading]) -> tuple[float, float]:
    """Bytes a request by which a process grows over the later half of its readings, and bytes in all: the median slope
    of every two readings (Theil and Sen), which one peak does not bend."""
    half = readings[len(readings) // 2 :]
    slopes = [
        (after.resident_bytes - before.resident_bytes) / (after.num_requests - before.num_requests)
        for before, after in combinations(half, 2)
        if after.num_requests > before.num_requests
    ]
    slope = statistics.median(slopes) if slopes else 0.0
    return slope, slope * (half[-1].num_requests - half[0].num_requests)


def _requests_between(first: Reading, last: Reading) -> str:
    return f"{last.num_requests - first.num_requests} requests"
