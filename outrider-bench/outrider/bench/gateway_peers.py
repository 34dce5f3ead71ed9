"""Who stands around a gateway whose own cost is measured, as workers:

    python -m outrider.bench.gateway_peers services FOLDER NUM_PAIRS STEPS_PER_S
    python -m outrider.bench.gateway_peers clients

Targets and drafts are the planner's (outrider.planner.virtual_services), which compute nothing but counts, in real
time: a target steps at a fixed pace and takes every stream whose window is there, a draft's window takes a few
milliseconds. 0.72 of the drafted tokens whose predecessors were accepted are, too, as the frames of the embedded pair
showed (greedy, k=4). Clients ask for completions without an end, and what comes is counted, not read."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import grpc.aio

from outrider.bench.harness import Send, take_output
from outrider.planner.estimates import Acceptance, StepTime
from outrider.planner.simulate import Action, Cancellable
from outrider.planner.virtual_services import RIGHT, DraftQuality, TargetStream, Text, VirtualDraft, VirtualTarget
from outrider.rpc.channel import connect
from outrider.rpc.codec import DRAFT_INFO, DRAFT_STREAM, TARGET_INFO, TARGET_STREAM, StreamKind
from outrider.rpc.messages import (
    Close,
    Closed,
    Commit,
    DraftInfo,
    DraftMethod,
    DraftTokens,
    ModelInfo,
    Open,
    TargetInfo,
    is_last,
)
from outrider.rpc.server import build_server
from outrider.rpc.stream import server_stream
from outrider.rpc.vocabulary import read_vocabulary
from outrider.v1 import draft_pb2_grpc, target_pb2_grpc
from outrider.v1 import generation_pb2 as pb

MAX_MODEL_LEN = 1 << 24
MAX_ROWS = 512
DRAFT_US = 800  # of a draft's pass, whatever its rows
STEP_SHARE = 0.5  # of the time between two steps: the rest is for commits to get to the draft, and chains back
ROUNDING = 1e-6  # of a tick, in periods: a step that begins at one belongs to it
STEP_COSTS = ((1, 10_000), (64, 12_000), (MAX_ROWS, 40_000))  # that a target tells gateways
QUALITY = DraftQuality(0.72)
TEXTS = [Text(QUALITY, seed) for seed in range(16)]
TRUE_IDS = (293, 2365, 65, 486, 10, 2440, 283, 276, 394, 774, 88)  # "def parse_args(argv):\n    return argv"
WRONG_ID = 300
GENERATE = "/outrider.v1.GenerationService/Generate"
PROMPT_LEN = 70  # more than what chooses a replica
MAX_TOKENS = 1 << 22

Deliver = Callable[..., None]


def true_id(position: int) -> int:
    """What the target generates at a position."""
    return TRUE_IDS[position % len(TRUE_IDS)]


class RealTime:
    """The event loop's clock, as the virtual services take one."""

    @property
    def now(self) -> float:
        """Seconds."""
        return time.monotonic()

    def call_later(self, delay: float, action: Action) -> Cancellable:
        """On the running loop."""
        return asyncio.get_running_loop().call_later(delay, action)


class Paced:
    """A target's policy: windows are verified whole, and a step begins at the next tick of a clock, which another one's
    is `phase` periods behind."""

    def __init__(self, period_s: float, phase: float) -> None:
        self._period_s, self._phase, self._due = period_s, phase, 0.0

    def cut(self, windows: Sequence[tuple[Acceptance, int]], max_rows: int) -> list[int]:
        """All of them."""
        return [window for _, window in windows]

    def verified(self, acceptance: Acceptance, num_drafted: int, num_accepted: int) -> None:
        """Nothing is learned from it."""

    def hold(self, ready: Sequence[TargetStream], missing: Sequence[TargetStream], now: float) -> float:
        """Until the tick behind the last step's."""
        if now < self._due:
            return self._due - now
        tick = (now / self._period_s - self._phase + ROUNDING) // 1
        self._due = (tick + 1 + self._phase) * self._period_s
        return 0.0

    def stepped(self, num_rows: int, seconds: float, pause_s: float) -> None:
        """Nothing is learned from it."""


