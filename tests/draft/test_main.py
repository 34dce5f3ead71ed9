"""`python -m outrider.draft_service` in a process of its own: its line, its end, its errors."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import save_tiny

from outrider.draft_service.__main__ import main
from outrider.draft_service.boot import load_methods
from outrider.draft_service.settings import DraftSettings

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "outrider.draft_service", "--listen", "localhost:0"]


def environment() -> dict[str, str]:
    roots = ("protos", "rpc", "planner", "kernels", "engine", "proposers", "draft_service")
    return os.environ | {"PYTHONPATH": os.pathsep.join(str(ROOT / root) for root in roots), "OMP_NUM_THREADS": "1"}


def test_it_says_where_it_listens_and_ends_on_sigterm(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "tiny")
    command = [*COMMAND, "--model", str(model), "--threads", "1", "--num-blocks", "8", "--grace-s", "2"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(), text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("draft listening on localhost:")
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=20)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    assert process.returncode == 0 and "Traceback" not in log


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "/no/such/folder"], "there is no folder /no/such/folder"),
        (["--model", str(Path(__file__).parent)], "config.json"),
    ],
)
def test_a_checkpoint_that_cannot_be_served(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--listen", "localhost:0"]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("outrider draft: error: ") and message in error


def test_settings_need_a_model_or_a_method_without(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([])
    assert "--method ngram" in capsys.readouterr().err


def test_what_it_says_of_itself(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "tiny", generation={"eos_token_id": [2, 3], "temperature": 0.7})
    methods, info = load_methods(DraftSettings(model=model, num_blocks=8, dtype="float32"))
    assert [method.name for method in methods] == ["draft_model", "ngram"] == [method.name for method in info.methods]
    assert (info.model.name, info.model.vocab_size, info.model.max_model_len) == ("tiny", 97, 128)  # 8 blocks
    assert info.model.eos_token_ids == (2, 3) and info.model.default_sampling.temperature == 0.7
    assert info.model.digest and info.model.num_tokens == 0 and info.model.engine.startswith("outrider-")
    methods, info = load_methods(DraftSettings(method="ngram", prompt_lookup_min=2, prompt_lookup_max=3))
    assert [method.name for method in methods] == ["ngram"] and info.model.vocab_size == 0
