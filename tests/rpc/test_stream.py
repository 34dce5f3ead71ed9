"""FrameStream: over scripted calls with a clock in hand, and over real gRPC on the loopback.

From the device thread to the streams: a message that no frame can hold harms its own sequence alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from threading import Event, get_ident
from typing import Any, cast

import grpc.aio
import pytest
from support.fakes import until

from outrider.rpc.channel import connect
from outrider.rpc.codec import COMMIT, TARGET_STREAM
from outrider.rpc.errors import OutriderError, ProtocolError, Unavailable
from outrider.rpc.messages import Close, Closed, Commit, Credit, Failure, FrameHeader, Open
from outrider.rpc.server import build_server
from outrider.rpc.status import from_rpc_error
from outrider.rpc.stream import FrameStream, Outboxes, RoundTrip, StreamConfig, client_stream, server_stream
from outrider.rpc.words.answer import TokenLogprob
from outrider.rpc.words.sampling_params import SamplingParams
from outrider.v1 import target_pb2_grpc

QUICK = StreamConfig(heartbeat_s=0.05, silence_s=30.0)  # a busy machine is no silent peer
IMPATIENT = replace(QUICK, silence_s=0.3)


class Clock:
    """Time that moves when told."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


class Script:
    """A call whose frames the test puts in and takes out."""

    def __init__(self) -> None:
        self.incoming: asyncio.Queue[Any] = asyncio.Queue()
        self.written: list[Any] = []
        self.aborted = False

    async def read(self) -> Any | None:
        frame = await self.incoming.get()
        if isinstance(frame, Exception):
            raise frame
        return grpc.aio.EOF if frame is None else frame

    async def write(self, frame: Any) -> None:
        self.written.append(frame)

    def cancel(self) -> None:
        self.aborted = True


def events(number: int, *messages: Any, **header: Any) -> Any:
    return TARGET_STREAM.events.build(
        FrameHeader(number, **header), [TARGET_STREAM.events.encode(message) for message in messages]
    )


def commands(number: int, *messages: Any, **header: Any) -> Any:
    return TARGET_STREAM.commands.build(
        FrameHeader(number, **header), [TARGET_STREAM.commands.encode(message) for message in messages]
    )


def new_open(sequence_id: int, num_ids: int = 3) -> Open:
    return Open(sequence_id, tuple(range(num_ids)), SamplingParams())


def scripted(*, client: bool = True, **options: Any) -> tuple[FrameStream, Script, Clock]:
    script, clock = Script(), Clock()
    return FrameStream(TARGET_STREAM, script, client=client, clock=clock, **options), script, clock


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_what_one_turn_sends_is_one_frame() -> None:
    stream, script, _ = scripted()
    async with stream:
        await turns()
        assert [len(frame.messages) for frame in script.written] == [0]  # the hello
        stream.send(new_open(1), Credit(1, 9, 4))
        stream.send(new_open(2))
        await turns()
        assert [len(frame.messages) for frame in script.written] == [0, 3]
        assert [frame.header.number for frame in script.written] == [1, 2]
    assert script.aborted and stream.closed and stream.error is None


async def test_an_idle_side_sends_heartbeats_with_its_state() -> None:
    stream, script, clock = scripted(step_age_ms=lambda: 77)
    async with stream:
        await turns()
        for _ in range(9):
            clock.now += 0.0625  # exact in binary
            stream.tick()
            await turns()
        assert len(script.written) == 3  # the hello, and one each 200 ms, at the next tick
        assert script.written[-1].header.step_age_ms == 77 and not script.written[-1].header.draining


async def test_a_silent_peer_breaks_the_stream() -> None:
    stream, script, clock = scripted()
    async with stream:
        for step in range(40):
            clock.now += 0.125
            if step == 5:
                script.incoming.put_nowait(events(1))
                await turns()
            stream.tick()
            if stream.closed:
                break
        assert step == 20  # more than 1.8 s after its last frame
        with pytest.raises(Unavailable, match=r"no frame for 1\.8 s"):
            await anext(stream)
        with pytest.raises(Unavailable):
            await stream.wait_closed()
        stream.send(Close(9))  # too late, and no error
    assert script.aborted


