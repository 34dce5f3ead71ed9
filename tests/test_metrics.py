"""docs/metrics.md: its tables have every series of the services and of a learner, and no other."""

from __future__ import annotations

import re
from pathlib import Path

from support.metrics import declared


def documented(text: str) -> dict[str, str]:
    """The rows of its tables: a series, with its labels in braces, and its type."""
    return dict(re.findall(r"^\| `(\w+)(?:\{[\w, ]*\})?` \| (\w+) \|", text, re.MULTILINE))


def test_the_documentation_has_every_series(repository: Path) -> None:
    told = documented((repository / "docs/metrics.md").read_text(encoding="utf-8"))
    found = {name: "info" if name.endswith("_info") else kind for name, kind in declared().items()}
    assert len(found) > 50
    assert {name: kind for name, kind in found.items() if told.get(name) != kind} == {}, "in the code alone"
    assert set(told) - set(found) == set(), "in the documentation alone"
