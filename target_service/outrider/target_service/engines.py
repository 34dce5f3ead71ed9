"""Engines that other wheels bring, by the name that `--engine` takes. Each is a module: `start(settings)` serves a
target by it, `join(settings)` computes for one on another host, `start_engine`, `adapter_changes_of` and `SPECULATIVE`
are for a process that holds it (outrider.llm)."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from outrider.engine.models.base import UnsupportedModel

GROUP = "outrider.engines"


def has_engine(name: str) -> bool:
    """Whether a wheel with this engine is installed."""
    return bool(entry_points(group=GROUP, name=name))


def engine_of(name: str) -> Any:
    """The engine's module. Raises UnsupportedModel where its wheel is not installed."""
    for point in entry_points(group=GROUP, name=name):
        return point.load()
    raise UnsupportedModel(f"engine {name} is not installed: pip install 'outrider[{name}]'")
