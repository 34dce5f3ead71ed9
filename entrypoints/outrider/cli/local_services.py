"""The demo's processes: a draft, a target and a gateway on loopback, on ports that the system chooses.

Service processes of this machine: started, watched until they listen, and ended together, whatever happens.

Whether a gateway has found its peers: it listens before, and then answers without a draft, or not at all.

The settings of `outrider demo`."""

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
from types import TracebackType
from typing import ClassVar, Self

from pydantic import Field

from outrider.cli.terminal import Advance
from outrider.client import Client
from outrider.rpc.errors import OutriderError
from outrider.rpc.settings import ServiceSettings

LISTENING = re.compile(r"^\S+ listening on (\S+)$", re.MULTILINE)
POLL_S = 0.05
TERMINATE_S = 4.0  # then SIGKILL
TAIL_LINES = 12


class ServiceFailed(Exception):
    """A service did not start, or died; the message holds the end of its log."""


class Service:
    """One process that runs `outrider COMMAND ...`, with its output in a file."""

    def __init__(self, name: str, arguments: Sequence[str], log_path: Path) -> None:
        self.name = name
        self.address = ""  # known when it listens
        self._log_path = log_path
        with log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "outrider.cli.attached", *arguments],
                stdin=subprocess.PIPE,  # held open and never written: its end is ours (see attached)
                stdout=log,
                stderr=subprocess.STDOUT,
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

    def __init__(self) -> None:
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
        service = Service(name, arguments, Path(self._folder.name) / f"{self._num_started}-{name}.log")
        self._running.append(service)
        return service

    def wait(self, service: Service, timeout_s: float) -> str:
        """Waits until a service listens, and returns its address. Raises ServiceFailed if any of them ends."""
        end = time.monotonic() + timeout_s
        while not service.poll():
            self.check()
            if time.monotonic() > end:
                raise ServiceFailed(
                    f"the {service.name} did not listen within {timeout_s:g} s. Its last lines:\n{service.tail()}"
                )
            time.sleep(POLL_S)
        return service.address

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


ASK_S = 5.0


def wait_for_draft(address: str, timeout_s: float, check: Callable[[], None]) -> None:
    """Returns when the gateway knows a target and a draft; `check` is called while it does not. Raises TimeoutError."""
    asyncio.run(_wait(address, time.monotonic() + timeout_s, check))


async def _wait(address: str, end: float, check: Callable[[], None]) -> None:
    async with Client(address) as client:
        while not await has_draft(client):
            check()
            if time.monotonic() > end:
                raise TimeoutError(f"the gateway at {address} did not find its draft in time")
            await asyncio.sleep(POLL_S)


async def has_draft(client: Client) -> bool:
    """Whether the gateway has found its peers."""
    try:
        return (await client.info(timeout=ASK_S)).draft is not None
    except OutriderError:  # it has no target yet
        return False


PROMPT = 'def parse_args(argv):\n    """'


class DemoSettings(ServiceSettings):
    """What the demo generates, measures and shows."""

    section: ClassVar[str] = "demo"

    prompt: str = Field(PROMPT, min_length=1, description="the text to continue; also the bare argument")
    max_tokens: int = Field(128, ge=1, le=900, description="tokens of the completion")
    temperature: float = Field(0.0, ge=0, le=100, description="0 is greedy")
    seed: int = Field(0, ge=0, description="of the sampling, above temperature 0")
    num_draft_tokens: int = Field(4, ge=1, le=32, description="tokens drafted a round")
    pair: str = Field("python", description="the embedded pair")
    expand: bool = Field(True, description="compare with plain decoding, on a target that is made large")
    compare_tokens: int = Field(64, ge=2, le=900, description="tokens of each completion of the comparison")
    repeats: int = Field(
        3, ge=1, le=100, description="completions of the comparison, with and without speculation each"
    )
    plain: bool = Field(False, description="no colours, and no progress bars")
    trace_file: Path = Field(Path("trace.jsonl"), description="where the trace goes, as OTLP JSON lines")
    threads: int | None = Field(None, ge=1, le=256, description="threads of the target (default: all cores)")
    start_timeout: float = Field(120.0, gt=0, description="seconds that a service may take to start")


LOOPBACK = "127.0.0.1:0"
GRACE_S = "2"


@dataclass(frozen=True, slots=True)
class Folders:
    """The checkpoints of a pair."""

    target: Path
    draft: Path


@dataclass(slots=True)
class Fleet:
    """The services of one demo. The target, and the gateway with it, can be replaced."""

    services: Services
    settings: DemoSettings
    folders: Folders
    draft: Service | None = None
    target: Service | None = None
    gateway: Service | None = None

    def start(self, advance: Advance) -> str:
        """Starts the three services and returns the gateway's address."""
        self.draft = self._start("draft", "--model", str(self.folders.draft))
        self.target = self._start_target()  # both load at the same time
        advance(f"draft listens on {self._wait(self.draft)}")
        return self._connect(advance, self.draft, self.target)

    def enlarge(self, advance: Advance) -> str:
        """Puts the pair's expansion in the target's place and returns the new gateway's address."""
        if self.draft is None or self.target is None or self.gateway is None:
            raise ValueError("there is no fleet to enlarge: start it first")
        self.services.stop(self.gateway, self.target)
        self.target = self._start_target("--expand")
        return self._connect(advance, self.draft, self.target)

    def _connect(self, advance: Advance, draft: Service, target: Service) -> str:
        """Waits for the target and starts a gateway in front of the two."""
        advance(f"target listens on {self._wait(target)}")
        self.gateway = self._start(
            "gateway", "--target", target.address, "--draft", draft.address, "--tokenizer", str(self.folders.target),
            "--num-draft-tokens", str(self.settings.num_draft_tokens),
        )  # fmt: skip
        address = self._wait(self.gateway)
        wait_for_draft(address, self.settings.start_timeout, self.services.check)
        advance(f"gateway listens on {address}")
        return address

    def _start_target(self, *more: str) -> Service:
        if self.settings.threads is not None:
            more += ("--threads", str(self.settings.threads))
        return self._start("target", "--model", str(self.folders.target), *more)

    def _start(self, name: str, *arguments: str) -> Service:
        common = ["--listen", LOOPBACK, "--grace-s", GRACE_S, "--trace-file", str(self.settings.trace_file)]
        return self.services.start(name, [name, *common, *arguments])

    def _wait(self, service: Service) -> str:
        return self.services.wait(service, self.settings.start_timeout)
