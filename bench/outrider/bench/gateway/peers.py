"""Targets and drafts that compute nothing, for the bench of a gateway's own cost: they speak the protocol and answer by
a script, whose counts are those of the embedded pair (greedy, k=4, measured over its frames): 0.72 of the drafted
tokens whose predecessors were accepted are, too; a chain leaves in pieces of a window; of branches all sequences
together get at most 20 a round, one at most 10.

A target steps at a fixed pace, and a step takes every sequence whose window is there: all its commits leave in one
frame, as from a device that verifies them in one pass. A draft answers what came in a few milliseconds in one frame.
Messages are read and written as protobuf has them: this process takes a fraction of the gateway's time."""

from __future__ import annotations

import asyncio
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import grpc.aio

from outrider.bench.worker import Send, take_output
from outrider.planner.virtual_services import DraftQuality, Text
from outrider.rpc.codec import DRAFT_INFO, TARGET_INFO
from outrider.rpc.messages import DraftInfo, DraftMethod, ModelInfo, TargetInfo
from outrider.rpc.server import build_server
from outrider.rpc.vocabulary import read_vocabulary
from outrider.v1 import common_pb2, draft_pb2, draft_pb2_grpc, generation_pb2, target_pb2, target_pb2_grpc

MAX_MODEL_LEN = 1 << 24
HEARTBEAT_S = 0.5
DRAFT_S = 0.004  # from a commit to the pieces that answer it
VERIFY_SHARE = 0.8  # of the time between two steps
MAX_FRAME_MESSAGES = 512
TEXTS = [Text(DraftQuality(0.72), seed) for seed in range(16)]
BRANCH_PIECES, MOST_BRANCH_PIECES = 20, 10  # a round, of all sequences and of one
TRUE_IDS = (293, 2365, 65, 486, 10, 2440, 283, 276, 394, 774, 88)  # "def parse_args(argv):\n    return argv"
WRONG_ID = 300
ACCEPTED, RECOVERED = generation_pb2.TOKEN_ORIGIN_ACCEPTED, generation_pb2.TOKEN_ORIGIN_RECOVERED

S = TypeVar("S")  # what a peer keeps of a sequence
LENGTH = generation_pb2.FINISH_REASON_LENGTH


def true_id(position: int) -> int:
    """What the target generates at a position."""
    return TRUE_IDS[position % len(TRUE_IDS)]


class PeerStream:
    """One stream of a gateway's at a peer, frame by frame."""

    def __init__(self, context: Any, frame: type[Any]) -> None:
        self._context, self._frame = context, frame
        self._number = self._last_seen = 0
        self._received_at = 0.0
        self._unsent: asyncio.Queue[list[Any]] = asyncio.Queue()

    def send(self, entries: list[Any]) -> None:
        """In one frame, or in as few as hold them."""
        for start in range(0, max(1, len(entries)), MAX_FRAME_MESSAGES):
            self._unsent.put_nowait(entries[start : start + MAX_FRAME_MESSAGES])

    async def frames(self) -> Any:
        """Yields the messages of each frame, to the stream's end."""
        tasks = [asyncio.create_task(self._write()), asyncio.create_task(self._beat())]
        try:
            while (frame := await self._context.read()) is not grpc.aio.EOF:
                self._last_seen, self._received_at = frame.header.number, time.monotonic()
                yield frame.messages
        finally:
            for task in tasks:
                task.cancel()

    async def _write(self) -> None:
        with suppress(grpc.aio.UsageError, grpc.aio.InternalError, asyncio.InvalidStateError):  # the gateway is gone
            while True:
                entries = await self._unsent.get()
                self._number += 1
                held_us = round((time.monotonic() - self._received_at) * 1e6) if self._last_seen else 0
                header = common_pb2.FrameHeader(number=self._number, last_seen=self._last_seen, held_us=held_us)
                await self._context.write(self._frame(header=header, messages=entries))

    async def _beat(self) -> None:
        while True:
            self.send([])
            await asyncio.sleep(HEARTBEAT_S)


