"""Service processes of this machine: started, watched until they listen, and ended together, whatever happens. A
gateway listens before it has found its peers, and then answers without a draft, or not at all: `wait_for_draft` waits
for them."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

from outrider.client import Client
from outrider.rpc.errors import OutriderError

LISTENING = re.compile(r"^\S+ listening on (\S+)$", re.MULTILINE)
PEERS = re.compile(r"^gateway has (its peers)$", re.MULTILINE)  # it shows so to whoever may not ask it
POLL_S = 0.05
TERMINATE_S = 4.0  # then SIGKILL
TAIL_LINES = 12
ASK_S = 5.0
LOOPBACK = "127.0.0.1:0"  # on a port that the system chooses
GRACE_S = "2"


class ServiceFailed(Exception):
    """A service did not start, or died; the message holds the end of its log."""


class Service:
    """One process that runs `outrider COMMAND ...`, with its output in a file."""

    def __init__(self, name: str, arguments: Sequence[str], log_path: Path, shows_log: bool = False) -> None:
        self.name = name
        self.address = ""  # known when it listens
        self._log_path = log_path
        with log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "outrider.cli.attached", *arguments],
                stdin=subprocess.PIPE,  # held open and never written: its end is ours (see attached)
                stdout=log,
                stderr=None if shows_log else subprocess.STDOUT,
                env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"},
                start_new_session=True,  # Ctrl-C reaches this process alone, which then ends them in order
            )

    @property
    def pid(self) -> int:
        """The process id, which is also its group's."""
        return self._process.pid

    def poll(self) -> bool:
        """Whether it listens by now. Raises ServiceFailed if it has ended."""
        self.check()
        self.address = self.address or self.find(LISTENING)
        return bool(self.address)

    def check(self) -> None:
        """Raises ServiceFailed if the process has ended."""
        status = self._process.poll()
        if status is not None:
            how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
            raise ServiceFailed(f"the {self.name} {how}. Its last lines:\n{self.tail()}")

    def tail(self) -> str:
        """The last lines of its output."""
        lines = self._log().splitlines()[-TAIL_LINES:]
        return "\n".join(f"  {line}" for line in lines) or "  (none)"

    def find(self, pattern: re.Pattern[str]) -> str:
        """The first group of a pattern's first match in its output; empty if there is none yet."""
        found = pattern.search(self._log())
        return found[1] if found else ""

    def terminate(self) -> None:
        """Asks the process group to end."""
        self._signal(signal.SIGTERM)

    def kill(self, wait_s: float) -> None:
        """Waits for the end, and makes it after `wait_s`."""
        try:
            self._process.wait(wait_s)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()

    def _signal(self, number: int) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)

    def _log(self) -> str:
        return self._log_path.read_text(encoding="utf-8", errors="replace")


class Services:
    """The processes that a command starts. Leaving the context ends all of them."""

    def __init__(self, shows_logs: bool = False) -> None:
        """`shows_logs`: what they log goes to this process's standard error, and not into the tails of failures."""
        self._shows_logs = shows_logs
        self._folder = tempfile.TemporaryDirectory(prefix="outrider-")
        self._running: list[Service] = []
        self._num_started = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop(*self._running)
        self._folder.cleanup()

    def start(self, name: str, arguments: Sequence[str]) -> Service:
        """Starts a process; it does not listen yet."""
        self._num_started += 1
        log_path = Path(self._folder.name) / f"{self._num_started}-{name}.log"
        service = Service(name, arguments, log_path, self._shows_logs)
        self._running.append(service)
        return service

    def private_address(self, name: str) -> str:
        """Where no other user of the machine comes: a Unix socket in a folder of this user's own."""
        return f"unix:{Path(self._folder.name) / name}.sock"

    def wait(self, service: Service, timeout_s: float) -> str:
        """Waits until a service listens, and returns its address. Raises ServiceFailed if any of them ends."""
        self._wait_for(service, service.poll, timeout_s, "listen")
        return service.address

    def wait_ready(self, gateway: Service, timeout_s: float) -> None:
        """Waits until a gateway has found its target and its draft, if it has one. Raises ServiceFailed as `wait`."""
        self._wait_for(gateway, lambda: bool(gateway.find(PEERS)), timeout_s, "find its peers")

    def _wait_for(self, service: Service, has_done: Callable[[], bool], timeout_s: float, what: str) -> None:
        end = time.monotonic() + timeout_s
        while not has_done():
            self.check()
            if time.monotonic() > end:
                raise ServiceFailed(
                    f"the {service.name} did not {what} within {timeout_s:g} s. Its last lines:\n{service.tail()}"
                )
            time.sleep(POLL_S)

    def check(self) -> None:
        """Raises ServiceFailed if one of them has ended."""
        for service in self._running:
            service.check()

    def stop(self, *services: Service) -> None:
        """Ends services: all are asked at once; those that do not follow are killed."""
        for service in reversed(services):
            service.terminate()
        end = time.monotonic() + TERMINATE_S
        for service in services:
            service.kill(max(0.0, end - time.monotonic()))
        self._running = [service for service in self._running if service not in services]


async def wait_for_draft(address: str, timeout_s: float, check: Callable[[], None] = lambda: None) -> None:
    """Returns when the gateway has found a target and a draft; `check` is called while it has not. Raises
    TimeoutError."""
    end = time.monotonic() + timeout_s
    async with Client(address) as client:
        while not await _has_draft(client):
            check()
            if time.monotonic() > end:
                raise TimeoutError(f"the gateway at {address} did not find its draft in time")
            await asyncio.sleep(POLL_S)


async def _has_draft(client: Client) -> bool:
    try:
        return (await client.info(timeout=ASK_S)).draft is not None
    except OutriderError:  # it has no target yet
        return False


@dataclass(frozen=True, slots=True)
class Folders:
    """The checkpoints of a pair."""

    target: Path
    draft: Path


def leave_on_signals() -> None:
    """From now on SIGTERM and SIGHUP end this process as Ctrl-C does, with the services."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)
