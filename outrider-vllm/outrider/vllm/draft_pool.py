"""Draft services at several addresses, asked from a thread of their own: an event loop with one stream to each, opened
again for ever when it breaks. A sequence goes to the draft that has the fewest; where that one is lost, it is opened at
another, or again at the first that comes back, with all that was committed meanwhile.

What is no draft for this model counts as absent, and the log says so once."""

from __future__ import annotations

import asyncio
import logging
import random
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

import grpc.aio
from grpc import StatusCode

from outrider.rpc.channel import dial_target
from outrider.rpc.codec import DRAFT_INFO, DRAFT_STREAM, Message
from outrider.rpc.errors import FailedPrecondition, InvalidArgument, OutriderError, Unavailable
from outrider.rpc.messages import (
    Close,
    Closed,
    Commit,
    Credit,
    DraftCommand,
    DraftInfo,
    DraftTokens,
    Failure,
    ModelInfo,
    Open,
    validate_piece,
)
from outrider.rpc.pair import check_pair
from outrider.rpc.security import ClientTls, PeerChannel
from outrider.rpc.status import from_rpc_error
from outrider.rpc.stream import FrameStream, StreamConfig, client_stream
from outrider.v1 import draft_pb2, draft_pb2_grpc

log = logging.getLogger(__name__)

PROTOCOL_MAJOR = 1
HANDSHAKE_S = 5.0
MIN_BACKOFF_S, MAX_BACKOFF_S = 0.5, 5.0
RETRY_S = 1.0  # until a sequence that a draft could not take is offered again
AFFINITY_TOKENS = 64  # later tokens tell prompts of one kind apart
END_S = 5.0
MAX_WAITING = 1024  # commands
SWITCH_S = 0.0005  # for which the engine's thread may keep the interpreter from this one; Python's 5 ms are a step
# A failure with another code (a sequence longer than the draft's context) would come again.
PASSING = frozenset(
    code.value[0] for code in (StatusCode.UNAVAILABLE, StatusCode.INTERNAL, StatusCode.RESOURCE_EXHAUSTED)
)
DraftNews = DraftTokens | Closed  # of a sequence that no draft has any more: Closed


@dataclass(slots=True)
class DraftedSequence:
    """One sequence, wherever it is drafted."""

    request: Open  # as it was at first; its id is the caller's
    output: list[int] = field(default_factory=list)
    credit: Credit | None = None
    draft: DraftConnection | None = None
    number: int = 0  # its id on that draft's stream
    last_chain: int = -1
    refused: bool = False  # no draft will do

    def as_it_is(self, number: int, tokenizer_fingerprint: str) -> Open:
        """How it is opened now. Chains are numbered on, and no noise is spent twice."""
        seed = self.request.seed
        if self.output or self.last_chain >= 0:
            facts = (seed, len(self.output), self.last_chain + 1)
            noise = blake2b(b"".join(fact.to_bytes(8, "little") for fact in facts), digest_size=8)
            seed = int.from_bytes(noise.digest(), "little")
        return replace(
            self.request,
            sequence_id=number,
            output_ids=tuple(self.output),
            first_chain=self.last_chain + 1,
            seed=seed,
            tokenizer_fingerprint=tokenizer_fingerprint,
        )


@dataclass(slots=True, eq=False)
class DraftConnection:
    """One address."""

    address: str
    stream: FrameStream | None = None
    sequences: dict[int, DraftedSequence] = field(default_factory=dict)  # by their numbers on this stream
    last_number: int = 0
    last_problem: str = ""

    @property
    def usable(self) -> bool:
        """Whether a sequence may go there."""
        stream = self.stream
        return stream is not None and not (stream.closed or stream.peer_draining or stream.device_dead)


