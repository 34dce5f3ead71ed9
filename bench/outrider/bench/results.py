"""What all results of the bench have in common: the machine and the time they were measured, medians with their spread,
tables, and the files that they are stored in."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from outrider.bench.machine import Machine

Json = dict[str, Any]


def new_result(machine: Machine, setup: Json) -> Json:
    """When and where something is measured, and with which settings."""
    return {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": asdict(machine) | {"flags": list(machine.flags)},
        "setup": setup,
    }


def spread(values: Sequence[float | None]) -> Json | None:
    """Median, least and greatest of the values that are there."""
    found = [round(value, 4) for value in values if value is not None]
    return {"median": median(found), "min": min(found), "max": max(found), "values": found} if found else None


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Between the two nearest values, in proportion."""
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


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
