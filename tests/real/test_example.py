"""The README's two commands, behind the first one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
RUN = "import runpy, sys; sys.path.append(sys.argv.pop(1)); sys.argv.pop(0); runpy.run_path(sys.argv[0])"


def test_real_text(installed: Path, repository: Path) -> None:
    """With the package of the other environment, behind all that is installed here."""
    (packages,) = (installed / "peer" / "lib").glob("python3*/site-packages")
    example, prompt = repository / "examples" / "real_model.py", "The capital of France is"
    done = subprocess.run(
        [sys.executable, "-c", RUN, packages, example, prompt], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith(f"{prompt} the capital of the country of France.")