@pytest.mark.parametrize("pause_s", [0.5, 60.0])
async def test_pauses_of_our_own_are_not_the_peers_silence(pause_s: float) -> None:
    """One long one, as when this process is stopped, or many, as on a machine that has too much to do."""
    stream, _, clock = scripted()
    async with stream:
        for _ in range(9):
            clock.now += pause_s
            stream.tick()
            stream.tick()  # no time has passed
        assert not stream.closed
        clock.now += pause_s
        stream.tick()
        assert stream.closed, "in ten turns of this process nothing has come"


async def test_a_gap_breaks_the_stream() -> None:
    stream, script, _ = scripted()
    async with stream:
        script.incoming.put_nowait(events(2))
        with pytest.raises(ProtocolError, match="frame 2 after frame 0"):
            await anext(stream)


async def test_the_end_of_the_peer_ends_the_iteration() -> None:
    stream, script, _ = scripted()
    async with stream:
        stream.send(new_open(1))
        script.incoming.put_nowait(events(1, Commit(1, 3, (5,)), Commit(1, 4, (6,))))
        script.incoming.put_nowait(None)
        assert [batch async for batch in stream] == [[Commit(1, 3, (5,)), Commit(1, 4, (6,))]]


async def test_a_long_message_is_decoded_beside_the_event_loop() -> None:
    threads: list[int] = []

    def decode(message: Any) -> Commit:
        threads.append(get_ident())
        return cast(Commit, COMMIT.decode(message))

    watched = replace(TARGET_STREAM.events, decoders={**TARGET_STREAM.events.decoders, "commit": decode})
    script = Script()
    long = Commit(1, 3, (5,), logprobs=(tuple(TokenLogprob(token, -0.5, 1) for token in range(9_000)),))
    async with FrameStream(replace(TARGET_STREAM, events=watched), script, client=True) as stream:
        stream.send(new_open(1))
        for frame in (events(1, long), events(2, Commit(1, 4, (6,))), None):
            script.incoming.put_nowait(frame)
        assert [batch async for batch in stream] == [[long], [Commit(1, 4, (6,))]]
    beside, here = threads
    assert beside != get_ident() == here


async def test_round_trips_take_off_what_the_peer_held() -> None:
    stream, script, clock = scripted()
    async with stream:
        await turns()
        clock.now += 0.010
        script.incoming.put_nowait(events(1, last_seen=1, held_us=7_000))
        await turns()
        assert stream.round_trip_us == pytest.approx(3_000)
        clock.now += 0.5
        script.incoming.put_nowait(events(2, last_seen=1, held_us=507_000))  # nothing new acknowledged
        await turns()
        assert stream.round_trip_us == pytest.approx(3_000)


def test_the_estimate_smooths() -> None:
    estimate = RoundTrip()
    for number, taken in enumerate((0.004, 0.002, 0.004), start=1):
        estimate.sending(number, 10.0 * number)
        estimate.received(number, number, 0, 10.0 * number + taken)
    assert estimate.smoothed_us == pytest.approx(3_781.25)
    assert estimate.sending(9, 40.0) == (3, 9_996_000)


async def test_a_stuck_device_and_a_draining_peer_are_told() -> None:
    told: list[tuple[bool, bool]] = []
    stream: FrameStream
    stream, script, _ = scripted(on_peer_change=lambda: told.append((stream.device_dead, stream.peer_draining)))
    async with stream:
        headers: Any = {"step_age_ms": 30_000}, {"step_age_ms": 30_001}, {"step_age_ms": 31_000}, {"draining": True}
        for number, header in enumerate(headers, start=1):
            script.incoming.put_nowait(events(number, **header))
        await turns(10)
        assert told == [(True, False), (False, True)]


async def test_a_peer_that_has_changed_is_told_and_says_so() -> None:
    told, version = list[int](), 3
    stream: FrameStream
    stream, script, _ = scripted(
        on_peer_change=lambda: told.append(stream.peer_info_version), info_version=lambda: version
    )
    async with stream:
        for number, changes in enumerate((0, 1, 1, 2), start=1):
            script.incoming.put_nowait(events(number, info_version=changes))
        await turns(10)
        assert told == [1, 2]
        stream.send(new_open(1))
        await turns()
        assert script.written[-1].header.info_version == 3


async def test_a_vanished_open_is_answered_here_and_not_within_send() -> None:
    got: list[Any] = []
    stream, script, _ = scripted(on_messages=got.extend)
    async with stream:
        await turns()
        stream.send(new_open(1), Close(1))
        assert got == []
        await turns()
        assert got == [Closed(1)] and len(script.written) == 1 and stream.num_sequences == 0


