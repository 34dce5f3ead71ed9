"""The regression check: ratios and shares of the floor against the last stored result of the same machine and setup."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from outrider.commands.bench_result import Json, title


def last_result(folder: Path, machine: Json, setup: Json) -> Json | None:
    """The newest stored result of the same machine description and setup."""
    found: list[Json] = []
    for path in folder.glob("*.json"):
        result: Json = json.loads(path.read_text(encoding="utf-8"))
        if result["machine"] == machine and result["setup"] == setup:
            found.append(result)
    return max(found, key=lambda result: str(result["when"]), default=None)


def moved(old: Json, new: Json) -> list[str]:
    """What moved by more than the spread: either median lies outside the other's range. What was measured only once
    has no spread, and is left out."""
    before = dict(_figures(old))
    lines = []
    for name, now in _figures(new):
        then = before.get(name)
        if then is None or min(len(then["values"]), len(now["values"])) < 2:
            continue
        if _outside(now["median"], then) and _outside(then["median"], now):
            word = "better" if now["median"] > then["median"] else "worse"
            lines.append(f"{name}: {then['median']:.2f} -> {now['median']:.2f}, {word}")
    return lines


def _figures(result: Json) -> Iterator[tuple[str, Json]]:
    for block in result["blocks"]:
        for name, ratio in block["ratios"].items():
            yield f"{title(block)}: {name}", ratio
        for name, way in block["ways"].items():
            if "share_of_floor" in way:
                yield f"{title(block)}: {name}, share of floor", way["share_of_floor"]


def _outside(value: float, found: Json) -> bool:
    return not found["min"] <= value <= found["max"]