@dataclass(slots=True)
class TargetSequence:
    """One sequence at a target. Of a chain it knows to where it reaches, and to where it is right."""

    length: int  # committed
    last: int  # nothing past it is committed
    since: float  # when it committed last
    until: int = 0
    max_window: int = 0
    patience_s: float = 0.0
    num_rounds: int = 0
    chains: dict[int, tuple[int, int]] = field(default_factory=dict)

    def hold(self, piece: Any) -> None:
        """Takes a piece, if it goes on with what is held."""
        start, known = piece.position, self.chains.get(piece.chain)
        if known is None:
            parent = self.chains.get(piece.parent) if piece.HasField("parent") else None
            if start > self.length and (parent is None or start > parent[0]):
                return
            known = start, start if parent is None or start <= self.length else min(start, parent[1])
        end, right = known
        if start > max(end, self.length):
            return
        for position, token in enumerate(piece.ids, start):
            right += right == position and token == true_id(position)
        self.chains[piece.chain] = max(end, start + len(piece.ids)), right

    def commit(self, now: float) -> Any:
        """The next round; None while the draft is waited for, or there is no credit."""
        length = self.length
        if min(self.until, self.last) <= length:
            return None
        live = min((number for number, (end, right) in self.chains.items() if end > length <= right), default=None)
        waits = self.num_rounds and self.max_window and now - self.since < self.patience_s
        if live is None and waits:
            return None
        drafted = accepted = 0
        if live is not None:
            end, right = self.chains[live]
            drafted = min(end - length, self.max_window, self.until - length, self.last - length)
            accepted = min(right - length, drafted)
        count = min(accepted + 1, self.until - length, self.last - length)
        self.length, self.since, self.num_rounds = length + count, now, self.num_rounds + 1
        self.chains = {
            number: held for number, held in self.chains.items() if held[0] > self.length and held[1] >= self.length
        }
        ids = [true_id(position) for position in range(length, length + count)]
        origins = [ACCEPTED] * min(accepted, count) + [RECOVERED] * (count - min(accepted, count))
        return common_pb2.Commit(
            position=length,
            chain=live,
            num_drafted=drafted,
            num_accepted=accepted,
            ids=ids,
            origins=origins,
            finish_reason=LENGTH if self.length == self.last else None,
        )


class ScriptedPeer(ABC, Generic[S]):
    """The sequences of all streams of a peer."""

    _sequences: dict[tuple[PeerStream, int], S]

    async def _serve(self, stream: PeerStream) -> None:
        """Takes what a stream brings; its sequences end with it."""
        try:
            async for messages in stream.frames():
                for message in messages:
                    self._take(stream, message)
        finally:
            self._sequences = {key: found for key, found in self._sequences.items() if key[0] is not stream}

    @abstractmethod
    def _take(self, stream: PeerStream, message: Any) -> None:
        """Applies one message of a stream."""


