"""Every command of the README is run by a test or by CI; those that take seconds are run here, as they stand."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.models import save_tiny, tiny_hf_model, tiny_state, train_byte_level
from support.services import succeed

from outrider.cli.local_services import Services, wait_for_draft

REPOSITORY = Path(__file__).parents[1]
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
BY_CI = {"make check", "make test", "make prove-laws"}  # .ci/run is these three
ELSEWHERE = "## First OpenAI call"  # its commands are run by tests/gateway/test_page.py
SERVICES = ("target", "draft", "gateway")
START_S = 60


def commands() -> list[str]:
    """The lines of the README's shell blocks."""
    here = re.sub(rf"^{ELSEWHERE}\n.*?(?=^## )", "", README, flags=re.MULTILINE | re.DOTALL)
    blocks = re.findall(r"^```sh\n(.*?)^```", here, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line]


MAKE = [command for command in commands() if command.startswith("make ")]
OUTRIDER = [command for command in commands() if command.startswith("outrider ")]


def test_there_is_no_other_command() -> None:
    assert MAKE and OUTRIDER and set(MAKE) | set(OUTRIDER) == set(commands())
    assert {"make demo", "make test"} <= set(MAKE)


def test_the_ci_runs_the_make_targets() -> None:
    script = (REPOSITORY / ".ci/run").read_text(encoding="utf-8").splitlines()
    assert set(script) >= BY_CI
    assert os.access(REPOSITORY / ".ci/run", os.X_OK)


def test_what_the_text_names_exists() -> None:
    named = re.findall(r"`((?:make|outrider) [a-z-]+)`", README)
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    for command in named:
        tool, name = command.split()
        assert tool == "outrider" or re.search(rf"^{name}:", makefile, re.MULTILINE), command
    for link in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (REPOSITORY / link).exists(), link


@pytest.mark.timeout(180)
@pytest.mark.parametrize("command", [command for command in MAKE if command not in BY_CI])
def test_the_demo_as_it_stands(command: str, tmp_path: Path) -> None:
    """With what is installed here, a short comparison (once), and its trace elsewhere; else word by word."""
    compares = command == "make demo"
    arguments = shlex.split(command)
    arguments[1:1] = ["-o", ".venv/.installed", f"BIN={Path(sys.executable).parent}"]
    brief = {
        "TRACE_FILE": str(tmp_path / "trace.jsonl"),
        "REPEATS": "1",
        "COMPARE_TOKENS": "10",
        "EXPAND": str(compares),
    }
    outer = ("MAKE", "MFLAGS", "ARGS", "PROMPT", "MAX_TOKENS")  # this test may itself run under make
    environment = {name: value for name, value in os.environ.items() if not name.startswith(outer)}
    environment |= {f"OUTRIDER_DEMO__{name}": value for name, value in brief.items()}
    done = subprocess.run(
        arguments, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=170, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "tokens per round" in done.stdout and "by position" in done.stdout
    assert (tmp_path / "trace.jsonl").stat().st_size
    if "PROMPT" in command:
        assert "def parse_args(argv):" in done.stdout and re.search(r"tokens +200 |then stop", done.stdout)
    figures = (
        r"with speculation +\d+\.\d tokens/s",
        r"without +\d+\.\d tokens/s",
        r"ratio +\d+\.\d\d",
        r"same tokens +(?:yes|no)\b",
    )
    assert all(bool(re.search(figure, done.stdout)) is compares for figure in figures)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with everything that the commands name: random models with a tokenizer, a text, an old checkpoint."""
    for name, seed in (("large", 0), ("small", 1), ("old", 2)):
        save_tiny(tmp_path / "models" / name, seed=seed, vocab_size=400)
        train_byte_level(400).save(str(tmp_path / "models" / name / "tokenizer.json"))
    (tmp_path / "models/old/model.safetensors").unlink()
    torch.save(tiny_state(tiny_hf_model(seed=2, vocab_size=400)), tmp_path / "models/old/pytorch_model.bin")
    (tmp_path / "sample.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 4)
    return tmp_path


def test_the_commands_in_their_order(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Services on ports that are free; the addresses that follow are theirs."""
    monkeypatch.chdir(folder)
    addresses: dict[str, str] = {}
    ran = set()
    with Services() as services:
        for command in OUTRIDER:
            _, name, *arguments = shlex.split(command)
            if name not in SERVICES:
                arguments = [addresses.get(argument, argument) for argument in arguments]
                assert succeed(*([name, *arguments]), cwd=folder)
            else:
                place = arguments.index("--listen") + 1
                named, arguments[place] = arguments[place], "127.0.0.1:0"
                arguments = [addresses.get(argument, argument) for argument in arguments]
                service = services.start(name, [name, *arguments, "--grace-s", "1"])
                addresses.setdefault(named, services.wait(service, START_S))
                if name == "gateway":
                    wait_for_draft(service.address, START_S, services.check)
            ran.add(name)
    assert ran >= {*SERVICES, "generate", "check-pair", "convert", "--help"}
    assert (folder / "models/converted/model.safetensors").is_file()
