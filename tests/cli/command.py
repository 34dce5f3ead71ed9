"""The command line as a user runs it: processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TIMEOUT_S = 60


def outrider(
    *arguments: str, cwd: Path | None = None, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs `outrider ARGUMENTS` to its end."""
    return subprocess.run(
        [sys.executable, "-m", "outrider.cli", *arguments],
        cwd=cwd,
        env=os.environ | (env or {}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def succeed(*arguments: str, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    """Runs it and returns what it wrote; any other status than 0 fails the test with what it complained of."""
    done = outrider(*arguments, cwd=cwd, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout
