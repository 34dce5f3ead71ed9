"""`outrider demo` as a user runs it, and that nothing of it is left. Its comparison runs in tests/test_readme.py."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.services import END_S, alive, children_of, needs_proc, wait_gone

from outrider.cli.local_services import ServiceFailed, Services

START_S = 40
DEMO = [sys.executable, "-m", "outrider.cli", "demo", "--threads", "1", "--max-tokens", "24", "--num-draft-tokens", "3"]


def demo(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [*DEMO, *arguments]
    return subprocess.run(
        command, cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=START_S, check=False
    )


def test_the_demo_without_the_expansion(tmp_path: Path) -> None:
    done = demo("--plain", "--no-expand", "--prompt", "def main():", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout and "def main():" in done.stdout
    for name in ("draft", "target", "gateway"):
        assert f"{name} listens on 127.0.0.1:" in done.stdout
    assert re.search(r"tokens +24 \(.*\), then length", done.stdout)
    assert re.search(r"tokens per round +\d\.\d\d in \d+ rounds", done.stdout)
    assert re.search(r"by position +1: \d+% \(\d+/\d+\)  2: ", done.stdout)
    assert re.search(r"control overhead +\d+\.\d\d ms a round", done.stdout)
    assert "traces: appended to trace.jsonl" in done.stdout
    lines = (tmp_path / "trace.jsonl").read_text().splitlines()
    assert lines and all("resourceSpans" in json.loads(line) for line in lines)


def test_colours_on_a_terminal(tmp_path: Path) -> None:
    leader, follower = pty.openpty()
    environment = os.environ | {"TERM": "xterm"}
    environment.pop("NO_COLOR", None)
    with subprocess.Popen(
        [*DEMO, "--no-expand"], cwd=tmp_path, env=environment, stdin=follower, stdout=follower, stderr=follower
    ) as process:
        os.close(follower)
        shown = b"".join(read_terminal(leader))
        assert process.wait(END_S) == 0, shown
    os.close(leader)
    assert b"\x1b[32maccepted" in shown and b"\x1b[33mrecovered" in shown  # the legend
    assert shown.count(b"\x1b[32m") > 1  # and tokens


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


@needs_proc
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_no_process_is_left(tmp_path: Path, number: signal.Signals, status: int) -> None:
    """However the demo ends: by Ctrl-C in mid-stream, or killed."""
    with subprocess.Popen(
        [*DEMO, "--plain", "--no-expand", "--max-tokens", "900"], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("A completion"):
                break
        children = children_of(process.pid)
        assert len(children) == 3
        process.send_signal(number)
        assert process.wait(END_S) == status
        left = wait_gone(children)
    assert not left


@needs_proc
def test_an_interrupt_while_the_services_start(tmp_path: Path) -> None:
    with subprocess.Popen([*DEMO, "--plain"], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and "starting" in process.stdout.readline()
        time.sleep(0.3)
        children = children_of(process.pid)
        process.send_signal(signal.SIGINT)
        assert process.wait(END_S) == 130
    assert not wait_gone(children)


def test_an_unknown_pair_is_one_line(tmp_path: Path) -> None:
    done = demo("--pair", "cobol", cwd=tmp_path)
    assert done.returncode == 1 and "no embedded pair 'cobol'" in done.stderr and "Traceback" not in done.stderr


def test_a_service_that_dies_is_reported_with_its_last_lines() -> None:
    with Services() as services:
        service = services.start("target", ["target", "--model", "/nowhere", "--listen", "127.0.0.1:0"])
        with pytest.raises(ServiceFailed, match=r"the target ended with status 2\. Its last lines:\n.*/nowhere"):
            services.wait(service, START_S)


@needs_proc
def test_a_port_in_use_is_reported(tmp_path: Path) -> None:
    with Services() as services:
        first = services.start("draft", ["draft", "--method", "ngram", "--listen", "127.0.0.1:0"])
        address = services.wait(first, START_S)
        second = services.start("draft", ["draft", "--method", "ngram", "--listen", address])
        with pytest.raises(ServiceFailed, match=f"cannot listen on {address}"):
            services.wait(second, START_S)
        assert alive(first.pid)
    assert not wait_gone([first.pid])
