"""A TCP proxy before one service, which can do to its connections what networks do: cut them with a reset, swallow all
that they carry, or hold it up. It reads the gRPC messages that pass, unencrypted, so that a fault can be timed by one:
`watch` holds the next one of a name back until the fault is there."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import defaultdict
from collections.abc import Coroutine, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import DecodeError

from outrider.v1 import draft_pb2, generation_pb2, target_pb2

CHUNK = 1 << 16
LINGER_NOT = struct.pack("ii", 1, 0)  # on close the kernel sends a reset, and drops what is unsent
UP, DOWN = "up", "down"  # to the service, and from it

# What the messages of a stream are, by the service and the direction.
MESSAGES: dict[tuple[str, str], Any] = {
    ("target", UP): target_pb2.VerifyRequest,
    ("target", DOWN): target_pb2.VerifyResponse,
    ("draft", UP): draft_pb2.ProposeRequest,
    ("draft", DOWN): draft_pb2.ProposeResponse,
    ("gateway", UP): generation_pb2.GenerateRequest,
    ("gateway", DOWN): generation_pb2.GenerateResponse,
}


@dataclass
class Counts:
    """What a proxy has done."""

    connections: int = 0
    refused: int = 0  # connections, by nobody who listens
    resets: int = 0  # connections
    swallowed: int = 0  # bytes
    delayed: int = 0  # chunks


@dataclass
class Watch:
    """A message that is waited for, and held where it came by."""

    direction: str
    message: str
    reached: asyncio.Event = field(default_factory=asyncio.Event)
    released: asyncio.Event = field(default_factory=asyncio.Event)
    lost: bool = False  # once released: the message goes no further, nor does its connection

    def release(self, lost: bool = False) -> None:
        """Lets the message go, or has it lost with its connection."""
        self.lost = lost
        self.released.set()


class FaultProxy:
    """The proxy of one service. `upstream` is where that listens now; empty: nowhere. One that does not read what
    passes costs next to nothing, and cannot be watched."""

    def __init__(self, role: str, reads: bool = True) -> None:
        self.role, self.upstream, self.address, self._reads = role, "", "", reads
        self.swallows, self.delay_s = False, 0.0
        self.counts = Counts()
        self._links: set[_Link] = set()
        self._watch: Watch | None = None
        self._listening: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._connecting: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listens on a free port."""
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=128)
        self._listening.setblocking(False)
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self._accepting = asyncio.create_task(self._accept(self._listening))

    async def stop(self) -> None:
        """Ends it and every connection."""
        if self._listening is not None and self._accepting is not None:
            self._accepting.cancel()
            await asyncio.wait([self._accepting])
            self._listening.close()
        self.unwatch()
        tasks = [*self._connecting, *(task for link in list(self._links) for task in link.cut())]
        await asyncio.gather(*tasks, return_exceptions=True)

    def watch(self, direction: str, message: str) -> Watch:
        """The next message of that name is held back."""
        self._watch = Watch(direction, message)
        return self._watch

    def unwatch(self) -> None:
        """Nothing is waited for any more, and nothing held."""
        if self._watch is not None:
            self._watch.release()
        self._watch = None

    @property
    def num_connections(self) -> int:
        """Those that live."""
        return len(self._links)

    def reset(self) -> None:
        """Cuts every connection, as a firewall does that has forgotten it."""
        for link in list(self._links):
            self.counts.resets += 1
            link.cut()

    def heal(self) -> None:
        """From now on all passes. A connection that misses bytes is cut."""
        self.swallows, self.delay_s = False, 0.0
        for link in [link for link in self._links if link.torn]:
            link.cut()

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            client, _ = await loop.sock_accept(listening)
            task = asyncio.create_task(self._connect(client))
            self._connecting.add(task)
            task.add_done_callback(self._connecting.discard)

    async def _connect(self, client: socket.socket) -> None:
        self.counts.connections += 1
        host, _, port = self.upstream.rpartition(":")
        service = socket.socket()
        for held in (client, service):
            held.setblocking(False)
            held.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link = _Link(self, (client, service))
        try:
            await asyncio.get_running_loop().sock_connect(service, (host or "127.0.0.1", int(port or 1)))
        except OSError:  # nobody listens there (any more)
            self.counts.refused += 1
            link.end()
            return
        self._links.add(link)
        link.run(self._pump(link, client, service, UP), self._pump(link, service, client, DOWN))

    def forget(self, link: _Link) -> None:
        """The connection is over."""
        self._links.discard(link)

    async def _pump(self, link: _Link, source: socket.socket, sink: socket.socket, direction: str) -> None:
        loop = asyncio.get_running_loop()
        messages = MessageReader(self.role, direction, link.begun)
        while data := await _received(source):
            if self._reads and await self._is_lost(direction, set(messages.names(data))):
                link.end()
                return
            if self.swallows:
                self.counts.swallowed += len(data)
                link.torn = True
            elif not link.torn:
                if self.delay_s:
                    self.counts.delayed += 1
                    await asyncio.sleep(self.delay_s)
                with suppress(OSError):  # who has gone hears nothing; who speaks to it is read on, or would be reset
                    await loop.sock_sendall(sink, data)
        while self.swallows:  # noqa: ASYNC110 (the end is swallowed, too)
            await asyncio.sleep(0.05)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    async def _is_lost(self, direction: str, names: set[str]) -> bool:
        """Holds what is watched for until its fault is there; whether it is lost by that."""
        watch = self._watch
        if watch is None or watch.direction != direction or watch.message not in names:
            return False
        self._watch = None
        watch.reached.set()
        await watch.released.wait()
        return watch.lost


