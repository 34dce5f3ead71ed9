"""FrameStream: one side of a draft or target stream over grpc.aio. It coalesces what is sent in one turn of the event
loop into one frame, sends a heartbeat when idle, notices a peer that is silent or whose device is stuck, and
estimates the round trip (RoundTrip). All methods belong to the event loop; a device thread sends by Outboxes, so that
what one step says to one stream leaves in one frame."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from threading import Lock
from types import TracebackType
from typing import Any, Protocol

import grpc.aio
from google.protobuf.message import DecodeError

from outrider.rpc.beats import next_beat
from outrider.rpc.codec import Encoded, Message, StreamKind
from outrider.rpc.errors import Internal, OutriderError, ProtocolError, Unavailable, unexpected
from outrider.rpc.frames import MAX_FRAME_BYTES, Decoded, FrameAssembler, FramePacker, SequenceTable
from outrider.rpc.messages import Closed, Commit, Credit, DraftTokens, FrameHeader, Open, to_failure
from outrider.rpc.status import from_rpc_error

log = logging.getLogger(__name__)

MessageBatch = list[Message]  # what one frame brought: it holds together
SILENT_PEER = "SILENT_PEER"  # the reason of a stream that ends since nothing comes
_SMOOTHING = 1 / 8  # of the round trip, as TCP does
_MAX_OUTSTANDING = 1024  # frames; a peer that acknowledges none of so many is measured no more until it does
_MAX_STEP_AGE_MS = (1 << 32) - 1
_LAST_WRITE_S = 1.0  # for a write to a peer that may not be reading any more
_SLOW_S = 1.0  # a frame that takes longer to leave meets a slow reader


class FrameCall(Protocol):
    """One side of a call: gRPC's own StreamStreamCall, or a ServicerContext."""

    async def read(self) -> Any:
        """The next frame; EOF when the peer has ended its side."""

    async def write(self, frame: Any) -> None:
        """Sends a frame; waits while the peer's flow-control window is full."""

    def cancel(self) -> object:
        """Ends the call at once; a service's ends when its handler returns or raises."""


class RoundTrip:
    """The smoothed round trip to a peer, in microseconds, from frame headers; 0 before the first measurement.
    Clocks need not agree: the peer says how long it held the last frame it saw, and that is taken off the time that
    this side measured."""

    __slots__ = ("_last_received", "_last_received_at", "_sent", "smoothed_us")

    def __init__(self) -> None:
        self.smoothed_us = 0.0
        self._sent: deque[tuple[int, float]] = deque(maxlen=_MAX_OUTSTANDING)
        self._last_received = 0
        self._last_received_at = 0.0

    def sending(self, number: int, now: float) -> tuple[int, int]:
        """Notes a frame that leaves; (last_seen, held_us) for its header."""
        self._sent.append((number, now))
        if not self._last_received:
            return 0, 0
        return self._last_received, max(0, round((now - self._last_received_at) * 1e6))

    def received(self, number: int, last_seen: int, held_us: int, now: float) -> None:
        """Notes a frame that arrived. Each of our frames is measured by its first acknowledgement alone: the wait of
        a later one is the peer's idleness."""
        self._last_received, self._last_received_at = number, now
        sent_at = None
        while self._sent and self._sent[0][0] <= last_seen:
            acknowledged, at = self._sent.popleft()
            sent_at = at if acknowledged == last_seen else None
        if sent_at is not None:
            sample_us = max(0.0, (now - sent_at) * 1e6 - held_us)
            before = self.smoothed_us or sample_us
            self.smoothed_us = before + _SMOOTHING * (sample_us - before)


@dataclass(frozen=True, slots=True)
class StreamConfig:
    """Times and bounds of a stream; both sides use the defaults."""

    heartbeat_s: float = 0.2
    silence_s: float = 1.8  # noticed within two seconds, the tick's own time included
    device_timeout_s: float = 30.0
    max_pending_bytes: int = 64 << 20  # short messages unsent; a peer that reads too slowly for this is broken
    max_inbox: int = 1024  # frames received and not yet taken by the iterator; then the peer is held up
    wrap: Callable[[FrameCall], FrameCall] = lambda call: call  # what it returns sees every frame


def client_stream(kind: StreamKind, call: FrameCall, **options: Any) -> FrameStream:
    """The gateway's side of a call; options as for FrameStream."""
    return FrameStream(kind, call, client=True, **options)


