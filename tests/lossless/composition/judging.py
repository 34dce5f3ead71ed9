"""What tests ask of the rows of the first table that one kind of kernels computes: pairs in every run, and with
`--prove` every three values of different factors."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from lossless.composition.driver import Outcome, run
from lossless.composition.table import FACTORS, Kernels, rows
from support.environment import SEED


def check(kernels: Kernels, folder: Path, prove: bool) -> None:
    """AssertionError names every row that failed, and how. What the rows are there for has to have happened."""
    chosen = [row for row in rows(3 if prove else 2, SEED) if row.kernels == kernels]
    found = run(chosen, folder)
    assert not found.failures, "\n".join(found.failures)
    assert len(found.outcomes) == len(chosen) and found.num_preempted > 0
    assert sum(one.num_replayed for one in found.outcomes) > len(chosen)
    accepted = accepted_by_method(found.outcomes)
    wrong = {method for method in FACTORS["method"] if method != "none" and not accepted[method]}
    assert accepted.total() > len(chosen), "drafts are hardly ever right"
    assert not (prove and wrong), f"seed {SEED}: no draft of {wrong} was accepted: rows of these show half"


def accepted_by_method(outcomes: list[Outcome]) -> Counter[str]:
    """Drafted tokens that were."""
    counts: Counter[str] = Counter()
    for one in outcomes:
        counts[one.row.method] += one.num_accepted
    return counts
