"""The replicas of one service, drafts or targets: one for each address, which come and go as names are looked up again.
A replica is a stream that carries many sequences, opened again for ever when it breaks, and a circuit breaker: one that
fails again and again is left alone for a while, then tried with one sequence. remote.py has what differs."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import grpc.aio

from outrider.gateway.peers.addresses import RESOLVE_S, Addresses, Lookup, look_up
from outrider.gateway.peers.routing import AFFINITY_TOKENS, affinity_key, choose
from outrider.gateway.speculation.backends import Lost
from outrider.gateway.speculation.core import DRAINING, PARENT_GONE
from outrider.rpc.codec import Message, StreamKind
from outrider.rpc.errors import FailedPrecondition, InvalidArgument, OutriderError, Unavailable, Violations
from outrider.rpc.media import MEDIA
from outrider.rpc.messages import (
    Close,
    Commit,
    DraftInfo,
    Failure,
    Load,
    ModelInfo,
    Open,
    TargetInfo,
    is_last,
    to_failure,
    validate_commit,
)
from outrider.rpc.security import ClientTls, PeerChannel
from outrider.rpc.status import from_rpc_error
from outrider.rpc.stream import SILENT_PEER, FrameStream, StreamConfig, client_stream
from outrider.rpc.words.sampling_params import lacking

MAX_FAILURES = 3  # in a row
FIRST_OPEN_S, MAX_OPEN_S = 1.0, 30.0
NO_FAULTS = frozenset({DRAINING, PARENT_GONE})  # reasons of refusals that say nothing of the next sequence


@dataclass(slots=True)
class Breaker:
    """Closed: all may go. Open: nobody, until its time is over; then one sequence each time, until one goes well. The
    clock is given."""

    _failures: int = 0
    _open_s: float = 0.0  # 0: closed
    _next_trial: float = 0.0
    _tried: bool = False  # a trial is under way

    @property
    def open(self) -> bool:
        """Whether it has tripped, and nothing has gone well since."""
        return self._open_s > 0

    def allows(self, now: float) -> bool:
        """Whether a sequence may start."""
        return not self.open or now >= self._next_trial

    def started(self, now: float) -> None:
        """A sequence starts: while open, it is the trial, and the next has to wait."""
        self._next_trial, self._tried = now + self._open_s, self.open

    def succeeded(self) -> None:
        """The replica has done what it is there for."""
        self._failures, self._open_s, self._tried = 0, 0.0, False

    def failed(self, now: float) -> None:
        """A sequence failed by the replica's fault. The time doubles with each trial that fails; what else was there
        when it broke says nothing new."""
        self._failures += 1
        if self.open and not self._tried:
            return
        if self.open:
            self._open_s = min(2 * self._open_s, MAX_OPEN_S)
        elif self._failures >= MAX_FAILURES:
            self._open_s = FIRST_OPEN_S
        self._next_trial, self._tried = now + self._open_s, False


log = logging.getLogger(__name__)

PROTOCOL_MAJOR = 1
MIN_BACKOFF_S, MAX_BACKOFF_S = 0.1, 5.0
STABLE_S = 5.0  # a stream that lived that long is reopened without growing pauses
HANDSHAKE_S = 5.0
STALE_S = 2.0
LOSSES_S = 0.002  # of a turn of the event loop, in which sequences learn that they have lost their replica
EVENTS_S = 0.001  # the same for what a replica has sent: one step of it speaks of many sequences

Info = TypeVar("Info", bound=TargetInfo | DraftInfo)


@dataclass(frozen=True, slots=True)
class ReplicaService(Generic[Info]):
    """What differs between a draft and a target."""

    name: str
    stream: StreamKind
    get_info: Callable[[grpc.aio.Channel], Awaitable[Info]]
    start_call: Callable[[grpc.aio.Channel], Any]
    progress: type  # of the message that says that a sequence fares well
    faults: frozenset[int]  # codes of failures that are the replica's
    info_s: float = HANDSHAKE_S  # until get_info has answered


class ReplicaLink:
    """One sequence at a replica. It sets the sequence id of what it sends."""

    __slots__ = ("_length", "_opened_at", "_stream", "links", "model", "on_event", "request", "sequence_id")

    def __init__(
        self,
        links: dict[int, ReplicaLink],
        stream: FrameStream,
        sequence_id: int,
        on_event: Callable[[Any], None],
        model: ModelInfo,
        request: Open,
    ) -> None:
        self.links, self._stream = links, stream
        self.sequence_id, self.model, self.request = sequence_id, model, request
        self.on_event = on_event
        self._opened_at = time.monotonic()
        self._length = len(request.prompt_ids) + len(request.output_ids)
        links[sequence_id] = self

    @property
    def unheard(self) -> bool:
        """Whether the replica fell silent, and nothing has come from it since the sequence was opened."""
        error = self._stream.error
        silent = error is not None and error.reason == SILENT_PEER
        return silent and self._stream.last_received_at < self._opened_at

    def alive_on(self, stream: FrameStream) -> bool:
        """Whether the sequence is open on this stream."""
        return self._stream is stream and self.links.get(self.sequence_id) is self

    def send(self, *messages: Any) -> None:
        """Sends in order; nothing after the end."""
        if self.alive_on(self._stream):
            self._stream.send_commands(self.sequence_id, messages)

    def check(self, commit: Commit) -> None:
        """InvalidArgument for a commit that no sound target sends next."""
        validate_commit(commit, self.model.vocab_size)
        room = len(self.request.prompt_ids) + self.request.sampling.max_tokens - self._length
        found = Violations("commit.")
        if commit.position != self._length:
            found.add("position", f"is {commit.position}", f"{self._length}")
        found.length("ids", commit.ids, room)
        found.raise_if_any()
        self._length += len(commit.ids)

    def close(self) -> None:
        """Ends the sequence, if it has not ended; no event follows, nor that of a loss that others are told of now."""
        self.end()
        self.on_event = lambda event: None

    def end(self) -> None:
        """The same, but one event may follow: why it ends."""
        if self.alive_on(self._stream):
            del self.links[self.sequence_id]
            self._stream.send(Close(self.sequence_id))


class Replica(Generic[Info]):
    """A draft or target at one address. `admit` raises FailedPrecondition for one that must not be used."""

    def __init__(
        self,
        address: str,
        service: ReplicaService[Info],
        admit: Callable[[Info], None],
        on_change: Callable[[], None],
        stream_config: StreamConfig | None = None,
        tls: ClientTls | None = None,
    ) -> None:
        self.address, self._tls = address, tls
        self.info: Info | None = None  # of the last replica that was admitted at this address
        self.refusal: FailedPrecondition | None = None
        self.attempted = asyncio.Event()  # whether a first attempt to connect has ended, well or not
        self.retired = False  # its address is gone: no new sequences
        self.disagrees = False  # with others that compute alike, as the canary has found
        self.breaker = Breaker()
        self.full_until = 0.0  # until then others are asked before it
        self.reported: Load | None = None  # by the last commit from there
        self._service, self._admit, self._on_change, self._stream_config = service, admit, on_change, stream_config
        self._stream: FrameStream | None = None
        self.links: dict[int, ReplicaLink] = {}  # of what is open there, the oldest first
        self._inbox: deque[Message] = deque()  # what has come, and its sequences have not been told
        self._last_id = 0
        self._last_problem = ""
        self._peer_changed = asyncio.Event()
        self.num_streams, self._others, self._others_at = 0, 0, 0.0  # streams that were opened so far; see load

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
        return len(self.links)

    @property
    def load(self) -> int:
        """The sequences there: this gateway's, and those of others when a commit last spoke of them."""
        others = self._others if time.monotonic() - self._others_at < STALE_S else 0
        return len(self.links) + others

    @property
    def round_trip_us(self) -> float:
        """The smoothed round trip; 0 before the first measurement."""
        return 0.0 if self._stream is None else self._stream.round_trip_us

    def holds(self, link: object) -> bool:
        """Whether a link is alive on the present stream."""
        return self._stream is not None and isinstance(link, ReplicaLink) and link.alive_on(self._stream)

    def opened(self, link: object) -> bool:
        """Whether a link was opened here, whatever became of it."""
        return isinstance(link, ReplicaLink) and link.links is self.links

    def open(self, request: Open, on_event: Callable[[Any], None], parent: ReplicaLink | None = None) -> ReplicaLink:
        """Starts a sequence; with a parent that is alive here it shares the parent's prompt."""
        stream, info = self._stream, self.info
        if stream is None or info is None:
            raise Unavailable(f"{self._service.name} {self.address} is not connected")
        self._last_id += 1
        if parent is None:
            message = replace(request, sequence_id=self._last_id, fork_of=None)
        else:
            message = replace(request, sequence_id=self._last_id, fork_of=parent.sequence_id, prompt_ids=(), media=())
        stream.send(message)
        self.breaker.started(time.monotonic())
        return ReplicaLink(self.links, stream, self._last_id, on_event, info.model, request)

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
        channel = PeerChannel(self.address, self._tls)
        backoff = MIN_BACKOFF_S
        try:
            while True:
                began = time.monotonic()
                self._report(await self._serve_once(await channel.current()))
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
                follower = asyncio.create_task(self._follow_info(channel, stream, info))
                try:
                    await stream.wait_closed()
                finally:
                    follower.cancel()
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
            async with asyncio.timeout(self._service.info_s):
                info = await self._service.get_info(channel)
        except TimeoutError:
            raise Unavailable(f"no answer within {HANDSHAKE_S:g} s") from None
        major = info.model.protocol_major
        if major != PROTOCOL_MAJOR:
            raise FailedPrecondition(f"it speaks protocol {major}, this gateway {PROTOCOL_MAJOR}", reason="PROTOCOL")
        self._admit(info)
        return info

    async def _follow_info(self, channel: grpc.aio.Channel, stream: FrameStream, info: Info) -> None:
        """Asks again what the peer says of itself when that changed: it reloads its weights, or another process took
        the stream than had answered. What is open stays; where it must not be used any more, nothing new comes."""
        known = info.info_version
        while not stream.closed:
            self._peer_changed.clear()
            if stream.peer_info_version in (0, known):  # 0: nothing has come yet
                await self._peer_changed.wait()
                continue
            version = stream.peer_info_version
            try:
                self.info, self.refusal = await self._handshake(channel), None
            except FailedPrecondition as error:
                self.refusal = error
                self._report(error.message)
            except (OutriderError, grpc.aio.AioRpcError) as error:
                log.warning("%s %s: does not say what has changed: %s", self._service.name, self.address, error)
                await asyncio.sleep(MIN_BACKOFF_S)
                continue
            known = version
            self._on_change()

    def _up(self, info: Info, stream: FrameStream) -> None:
        self.info, self.refusal, self._stream, self._last_problem = info, None, stream, ""
        self._last_id, self.num_streams = 0, self.num_streams + 1
        self.attempted.set()
        log.info("%s %s: connected (%s)", self._service.name, self.address, info.model.name)
        self._on_change()

    def _report(self, problem: str) -> None:
        """Logs why there is no stream, once for each reason in a row."""
        if problem != self._last_problem:
            log.warning("%s %s: %s; trying again", self._service.name, self.address, problem)
        self._last_problem = problem

    def _lose(self, reason: str) -> None:
        """Every sequence has to be opened elsewhere."""
        self._stream = None
        self._tell_some(math.inf)
        self._tell_lost(reason)
        self._on_change()

    def _tell_lost(self, reason: str) -> None:
        """Sequences that begin alike are told one after another: what one has computed elsewhere, the next finds."""
        links = sorted(self.links.values(), key=lambda link: link.request.prompt_ids[:AFFINITY_TOKENS])
        for link in links:
            link.end()
        self._tell(iter(links), f"{self._service.name} {self.address}: {reason}")

    def _tell(self, links: Iterator[ReplicaLink], reason: str) -> None:
        """As many in each turn of the event loop as leave time for what goes on at other replicas."""
        end = time.monotonic() + LOSSES_S
        for link in links:
            self.breaker.failed(time.monotonic())
            link.on_event(Lost(reason, link.unheard))
            if time.monotonic() >= end:
                asyncio.get_running_loop().call_soon(self._tell, links, reason)
                return

    def _on_peer_change(self) -> None:
        if self._stream is not None and self._stream.device_dead:
            self._tell_lost("its device is stuck")
        self._peer_changed.set()
        self._on_change()

    def _on_messages(self, batch: list[Message]) -> None:
        last = batch[-1] if batch else None
        if isinstance(last, Commit):
            self._others = max(0, last.load.running + last.load.waiting - len(self.links))
            self.reported, self._others_at = last.load, time.monotonic()
        is_telling = bool(self._inbox)
        self._inbox += batch
        if not is_telling:
            self._tell_some()

    def _tell_some(self, seconds: float = EVENTS_S) -> None:
        """As much of the inbox in each turn of the event loop as leaves time for everybody else's."""
        end = time.monotonic() + seconds
        try:
            while self._inbox and time.monotonic() < end:
                self._tell_one(self._inbox.popleft())
        finally:
            if self._inbox:
                asyncio.get_running_loop().call_soon(self._tell_some)

    def _tell_one(self, message: Message) -> None:
        link = self.links.get(message.sequence_id)
        if link is None:
            return
        if isinstance(message, Commit):
            message = self._judged(message, link)
        if isinstance(message, self._service.progress):
            self.breaker.succeeded()
        elif isinstance(message, Failure) and message.is_full:  # no fault; who comes back by then finds another
            self.full_until = time.monotonic() + min(2 * message.retry_after_ms / 1000, MAX_OPEN_S)
        elif isinstance(message, Failure) and message.code in self._service.faults and message.reason not in NO_FAULTS:
            self.breaker.failed(time.monotonic())
        if is_last(message):
            self.links.pop(message.sequence_id, None)
        link.on_event(message)

    def _judged(self, commit: Commit, link: ReplicaLink) -> Commit | Failure:
        """A commit; in the place of one that no sound target sends the failure of its sequence, which is closed there
        and goes on elsewhere."""
        try:
            link.check(commit)
        except InvalidArgument as error:
            link.end()
            why = f"{self._service.name} {self.address}: {error.message}"
            log.error("%s", why)
            return to_failure(commit.sequence_id, Unavailable(why, reason="BAD_COMMIT"))
        return commit


