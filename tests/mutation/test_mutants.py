"""No mutant is stale: its line stands in its file once, and the test that kills it is there."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest
from mutation.mutants import MUTANTS, Mutant
from mutation.run import copied, survives

REPOSITORY = Path(__file__).parents[2]


@cache
def functions_of(file: str) -> set[str]:
    tree = ast.parse((REPOSITORY / file).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_it_can_be_made(mutant: Mutant) -> None:
    text = (REPOSITORY / mutant.file).read_text(encoding="utf-8")
    assert text.count(mutant.line) == 1 and mutant.applied(text) != text
    if mutant.is_python:
        ast.parse(mutant.applied(text))
    file, name = mutant.killed_by.split("::")
    assert name.partition("[")[0] in functions_of(file)


def test_there_are_many() -> None:
    assert len(MUTANTS) == len(set(MUTANTS)) >= 60


def test_one_is_found_in_what_a_copy_imports(tmp_path: Path) -> None:
    (mutant,) = (each for each in MUTANTS if each.killed_by.endswith("::test_coins_lie_on_their_grid"))
    assert not survives(copied(tmp_path / "copy"), mutant)
