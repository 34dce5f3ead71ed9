"""Processes that the bench asks for something: the floor, peers, co-located engines, delay proxies, a slow draft.

A JSON object a line in each direction, over pipes: the process says once that it is ready, and with what, then answers
question by question; {"error": ...} ends it. Both sides of that are here."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import IO, Any, Self

ANSWER_S = 900.0
END_S = 10.0

Send = Callable[[dict[str, Any]], None]
Handler = Callable[[dict[str, Any]], dict[str, Any]]


class BenchWorkerFailed(Exception):
    """A worker ended, said nothing in time, or answered with an error."""


@contextmanager
def on_cores(cores: Sequence[int]) -> Iterator[None]:
    """What is started inside runs on these cores alone; without any, or where the system cannot, everywhere."""
    if not cores or not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class BenchWorker:
    """One process. It ends when its input does, so it never outlives this one. With `pauses` it and what it starts
    stand still between questions: some engines poll while they are idle."""

    def __init__(self, name: str, command: Sequence[str], cores: Sequence[int] = (), *, pauses: bool = False) -> None:
        self.name = name
        self.ready: dict[str, Any] = {}  # what it said when it was; see wait()
        self._pauses = pauses
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the process
        environment = os.environ | {"TOKENIZERS_PARALLELISM": "false"}
        environment.pop("OMP_NUM_THREADS", None)
        environment.pop("OMP_WAIT_POLICY", None)
        if not pauses:  # who stands still takes no core from others, and waits as it likes while it runs
            environment["OMP_WAIT_POLICY"] = "PASSIVE"
        with on_cores(cores):
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env=environment,
                process_group=0 if pauses else None,
            )

    @classmethod
    def of_module(cls, name: str, module: str, *arguments: object, cores: Sequence[int] = ()) -> Self:
        """A module of the bench as a process."""
        return cls(name, [sys.executable, "-m", f"outrider.bench.{module}", *map(str, arguments)], cores)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def wait(self, timeout_s: float) -> dict[str, Any]:
        """Returns what it says when it is ready. Raises BenchWorkerFailed."""
        self.ready = self.receive(timeout_s)
        return self.ready

    def receive(self, timeout_s: float = ANSWER_S) -> dict[str, Any]:
        """The next answer. Raises BenchWorkerFailed."""
        out = self._process.stdout
        if out is None:
            raise BenchWorkerFailed(f"{self.name} has no output")
        with selectors.DefaultSelector() as selector:
            selector.register(out, selectors.EVENT_READ)
            line = out.readline() if selector.select(timeout_s) else b""
        if not line:
            raise BenchWorkerFailed(f"{self.name} did not answer. Its last lines:\n{self._tail()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise BenchWorkerFailed(f"{self.name}: {answer['error']}")
        self._signal(signal.SIGSTOP)
        return answer

    def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Sends a question and waits for the answer."""
        if self._process.stdin is None:
            raise BenchWorkerFailed(f"{self.name} has no input")
        self._signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise BenchWorkerFailed(f"{self.name} has ended. Its last lines:\n{self._tail()}") from error
        return self.receive()

    def kill(self) -> None:
        """Ends the process without a word."""
        self._process.kill()

    def close(self) -> None:
        """Ends the process."""
        self._signal(signal.SIGCONT)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()

    def _signal(self, number: signal.Signals) -> None:
        if self._pauses and self._process.poll() is None:
            os.killpg(self._process.pid, number)

    def _tail(self) -> str:
        self._errors.seek(0)
        return "\n".join(self._errors.read().decode(errors="replace").splitlines()[-8:])


def take_output() -> Send:
    """What writes an answer as a line of JSON; all other writing to standard output goes to standard error now."""
    sys.stdout.flush()
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def send(answer: dict[str, Any]) -> None:
        out.write(json.dumps(answer) + "\n")
        out.flush()

    return send


def serve_requests(make: Callable[[Sequence[str]], Handler]) -> int:
    """The worker's side: makes the handler by the command line, says that it is ready, answers until the input ends."""
    send = take_output()
    try:
        handle = make(sys.argv[1:])
        send({"ready": True})
        answer_requests(handle, send)
    except Exception as error:
        send({"error": f"{type(error).__name__}: {error}"})
        return 1
    return 0


def answer_requests(handle: Handler, send: Send) -> None:
    """Answers until the input ends."""
    for line in sys.stdin:
        send(handle(json.loads(line)))