async def test_a_draining_service_refuses_opens_and_ends_after_its_last_sequence() -> None:
    stream, script, _ = scripted(client=False)
    async with stream:
        script.incoming.put_nowait(commands(1, new_open(1)))
        assert await anext(stream) == [new_open(1)]
        stream.drain()
        script.incoming.put_nowait(commands(2, new_open(2), Credit(2, 9, 4), Credit(1, 9, 4)))
        assert await anext(stream) == [Credit(1, 9, 4)]
        await turns()
        stream.tick()
        assert not stream.closed and script.written[-1].header.draining
        assert script.written[-1].messages[0].failure.status.code == 14
        stream.send(Closed(1))
        await turns()
        stream.tick()
        assert stream.closed and script.written[-1].messages[0].closed.sequence_id == 1
        await stream.wait_closed()


async def test_a_slow_consumer_holds_the_peer_up_and_is_not_silence() -> None:
    stream, script, clock = scripted(config=StreamConfig(max_inbox=2))
    async with stream:
        stream.send(new_open(1))
        for number in range(1, 6):
            script.incoming.put_nowait(events(number, Commit(1, number, (5,))))
        await turns(20)
        assert script.incoming.qsize() == 3
        for _ in range(50):
            clock.now += 0.1
            stream.tick()
        assert not stream.closed
        for _ in range(5):
            assert len(await anext(stream)) == 1


async def test_a_frame_that_takes_long_to_decode_is_not_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, script, clock = scripted()
    begun, may_end, decode = Event(), Event(), stream._assembler.decode

    def slow(frame: Any) -> Any:
        begun.set()
        may_end.wait(30)
        return decode(frame)

    monkeypatch.setattr(stream._assembler, "decode", slow)
    async with stream:
        stream.send(new_open(1))
        await turns()
        row = tuple(TokenLogprob(token, -1.0, 1) for token in range(9000))
        script.incoming.put_nowait(events(1, long := Commit(1, 3, (4,), logprobs=(row,))))
        await asyncio.to_thread(begun.wait, 30)
        for _ in range(40):
            clock.now += 0.125
            stream.tick()
        may_end.set()
        (found,) = await anext(stream)
        assert isinstance(found, Commit) and found.logprobs == long.logprobs and not stream.closed
        for _ in range(20):
            clock.now += 0.125
            stream.tick()
        assert stream.closed


async def test_what_a_slow_peer_is_owed_is_bounded() -> None:
    stream, _, _ = scripted(config=StreamConfig(max_pending_bytes=1_000))
    async with stream:
        stream.send(new_open(1), *[Credit(1, 9, 4)] * 100)  # one turn's messages have had no time to leave
        assert not stream.closed
        stream.send(*[Credit(1, 9, 4)] * 900)
        with pytest.raises(Unavailable, match="too slowly"):
            await asyncio.wait_for(stream.wait_closed(), 30)


async def test_a_bug_in_the_callback_ends_the_stream(caplog: pytest.LogCaptureFixture) -> None:
    def broken(batch: list[Any]) -> None:
        raise KeyError("the secret prompt")

    stream, script, _ = scripted(on_messages=broken)
    async with stream:
        stream.send(new_open(1))
        script.incoming.put_nowait(events(1, Commit(1, 3, (5,))))
        with pytest.raises(OutriderError, match="unexpected KeyError") as caught:
            await stream.wait_closed()
    assert "secret" not in str(caught.value) and "unexpected error" in caplog.text


class Echo(target_pb2_grpc.TargetServiceServicer):
    """Commits one token per credit; fails sequence 13; goes mute when told."""

    mute = False
    config = QUICK

    def __init__(self) -> None:
        self.streams: list[FrameStream] = []
        self.released: list[int] = []  # sequences that were open when a stream ended

    async def Verify(self, requests: Any, context: Any) -> None:
        if self.mute:
            await context.read()
            await asyncio.sleep(30)
        stream = server_stream(TARGET_STREAM, context, config=self.config)
        self.streams.append(stream)
        try:
            async with stream:
                async for batch in stream:
                    for message in batch:
                        stream.send(*self.answer(message))
        finally:
            self.released.append(stream.num_sequences)

    def answer(self, message: Any) -> tuple[Any, ...]:
        if isinstance(message, Credit):
            return (Commit(message.sequence_id, message.until, (5,)),)
        if isinstance(message, Close):
            return (Closed(message.sequence_id),)
        return (Failure(13, 5, "unlucky"),) if message.sequence_id == 13 else ()


