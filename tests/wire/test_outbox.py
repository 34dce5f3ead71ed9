"""From the device thread to the streams: a message that no frame can hold harms its own sequence alone."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from threading import get_ident
from typing import Any

from outrider.rpc.codec import encode_commit
from outrider.rpc.frames import TARGET_STREAM
from outrider.rpc.messages import Commit, Failure, FrameHeader, Open, TokenLogprob
from outrider.rpc.sampling_params import SamplingParams
from outrider.rpc.stream import FrameStream, Outboxes

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

    def abort(self) -> None:
        pass


async def test_what_takes_long_is_encoded_where_it_is_put() -> None:
    threads: list[int] = []

    def encode(message: Commit) -> Any:
        threads.append(get_ident())
        return encode_commit(message)

    row = replace(TARGET_STREAM.events.rows[Commit], encode=encode)
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
