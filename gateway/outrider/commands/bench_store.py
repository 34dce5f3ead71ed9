"""Stored results: JSON and a plot beside it, in files named by time and machine."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

from outrider.commands.bench_plot import draw
from outrider.commands.bench_result import Json


def store(folder: Path, result: Json, plot: Callable[[Json], str] = draw) -> Path:
    """Writes both files; returns the JSON's path."""
    folder.mkdir(parents=True, exist_ok=True)
    machine = result["machine"]
    slug = re.sub(r"[^a-z0-9]+", "-", re.sub(r"\(.*?\)", "", machine["cpu"]).lower()).strip("-")
    when = re.sub(r"[-:]", "", result["when"])[:13]
    path = folder / f"{when}-{slug}-{machine['cores']}c.json"
    path.write_text(dump(result), encoding="utf-8")
    path.with_suffix(".svg").write_text(plot(result), encoding="utf-8")
    return path


def dump(result: Json) -> str:
    """JSON with short lists on one line."""
    text = json.dumps(result, indent=1)
    return re.sub(r"\[[^][{}]*\]", lambda found: re.sub(r"\s+", " ", found[0]), text) + "\n"
