"""What every bench stands on: the settings of a pair, the processes that it starts, and failures told in one line.

Services start as `outrider serve` starts them. All else that is measured, or measures, is a worker: a process that
takes and gives a JSON object a line over pipes. It says once that it is ready, and with what, then answers question by
question; {"error": ...} ends it. Both sides of that are here."""

from __future__ import annotations

import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, aclosing, contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, Annotated, Any, Self

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from pydantic import BeforeValidator, Field, model_validator

from outrider.bench.results import Json, dump, note, store
from outrider.cli.arguments import split_ids
from outrider.cli.local_services import LOOPBACK, Folders, Service, ServiceFailed, Services
from outrider.gateway.engine import GenerationEngine
from outrider.pairs import pair_path
from outrider.planner.policy import Round
from outrider.rpc.errors import OutriderError
from outrider.rpc.hub import locate
from outrider.rpc.settings import ServiceSettings
from outrider.rpc.words.request import GenerationRequest

PEER_START_S = 600.0  # vLLM compiles
ANSWER_S = 900.0
END_S = 10.0
GRACE_S = "0"  # nothing runs when services end
RESULTS = Path("outrider-bench/results")
RESULTS_TEXT = "folder of the stored results"
EXPAND = "make the embedded target large: the same function, about 300M parameters (Llama)"

Send = Callable[[dict[str, Any]], None]
Handler = Callable[[dict[str, Any]], dict[str, Any]]
Temperatures = Annotated[tuple[Annotated[float, Field(ge=0)], ...], BeforeValidator(split_ids)]
Batches = Annotated[tuple[Annotated[int, Field(ge=1, le=16)], ...], BeforeValidator(split_ids)]


class PairSettings(ServiceSettings):
    """Which pair is measured, and where the result goes."""

    target: Path | None = Field(None, description="folder of the target's checkpoint (default: the embedded pair's)")
    draft: Path | None = Field(None, description="folder of the draft's checkpoint (default: the embedded pair's)")
    pair: str = Field("python", description="the embedded pair, where target and draft are not given")
    num_draft_tokens: int = Field(4, ge=1, le=32, description="tokens drafted a round")
    seed: int = Field(0, ge=0, description="of the order, the sampling and the networks")
    store: bool = Field(True, description="store the result and its plot")
    results: Path = Field(RESULTS, description=RESULTS_TEXT)
    output: Path | None = Field(None, description="file to write the result to as well, as JSON")
    start_timeout: float = Field(180.0, gt=0, description="seconds that a process may take to start")

    @model_validator(mode="after")
    def _check_pair(self) -> Self:
        if (self.target is None) != (self.draft is None):
            raise ValueError("give both --target and --draft, or neither")
        return self

    def checkpoints(self) -> tuple[Folders, str]:
        """The checkpoints' folders, and what to call the pair."""
        if self.target is not None and self.draft is not None:
            folders = Folders(locate(self.target), locate(self.draft, drafts_by="draft_model"))
            return folders, f"{self.target.name} with {self.draft.name}"
        pair = pair_path(self.pair)
        return Folders(pair.target, pair.draft), f"the embedded pair {self.pair}"

    def expanded(self, expand: bool, stack: ExitStack) -> tuple[Folders, str]:
        """The checkpoints, the embedded target made large where that is wanted: in a folder that ends with the bench,
        because peers load folders."""
        folders, name = self.checkpoints()
        if not expand or self.target is not None:
            return folders, name
        from outrider.pairs.expansion import write_expanded

        note("making the target large: the same function, about 300M parameters ...")
        folder = Path(tempfile.mkdtemp(prefix="outrider-bench-"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        write_expanded(folders.target, folder / "target")
        return Folders(folder / "target", folders.draft), f"the expansion of {name}"

    def filled(self, values: Mapping[str, Any]) -> Self:
        """With these values where nothing else was said."""
        return self.model_copy(
            update={name: value for name, value in values.items() if name not in self.model_fields_set}
        )

    def finish(self, result: Json, page: Iterable[str]) -> Path | None:
        """Prints the page, and writes and stores the result where that is wanted; where it is stored."""
        print("\n".join(page))
        if self.output is not None:
            self.output.write_text(dump(result), encoding="utf-8")
        if not self.store:
            return None
        path = store(self.results, result)
        print(f"\nstored in {path}")
        return path


def report_failures(prog: str, work: Callable[[], int | None]) -> int:
    """The status of a command: 1, and a line, where something does not start, or dies."""
    try:
        return work() or 0
    except (ServiceFailed, BenchWorkerFailed, OutriderError, OSError, ValueError) as error:
        if isinstance(error, BrokenPipeError):
            raise
        print(f"{prog}: error: {error}", file=sys.stderr)
        return 1


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


def start_service(services: Services, name: str, *arguments: object, cores: Sequence[int] = ()) -> Service:
    """A service, which does not listen yet. A target keeps no prompts: nobody else does between runs."""
    more = ("--no-prefix-cache",) if name == "target" else ()
    with on_cores(cores):
        return services.start(name, [name, "--listen", LOOPBACK, "--grace-s", GRACE_S, *more, *map(str, arguments)])


async def rounds_of(engine: GenerationEngine, request: GenerationRequest) -> list[Round]:
    """The rounds of an answer."""
    async with aclosing(engine.generate(request)) as deltas:
        return [delta.round async for delta in deltas if delta.round is not None]


def scrape(url: str) -> Iterator[Sample]:
    """What a service counts, in Prometheus' text format."""
    with urllib.request.urlopen(url) as answer:
        text = answer.read().decode()
    for family in text_string_to_metric_families(text):
        yield from family.samples


class BenchWorkerFailed(Exception):
    """A worker ended, said nothing in time, or answered with an error."""


class BenchWorker:
    """One process. It ends when its input does, so it never outlives this one. With `pauses` it and what it starts
    stand still between questions: some engines poll while they are idle."""

    def __init__(self, name: str, command: Sequence[str], cores: Sequence[int] = (), *, pauses: bool = False) -> None:
        self.name = name
        self.ready: dict[str, Any] = {}  # what it said when it was; see wait()
        self._pauses = pauses
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the process
        environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "OMP_WAIT_POLICY": "PASSIVE"}
        environment.pop("OMP_NUM_THREADS", None)
        if pauses:  # who stands still takes no core from others, and waits as it likes while it runs
            environment.pop("OMP_WAIT_POLICY")
        with on_cores(cores):
            self._process = subprocess.Popen(
                list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, env=environment,
                process_group=0 if pauses else None,
            )  # fmt: skip

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


def serve_requests(make: Callable[[], Handler]) -> int:
    """The worker's side: makes the handler, says that it is ready, answers until the input ends."""
    send = take_output()
    try:
        handle = make()
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