START_S = 2.0  # no longer does the start wait for a name's first answer


class ReplicaPool(Generic[Info]):
    """Replicas of one kind. `async with` keeps their connections up in the background. InvalidArgument names what is no
    address."""

    def __init__(
        self,
        addresses: Sequence[str],
        service: ReplicaService[Info],
        admit: Callable[[Info], None],
        stream_config: StreamConfig | None = None,
        lookup: Lookup = look_up,
        tls: ClientTls | None = None,
    ) -> None:
        self._addresses, self._tls = Addresses(addresses, lookup), tls
        self._service, self._admitted, self._stream_config = service, admit, stream_config
        self.replicas = [self._new_replica(address) for address in self._addresses.known]  # in their order
        self._tasks: dict[Replica[Info], asyncio.Task[None]] = {}
        self._others: set[asyncio.Task[None]] = set()  # of replicas that leave, and the one that looks names up
        self._looked_up, self._change = asyncio.Event(), asyncio.Event()

    async def __aenter__(self) -> Self:
        self._run_replicas()
        if self._addresses.complete:
            self._looked_up.set()
        else:
            self._others.add(asyncio.create_task(self._follow_names()))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        tasks = [*self._tasks.values(), *self._others]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def usable(self) -> bool:
        """Whether any replica takes new sequences."""
        return any(replica.usable for replica in self.replicas)

    async def wait_usable(self) -> None:
        """Waits until a replica takes new sequences."""
        while not self.usable:
            await self.wait_change()

    async def wait_change(self) -> None:
        """Waits until any of them comes, goes, or says something new of itself."""
        self._change.clear()
        await self._change.wait()

    async def wait_admitted(self) -> FailedPrecondition | None:
        """Waits until a replica takes new sequences, or every one has answered and is refused; returns why."""
        while not self.usable and self.refusal is None:
            await self.wait_change()
        return self.refusal

    async def wait_attempted(self) -> FailedPrecondition | None:
        """Waits for the end of every replica's first attempt; returns what speaks against them if all have answered
        and are refused."""
        await self._looked_up.wait()
        await asyncio.gather(*(replica.attempted.wait() for replica in self.replicas))
        return self.refusal

    @property
    def refusal(self) -> FailedPrecondition | None:
        """Why none of the replicas may be used, once every one has said so much of itself; one that fits is enough."""
        refusals = [replica.refusal for replica in self.replicas]
        return None if not refusals or None in refusals or not self._addresses.complete else refusals[0]

    def recheck(self) -> None:
        """Judges the replicas again, by what is known now."""
        for replica in self.replicas:
            replica.recheck()

    def _able(self, request: Open) -> list[Replica[Info]]:
        """Those that take new sequences and can do all that is asked."""
        usable = [(replica, replica.info) for replica in self.replicas if replica.usable]
        return [
            replica
            for replica, info in usable
            if info is not None
            and not lacking(info.capabilities, request.sampling, request.acceptance, request.reasoning)
            and (not request.media or MEDIA in info.capabilities)
        ]

    @staticmethod
    def _place(request: Open, replicas: Sequence[Replica[Info]]) -> Replica[Info] | None:
        """One of the replicas, by the prompt and by how busy they are."""
        if len(replicas) == 1:
            return replicas[0]
        named = {replica.address: replica for replica in replicas}
        name = choose(
            affinity_key(request.prompt_ids, request.salt, request.adapter, request.media),
            {replica.address: replica.load for replica in replicas},
        )
        return None if name is None else named[name]

    def _changed(self) -> None:
        self._change.set()

    def _new_replica(self, address: str) -> Replica[Info]:
        return Replica(address, self._service, self._admitted, self._changed, self._stream_config, self._tls)

    async def _follow_names(self) -> None:
        """Each by itself: one with a slow answer holds up no other, and the start for a while only."""
        async with asyncio.TaskGroup() as group:
            for name in self._addresses.names:
                group.create_task(self._follow(name))
            await asyncio.sleep(START_S)
            self._looked_up.set()
            self._changed()

    async def _follow(self, name: str) -> None:
        while True:
            await self._addresses.refresh(name)
            if self._addresses.complete:
                self._looked_up.set()
            self._update()
            await asyncio.sleep(RESOLVE_S)

    def _update(self) -> None:
        """One replica an address. One whose address is gone gets no new sequences, and leaves after its last."""
        before = {replica.address: replica for replica in self.replicas}
        named = [before.get(address) or self._new_replica(address) for address in self._addresses.known]
        for replica in self.replicas:
            replica.retired = replica not in named
        self.replicas = [*named, *(replica for replica in self.replicas if replica.retired and replica.num_sequences)]
        for replica in before.values():
            if replica not in self.replicas:
                log.info("%s %s: its address is gone", self._service.name, replica.address)
                task = self._tasks.pop(replica)
                task.cancel()
                self._others.add(task)
                task.add_done_callback(self._others.discard)
        self._run_replicas()
        self._changed()

    def _run_replicas(self) -> None:
        for replica in self.replicas:
            if replica not in self._tasks:
                self._tasks[replica] = asyncio.create_task(replica.run())


def allowed_by_breaker(replicas: Iterable[Replica[Info]]) -> list[Replica[Info]]:
    """Those that have not failed again and again lately."""
    now = time.monotonic()
    return [replica for replica in replicas if replica.breaker.allows(now)]
