"""CONTRIBUTING.md: the files, functions and tests that it names are there, and so are its commands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_tour import defined

REPOSITORY = Path(__file__).parents[1]
TEXT = (REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8")
NAMED = re.findall(r"\[`([\w.]+)`\]\(([^)#]+\.py)\)", TEXT)
TESTS = re.findall(r"\b(tests/[\w/]+\.py)::(\w+)", TEXT)
PLACEHOLDERS = ("NAME", "OPERATION")
RECIPES = ("drafting method", "model family", "kernel", "flag", "metric")


@pytest.mark.parametrize(("name", "link"), NAMED)
def test_what_a_step_names_is_there(name: str, link: str) -> None:
    assert name in defined(REPOSITORY / link)


@pytest.mark.parametrize(("file", "name"), sorted(set(TESTS)))
def test_a_promise_has_its_test(file: str, name: str) -> None:
    assert name in defined(REPOSITORY / file)


def test_every_promise_is_held() -> None:
    table = TEXT[TEXT.index("## Promises") : TEXT.index("## Release")]
    rows = [row.split("|")[1:-1] for row in table.splitlines() if row.startswith("| ")][1:]
    assert len(rows) >= 10
    for promise, where, tests in rows:
        assert where.strip() and "::" in tests, promise


def test_every_file_is_there() -> None:
    paths = re.findall(r"`([\w./-]+/[\w.-]+\.\w+)`", TEXT) + re.findall(r"\]\(([^)#:]+)\)", TEXT)
    for path in paths:
        assert any(word in path for word in PLACEHOLDERS) or (REPOSITORY / path).exists(), path


def test_every_recipe_and_make_target_is_there() -> None:
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    for recipe in RECIPES:
        steps = TEXT[TEXT.index(f"### A {recipe}") :].split("\n###")[0].split("\n## ")[0]
        assert steps.count("\n1. ") == 1 and "tests/" in steps and "docs/" in steps + "docs/" * (recipe == "kernel")
    for target in re.findall(r"(?:^|`)make ([a-z0-9-]+)", TEXT, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