class VirtualServicer:
    """Serves the streams of gateways with what a virtual service says; `deliver` takes a number of its own for every
    sequence, messages and the way back."""

    def __init__(self, info: Any, deliver: Deliver) -> None:
        self._info, self._deliver, self._streams = info, deliver, count()
        self._outbox: dict[float, list[Callable[[], None]]] = {}  # by when it leaves: what a step says is one frame

    async def serve(self, kind: StreamKind, context: Any) -> None:
        """One stream, until it ends, and its sequences with it."""
        first, live = next(self._streams) << 32, set[int]()
        stream = server_stream(kind, context)
        try:
            async with stream:
                async for batch in stream:
                    for message in batch:
                        self._hear(first, live, stream.send, message)
        finally:
            for number in live:
                self._deliver(first + number, (Close(number),), print)
            live.clear()

    def _hear(self, first: int, live: set[int], send: Callable[[Any], None], message: Any) -> None:
        number = message.sequence_id
        if isinstance(message, Close):
            live.discard(number)
            send(Closed(number))
        elif isinstance(message, Open):
            live.add(number)

        def say(event: Any) -> None:
            if number in live:
                send(_spoken(event, number))
                if is_last(event):
                    live.discard(number)
                    self._deliver(first + number, (Close(number),), print)

        def reply(event: Any, after: float) -> None:
            loop = asyncio.get_running_loop()
            when = round(loop.time() + after, 3)
            if when not in self._outbox:
                self._outbox[when] = []
                loop.call_at(when, self._flush, when)
            self._outbox[when].append(partial(say, event))

        self._deliver(first + number, (_heard(message),), reply)

    def _flush(self, when: float) -> None:
        for say in self._outbox.pop(when):
            say()


class TargetServicer(VirtualServicer, target_pb2_grpc.TargetServiceServicer):
    """A virtual target's gRPC."""

    async def GetTargetInfo(self, request: Any, context: Any) -> Any:
        """As any target."""
        return TARGET_INFO.encode(self._info)

    async def Verify(self, request: Any, context: Any) -> None:
        """As any target."""
        await self.serve(TARGET_STREAM, context)


class DraftServicer(VirtualServicer, draft_pb2_grpc.DraftServiceServicer):
    """A virtual draft's gRPC."""

    async def GetDraftInfo(self, request: Any, context: Any) -> Any:
        """As any draft."""
        return DRAFT_INFO.encode(self._info)

    async def Propose(self, request: Any, context: Any) -> None:
        """As any draft."""
        await self.serve(DRAFT_STREAM, context)


def _heard(message: Any) -> Any:
    """Token ids as the virtual services have them: the target's own is RIGHT, whatever the position."""
    if not isinstance(message, DraftTokens):
        return message
    ids = tuple([RIGHT if id_ == true_id(at) else 1 for at, id_ in enumerate(message.ids, message.position)])
    return replace(message, ids=ids)


def _spoken(event: Any, number: int) -> Any:
    """The other way around."""
    if not isinstance(event, Commit | DraftTokens):
        return replace(event, sequence_id=number)
    ids = tuple([true_id(at) if id_ == RIGHT else WRONG_ID for at, id_ in enumerate(event.ids, event.position)])
    return replace(event, sequence_id=number, ids=ids)


def target_of(model: ModelInfo, steps_per_s: float, phase: float = 0.0) -> TargetServicer:
    """A target that steps so often."""
    period_s = 1 / steps_per_s
    costs = StepTime(((1, STEP_SHARE * 1e6 * period_s), (MAX_ROWS, STEP_SHARE * 1e6 * period_s)))
    target = VirtualTarget(RealTime(), costs, Paced(period_s, phase))
    return TargetServicer(TargetInfo(model, 32, step_costs=STEP_COSTS), target.deliver)


def draft_of(model: ModelInfo) -> DraftServicer:
    """A draft whose texts are those of all streams in turn."""
    draft = VirtualDraft(RealTime(), StepTime(((1, DRAFT_US), (MAX_ROWS, DRAFT_US))), QUALITY)

    def deliver(number: int, messages: Sequence[object], reply: Any) -> None:
        draft.deliver(number, messages, reply, TEXTS[number % len(TEXTS)])

    return DraftServicer(DraftInfo(model, (DraftMethod("draft_model"),)), deliver)


def model_of(folder: Path) -> ModelInfo:
    """A model with the vocabulary of a checkpoint's folder."""
    vocabulary = read_vocabulary(folder)
    if vocabulary is None:
        raise ValueError(f"{folder} has no tokenizer.json")
    size, fingerprint = vocabulary.num_tokens, vocabulary.fingerprint
    return ModelInfo("virtual", "virtual", size, MAX_MODEL_LEN, num_tokens=size, tokenizer_fingerprint=fingerprint)


