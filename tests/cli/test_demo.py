"""`outrider demo` on a terminal, and that nothing of it is left however it ends.

What it prints to its end: tests/test_readme.py."""

from __future__ import annotations

import asyncio
import io
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.environment import START_S
from support.fakes import ToyTarget
from support.gateways import gateway
from support.heads import random_head_of
from support.proofs import mostly_long
from support.services import END_S, Trio, children_of, needs_proc, outrider, succeed, wait_gone

from outrider.cli import demo
from outrider.cli.demo import DemoSettings, large_target
from outrider.cli.local_services import ServiceFailed, Services
from outrider.cli.terminal import Painter
from outrider.gateway.peers.local_drafts import LocalDrafter
from outrider.pairs import expansion, pair_path
from outrider.proposers.registry import METHODS, make_proposer

DEMO = [sys.executable, "-m", "outrider.cli", "demo", "--target.threads", "1", "--max-tokens", "900"]


def demo_settings(**given: Any) -> DemoSettings:
    return DemoSettings.model_validate(given)


@needs_proc
def test_colours_on_a_terminal_until_ctrl_c(tmp_path: Path) -> None:
    leader, follower = pty.openpty()
    environment = os.environ | {"TERM": "xterm"}
    environment.pop("NO_COLOR", None)
    with subprocess.Popen(
        [*DEMO, "--no-expand"], cwd=tmp_path, env=environment, stdin=follower, stdout=follower, stderr=follower
    ) as process:
        os.close(follower)
        shown, children = b"", list[int]()
        for block in read_terminal(leader):
            shown += block
            if not children and b"\x1b[32m" in shown.partition(b"kept by the target")[2]:  # a token's, after the legend
                children = children_of(process.pid)
                process.send_signal(signal.SIGINT)
        assert process.wait(END_S) == 130, shown
    os.close(leader)
    assert b"\x1b[32maccepted" in shown and b"\x1b[33mrecovered" in shown  # the legend
    assert len(children) == 3 and not wait_gone(children)


def test_the_large_target_of_vllm_is_a_folder_while_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    written = list[tuple[Path, Path]]()

    def write(source: Path, destination: Path) -> None:
        destination.mkdir()
        written.append((source, destination))

    monkeypatch.setattr(expansion, "write_expanded", write)
    with large_target(demo_settings(target={"engine": "vllm", "engine_args": {"block_size": 32}})) as arguments:
        ((source, folder),) = written
        assert source == pair_path().target and folder.is_dir()
        assert {f"--model={folder}", "--engine=vllm", '--engine-args={"block_size": 32}'} <= {*arguments}
    assert not folder.exists()
    with large_target(demo_settings()) as arguments:
        assert "--expand" in arguments and len(written) == 1


def read_terminal(leader: int) -> Iterator[bytes]:
    """What is written until the other side is closed."""
    while True:
        try:
            block = os.read(leader, 65536)
        except OSError:
            return
        if not block:
            return
        yield block


SERVING = """
import sys, time
from outrider.cli.local_services import Services
with Services() as services:
    print(services.wait(services.start("gateway", sys.argv[1:]), 60), flush=True)
    time.sleep(60)
"""


@needs_proc
def test_a_service_does_not_outlive_a_command_that_is_killed(trio: Trio) -> None:
    command = [sys.executable, "-c", SERVING, *trio.gateway_arguments()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline().startswith("127.0.0.1:")
        children = children_of(process.pid)
        process.send_signal(signal.SIGKILL)
        assert process.wait(END_S) == -9
    assert len(children) == 1 and not wait_gone(children)


@needs_proc
def test_a_signal_while_the_services_start(tmp_path: Path) -> None:
    with subprocess.Popen([*DEMO, "--plain"], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and "starting" in process.stdout.readline()
        time.sleep(0.3)
        children = children_of(process.pid)
        process.send_signal(signal.SIGTERM)
        assert process.wait(END_S) == 143
    assert not wait_gone(children)


@pytest.mark.parametrize("method", mostly_long(METHODS, ["draft_model"]))
def test_every_method(method: str, tmp_path: Path) -> None:
    trace = str(tmp_path / "trace.jsonl")
    flags = ["--plain", "--no-expand", "--max-tokens", "40", "--trace-file", trace]
    said = succeed("demo", "--draft.method", method, *flags)
    assert re.search(r"tokens +40 \(", said) and "tokens per round" in said


async def rounds_of_a_comparison(repeats: int) -> str:
    """What it says of the last turn, where suffix drafts, on a target that repeats nothing within a completion."""
    settings, out = demo_settings(prompt="a b c", compare_tokens=40, repeats=repeats), io.StringIO()
    target = ToyTarget(rule=lambda tokens, prompt_len: 11 + len(tokens))
    drafts = LocalDrafter([make_proposer("suffix", {}, False)], in_turn=True)
    async with gateway(target, drafts, mode="sequential") as served:  # type: ignore[arg-type]
        await asyncio.to_thread(demo._compare, settings, Painter(out, colours=False), served.grpc_address)
    (rounds,) = re.findall(r"tokens per round +(\S+) in", out.getvalue())
    return str(rounds)


async def test_no_turn_of_the_comparison_drafts_from_another() -> None:
    """With the answer of a turn before there would be one or two rounds a window."""
    assert await rounds_of_a_comparison(1) == await rounds_of_a_comparison(3) == "1.00"


def test_a_head_without_a_draft(tmp_path: Path, prove: bool) -> None:
    """In the long form beside the large target, too."""
    head = str(random_head_of(pair_path().target, "eagle3", tmp_path / "head"))
    flags = ["--plain", "--max-tokens", "24", "--trace-file", str(tmp_path / "trace.jsonl")]
    flags += ["--compare-tokens", "8", "--repeats", "1"] if prove else ["--no-expand"]
    said = succeed("demo", "--target.head", head, "--target.head-trial", "off", *flags)
    assert "starting target and gateway" in said and said.count("tokens per round") == 1 + prove
    assert bool(re.search(r"same tokens +yes", said)) == prove


@pytest.mark.parametrize("method", mostly_long(pair_path().heads, list(pair_path().heads)[:1]))
def test_every_head_of_the_pair(method: str, tmp_path: Path) -> None:
    said = succeed(
        "demo", "--draft.method", method, "--plain", "--no-expand", "--max-tokens", "40", "--trace-file",
        str(tmp_path / "trace.jsonl"),
    )  # fmt: skip
    assert re.search(r"acceptance +[1-9]", said) and "starting target and gateway" in said


def test_a_head_that_the_pair_has_not_is_one_line() -> None:
    done = outrider("demo", "--draft.method", "eagle")
    assert done.returncode == 2 and "the embedded pair 'python' has no head 'eagle'; there are: " in done.stderr


def test_an_unknown_method_is_refused_before_anything_starts() -> None:
    done = outrider("demo", "--draft.method", "sufix")
    assert done.returncode == 2 and "did you mean suffix" in done.stderr and "Traceback" not in done.stderr


def test_an_unknown_pair_is_one_line() -> None:
    done = outrider("demo", "--pair", "cobol")
    assert done.returncode == 2 and "no embedded pair 'cobol'" in done.stderr and "Traceback" not in done.stderr


def test_a_service_that_dies_is_reported_with_its_last_lines() -> None:
    with Services() as services:
        service = services.start("target", ["target", "--modle", "x"])
        with pytest.raises(ServiceFailed, match=r"the target ended with status 2\. Its last lines:\n.*--modle"):
            services.wait(service, START_S)