@pytest.fixture
async def echo() -> AsyncIterator[tuple[Echo, Any]]:
    servicer = Echo()
    server = build_server(
        "localhost:0", [], lambda server: target_pb2_grpc.add_TargetServiceServicer_to_server(servicer, server)
    )
    await server.start()
    channel: grpc.aio.Channel = connect(server.address)
    yield servicer, target_pb2_grpc.TargetServiceStub(channel)
    await channel.close()
    await server.stop()


async def test_messages_cross_a_real_stream(echo: tuple[Echo, Any]) -> None:
    servicer, stub = echo
    long = new_open(2, 100_000)
    async with client_stream(TARGET_STREAM, stub.Verify(), config=QUICK) as stream:
        stream.send(new_open(1), long, new_open(13), Credit(2, 100_000, 4), Credit(1, 3, 4))
        got: list[Any] = []
        while len(got) < 3:
            got += await asyncio.wait_for(anext(stream), 30)
        assert {type(message) for message in got} == {Failure, Commit}
        stream.send(Close(1))
        assert await anext(stream) == [Closed(1)]
        ends = (stream, servicer.streams[0])
        await until(lambda: all(end.round_trip_us for end in ends))  # idle: heartbeats flow
        assert all(end.num_sequences == 1 and 50 < end.round_trip_us < 5_000_000 for end in ends)
    await until(lambda: servicer.released)
    assert servicer.released == [1]  # the end of a stream releases what it opened


async def test_a_mute_service_is_noticed(echo: tuple[Echo, Any]) -> None:
    servicer, stub = echo
    servicer.mute = True
    async with client_stream(TARGET_STREAM, stub.Verify(), config=IMPATIENT) as stream:
        with pytest.raises(Unavailable, match=r"no frame for 0\.3 s"):
            await asyncio.wait_for(stream.wait_closed(), 30)


async def test_a_mute_client_is_noticed_and_told_why(echo: tuple[Echo, Any]) -> None:
    servicer, stub = echo
    servicer.config = IMPATIENT
    call = stub.Verify()
    await call.write(commands(1, new_open(1)))
    with pytest.raises(grpc.aio.AioRpcError, match="no frame") as caught:
        while True:  # the status arrives behind the frames
            await asyncio.wait_for(call.read(), 30)
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE and servicer.released == [1]


async def test_a_protocol_error_reaches_the_peer_with_its_reason(echo: tuple[Echo, Any]) -> None:
    _, stub = echo
    async with client_stream(TARGET_STREAM, stub.Verify(), config=QUICK) as stream:
        stream._number = 5
        with pytest.raises(ProtocolError, match="frame 6 after frame 0"):
            await asyncio.wait_for(stream.wait_closed(), 30)


async def test_a_frame_that_cannot_be_read_is_a_protocol_error(echo: tuple[Echo, Any]) -> None:
    servicer, stub = echo
    call = stub.Verify()
    call._request_serializer = lambda frame: frame if isinstance(frame, bytes) else frame.SerializeToString()
    await call.write(commands(1, new_open(1)))
    await call.write(b"\xff")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        while True:
            await asyncio.wait_for(call.read(), 30)
    assert type(from_rpc_error(caught.value)) is ProtocolError and servicer.released == [1]


async def test_a_frame_that_a_client_cannot_read_is_a_protocol_error() -> None:
    stream, script, _ = scripted()

    async def read() -> None:  # as gRPC gives what it cannot deserialize to a client
        return None

    script.read = read  # type: ignore[method-assign]
    async with stream:
        with pytest.raises(ProtocolError, match="a frame that is no message"):
            await asyncio.wait_for(stream.wait_closed(), 30)


async def test_a_cancelled_call_is_noticed_by_both(echo: tuple[Echo, Any]) -> None:
    servicer, stub = echo
    call = stub.Verify()
    async with client_stream(TARGET_STREAM, call, config=QUICK) as stream:
        stream.send(new_open(1), Credit(1, 3, 4))
        await anext(stream)
        call.cancel()
        with pytest.raises(OutriderError):
            await asyncio.wait_for(stream.wait_closed(), 30)
    await until(lambda: servicer.released)
    assert servicer.released == [1]


