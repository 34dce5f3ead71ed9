"""`outrider target` as a process: it serves, drains on SIGTERM, and says in one line why it cannot start."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny import save_tiny

from outrider.cli.local_services import Services


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "outrider.target_service", *arguments], capture_output=True, text=True, timeout=60
    )


def test_serves_and_drains(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model")
    with Services() as services:
        service = services.start("target", ["target", "--listen", "127.0.0.1:0", "--model", str(folder)])
        assert services.wait(service, 60).startswith("127.0.0.1:")
        service.terminate()
        for _ in range(100):
            if service._process.poll() is not None:
                break
            time.sleep(0.1)
        assert service._process.poll() == 0


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--model", "no/such/folder"), "no/such/folder"),
        (("--modl", "x"), "--model"),
        (("--model", "x", "--max-window", "900"), "max-window"),
        ((), "--model"),
    ],
)
def test_says_why_it_cannot_start(arguments: tuple[str, ...], expected: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2 and expected in done.stderr and "Traceback" not in done.stderr


def test_refuses_a_checkpoint_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}))
    done = run("--model", str(tmp_path))
    assert done.returncode == 2 and "Traceback" not in done.stderr
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    done = run("--model", str(tmp_path))
    assert "outrider convert" in done.stderr
