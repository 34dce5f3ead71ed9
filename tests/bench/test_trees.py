"""Trees beside chains and branches: a short run fills the table."""

from __future__ import annotations

import argparse

from outrider.bench.trees import FORMS, TREE, measure, table


def test_a_short_run() -> None:
    options = argparse.Namespace(tree=TREE, tokens=12, runs=1, threads=1)
    rows = measure(options, 0.0, 2)
    assert [row["form"] for row in rows] == list(FORMS)
    assert all(1 <= row["per_round"][0] <= 7 and 0 < row["per_round"][1] <= 6 for row in rows)
    assert rows[0]["ratio"]["values"] == [1.0]
    head, _, first, *_ = table(rows)
    assert head.startswith("| temperature | streams | form |") and first.startswith("| 0 | 2 | chains |")