async def _received(source: socket.socket) -> bytes:
    """The next bytes; none at the end, also where that is a reset."""
    try:
        return await asyncio.get_running_loop().sock_recv(source, CHUNK)
    except OSError:
        return b""


class _Link:
    """One connection, by its two sockets: the client's and the service's. It ends with the way from the service: one
    that has gone cannot be written to, while its last words are still on that way. So they are sockets, and no streams
    of asyncio's, which end both ways by an error in either."""

    def __init__(self, proxy: FaultProxy, sockets: tuple[socket.socket, socket.socket]) -> None:
        self.torn = False  # bytes are missing
        self.begun: set[tuple[str, int, int]] = set()  # see MessageReader
        self._proxy, self._sockets = proxy, sockets
        self._tasks: tuple[asyncio.Task[None], ...] = ()

    def run(self, up: Coroutine[Any, Any, None], down: Coroutine[Any, Any, None]) -> None:
        """Until the pump from the service ends."""
        self._tasks = asyncio.create_task(up), asyncio.create_task(down)
        self._tasks[0].add_done_callback(_raise_unexpected)
        self._tasks[1].add_done_callback(self._ended)

    def cut(self) -> tuple[asyncio.Task[None], ...]:
        """Ends it with a reset to both sides; returns what is to be waited for."""
        for held in self._sockets:
            if held.fileno() >= 0:
                held.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_NOT)
        self.end()
        return self._tasks

    def end(self) -> None:
        """Closes it."""
        loop = asyncio.get_running_loop()
        for task in self._tasks:
            task.cancel()
        for held in self._sockets:
            if held.fileno() >= 0:
                loop.remove_reader(held)
                loop.remove_writer(held)
            held.close()
        self._proxy.forget(self)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.end()
        _raise_unexpected(task)


def _raise_unexpected(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None and not isinstance(task.exception(), OSError):
        raise task.exception()  # type: ignore[misc]  # the event loop logs it


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADER_BYTES = 9
DATA, PADDED = 0, 8  # of HTTP/2's frames


class MessageReader:
    """Names the messages of one direction of a connection, as its bytes go by. `begun` is what each sequence of each
    call has had once, so that its first commit and its first piece have names of their own."""

    def __init__(self, role: str, direction: str, begun: set[tuple[str, int, int]]) -> None:
        self._role, self._kind, self._begun = role, MESSAGES[role, direction], begun
        self._bytes = bytearray()
        self._preface = len(PREFACE) if direction == UP else 0
        self._streams: defaultdict[int, bytearray] = defaultdict(bytearray)

    def names(self, data: bytes) -> Iterator[str]:
        """Of the messages that end in these bytes."""
        self._bytes += data
        if len(self._bytes) < self._preface:
            return
        del self._bytes[: self._preface]
        self._preface = 0
        for stream, payload in self._payloads():
            held = self._streams[stream]
            held += payload
            while len(held) >= 5 and len(held) >= 5 + (size := int.from_bytes(held[1:5], "big")):
                message = bytes(held[5 : 5 + size])
                del held[: 5 + size]
                yield from self._names_in(message, stream)
            if not held:
                del self._streams[stream]

    def _payloads(self) -> Iterator[tuple[int, bytes]]:
        """Of whole DATA frames, with their streams."""
        while len(self._bytes) >= HEADER_BYTES:
            size = int.from_bytes(self._bytes[:3], "big")
            if len(self._bytes) < HEADER_BYTES + size:
                return
            kind, flags = self._bytes[3], self._bytes[4]
            stream = int.from_bytes(self._bytes[5:9], "big")
            payload = bytes(self._bytes[HEADER_BYTES : HEADER_BYTES + size])
            del self._bytes[: HEADER_BYTES + size]
            if kind == DATA:
                yield stream, payload[1 : len(payload) - payload[0]] if flags & PADDED else payload

    def _names_in(self, message: bytes, stream: int) -> Iterator[str]:
        """None of another call's message on the same connection, as one that asks for a description."""
        try:
            decoded = self._kind.FromString(message)
        except DecodeError:
            return
        if self._role == "gateway":
            if isinstance(decoded, generation_pb2.GenerateRequest):
                if decoded.WhichOneof("input"):
                    yield "request"
            elif decoded.token_ids:
                yield "tokens"
            return
        for each in decoded.messages:
            name = each.WhichOneof("command" if hasattr(each, "open") else "event")
            if name is None:
                continue
            key = name, stream, getattr(each, name).sequence_id
            yield f"first {name}" if name in ("commit", "piece") and key not in self._begun else name
            self._begun.add(key)