async def test_a_draining_server_ends_the_stream_cleanly(echo: tuple[Echo, Any]) -> None:
    servicer, stub = echo
    changed = asyncio.Event()
    async with client_stream(TARGET_STREAM, stub.Verify(), config=QUICK, on_peer_change=changed.set) as stream:
        stream.send(new_open(1), Credit(1, 3, 4))
        await anext(stream)
        servicer.streams[0].drain()
        await asyncio.wait_for(changed.wait(), 30)
        assert stream.peer_draining
        stream.send(Close(1))
        assert [batch async for batch in stream] == [[Closed(1)]]
        assert stream.error is None


SMALL = replace(TARGET_STREAM, events=replace(TARGET_STREAM.events, max_lone_bytes=1000))


class Peer:
    """A transport whose peer opens two sequences and then only listens."""

    def __init__(self) -> None:
        opens = [TARGET_STREAM.commands.encode(Open(number, (1, 2), SamplingParams())) for number in (1, 2)]
        self._frames = [TARGET_STREAM.commands.build(FrameHeader(1), opens)]
        self.heard: list[Any] = []

    async def read(self) -> Any | None:
        if not self._frames:
            await asyncio.Event().wait()
        return self._frames.pop()

    async def write(self, frame: Any) -> None:
        self.heard += [TARGET_STREAM.events.decode(entry) for entry in frame.messages]

    def cancel(self) -> None:
        pass


async def test_what_takes_long_is_encoded_where_it_is_put() -> None:
    threads: list[int] = []

    def encode(message: Commit) -> Any:
        threads.append(get_ident())
        return COMMIT.encode(message)

    row = replace(TARGET_STREAM.events.rows[Commit], codec=replace(COMMIT, encode=encode))
    watched = replace(TARGET_STREAM.events, rows={**TARGET_STREAM.events.rows, Commit: row})
    peer = Peer()
    long = Commit(1, 2, (3,), logprobs=(tuple(TokenLogprob(token, -0.5, 1) for token in range(9_000)),))
    async with FrameStream(replace(TARGET_STREAM, events=watched), peer, client=False) as stream:
        await anext(stream)
        boxes = Outboxes(asyncio.get_running_loop())
        await asyncio.to_thread(boxes.put, stream, long)
        await asyncio.to_thread(boxes.put, stream, Commit(1, 3, (8,)))
        boxes.flush()
        for _ in range(10):
            await asyncio.sleep(0)
    assert peer.heard == [long, Commit(1, 3, (8,))]
    beside, here = threads
    assert beside != get_ident() == here


async def test_a_message_that_no_frame_can_hold_fails_its_sequence_and_the_others_leave() -> None:
    peers = Peer(), Peer()
    row = tuple(TokenLogprob(token, -1.0, 1) for token in range(1000))
    async with FrameStream(SMALL, peers[0], client=False) as first, FrameStream(SMALL, peers[1], client=False) as other:
        await anext(first)
        await anext(other)
        boxes = Outboxes(asyncio.get_running_loop())
        boxes.put(first, Commit(1, 2, (3,), logprobs=(row,)))
        boxes.put(first, Commit(2, 2, (7,)))
        boxes.put(other, Commit(1, 2, (8,)))
        boxes.flush()
        for _ in range(10):
            await asyncio.sleep(0)
        assert not first.closed and not other.closed
    failure, commit = peers[0].heard
    assert isinstance(failure, Failure) and failure.sequence_id == 1 and "allowed: at most 1000" in failure.message
    assert commit == Commit(2, 2, (7,)) and peers[1].heard == [Commit(1, 2, (8,))]


async def test_a_number_that_no_field_can_hold_fails_its_sequence_and_the_others_leave() -> None:
    peer = Peer()
    async with FrameStream(TARGET_STREAM, peer, client=False) as stream:
        await anext(stream)
        boxes = Outboxes(asyncio.get_running_loop())
        boxes.put(stream, Commit(1, 2, (3,), chain=2**32))
        boxes.put(stream, Commit(2, 2, (7,)))
        boxes.flush()
        await turns(10)
        assert not stream.closed
    failure, commit = peer.heard
    assert isinstance(failure, Failure) and (failure.sequence_id, failure.code) == (1, 13)
    assert commit == Commit(2, 2, (7,))