class DraftPool:
    """`target` says what the drafts are for, once, on the pool's thread; `on_news` is called there, too. Raises
    InvalidArgument for what is no address."""

    def __init__(
        self,
        addresses: Sequence[str],
        target: Callable[[], ModelInfo],
        on_news: Callable[[DraftNews], None],
        stream_config: StreamConfig | None = None,
        tls: ClientTls | None = None,
    ) -> None:
        for address in addresses:
            dial_target(address)
        self._drafts = [DraftConnection(address) for address in addresses]
        self._read_target, self._on_news, self._stream_config = target, on_news, stream_config
        self._tls, self._fingerprint = tls, ""  # of the target's tokenizer
        self._sequences: dict[int, DraftedSequence] = {}
        self._commands: deque[DraftCommand] = deque()
        self._is_up = False  # any draft; set before the commands are looked at, read after one was added
        self._loop = asyncio.new_event_loop()
        self._end = asyncio.Event()
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_S))
        self._thread = threading.Thread(target=self._run, name="outrider-drafts", daemon=True)
        self._thread.start()

    def submit(self, commands: Sequence[DraftCommand]) -> None:
        """Applies commands, in order; from any thread. Sequence ids are the caller's. With no draft there they lie
        until one is, or too many do: to wake a thread costs each step more than all else here."""
        self._commands.extend(commands)
        if self._is_up or len(self._commands) > MAX_WAITING:
            self._loop.call_soon_threadsafe(self._apply_all)

    def close(self) -> None:
        """Ends the streams and the thread."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._end.set)
            self._thread.join(END_S)

    # The thread.

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        target = await asyncio.to_thread(self._read_target)
        self._fingerprint = target.tokenizer_fingerprint
        tasks = [asyncio.create_task(self._keep(draft, target)) for draft in self._drafts]
        await self._end.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # Sequences.

    def _apply_all(self) -> None:
        commands = []
        while self._commands:
            commands.append(self._commands.popleft())
        self._apply(commands)

    def _apply(self, commands: Sequence[DraftCommand]) -> None:
        for command in commands:
            if isinstance(command, Open):
                self._sequences[command.sequence_id] = DraftedSequence(command)
                continue
            sequence = self._sequences.get(command.sequence_id)
            if sequence is None:
                continue
            if isinstance(command, Close):
                del self._sequences[command.sequence_id]
                self._leave(sequence)
                continue
            if isinstance(command, Commit):
                sequence.output += command.ids
            else:
                sequence.credit = command
            self._send(sequence, command)
        for command in commands:  # an Open comes with its credit
            if isinstance(command, Open) and command.sequence_id in self._sequences:
                self._place(self._sequences[command.sequence_id])

    def _send(self, sequence: DraftedSequence, command: Commit | Credit) -> None:
        draft = sequence.draft
        if draft is not None and draft.stream is not None:
            draft.stream.send_commands(sequence.number, [command])

    def _place(self, sequence: DraftedSequence, besides: DraftConnection | None = None) -> None:
        """Opens a sequence where the fewest are; of equals its first tokens choose. `besides` comes last."""
        alive = self._sequences.get(sequence.request.sequence_id) is sequence
        usable = [draft for draft in self._drafts if draft.usable]
        if not alive or sequence.refused or sequence.draft is not None or not usable:
            return
        key = affinity_key(sequence.request)
        draft = min(usable, key=lambda one: (one is besides, len(one.sequences), rank(key, one.address)))
        stream = draft.stream
        if stream is None:
            return
        draft.last_number += 1
        sequence.draft, sequence.number = draft, draft.last_number
        draft.sequences[sequence.number] = sequence
        try:
            stream.send(sequence.as_it_is(sequence.number, self._fingerprint))
        except OutriderError as error:  # longer than any stream takes
            self._lose(sequence)
            self._refuse(sequence, error.message)
            return
        if sequence.credit is not None:
            self._send(sequence, sequence.credit)

    def _leave(self, sequence: DraftedSequence) -> None:
        """Closes it where it is drafted."""
        draft, number = sequence.draft, sequence.number
        sequence.draft = None
        if draft is not None and draft.sequences.pop(number, None) is not None and draft.stream is not None:
            draft.stream.send(Close(number))

    def _lose(self, sequence: DraftedSequence) -> None:
        """Nobody drafts for it now."""
        self._leave(sequence)
        self._on_news(Closed(sequence.request.sequence_id))

    def _refuse(self, sequence: DraftedSequence, reason: str) -> None:
        log.info("a request goes on without drafts: %s", reason)
        sequence.refused = True

    # What drafts say.

    def _take(self, draft: DraftConnection, messages: Sequence[Message]) -> None:
        for message in messages:
            sequence = draft.sequences.get(message.sequence_id)
            if sequence is None:
                continue
            if isinstance(message, DraftTokens):
                self._take_piece(draft, sequence, message)
            elif isinstance(message, Failure):
                del draft.sequences[sequence.number]
                self._lose(sequence)
                if message.code in PASSING:
                    pause = max(RETRY_S, message.retry_after_ms / 1000)
                    if any(other.usable for other in self._drafts if other is not draft):
                        pause = 0.0
                    self._loop.call_later(pause, self._place, sequence, draft)
                else:
                    self._refuse(sequence, f"draft {draft.address}: {message.message}")

    def _take_piece(self, draft: DraftConnection, sequence: DraftedSequence, piece: DraftTokens) -> None:
        try:
            validate_piece(piece)
        except InvalidArgument as error:
            self._lose(sequence)
            self._refuse(sequence, f"draft {draft.address}: {error.message}")
            return
        sequence.last_chain = max(sequence.last_chain, piece.chain)
        piece.sequence_id = sequence.request.sequence_id
        self._on_news(piece)

    # Streams.

    async def _keep(self, draft: DraftConnection, target: ModelInfo) -> None:
        """Connects, and connects again, until cancelled."""
        channel = PeerChannel(draft.address, self._tls)
        backoff = MIN_BACKOFF_S
        try:
            while True:
                began = time.monotonic()
                self._report(draft, await self._serve_once(draft, await channel.current(), target))
                if time.monotonic() - began >= MAX_BACKOFF_S:
                    backoff = MIN_BACKOFF_S
                await asyncio.sleep(backoff * random.uniform(0.5, 1.0))
                backoff = min(2 * backoff, MAX_BACKOFF_S)
        finally:
            await channel.close()

    async def _serve_once(self, draft: DraftConnection, channel: grpc.aio.Channel, target: ModelInfo) -> str:
        """One handshake and one stream, to its end; returns why it ended."""
        try:
            info = await shake_hands(channel, target)
            stub: Any = draft_pb2_grpc.DraftServiceStub(channel)
            async with client_stream(
                DRAFT_STREAM,
                stub.Propose(),
                on_messages=lambda messages: self._take(draft, messages),
                on_peer_change=lambda: self._follow(draft),
                config=self._stream_config,
            ) as stream:
                self._up(draft, stream, info)
                try:
                    await stream.wait_closed()
                finally:
                    self._down(draft)
            return "it ended the stream"
        except OutriderError as error:
            return error.message
        except grpc.aio.AioRpcError as error:
            return from_rpc_error(error).message
        except Exception as error:  # a bug must not end the attempts
            log.error("draft %s: an unexpected error", draft.address, exc_info=error)
            return f"unexpected {type(error).__name__}"

    def _up(self, draft: DraftConnection, stream: FrameStream, info: DraftInfo) -> None:
        log.info("draft %s: connected (%s)", draft.address, info.model.name)
        draft.stream, draft.last_number, draft.last_problem = stream, 0, ""
        self._is_up = True
        self._apply_all()
        self._place_all()

    def _down(self, draft: DraftConnection) -> None:
        draft.stream = None
        self._is_up = any(one.stream is not None for one in self._drafts)
        self._lose_all(draft)

    def _follow(self, draft: DraftConnection) -> None:
        """Its device is stuck, or goes on."""
        if draft.stream is not None and draft.stream.device_dead:
            self._lose_all(draft)
        elif draft.usable:
            self._place_all()

    def _lose_all(self, draft: DraftConnection) -> None:
        for sequence in list(draft.sequences.values()):
            self._lose(sequence)
        self._place_all()

    def _place_all(self) -> None:
        for sequence in list(self._sequences.values()):
            self._place(sequence)

    def _report(self, draft: DraftConnection, problem: str) -> None:
        """Logs why there is no stream, once for each reason in a row."""
        if problem != draft.last_problem:
            log.warning("draft %s: %s; decoding goes on, and it is tried again", draft.address, problem)
        draft.last_problem = problem


async def shake_hands(channel: grpc.aio.Channel, target: ModelInfo) -> DraftInfo:
    """What a draft says of itself. Raises FailedPrecondition for one that is none for the target."""
    stub: Any = draft_pb2_grpc.DraftServiceStub(channel)
    try:
        async with asyncio.timeout(HANDSHAKE_S):
            info = DRAFT_INFO.decode(await stub.GetDraftInfo(draft_pb2.GetDraftInfoRequest()))
    except TimeoutError:
        raise Unavailable(f"no answer within {HANDSHAKE_S:g} s") from None
    major = info.model.protocol_major
    if major != PROTOCOL_MAJOR:
        raise FailedPrecondition(f"it speaks protocol {major}, this engine {PROTOCOL_MAJOR}", reason="PROTOCOL")
    if warning := check_pair(target, info.model):
        log.warning(warning)
    return info


def affinity_key(request: Open) -> bytes:
    """Prompts that begin alike meet at one draft, whose prefix cache then knows them. A salt parts two callers, and an
    adapter two caches."""
    digest = blake2b(request.salt.encode() + request.adapter.encode(), digest_size=16)
    digest.update(b"".join(token.to_bytes(4, "little") for token in request.prompt_ids[:AFFINITY_TOKENS]))
    return digest.digest()


def rank(key: bytes, address: str) -> bytes:
    """Rendezvous hashing (Thaler and Ravishankar 1998): a lost draft moves its share alone."""
    return blake2b(address.encode(), key=key, digest_size=8).digest()
