"""What all results of the bench have in common: the machine and the time they were measured, how busy other programs
kept it, medians with their spread, tables, and the files that they are stored in."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from itertools import zip_longest
from pathlib import Path
from statistics import median
from typing import Any

from outrider.rpc.settings import usable_cores

Json = dict[str, Any]
FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve")
CPUINFO, PROC = Path("/proc/cpuinfo"), Path("/proc")
IDLE_FIELDS = (3, 4)  # of the line "cpu": idle, and idle that waits for a disk
NUM_FIELDS = 8  # those after it are counted in the first ones already
PARENT, USER, SYSTEM = 1, 11, 12  # of a process's stat, after its name


def note(text: str) -> None:
    """Says how far it is, on standard error."""
    print(text, file=sys.stderr, flush=True)


def describe_machine() -> Json:
    """This machine, and no names: enough to know whether two results may be compared."""
    info = CPUINFO.read_text() if CPUINFO.is_file() else ""
    name = re.search(r"^(?:model name|Processor)\s*:\s*(.+)$", info, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", info, re.MULTILINE)
    known = set(flags[1].split()) if flags else set()
    return {
        "cpu": name[1].strip() if name else platform.processor() or platform.machine(),
        "flags": [flag for flag in FLAGS if flag in known],
        "cores": usable_cores(),  # that this process may use
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "transformers": metadata.version("transformers"),
    }


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


class ForeignLoad:
    """From its making on: the processors that this process and what it started did not keep busy, but somebody did.
    OpenMP's products suffer from them beyond their share."""

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


def processor_s(pid: int) -> float:
    """Processor time of a process so far, in seconds; 0 where the system does not tell."""
    stat = _stat(PROC / str(pid) / "stat")
    return (int(stat[USER]) + int(stat[SYSTEM])) / os.sysconf("SC_CLK_TCK") if stat else 0.0


def _stat(path: Path) -> list[str]:
    """Of a process's stat, after its name; none if it has ended meanwhile."""
    try:
        return path.read_text().rpartition(")")[2].split()
    except OSError:
        return []


def new_result(setup: Json) -> Json:
    """When and where something is measured, and with which settings."""
    return {"when": datetime.now(UTC).isoformat(timespec="seconds"), "machine": describe_machine(), "setup": setup}


def spread(values: Sequence[float | None]) -> Json | None:
    """Median, least and greatest of the values that are there."""
    found = [round(value, 4) for value in values if value is not None]
    return {"median": median(found), "min": min(found), "max": max(found), "values": found} if found else None


def column_sums(rows: Sequence[Sequence[int]]) -> list[int]:
    """Of lists of unequal lengths, place by place."""
    return [sum(column) for column in zip_longest(*rows, fillvalue=0)]


def shares(way: Json) -> list[float]:
    """The share accepted at each position of those that were tested there: behind a refused token none is."""
    return [accepted / tested for accepted, tested in zip(way["accepted"], way["tested"], strict=True) if tested]


def bracketed(found: Json | None, digits: int = 2) -> str:
    """A median, with the least and the greatest in brackets."""
    if found is None:
        return "-"
    return f"{found['median']:.{digits}f} ({found['min']:.{digits}f}..{found['max']:.{digits}f})"


def median_of(found: Json | None, digits: int) -> str:
    """A median alone."""
    return number(None if found is None else found["median"], digits)


def number(value: float | None, digits: int = 2) -> str:
    """A number that may be missing."""
    return "-" if value is None else f"{value:.{digits}f}"


def title(block: Json) -> str:
    """A cell in words."""
    streams = "1 stream" if block["batch"] == 1 else f"{block['batch']} streams"
    kind = "greedy" if block["temperature"] == 0 else f"temperature {block['temperature']:g}"
    return f"{streams}, {kind}"


def where(result: Json) -> str:
    """The machine and the pair, in a line."""
    machine, setup = result["machine"], result["setup"]
    return f"{machine['cpu']}, {machine['cores']} cores, torch {machine['torch']}; {setup['pair']}, k={setup['k']}"


def other_programs(cpus: float | None) -> str:
    """How busy others kept the machine meanwhile."""
    return "other programs not known" if cpus is None else f"other programs {cpus:.2f} CPUs"


def align(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Columns of a text: the first to the left, all others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        yield "  " + "  ".join(cells).rstrip()


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]], words: Sequence[int] = (0,)) -> Iterator[str]:
    """A table in Markdown: the columns `words` to the left, those of numbers to the right."""
    yield f"| {' | '.join(head)} |"
    yield f"|{'|'.join('---' if column in words else '--:' for column in range(len(head)))}|"
    yield from (f"| {' | '.join(row)} |" for row in rows)


def file_stem(when: str, name: str) -> str:
    """A result's file name: when it was measured, and what on."""
    slug = re.sub(r"[^a-z0-9]+", "-", re.sub(r"\(.*?\)", "", name).lower()).strip("-")
    return f"{re.sub(r'[-:]', '', when)[:13]}-{slug}"


def store(folder: Path, result: Json, name: str | None = None) -> Path:
    """Writes the JSON under the name of the machine, or of the device given; returns its path."""
    machine = result["machine"]
    stem = f"{file_stem(result['when'], machine['cpu'])}-{machine['cores']}c"
    path = folder / f"{stem if name is None else file_stem(result['when'], name)}.json"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(dump(result), encoding="utf-8")
    return path


def dump(result: Json) -> str:
    """JSON with short lists on one line."""
    text = json.dumps(result, indent=1)
    return re.sub(r"\[[^][{}]*\]", lambda found: re.sub(r"\s+", " ", found[0]), text) + "\n"
