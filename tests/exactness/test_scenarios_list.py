"""The scenarios are a list: twenty-five bugs that other speculative decoders had, each a test named by its number.

`pytest tests/exactness -k scenario --collect-only` shows them; each test's docstring says the bug."""

from __future__ import annotations

import ast
import re
from pathlib import Path

NUM_SCENARIOS = 25


def test_the_list_is_whole() -> None:
    """Each scenario has a test, whose docstring begins with its number."""
    found: set[int] = set()
    for path in sorted(Path(__file__).parent.glob("test_scenarios_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_scenario_"):
                number = re.fullmatch(r"test_scenario_(\d\d)_\w+", node.name)
                assert number, node.name
                assert re.match(rf"{int(number[1])}[:,] ", ast.get_docstring(node) or ""), node.name
                found.add(int(number[1]))
    assert found == set(range(1, NUM_SCENARIOS + 1))
