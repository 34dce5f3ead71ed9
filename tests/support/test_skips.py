"""A strict run lets through what a machine cannot have, and of tools those that are named as missing."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.skips import FOR_WANT_OF, is_excused

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("reason", "missing", "excused"),
    [
        ("Skipped: needs a GPU and TRITON_INTERPRET=0", "", True),
        ("Skipped: this processor has no amx", "", True),
        ("Skipped: no C compiler", "", False),
        ("Skipped: no C compiler", "gcc", True),
        ("Skipped: no go, protoc on this machine: examples/clients/install.sh go", "cpp-client", False),
        ("Skipped: no go, protoc on this machine: examples/clients/install.sh go", "go-client", True),
        ("Skipped: for no reason", "gcc git", False),
    ],
)
def test_what_is_excused(reason: str, missing: str, excused: bool) -> None:
    assert is_excused(reason, missing.split()) == excused


def test_the_tools_are_those_that_the_script_looks_for() -> None:
    script = (REPOSITORY / ".ci/tools").read_text(encoding="utf-8")
    named = set(re.findall(r'^    "([\w+-]+):', script, re.MULTILINE))
    assert named >= {tool for tools in FOR_WANT_OF.values() for tool in tools}


@pytest.mark.parametrize(("strict", "failed"), [("0", 0), ("1", 1)])
def test_a_strict_run_fails_with_a_skip(strict: str, failed: int, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import pytest\n\ndef test_left_out():\n    pytest.skip('no C compiler')\n\n"
        "def test_excused():\n    pytest.skip('no git')\n"
    )
    (tmp_path / "conftest.py").write_text("pytest_plugins = ['support.strictness']\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path)],
        env={"OUTRIDER_CI_STRICT": strict, "OUTRIDER_CI_MISSING": "git", "PYTHONPATH": str(REPOSITORY / "tests")},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == failed and f"{2 - failed} skipped" in done.stdout, done.stdout + done.stderr
