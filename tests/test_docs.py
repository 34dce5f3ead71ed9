"""What the pages name is there: files that they link to or spell out, functions, tests, targets of make. And every
promise has its tests."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PAGES = [*sorted(REPOSITORY.glob("*.md")), *sorted((REPOSITORY / "docs").glob("*.md"))]
PLACEHOLDERS = ("NAME", "OPERATION", "VERSION", "FILE")
ROOTS = "|".join(re.escape(path.name) for path in REPOSITORY.iterdir() if path.is_dir() and path.name != "build")
LEAST_PROMISES = {"CONTRIBUTING.md": 10, "SECURITY.md": 20}  # rows of its table


@cache
def defined(path: Path) -> set[str]:
    """The functions, classes and constants of a file, as `Class.method`; of a C file its functions."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return set(re.findall(r"^\w[\w *]*?(\w+)\(", text, re.MULTILINE))

    def names(node: ast.AST, prefix: str) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield prefix + child.name
                yield from names(child, f"{prefix}{child.name}.")
            elif isinstance(child, ast.Assign):
                yield from (prefix + target.id for target in child.targets if isinstance(target, ast.Name))

    return set(names(ast.parse(text), ""))


def links(page: Path, text: str) -> Iterator[str]:
    """Relative ones that lead nowhere."""
    return (
        link for link in re.findall(r"\]\((?!https?:|mailto:)([^)#\s]+)", text) if not (page.parent / link).exists()
    )


def files(page: Path, text: str) -> Iterator[str]:
    """Spelled out from the root of the repository or the page's folder, or from a package: `engine/batch.py`."""
    named = re.findall(rf"`((?:{ROOTS})/[\w./-]*\.\w+)(?:::\w+)?`", text)
    return (name for name in named if not any(word in name for word in PLACEHOLDERS) and not found(page, name))


def found(page: Path, name: str) -> bool:
    root = name.partition("/")[0]
    return any((folder / name).exists() for folder in (REPOSITORY, page.parent, REPOSITORY / root / "outrider"))


def symbols(page: Path, text: str) -> Iterator[str]:
    """Names in code that link to the file which has them."""
    for name, link in re.findall(r"\[`([\w.]+)`\]\(([^)#:]+\.(?:py|c))\)", text):
        if not name.endswith(".py") and name not in defined((page.parent / link).resolve()):
            yield f"{name} in {link}"


def proofs(page: Path, text: str) -> Iterator[str]:
    for file, name in re.findall(r"\b(tests/[\w/]+\.py)::(\w+)", text):
        if not (REPOSITORY / file).exists() or name not in defined(REPOSITORY / file):
            yield f"{file}::{name}"


def targets(page: Path, text: str) -> Iterator[str]:
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    named = re.findall(r"(?:^|`)make ([a-z][a-z0-9-]*)", text, re.MULTILINE)
    return (name for name in named if not re.search(rf"^{name}:", makefile, re.MULTILINE))


CHECKS: list[Callable[[Path, str], Iterator[str]]] = [links, files, symbols, proofs, targets]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_names_is_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    missing = [f"{check.__name__}: {name}" for check in CHECKS for name in check(page, text)]
    assert missing == []


@pytest.mark.parametrize("name", LEAST_PROMISES)
def test_every_promise_has_its_tests(name: str) -> None:
    table = (REPOSITORY / name).read_text(encoding="utf-8").partition("| promise |")[2]
    rows = re.findall(r"^\| (?!-|promise )(.+) \| (.+) \|$", table, re.MULTILINE)
    assert len(rows) >= LEAST_PROMISES[name]
    for promise, named in rows:
        held_by = re.findall(r"`tests/[\w/]+\.py::test_\w+`", named)
        assert held_by and len(held_by) == named.count("`") // 2, promise


def test_each_check_finds_what_is_not_there() -> None:
    text = "[a](no.md) `tests/no.py` [`no`](../tests/test_docs.py) `tests/test_docs.py::test_no` `make no`"
    page = REPOSITORY / "docs" / "page.md"
    assert all(list(check(page, text)) for check in CHECKS)
