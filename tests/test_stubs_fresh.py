"""The committed stubs are what the pinned generator makes of the protos."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROTOS = Path(__file__).parents[1] / "protos"


def stubs(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((root / "outrider/v1").glob("*_pb2*")) if path.is_file()}


def test_the_stubs_are_fresh(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools", reason="the generator comes with the dev extra")
    environment = os.environ | {"PYTHON": sys.executable}
    subprocess.run(["bash", str(PROTOS / "generate.sh"), str(tmp_path)], check=True, env=environment, timeout=60)
    committed, generated = stubs(PROTOS), stubs(tmp_path)
    assert committed.keys() == generated.keys()
    stale = [name for name in generated if committed[name] != generated[name]]
    assert not stale, f"run protos/generate.sh: {stale}"