@asynccontextmanager
async def serving(
    targets: Sequence[TargetServicer], drafts: Sequence[DraftServicer]
) -> AsyncGenerator[tuple[list[str], list[str]], None]:
    """While in it they listen; yields where the targets and where the drafts do."""
    registered: list[tuple[Callable[[Any, Any], None], Any]]
    registered = [(target_pb2_grpc.add_TargetServiceServicer_to_server, target) for target in targets]
    registered += [(draft_pb2_grpc.add_DraftServiceServicer_to_server, draft) for draft in drafts]
    servers = [build_server("127.0.0.1:0", [], partial(register, servicer)) for register, servicer in registered]
    for server in servers:
        await server.start()
    try:
        addresses = [server.address for server in servers]
        yield addresses[: len(targets)], addresses[len(targets) :]
    finally:
        for server in servers:
            await server.stop()


def request_of(stream: int, mode: str, num_draft_tokens: int) -> pb.GenerateRequest:
    """Of one stream; mode "plain" is without speculation, "auto" without a number of tokens."""
    request = pb.GenerateRequest()
    request.token_ids.ids.extend((stream * 7 + place) % 4000 + 20 for place in range(PROMPT_LEN))
    request.sampling.max_tokens, request.sampling.temperature = MAX_TOKENS, 0.0
    request.sampling.ignore_eos = True
    request.speculation.enabled = mode != "plain"
    if mode != "plain":
        request.speculation.mode = mode
    if mode not in ("plain", "auto"):
        request.speculation.num_draft_tokens = num_draft_tokens
    return request


class StreamCounter:
    """Streams over a few connections, and what came of them."""

    def __init__(self, address: str, num_connections: int) -> None:
        self._channels = [connect(address) for _ in range(num_connections)]
        self._tasks: list[asyncio.Task[None]] = []
        self._started = asyncio.Event()  # or broken
        self._num_wanted = 0
        self.num_messages = 0
        self.error = ""

    async def open(self, num_streams: int, mode: str, num_draft_tokens: int) -> None:
        """Opens them, and waits until something has come of each."""
        self._num_wanted = num_streams
        for stream in range(num_streams):
            channel = self._channels[stream % len(self._channels)]
            request = request_of(stream, mode, num_draft_tokens)
            call = channel.unary_stream(GENERATE, request_serializer=pb.GenerateRequest.SerializeToString)
            self._tasks.append(asyncio.create_task(self._read(call(request, wait_for_ready=True))))
        await self._started.wait()

    async def _read(self, call: Any) -> None:
        try:
            if await call.read() is not grpc.aio.EOF:
                self._num_wanted -= 1
                if not self._num_wanted:
                    self._started.set()
            while await call.read() is not grpc.aio.EOF:
                self.num_messages += 1
            self.error = "a stream ended by itself"
        except grpc.aio.AioRpcError as error:
            self.error = f"{error.code().name}: {error.details()}"
        self._started.set()

    async def close(self) -> None:
        """Ends all."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for channel in self._channels:
            await channel.close()


async def run_clients(send: Send) -> None:
    """{"address", "connections", "streams", "mode", "k"} opens streams in place of those before, {"count": true} says
    how many messages came since, {} ends them."""
    counter: StreamCounter | None = None
    send({"ready": True})
    while line := await asyncio.to_thread(sys.stdin.readline):
        question: dict[str, Any] = json.loads(line)
        if counter is not None and "count" not in question:
            await counter.close()
            counter = None
        if "streams" in question:
            counter = StreamCounter(question["address"], question["connections"])
            await counter.open(question["streams"], question["mode"], question["k"])
        if counter is not None and counter.error:
            send({"error": counter.error})
            return
        send({"messages": 0 if counter is None else counter.num_messages})


async def run_services(folder: Path, num_pairs: int, steps_per_s: float, send: Send) -> None:
    """Says where the targets and drafts listen, and serves until the input ends. Targets step one after another."""
    model = model_of(folder)
    targets = [target_of(model, steps_per_s, index / num_pairs) for index in range(num_pairs)]
    async with serving(targets, [draft_of(model) for _ in range(num_pairs)]) as (at, drafts):
        send({"targets": at, "drafts": drafts})
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    if sys.argv[1] == "clients":
        asyncio.run(run_clients(take_output()))
    else:
        asyncio.run(run_services(Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), take_output()))
