"""The command line as a user runs it, and the services with the embedded pair as processes."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import chdir, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import pytest
from support.environment import START_S
from support.nursery import nurseries

from outrider.cli import local_services
from outrider.cli.__main__ import main
from outrider.cli.local_services import Service, Services
from outrider.pairs import PairPaths, pair_path

END_S = 60
needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds processes in /proc")


def wait_for_draft(address: str, timeout_s: float, check: Callable[[], None]) -> None:
    """Waits until a gateway has found a target and a draft."""
    asyncio.run(local_services.wait_for_draft(address, timeout_s, check))


def children_of(pid: int) -> list[int]:
    """The processes that a process started, from /proc."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            found.append(int(path.parent.name))
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_gone(pids: list[int]) -> list[int]:
    """Those that are still there after a while."""
    end = time.monotonic() + END_S
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    return [pid for pid in pids if alive(pid)]


TIMEOUT_S = 60
Done = subprocess.CompletedProcess[str]


def outrider(*arguments: str, cwd: Path | None = None, env: dict[str, str] | None = None, stdin: bytes = b"") -> Done:
    """Runs `outrider ARGUMENTS` to its end in this process, on a thread that no other command uses meanwhile: its
    status, and what it wrote."""
    out, err, status = io.StringIO(), io.StringIO(), 0
    typed = patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
    with patch.dict(os.environ, env or {}), typed, chdir(cwd or Path()), redirect_stdout(out), redirect_stderr(err):
        handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
        try:
            status = main(arguments)
        except SystemExit as ended:
            status = int(ended.code or 0)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
    return Done(arguments, status, out.getvalue(), err.getvalue())


def outrider_process(*arguments: str, env: dict[str, str] | None = None) -> Done:
    """The same in a process of its own, which nothing else has prepared."""
    return subprocess.run(
        [sys.executable, "-m", "outrider.cli", *arguments],
        env=os.environ | (env or {}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def succeed(*arguments: str, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    """Runs it in this process and returns what it wrote; any other status than 0 fails the test with what it complained
    of."""
    done = outrider(*arguments, cwd=cwd, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


COMMON = ("--listen", "127.0.0.1:0", "--grace-s", "1")


@dataclass
class Trio:
    """Draft and target of the embedded pair, and gateways before them: `gateway` lives as long as they do, `victim()`
    is one more that a test may kill."""

    services: Services
    pair: PairPaths
    target: str
    draft: str
    trace_file: Path
    gateway: str = ""

    def gateway_arguments(self) -> list[str]:
        """Of one more gateway before the two."""
        peers = ["--draft", self.draft, "--target", self.target, "--tokenizer", str(self.pair.target)]
        return ["gateway", *COMMON, *peers, "--draft-patience-ms", "10000"]  # drafts come late on a busy machine

    def start_gateway(self, *flags: str) -> Service:
        """It need not listen yet."""
        return self.services.start("gateway", [*self.gateway_arguments(), *flags])

    def wait(self, gateway: Service) -> str:
        """The address of a gateway that has found its peers."""
        address = self.services.wait(gateway, START_S)
        wait_for_draft(address, START_S, self.services.check)
        return address

    def victim(self) -> Service:
        """A gateway that is ready."""
        service = self.start_gateway()
        self.wait(service)
        return service

    def kill(self, service: Service) -> None:
        """As by a machine that loses its power."""
        os.killpg(service.pid, signal.SIGKILL)
        self.services.stop(service)


@pytest.fixture(scope="session", autouse=True)
def forked_services(pytestconfig: pytest.Config) -> Iterator[None]:
    """Services of the tests start without importing anything, but in the long forms, where each is a program of its
    own."""
    with nullcontext() if pytestconfig.getoption("--prove") else nurseries():
        yield


@pytest.fixture(scope="session")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trio]:
    """Started once, for all tests that leave it as it is."""
    pair, trace_file = pair_path(), tmp_path_factory.mktemp("traces") / "trace.jsonl"
    with Services() as services:
        common = [*COMMON, "--threads", "1"]
        draft = services.start("draft", ["draft", *common, "--model", str(pair.draft)])
        target = services.start("target", ["target", *common, "--model", str(pair.target), "--batch-invariant"])
        started = Trio(services, pair, services.wait(target, START_S), services.wait(draft, START_S), trace_file)
        # By itself a gateway may find that drafts do not pay on this machine.
        flags = ("--mode", "sequential", "--reflection", "--trace-file", str(trace_file))
        started.gateway = started.wait(started.start_gateway(*flags))
        yield started
