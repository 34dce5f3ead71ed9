"""Every command of the README is run by a test or by CI; those that take seconds are run here, as they stand."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.environment import START_S
from support.models import save_tiny, tiny_hf_model, tiny_state, train_byte_level
from support.services import Trio, succeed, wait_for_draft

from outrider.cli import demo
from outrider.cli.local_services import Service, Services
from outrider.proposers.registry import METHODS

REPOSITORY = Path(__file__).parents[1]
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
BY_CI = {"make check", "make test"}
ELSEWHERE = "## First OpenAI call"  # its commands are run by tests/gateway/test_page.py
SERVICES = ("target", "draft", "gateway")


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


def make(command: str, tools: Path, **settings: str) -> str:
    """Runs a command of make's with the `outrider` of a folder; what it wrote."""
    arguments = shlex.split(command)
    arguments[1:1] = ["-o", ".venv/.installed", f"BIN={tools}"]
    outer = ("MAKE", "MFLAGS", "ARGS", "PROMPT", "METHOD", "MAX_TOKENS")  # this test may itself run under make
    environment = {name: value for name, value in os.environ.items() if not name.startswith(outer)}
    environment |= {f"OUTRIDER_DEMO__{name}": value for name, value in settings.items()}
    done = subprocess.run(
        arguments, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=170, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


COMPLETION = (
    r"^tokens +\d+ \(.*\), then ",
    r"^tokens per round +\d\.\d\d in \d+ rounds",
    r"^by position +1: \d+% \(\d+/\d+\)  2: ",
    r"^control overhead +\d+\.\d\d ms a round",
)
COMPARISON = (
    r"^with speculation +\d+\.\d tokens/s",
    r"^without +\d+\.\d tokens/s",
    r"^ratio +\d+\.\d\d",
    r"^same tokens +(?:yes|no)\b",
)


def found(patterns: Sequence[str], text: str) -> list[str]:
    return [pattern for pattern in patterns if re.search(pattern.replace("^", "^ *"), text, re.MULTILINE)]


@pytest.mark.timeout(180)
def test_the_demo_as_it_stands(tmp_path: Path) -> None:
    """With what is installed here, a short comparison (once), and its trace elsewhere."""
    trace = tmp_path / "trace.jsonl"
    out = make("make demo", Path(sys.executable).parent, TRACE_FILE=str(trace), REPEATS="1", COMPARE_TOKENS="10")
    listens = [f"^{name} listens on 127.0.0.1:" for name in SERVICES]
    wanted = [*listens, *COMPLETION, *COMPARISON, f"^traces: appended to {trace} "]
    assert found(wanted, out) == wanted and "\x1b" not in out, out
    traced = trace.read_text().splitlines()
    assert traced and all("resourceSpans" in json.loads(line) for line in traced)


def handed_on(command: str, folder: Path) -> list[str]:
    """What a command of make's calls `outrider` with."""
    recorder = folder / "outrider"
    recorder.write_text("#!/bin/sh\nprintf '%s\\0' \"$@\"\n")
    recorder.chmod(0o755)
    return make(command, folder).split("\0")[:-1]


@pytest.mark.parametrize("method", METHODS)
def test_make_hands_the_method_on(method: str, tmp_path: Path) -> None:
    """The demo with it: tests/cli/test_demo.py."""
    assert handed_on(f"make demo METHOD={method}", tmp_path) == ["demo", f"--draft.method={method}"]


@pytest.mark.parametrize("command", [command for command in MAKE if command not in {"make demo", *BY_CI}])
def test_the_demo_of_something_else(command: str, trio: Trio, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What make hands to the demo, and the demo with that, on services that run and without the large target."""
    arguments = handed_on(command, tmp_path)
    running = SimpleNamespace(gateway=SimpleNamespace(address=trio.gateway))
    monkeypatch.setattr(demo, "start", lambda *given: running)
    out = succeed(*arguments, env={"OUTRIDER_DEMO__EXPAND": "false"})
    assert found([*COMPLETION, *COMPARISON], out) == list(COMPLETION), out
    if "PROMPT" in command:
        assert "def parse_args(argv):" in out and re.search(r"tokens +200 |then stop", out)


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
    started: dict[str, Service] = {}  # the first of an address that is named
    every, ran = [], set()
    with Services() as services:

        def present(argument: str) -> str:
            """The address that a service really has."""
            return services.wait(started[argument], START_S) if argument in started else argument

        for command in OUTRIDER:
            _, name, *arguments = shlex.split(command)
            if name not in SERVICES:
                ran.add(" ".join([name, *arguments[: name == "model"]]))
                assert succeed(name, *map(present, arguments), cwd=folder)
                continue
            ran.add(name)
            place = arguments.index("--listen") + 1
            named, arguments[place] = arguments[place], "127.0.0.1:0"
            service = services.start(name, [name, *map(present, arguments), "--grace-s", "1"])
            started.setdefault(named, service)
            every.append(service)
            if name == "gateway":
                wait_for_draft(services.wait(service, START_S), START_S, services.check)
        assert all(services.wait(service, START_S) for service in every)
    assert ran >= {*SERVICES, "generate", "model check", "model convert", "--help"}
    assert (folder / "models/converted/model.safetensors").is_file()