def server_stream(kind: StreamKind, context: Any, **options: Any) -> FrameStream:
    """A service's side of a call; options as for FrameStream."""
    return FrameStream(kind, context, client=False, **options)


class FrameStream:
    """Use as `async with stream:`, then `send(...)` and `async for batch in stream`, or give `on_messages`, which is
    called with each batch as it arrives (one task switch less), and `await stream.wait_closed()`.

    The end is seen by all: iteration and `wait_closed` raise the OutriderError that broke the stream, and stop
    quietly if the peer ended it or this side closed it. A draining service refuses each Open with UNAVAILABLE and
    ends the stream after its last sequence."""

    def __init__(
        self,
        kind: StreamKind,
        call: FrameCall,
        *,
        client: bool,
        config: StreamConfig | None = None,
        on_messages: Callable[[MessageBatch], None] | None = None,
        on_peer_change: Callable[[], None] | None = None,
        on_unsent: Callable[[int], None] = lambda sequence_id: None,
        step_age_ms: Callable[[], int] = lambda: 0,
        info_version: Callable[[], int] = lambda: 0,
        max_media_bytes: int = 0,  # of an Open, that are taken here
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        outgoing, incoming = (kind.commands, kind.events) if client else (kind.events, kind.commands)
        self.round_trip = RoundTrip()
        self._config = config or StreamConfig()
        self._call, self._clock = self._config.wrap(call), clock
        self._step_age_ms, self._info_version = step_age_ms, info_version
        self._on_messages, self._on_peer_change, self._client = on_messages, on_peer_change, client
        self.on_unsent = on_unsent  # told of a sequence that fails since no frame can hold what is said of it
        self._outgoing = outgoing
        self._table = SequenceTable()
        self._packer = FramePacker(outgoing, self._table)
        self._assembler = FrameAssembler(incoming, self._table, max_media_bytes)
        self._number = 0
        self._tick_s = min(self._config.heartbeat_s, self._config.silence_s) / 2
        self._last_sent_at = self._last_received_at = self._last_tick_at = clock()
        self._silent_s = 0.0  # of the peer, while this process ran
        self._draining = self._heartbeat_due = self._writing = self._held_up = False
        self._peer_state = (False, False, 0)  # draining, device dead, info version
        self._inbox: deque[MessageBatch] = deque()
        self._wake, self._arrived, self._taken = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._finished = asyncio.Event()
        self._error: OutriderError | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> FrameStream:
        self._heartbeat_due = True  # the first frame says at once that the peer is there
        self._tasks = [asyncio.create_task(loop()) for loop in (self._read_loop, self._write_loop, self._tick_loop)]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def peer_draining(self) -> bool:
        """Whether the peer refuses new sequences."""
        return self._peer_state[0]

    @property
    def device_dead(self) -> bool:
        """Whether the peer's device has been in one step for longer than the device timeout."""
        return self._peer_state[1]

    @property
    def peer_info_version(self) -> int:
        """Counts the changes of what the peer says of itself."""
        return self._peer_state[2]

    @property
    def round_trip_us(self) -> float:
        """The smoothed round trip, without the time that the peer held a frame; 0 before the first measurement."""
        return self.round_trip.smoothed_us

    @property
    def closed(self) -> bool:
        """Whether the stream has ended, for whatever reason."""
        return self._finished.is_set()

    @property
    def error(self) -> OutriderError | None:
        """What broke the stream."""
        return self._error

    @property
    def last_received_at(self) -> float:
        """When the last frame came, by the stream's clock (time.monotonic)."""
        return self._last_received_at

    @property
    def num_sequences(self) -> int:
        """The sequences that are open on this stream."""
        return self._table.num_active

    def encode_slow(self, message: Message) -> Message | Encoded:
        """Encodes a message that would hold up the event loop, to be sent afterwards; from any thread."""
        return self._outgoing.encode_slow(message)

    def send(self, *messages: Message | Encoded) -> None:
        """Queues messages and returns at once. After the end of the stream nothing is sent and nothing raised: the
        reader of this stream learns of the end."""
        if self.closed:
            return
        for message in messages:
            self._packer.push(message)
        self._report_vanished()
        self._sent()

    def send_commands(self, sequence_id: int, messages: Iterable[DraftTokens | Commit | Credit]) -> None:
        """The same for what every round sends of an open sequence, which is this one whatever they name."""
        if not self.closed:
            self._packer.push_commands(sequence_id, messages)
            self._sent()

    def _sent(self) -> None:
        self._wake.set()
        if self._is_slow(self._packer.pending_bytes):
            self._finish(Unavailable("the peer reads too slowly", reason="SLOW_PEER"))

    def _is_slow(self, pending: int) -> bool:
        """Much is unsent, and a frame has not left for a while: one turn alone may push a lot."""
        if pending <= self._config.max_pending_bytes:
            return False
        stuck = self._writing and self._clock() - self._last_sent_at > _SLOW_S
        return pending > self._config.max_pending_bytes * (1 if stuck else 4)

    def drain(self) -> None:
        """Says that no new sequence is welcome; a service's stream ends after its last one."""
        self._draining = self._heartbeat_due = True
        self._wake.set()

    async def close(self) -> None:
        """Ends the stream; what is unsent is lost, and the peer releases every sequence."""
        self._finish(None)
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        if tasks:
            _, stuck = await asyncio.wait(tasks, timeout=_LAST_WRITE_S)
            for task in stuck:
                task.cancel()

    async def wait_closed(self) -> None:
        """Waits for the end; raises what broke the stream."""
        await self._finished.wait()
        if self._error is not None:
            raise self._error

    def __aiter__(self) -> FrameStream:
        return self

    async def __anext__(self) -> MessageBatch:
        while not self._inbox:
            if self.closed:
                if self._error is not None:
                    raise self._error
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        self._taken.set()
        return self._inbox.popleft()

    def tick(self) -> None:
        """What is due by the clock: a heartbeat, the verdict on a silent peer, the end of a drained stream."""
        now = self._clock()
        unheard_s = now - max(self._last_tick_at, self._last_received_at)
        self._silent_s += min(unheard_s, 2 * self._tick_s)  # the rest is this process's own: something held it up
        self._last_tick_at = now
        if self._silent_s > self._config.silence_s and not self._held_up:
            self._finish(Unavailable(f"no frame for {self._config.silence_s:g} s", reason=SILENT_PEER))
        elif self._draining and not self._client and not self._table.num_active and self._quiet:
            self._finish(None)
        elif now - self._last_sent_at >= self._config.heartbeat_s:
            self._heartbeat_due = True
            self._wake.set()

    @property
    def _quiet(self) -> bool:
        return self._packer.idle and not self._writing and not self._heartbeat_due

    async def _read_loop(self) -> None:
        try:
            while (frame := await self._call.read()) is not grpc.aio.EOF:
                if frame is None:  # what gRPC makes of it at a client
                    raise DecodeError
                decoded = None
                if frame.ByteSize() > MAX_FRAME_BYTES:  # one long message: heartbeats go on beside it
                    self._last_received_at, self._held_up = self._clock(), True
                    decoded = await asyncio.to_thread(self._assembler.decode, frame)
                self._receive(frame, decoded)
                while len(self._inbox) >= self._config.max_inbox:
                    self._held_up = True
                    self._taken.clear()
                    await self._taken.wait()
                self._held_up = False
        except asyncio.CancelledError:
            self._finish(Unavailable("the call was cancelled"))  # unless it is our own doing: then this is too late
            raise
        except OutriderError as error:
            self._finish(error)
        except DecodeError:
            self._finish(ProtocolError("a frame that is no message of this stream"))
        except grpc.aio.AioRpcError as error:
            self._finish(from_rpc_error(error))
        except Exception as error:  # a bug in on_messages must end the stream, not leave it mute
            self._fail(error)
        self._finish(None)

    async def _write_loop(self) -> None:
        try:
            while not self.closed:
                entries = self._packer.next_frame()
                self._report_vanished()
                if entries is None and not self._heartbeat_due:
                    self._wake.clear()
                    await self._wake.wait()  # runs in the next turn: all that this turn pushes makes one frame
                    continue
                self._writing = True
                await self._call.write(self._build(entries or ()))
                self._writing = False
        except grpc.aio.AioRpcError as error:
            self._finish(from_rpc_error(error))
        except (grpc.aio.UsageError, grpc.aio.InternalError, asyncio.InvalidStateError) as error:
            self._finish(Unavailable(f"the stream is gone ({type(error).__name__})"))
        except Exception as error:
            self._fail(error)

    async def _tick_loop(self) -> None:
        while not self.closed:
            await next_beat(self._tick_s)
            self.tick()

    def _build(self, entries: Sequence[Any]) -> Any:
        now = self._clock()
        self._number += 1
        self._last_sent_at, self._heartbeat_due = now, False
        last_seen, held_us = self.round_trip.sending(self._number, now)
        step_age_ms = min(max(0, self._step_age_ms()), _MAX_STEP_AGE_MS)
        info_version = self._info_version()
        header = FrameHeader(self._number, last_seen, held_us, step_age_ms, self._draining, info_version)
        return self._outgoing.build(header, entries)

    def _receive(self, frame: Any, decoded: list[Decoded] | None) -> None:
        now = self._last_received_at = self._clock()
        self._silent_s = 0.0
        received = self._assembler.accept(frame, decoded)
        header = received.header
        self.round_trip.received(header.number, header.last_seen, header.held_us, now)
        if received.replies:
            self.send(*received.replies)
        messages = self._refuse_opens(received.messages) if self._draining else received.messages
        if messages:
            self._deliver(messages)
        device_dead = header.step_age_ms > self._config.device_timeout_s * 1000
        peer_state = (header.draining, device_dead, header.info_version)
        if peer_state != self._peer_state:
            self._peer_state = peer_state
            if self._on_peer_change is not None:
                self._on_peer_change()

    def _refuse_opens(self, messages: MessageBatch) -> MessageBatch:
        refusal = Unavailable("the service is draining", reason="DRAINING")
        refused = {message.sequence_id for message in messages if isinstance(message, Open)}
        self.send(*(to_failure(sequence_id, refusal) for sequence_id in refused))
        return [message for message in messages if message.sequence_id not in refused]

    def _deliver(self, messages: MessageBatch) -> None:
        if self._on_messages is not None:
            self._on_messages(messages)
        else:
            self._inbox.append(messages)
            self._arrived.set()

    def _report_vanished(self) -> None:
        if self._packer.vanished:
            closed: MessageBatch = [Closed(sequence_id) for sequence_id in self._packer.vanished]
            self._packer.vanished.clear()
            asyncio.get_running_loop().call_soon(self._deliver, closed)  # never from within the caller's send

    def _fail(self, error: Exception) -> None:
        log.error("a stream ends by an unexpected error", exc_info=error)
        self._finish(unexpected(error))

    def _finish(self, error: OutriderError | None) -> None:
        if self.closed:
            return
        self._error = error
        self._finished.set()
        self._arrived.set()
        if self._client:  # the service then releases what the stream opened
            self._call.cancel()
        # gRPC cannot send a call's status while a write of it is under way, cancelled or not: a service lets its last
        # write end, so that the peer learns why the stream ended.
        spared = self._tasks[1:2] if self._writing and not self._client else []
        for task in self._tasks:
            if task is not asyncio.current_task() and task not in spared:
                task.cancel()


class Outboxes:
    """Collects messages by stream on the device thread; `flush` hands all of them to the loop in one call."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = Lock()
        self._pending: dict[FrameStream, list[Any]] = {}
        self._scheduled = False

    def put(self, stream: FrameStream, message: Any) -> None:
        """Queues a message; from any thread, which encodes it if that takes long."""
        message = stream.encode_slow(message)
        with self._lock:
            self._pending.setdefault(stream, []).append(message)

    def flush(self) -> None:
        """Sends what is queued; from any thread. After the loop has ended there is nobody to send to."""
        with self._lock:
            if not self._pending or self._scheduled or self._loop.is_closed():
                return
            self._scheduled = True
        self._loop.call_soon_threadsafe(self.send)

    def send(self) -> None:
        """The same at once, on the loop."""
        with self._lock:
            pending, self._pending = self._pending, {}
            self._scheduled = False
        for stream, messages in pending.items():
            for message in messages:  # all that one turn sends shares frames
                try:
                    stream.send(message)
                except (OutriderError, ValueError) as error:  # no frame or field can hold it: the others still leave
                    log.error("a message of sequence %d cannot be sent: %s", message.sequence_id, error)
                    told = error if isinstance(error, OutriderError) else Internal("a number that no field can hold")
                    stream.send(to_failure(message.sequence_id, told))
                    stream.on_unsent(message.sequence_id)
