"""Processes as a user runs them: the command line, and the services with the embedded pair."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from outrider.cli.local_services import Service, Services, wait_for_draft
from outrider.pairs import PairPaths, pair_path

END_S = 10
needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds processes in /proc")


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


def outrider(
    *arguments: str, cwd: Path | None = None, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs `outrider ARGUMENTS` to its end."""
    return subprocess.run(
        [sys.executable, "-m", "outrider.cli", *arguments],
        cwd=cwd,
        env=os.environ | (env or {}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def succeed(*arguments: str, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    """Runs it and returns what it wrote; any other status than 0 fails the test with what it complained of."""
    done = outrider(*arguments, cwd=cwd, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


START_S = 60


@dataclass(frozen=True)
class Trio:
    """Where the services listen."""

    gateway: str
    target: str
    draft: str
    pair: PairPaths
    trace_file: Path


@pytest.fixture(scope="session")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trio]:
    pair = pair_path()
    trace_file = tmp_path_factory.mktemp("traces") / "trace.jsonl"
    common = ["--listen", "127.0.0.1:0", "--grace-s", "1"]
    with Services() as services:
        draft = services.start("draft", ["draft", *common, "--model", str(pair.draft), "--threads", "1"])
        target_flags = ["--model", str(pair.target), "--threads", "1", "--batch-invariant"]
        target = services.start("target", ["target", *common, *target_flags])
        addresses = [services.wait(draft, START_S), services.wait(target, START_S)]
        peers = ["--draft", addresses[0], "--target", addresses[1], "--tokenizer", str(pair.target)]
        gateway = services.start("gateway", ["gateway", *common, *peers, "--trace-file", str(trace_file)])
        address = services.wait(gateway, START_S)
        wait_for_draft(address, START_S, services.check)
        yield Trio(address, addresses[1], addresses[0], pair, trace_file)


COMMON = ("--listen", "127.0.0.1:0", "--grace-s", "1")


@dataclass
class Fleet:
    """The services; `gateway` lives as long as they do, `victim()` is one more that a test may kill."""

    services: Services
    pair: PairPaths
    target: str
    draft: str
    gateway: str
    _spare: Service | None = None

    def start_gateway(self, *flags: str) -> Service:
        """One more gateway, which need not listen yet."""
        peers = ["--draft", self.draft, "--target", self.target, "--tokenizer", str(self.pair.target)]
        return self.services.start("gateway", ["gateway", *COMMON, *peers, *flags])

    def victim(self) -> Service:
        """A gateway that is ready; the next one starts meanwhile."""
        service, self._spare = self._spare or self.start_gateway(), self.start_gateway()
        self.services.wait(service, START_S)
        wait_for_draft(service.address, START_S, lambda: None)
        return service

    def kill(self, service: Service) -> None:
        """As by a machine that loses its power."""
        os.killpg(service.pid, signal.SIGKILL)
        self.services.stop(service)


@pytest.fixture(scope="session")
def fleet() -> Iterator[Fleet]:
    pair = pair_path()
    with Services() as services:
        draft = services.start("draft", ["draft", *COMMON, "--model", str(pair.draft), "--threads", "1"])
        target_flags = ["--model", str(pair.target), "--threads", "1", "--batch-invariant"]
        target = services.start("target", ["target", *COMMON, *target_flags])
        started = Fleet(services, pair, services.wait(target, START_S), services.wait(draft, START_S), "")
        gateway = started.start_gateway("--reflection")
        started._spare = started.start_gateway()
        started.gateway = services.wait(gateway, START_S)
        wait_for_draft(started.gateway, START_S, services.check)
        yield started


@pytest.fixture(scope="session")
def build(repository: Path) -> Path:
    """Where examples/clients/build.sh puts what it makes."""
    return repository / "build" / "clients"
