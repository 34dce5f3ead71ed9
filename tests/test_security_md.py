"""SECURITY.md: every promise names tests, and they are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
TEXT = (REPOSITORY / "SECURITY.md").read_text(encoding="utf-8")
PROMISES = re.findall(r"^\| (?!promise |-)(.+?) \| (.+) \|$", TEXT, re.MULTILINE)


def test_there_are_promises() -> None:
    assert len(PROMISES) >= 20


@pytest.mark.parametrize(("promise", "tests"), PROMISES)
def test_a_promise_has_its_tests(promise: str, tests: str) -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", tests)
    assert named and len(named) == tests.count("`") // 2, promise
    for path, name in named:
        found = (REPOSITORY / path).read_text(encoding="utf-8")
        assert re.search(rf"^(async )?def {name}\(", found, re.MULTILINE), f"{path} has no {name}"
