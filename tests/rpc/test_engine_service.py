"""`outrider target` and `outrider draft`: in a process of their own they serve and end on SIGTERM; in one line they say
why they cannot start."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from support.models import save_tiny

from outrider.draft_service.__main__ import main as draft_main
from outrider.target_service.__main__ import main as target_main

REPOSITORY = Path(__file__).parents[2]
MAINS = {"draft": draft_main, "target": target_main}
ROOTS = {  # what each needs of the repository
    "draft": ("protos", "rpc", "planner", "kernels", "engine", "proposers", "draft_service"),
    "target": ("protos", "rpc", "planner", "kernels", "engine", "models", "target_service"),
}


@pytest.mark.parametrize("role", MAINS)
def test_it_says_where_it_listens_and_ends_on_sigterm(role: str, tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "tiny")
    command = [sys.executable, "-m", f"outrider.{role}_service", "--listen", "localhost:0", "--model", str(model)]
    options = ["--threads", "1", "--num-blocks", "8", "--grace-s", "2", "--log-format", "json"]
    options += ["--metrics", "localhost:0"]
    path = os.pathsep.join(str(REPOSITORY / root) for root in ROOTS[role])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    with subprocess.Popen([*command, *options], env=environment, text=True, stdout=pipe, stderr=pipe) as process:
        try:
            assert process.stdout is not None
            told, _, metrics = process.stdout.readline().strip().rpartition(" on ")
            assert told == f"{role} metrics"
            assert process.stdout.readline().startswith(f"{role} listening on localhost:")
            with urllib.request.urlopen(f"http://{metrics}/metrics", timeout=60) as answer:
                assert f'outrider_{role}_model_info{{digest="'.encode() in answer.read()
            with urllib.request.urlopen(f"http://{metrics}/livez", timeout=60) as answer:
                assert answer.status == 200
            process.send_signal(signal.SIGTERM)
            _, log = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 0 and "Traceback" not in log
    lines = [json.loads(line) for line in log.splitlines()]
    assert {line["service"] for line in lines} == {f"outrider-{role}"}
    assert any("draining" in line["message"] and line["level"] == "INFO" for line in lines)


@pytest.mark.parametrize(
    ("role", "arguments", "expected"),
    [
        ("draft", ("--model", "/no/such/folder"), "there is no folder /no/such/folder"),
        ("draft", ("--model", str(Path(__file__).parent)), "config.json"),
        ("draft", (), "--method ngram"),
        ("target", ("--model", "no/such/folder"), "no/such/folder"),
        ("target", ("--modl", "x"), "--model"),
        ("target", ("--model", "x", "--max-window", "900"), "max-window"),
        ("target", (), "--model"),
    ],
)
def test_says_why_it_cannot_start(
    role: str, arguments: tuple[str, ...], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert expected in refusal(role, arguments, capsys)


def test_refuses_a_checkpoint_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}))
    assert str(tmp_path) in refusal("target", ("--model", str(tmp_path)), capsys)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert "outrider model convert" in refusal("target", ("--model", str(tmp_path)), capsys)


@pytest.mark.parametrize("flag", ["--listen", "--health", "--metrics"])
@pytest.mark.parametrize("role", MAINS)
def test_an_address_in_use_is_refused_before_a_model_is_loaded(
    role: str, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        told = refusal(role, ("--model", "no/such/folder", flag, address), capsys)
    assert f"cannot listen on {address}" in told


def refusal(role: str, arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> str:
    """The last line of an error that ends the process with 2."""
    try:
        code = MAINS[role](["--listen", "localhost:0", *arguments])
    except SystemExit as end:
        assert end.code == 2
    else:
        assert code == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error and f"outrider {role}: error: " in error
    return error[error.index("error: ") :]