class ScriptedTarget(ScriptedPeer[TargetSequence], target_pb2_grpc.TargetServiceServicer):
    """A target that steps `steps_per_s` times a second."""

    def __init__(self, model: ModelInfo, steps_per_s: float) -> None:
        self._info = TargetInfo(model, 32, step_costs=((1, 10_000), (64, 12_000), (512, 40_000)))
        self._period_s = 1 / steps_per_s
        self._sequences: dict[tuple[PeerStream, int], TargetSequence] = {}

    async def GetTargetInfo(self, request: Any, context: Any) -> Any:
        """As any target."""
        return TARGET_INFO.encode(self._info)

    async def Verify(self, request: Any, context: Any) -> None:
        """As any target."""
        await self._serve(PeerStream(context, target_pb2.VerifyResponse))

    def _take(self, stream: PeerStream, message: Any) -> None:
        kind = message.WhichOneof("command")
        body = getattr(message, kind)
        key = stream, body.sequence_id
        sequence = self._sequences.get(key)
        if kind == "open":
            num_prompt = len(body.prompt_ids)
            length, last = num_prompt + len(body.output_ids), num_prompt + body.sampling.max_tokens
            self._sequences[key] = TargetSequence(length, last, time.monotonic())
        elif kind == "close":
            self._sequences.pop(key, None)
            stream.send([target_pb2.TargetEvent(closed=common_pb2.Closed(sequence_id=body.sequence_id))])
        elif kind == "credit" and sequence is not None:
            sequence.until, sequence.max_window = max(sequence.until, body.until), body.max_window
            sequence.patience_s = body.patience_ms / 1e3
        elif kind == "piece" and sequence is not None:
            sequence.hold(body)

    async def run(self, phase: float) -> None:
        """Steps for ever; `phase`, in periods, is against the clock."""
        period = self._period_s
        while True:
            now = time.monotonic()
            await asyncio.sleep(((now / period - phase) // 1 + 1 + phase) * period - now)
            self._step(time.monotonic())

    def _step(self, now: float) -> None:
        found = [(key, commit) for key, known in self._sequences.items() if (commit := known.commit(now)) is not None]
        num_rows = sum(commit.num_drafted + 1 for _, commit in found)
        timings = common_pb2.StepTimings(
            queue_us=100,
            verify_us=round(VERIFY_SHARE * self._period_s * 1e6),
            sample_us=100,
            num_rows=num_rows,
            num_sequences=len(found),
        )
        load = common_pb2.Load(running=len(self._sequences), free_blocks=1000)
        frames: dict[PeerStream, list[Any]] = {}
        for (stream, number), commit in found:
            if commit.finish_reason:
                del self._sequences[stream, number]
            commit.sequence_id = number
            commit.timings.CopyFrom(timings)
            commit.load.CopyFrom(load)
            frames.setdefault(stream, []).append(target_pb2.TargetEvent(commit=commit))
        for stream, entries in frames.items():
            stream.send(entries)


@dataclass(slots=True)
class DraftedChain:
    """What the draft has sent of a chain: to where it reaches, and to where it is right; of a branch its fork."""

    number: int
    end: int
    right: int
    fork: int = -1


@dataclass(slots=True)
class DraftSequence:
    """One sequence at a draft."""

    length: int  # committed
    text: Text
    chain: DraftedChain
    branches: list[DraftedChain] = field(default_factory=list)
    num_chains: int = 1
    until: int = 0
    window: int = 0
    max_branches: int = 0
    branches_due: bool = True  # for the verification under way

    def take(self, commit: Any) -> None:
        """Goes on with the chain that agrees with what was committed, or with a new one."""
        self.length = length = commit.position + len(commit.ids)
        if min(self.chain.end, self.chain.right) < length:
            agreeing = [branch for branch in self.branches if branch.fork < length <= branch.right]
            if agreeing:
                self.chain = agreeing[0]
            else:
                self.chain = DraftedChain(self._new_number(), length, length)
        self.branches.clear()
        self.branches_due = True

    def pieces(self, branch_pieces: int) -> Iterator[Any]:
        """What is due within the credit: whole windows, or the rest of the one that is verified next."""
        chain, window = self.chain, self.window
        while window and chain.end < self.until:
            count = min(window, self.until - chain.end)
            if count < window and chain.end >= self.length + window:
                break
            start = chain.end
            ids = [self._guess(chain, position) for position in range(start, start + count)]
            yield common_pb2.Piece(chain=chain.number, position=start, ids=ids, draft_us=400)
        if self.max_branches and self.branches_due and chain.end >= self.length + window:
            self.branches_due = False
            for number in range(min(branch_pieces, self.max_branches, 3 * (window + 1))):
                yield self._branch(self.length + number % (window + 1), 1 + number // (window + 1))

    def _branch(self, fork: int, rank: int) -> Any:
        parent = self.chain
        right = min(parent.right, fork)
        branch = DraftedChain(self._new_number(), fork + 1, right, fork)
        hits = right == fork and self.text.rank(fork) == rank
        branch.right += hits
        ids = [true_id(fork) if hits else WRONG_ID]
        ids += [self._guess(branch, fork + 1 + offset) for offset in range(self.window)]
        self.branches.append(branch)
        return common_pb2.Piece(chain=branch.number, parent=parent.number, position=fork, ids=ids, draft_us=100)

    def _guess(self, chain: DraftedChain, position: int) -> int:
        chain.end = position + 1
        if chain.right < position or self.text.rank(position):
            return WRONG_ID
        chain.right += 1
        return true_id(position)

    def _new_number(self) -> int:
        self.num_chains += 1
        return self.num_chains - 1


class ScriptedDraft(ScriptedPeer[DraftSequence], draft_pb2_grpc.DraftServiceServicer):
    """A draft that answers after a fixed time."""

    def __init__(self, model: ModelInfo) -> None:
        self._info = DraftInfo(model, (DraftMethod("draft_model"),))
        self._sequences: dict[tuple[PeerStream, int], DraftSequence] = {}
        self._pending: dict[tuple[PeerStream, int], None] = {}

    async def GetDraftInfo(self, request: Any, context: Any) -> Any:
        """As any draft."""
        return DRAFT_INFO.encode(self._info)

    async def Propose(self, request: Any, context: Any) -> None:
        """As any draft."""
        await self._serve(PeerStream(context, draft_pb2.ProposeResponse))

    def _take(self, stream: PeerStream, message: Any) -> None:
        kind = message.WhichOneof("command")
        body = getattr(message, kind)
        key = stream, body.sequence_id
        sequence = self._sequences.get(key)
        if kind == "open":
            length, first = len(body.prompt_ids) + len(body.output_ids), body.first_chain
            chain = DraftedChain(first, length, length)
            text = TEXTS[body.sequence_id % len(TEXTS)]
            self._sequences[key] = DraftSequence(length, text, chain, num_chains=first + 1)
        elif kind == "close":
            self._sequences.pop(key, None)
            stream.send([draft_pb2.DraftEvent(closed=common_pb2.Closed(sequence_id=body.sequence_id))])
        elif sequence is not None:
            if kind == "commit":
                sequence.take(body)
            else:
                sequence.until, sequence.window = max(sequence.until, body.until), body.max_window
                sequence.max_branches = body.max_branches
            if not self._pending:
                asyncio.get_running_loop().call_later(DRAFT_S, self._answer)
            self._pending[key] = None

    def _answer(self) -> None:
        branch_pieces = min(MOST_BRANCH_PIECES, max(1, BRANCH_PIECES // max(1, len(self._sequences))))
        frames: dict[PeerStream, list[Any]] = {}
        pending, self._pending = self._pending, {}
        for key in pending:
            stream, number = key
            sequence = self._sequences.get(key)
            for piece in () if sequence is None else sequence.pieces(branch_pieces):
                piece.sequence_id = number
                frames.setdefault(stream, []).append(draft_pb2.DraftEvent(piece=piece))
        for stream, entries in frames.items():
            stream.send(entries)


def model_of(folder: Path) -> ModelInfo:
    """A model with the vocabulary of a checkpoint's folder."""
    vocabulary = read_vocabulary(folder)
    if vocabulary is None:
        raise ValueError(f"{folder} has no tokenizer.json")
    return ModelInfo(
        "scripted",
        "scripted",
        vocabulary.num_tokens,
        MAX_MODEL_LEN,
        num_tokens=vocabulary.num_tokens,
        tokenizer_fingerprint=vocabulary.fingerprint,
    )


@asynccontextmanager
async def serving(
    targets: Sequence[ScriptedTarget], drafts: Sequence[ScriptedDraft]
) -> AsyncGenerator[tuple[list[str], list[str]], None]:
    """While in it they listen, and targets step one after another; yields where the targets and where the drafts do."""
    registered: list[tuple[Callable[[Any, Any], None], Any]]
    registered = [(target_pb2_grpc.add_TargetServiceServicer_to_server, target) for target in targets]
    registered += [(draft_pb2_grpc.add_DraftServiceServicer_to_server, draft) for draft in drafts]
    servers = [build_server("127.0.0.1:0", [], partial(register, servicer)) for register, servicer in registered]
    for server in servers:
        await server.start()
    steps = [asyncio.create_task(target.run(index / len(targets))) for index, target in enumerate(targets)]
    try:
        addresses = [server.address for server in servers]
        yield addresses[: len(targets)], addresses[len(targets) :]
    finally:
        for step in steps:
            step.cancel()
        for server in servers:
            await server.stop()


async def serve(folder: Path, num_pairs: int, steps_per_s: float, send: Send) -> None:
    """Says where the targets and drafts listen, and serves until the input ends."""
    model = model_of(folder)
    pairs = [(ScriptedTarget(model, steps_per_s), ScriptedDraft(model)) for _ in range(num_pairs)]
    async with serving(*zip(*pairs, strict=True)) as (targets, drafts):
        send({"targets": targets, "drafts": drafts})
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), take_output()))
