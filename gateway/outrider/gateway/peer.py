"""One peer of the gateway, a draft or a target: a stream that carries many sequences, opened again for ever when it
breaks. Written once for both kinds; remote.py says what differs."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import grpc.aio

from outrider.gateway.backends import Lost
from outrider.gateway.breaker import Breaker
from outrider.wire.channel import connect
from outrider.wire.codec_frames import Message, StreamKind
from outrider.wire.errors import FailedPrecondition, OutriderError, Unavailable, from_rpc_error
from outrider.wire.messages import Close, Closed, Commit, Failure, ModelInfo, Open
from outrider.wire.stream import SILENT_PEER, FrameStream, StreamConfig, client_stream

log = logging.getLogger(__name__)

PROTOCOL_MAJOR = 1
MIN_BACKOFF_S, MAX_BACKOFF_S = 0.1, 5.0
STABLE_S = 5.0  # a stream that lived that long is reopened without growing pauses
HANDSHAKE_S = 5.0
STALE_S = 2.0

Info = TypeVar("Info")


@dataclass(frozen=True, slots=True)
class PeerService(Generic[Info]):
    """What differs between a draft and a target."""

    name: str
    stream: StreamKind
    get_info: Callable[[grpc.aio.Channel], Awaitable[Info]]
    start_call: Callable[[grpc.aio.Channel], Any]
    model_of: Callable[[Info], ModelInfo]
    capabilities_of: Callable[[Info], tuple[str, ...]]
    progress: type  # of the message that says that a sequence fares well
    faults: frozenset[int]  # codes of failures that are the replica's


class PeerLink:
    """One sequence at a peer. It sets the sequence id of what it sends."""

    __slots__ = ("_opened_at", "_stream", "links", "model", "on_event", "sequence_id")

    def __init__(
        self,
        links: dict[int, PeerLink],
        stream: FrameStream,
        sequence_id: int,
        on_event: Callable[[Any], None],
        model: ModelInfo,
    ) -> None:
        self.links, self._stream = links, stream
        self.sequence_id, self.model = sequence_id, model
        self.on_event = on_event
        self._opened_at = time.monotonic()
        links[sequence_id] = self

    @property
    def unheard(self) -> bool:
        """Whether the peer fell silent, and nothing has come from it since the sequence was opened."""
        error = self._stream.error
        silent = error is not None and error.reason == SILENT_PEER
        return silent and self._stream.last_received_at < self._opened_at

    def alive_on(self, stream: FrameStream) -> bool:
        """Whether the sequence is open on this stream."""
        return self._stream is stream and self.links.get(self.sequence_id) is self

    def send(self, *messages: Any) -> None:
        """Sends in order; nothing after the end."""
        if self.alive_on(self._stream):
            self._stream.send(*(replace(message, sequence_id=self.sequence_id) for message in messages))

    def close(self) -> None:
        """Ends the sequence, if it has not ended."""
        if self.alive_on(self._stream):
            del self.links[self.sequence_id]
            self._stream.send(Close(self.sequence_id))


class Peer(Generic[Info]):
    """A draft or target at one address. `admit` raises FailedPrecondition for one that must not be used."""

    def __init__(
        self,
        address: str,
        service: PeerService[Info],
        admit: Callable[[Info], None],
        on_change: Callable[[], None],
        stream_config: StreamConfig | None = None,
    ) -> None:
        self.address = address
        self.info: Info | None = None  # of the last peer that was admitted at this address
        self.refusal: FailedPrecondition | None = None
        self.attempted = asyncio.Event()  # whether a first attempt to connect has ended, well or not
        self.retired = False  # its address is gone: no new sequences
        self.breaker = Breaker()
        self._service, self._admit, self._on_change, self._stream_config = service, admit, on_change, stream_config
        self._stream: FrameStream | None = None
        self._links: dict[int, PeerLink] = {}
        self._last_id = 0
        self._last_problem = ""
        self._others, self._others_at = 0, 0.0

    @property
    def present(self) -> bool:
        """Whether it answers, and what it said of itself fits."""
        return self._stream is not None and not self._stream.closed and self.refusal is None and not self.retired

    @property
    def usable(self) -> bool:
        """Whether a new sequence may go there."""
        stream = self._stream
        return self.present and stream is not None and not (stream.peer_draining or stream.device_dead)

    @property
    def num_sequences(self) -> int:
        """The sequences that are open there."""
        return len(self._links)

    @property
    def load(self) -> int:
        """The sequences there: this gateway's, and those of others when a commit last spoke of them."""
        others = self._others if time.monotonic() - self._others_at < STALE_S else 0
        return len(self._links) + others

    @property
    def round_trip_us(self) -> float:
        """The smoothed round trip; 0 before the first measurement."""
        return 0.0 if self._stream is None else self._stream.round_trip_us

    def holds(self, link: object) -> bool:
        """Whether a link is alive on the present stream."""
        return self._stream is not None and isinstance(link, PeerLink) and link.alive_on(self._stream)

    def opened(self, link: object) -> bool:
        """Whether a link was opened here, whatever became of it."""
        return isinstance(link, PeerLink) and link.links is self._links

    def open(self, request: Open, on_event: Callable[[Any], None], parent: PeerLink | None = None) -> PeerLink:
        """Starts a sequence; with a parent that is alive here it shares the parent's prompt."""
        stream, info = self._stream, self.info
        if stream is None or info is None:
            raise Unavailable(f"{self._service.name} {self.address} is not connected")
        self._last_id += 1
        if parent is None:
            message = replace(request, sequence_id=self._last_id, fork_of=None)
        else:
            message = replace(request, sequence_id=self._last_id, fork_of=parent.sequence_id, prompt_ids=())
        stream.send(message)
        self.breaker.started(time.monotonic())
        return PeerLink(self._links, stream, self._last_id, self._observed(on_event), self._service.model_of(info))

    def recheck(self) -> None:
        """Judges again what it said of itself, by what is known now."""
        if self._stream is None or self.info is None:
            return
        try:
            self._admit(self.info)
            self.refusal = None
        except FailedPrecondition as error:
            self.refusal = error
            self._report(error.message)
        self._on_change()

    async def run(self) -> None:
        """Connects, and connects again, until cancelled."""
        channel = connect(self.address)
        backoff = MIN_BACKOFF_S
        try:
            while True:
                began = time.monotonic()
                self._report(await self._serve_once(channel))
                self.attempted.set()
                self._on_change()
                if time.monotonic() - began >= STABLE_S:
                    backoff = MIN_BACKOFF_S
                await asyncio.sleep(backoff * random.uniform(0.5, 1.0))
                backoff = min(1.5 * backoff, MAX_BACKOFF_S)
        finally:
            self.attempted.set()
            self._lose("the gateway stops")
            await channel.close()

    async def _serve_once(self, channel: grpc.aio.Channel) -> str:
        """One handshake and one stream, to its end; returns why it ended."""
        try:
            info = await self._handshake(channel)
            async with client_stream(
                self._service.stream,
                self._service.start_call(channel),
                on_messages=self._on_messages,
                on_peer_change=self._on_peer_change,
                config=self._stream_config,
            ) as stream:
                self._up(info, stream)
                try:
                    await stream.wait_closed()
                finally:
                    self._lose(str(stream.error or "the peer ended the stream"))
            return "the peer ended the stream"
        except FailedPrecondition as error:
            self.refusal = error
            return error.message
        except OutriderError as error:
            return error.message
        except grpc.aio.AioRpcError as error:
            return from_rpc_error(error).message
        except Exception as error:  # a bug must not end the attempts
            log.error("%s %s: an unexpected error", self._service.name, self.address, exc_info=error)
            return f"unexpected {type(error).__name__}"

    async def _handshake(self, channel: grpc.aio.Channel) -> Info:
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                info = await self._service.get_info(channel)
        except TimeoutError:
            raise Unavailable(f"no answer within {HANDSHAKE_S:g} s") from None
        major = self._service.model_of(info).protocol_major
        if major != PROTOCOL_MAJOR:
            raise FailedPrecondition(f"it speaks protocol {major}, this gateway {PROTOCOL_MAJOR}", reason="PROTOCOL")
        self._admit(info)
        return info

    def _up(self, info: Info, stream: FrameStream) -> None:
        self.info, self.refusal, self._stream, self._last_problem = info, None, stream, ""
        self._last_id = 0
        self.attempted.set()
        log.info("%s %s: connected (%s)", self._service.name, self.address, self._service.model_of(info).name)
        self._on_change()

    def _report(self, problem: str) -> None:
        """Logs why there is no stream, once for each reason in a row."""
        if problem != self._last_problem:
            log.warning("%s %s: %s; trying again", self._service.name, self.address, problem)
        self._last_problem = problem

    def _lose(self, reason: str) -> None:
        """Every sequence has to be opened elsewhere."""
        self._stream = None
        self._tell_lost(reason)
        self._on_change()

    def _tell_lost(self, reason: str) -> None:
        links = list(self._links.values())
        for link in links:
            link.close()
        for link in links:
            link.on_event(Lost(f"{self._service.name} {self.address}: {reason}", link.unheard))

    def _observed(self, on_event: Callable[[Any], None]) -> Callable[[Any], None]:
        """Tells the breaker how a sequence fares, until that is known."""

        def observe(event: Any) -> None:
            if isinstance(event, self._service.progress):
                self.breaker.succeeded()
            elif isinstance(event, Lost) or (isinstance(event, Failure) and event.code in self._service.faults):
                self.breaker.failed(time.monotonic())
            on_event(event)

        return observe

    def _on_peer_change(self) -> None:
        if self._stream is not None and self._stream.device_dead:
            self._tell_lost("its device is stuck")
        self._on_change()

    def _on_messages(self, batch: list[Message]) -> None:
        last = batch[-1] if batch else None
        if isinstance(last, Commit):
            self._others = max(0, last.load.running + last.load.waiting - len(self._links))
            self._others_at = time.monotonic()
        for message in batch:
            link = self._links.get(message.sequence_id)
            if link is None:
                continue
            if isinstance(message, Closed | Failure) or (
                isinstance(message, Commit) and message.finish_reason is not None
            ):
                del self._links[message.sequence_id]
            link.on_event(message)
