"""The arrays cover what they say, and the page says what the tables are."""

from __future__ import annotations

from dataclasses import asdict
from itertools import combinations, product
from pathlib import Path

import pytest
from lossless.composition import on_vllm, processes
from lossless.composition.page import left_out, values_of, why_not
from lossless.composition.processes import process_rows
from lossless.composition.table import EXCLUSIONS, FACTORS, OF_REGISTRY, exclusion_of, rows
from support.environment import SEED


def test_every_method_of_the_registry_is_in_it() -> None:
    assert set(FACTORS["method"]) >= OF_REGISTRY


@pytest.mark.parametrize("which", ["in one process", "across processes"])
def test_every_pair_that_may_be_stands_in_some_row(which: str) -> None:
    inside = which == "in one process"
    made = [asdict(row) for row in (rows(2, SEED) if inside else process_rows(2, SEED))]
    factors, exclusions = (FACTORS, EXCLUSIONS) if inside else (processes.FACTORS, processes.EXCLUSIONS)
    met = {pair for row in made for pair in combinations(row.items(), 2)}
    for (first, ones), (second, others) in combinations(factors.items(), 2):
        for one, other in product(ones, others):
            may_be = exclusion_of({first: one, second: other}, exclusions) is None
            assert (((first, one), (second, other)) in met) == may_be


def test_the_page_has_the_tables_of_today(repository: Path) -> None:
    page = (repository / "docs" / "composition.md").read_text(encoding="utf-8")
    for factors, exclusions in ((FACTORS, EXCLUSIONS), (processes.FACTORS, processes.EXCLUSIONS)):
        assert values_of(factors) in page and why_not(exclusions) in page, "make composition writes it anew"
    assert values_of(on_vllm.FACTORS) in page and left_out() in page, "make composition writes it anew"
