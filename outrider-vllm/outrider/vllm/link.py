"""Between a target service and the vLLM engine that it drives, whose scheduler lives in another process: pieces and
credit one way, what steps committed the other. A Unix socket of this machine, in a folder that only this user may
enter, which the engine opens with a key; it carries the protocol's dataclasses as link_messages.py writes them, some in
a frame behind its length.

No thread stands between: the service reads on its event loop, the scheduler before its steps. What the service says
meanwhile lies in the socket, then in the service's memory: it waits for the engine nowhere. When a step began the
scheduler writes into a page of memory that both see, since a message would wake the service once more a step."""

from __future__ import annotations

import asyncio
import hmac
import logging
import mmap
import os
import secrets
import select
import socket
import struct
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from outrider.rpc.messages import Close, Commit, Credit, DraftTokens
from outrider.target_service.draft_buffer import ChainBuffer
from outrider.vllm import link_messages
from outrider.vllm.link_messages import LinkCommand, LinkEvent
from outrider.vllm.rows import DraftedRow
from outrider.vllm.source import LINK, StepReport

log = logging.getLogger(__name__)

KEY = "OUTRIDER_LINK_KEY"
KEY_BYTES = 32
EXTRA = "outrider"  # key of a request's extra_args
LENGTH = struct.Struct("<I")  # of the messages that follow
CLOCK = struct.Struct("<d")  # seconds of time.monotonic, which is one clock for a machine's processes
READ_BYTES = 1 << 16


def extra_of(request: Any) -> dict[str, Any] | None:
    """What the service says of a request that it added; None of others."""
    params = request.sampling_params
    found: dict[str, Any] | None = None if params is None else (params.extra_args or {}).get(EXTRA)
    return found


def framed(messages: Sequence[LinkCommand | LinkEvent]) -> bytes:
    """Messages as they travel together."""
    body = link_messages.write(messages)
    return LENGTH.pack(len(body)) + body


class Unframing:
    """Makes messages of what a socket gave, wherever it cut."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, read: bytes) -> Iterator[Any]:
        """The messages that are whole by now."""
        self._bytes += read
        while len(self._bytes) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(self._bytes)[0]
            if len(self._bytes) < end:
                return
            messages = link_messages.read(self._bytes[LENGTH.size : end])
            del self._bytes[:end]
            yield from messages


class StepClock:
    """When the step under way began, in a file that both ends map."""

    def __init__(self, link: str, create: bool = False) -> None:
        with Path(f"{link}-clock").open("w+b" if create else "r+b") as file:
            if create:
                file.truncate(CLOCK.size)
            self._page = mmap.mmap(file.fileno(), CLOCK.size)

    @property
    def started(self) -> float:
        """Seconds on the monotonic clock; 0 between steps."""
        (started,) = CLOCK.unpack_from(self._page)
        return float(started)

    @started.setter
    def started(self, seconds: float) -> None:
        CLOCK.pack_into(self._page, 0, seconds)


class LinkedService:
    """The engine's end: a DraftSource. Raises OSError where no service listens."""

    is_reader = True
    longest_wait_s = 0.02  # what vLLM's loop hears of is announced here: a sequence's first credit, and its Close

    def __init__(self, address: str, vllm_config: Any) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(address)
        self._socket.sendall(bytes.fromhex(os.environ[KEY]))
        self._clock = StepClock(address)
        self._readable = select.poll()
        self._readable.register(self._socket, select.POLLIN)
        self._received = Unframing()
        self._has_ended = False
        self._vocab_size = vllm_config.model_config.get_vocab_size()
        self._early: dict[int, list[LinkCommand]] = {}  # of sequences whose request has not come yet

    def output_len(self, request: Any) -> int:
        """Of a continuation."""
        extra = extra_of(request)
        return 0 if extra is None else int(extra["num_output"])

    def opened(self, request: Any) -> DraftedRow | None:
        """A request that the service added says which of its sequences it is."""
        extra = extra_of(request)
        if extra is None:
            return None
        row = DraftedRow(
            request_id=request.request_id,
            sequence_id=extra["sequence_id"],
            tokens=request.all_token_ids,
            prompt_len=request.num_prompt_tokens,
            max_tokens=request.max_tokens,
            weighs=extra["weighs"],
            chains=ChainBuffer(request.all_token_ids, self._vocab_size),
            suspect=extra["suspect"],
        )
        for command in self._early.pop(row.sequence_id, ()):
            self._apply(row, command)
        return row

    def closed(self, row: DraftedRow) -> None:
        """The service knows it, or closed it itself."""

    def take(self, rows: Mapping[int, DraftedRow]) -> bool:
        """Applies what the service sent; whether vLLM's own loop is to see something, too."""
        is_news = False
        for command in self._receive():
            row = rows.get(command.sequence_id)
            if isinstance(command, Close):
                self._early.pop(command.sequence_id, None)
                is_news = True
            elif row is not None:
                self._apply(row, command)
            else:
                self._early.setdefault(command.sequence_id, []).append(command)
                is_news = True
        return is_news

    def wait(self, timeout_s: float) -> None:
        """Until the service sends something."""
        if self._has_ended:
            time.sleep(timeout_s)
        else:
            self._readable.poll(timeout_s * 1000)

    def stepping(self, started: float) -> None:
        """The service sees from this how long a step takes."""
        self._clock.started = started

    def committed(self, report: StepReport) -> None:
        """To the service, at once."""
        self._clock.started = 0.0
        self._send(report)

    def close(self) -> None:
        """The service sees the end of the link."""
        self._socket.close()

    def _apply(self, row: DraftedRow, command: LinkCommand) -> None:
        if isinstance(command, Credit):
            row.grant(command)
        elif isinstance(command, DraftTokens):
            row.add(command)
            if row.chains.has_dropped:  # said at once: the draft then starts a chain that is not refused
                self._send(Commit(row.sequence_id, row.committed, (), dropped=row.chains.take_dropped()))

    def _send(self, event: LinkEvent) -> None:
        if self._has_ended:
            return
        try:
            self._socket.sendall(framed([event]))
        except OSError:
            self._end()

    def _receive(self) -> Iterator[LinkCommand]:
        """What has come by now."""
        while not self._has_ended:
            try:
                read = self._socket.recv(READ_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:
                read = b""
            if not read:
                self._end()
            yield from self._received.feed(read)
            if len(read) < READ_BYTES:
                return

    def _end(self) -> None:
        self._has_ended = True
        log.warning("the link to the target service has ended")


class EngineLink:
    """The service's end; all of it belongs to the event loop. `environment` tells the engine's process where it
    listens."""

    def __init__(self) -> None:
        self.on_event: Callable[[LinkEvent], None] = lambda event: None
        self.on_end: Callable[[], None] = lambda: None
        self._folder = tempfile.TemporaryDirectory(prefix="outrider-")  # only this user may enter it
        self._key = secrets.token_bytes(KEY_BYTES)
        self._address = str(Path(self._folder.name) / "link")
        self._clock = StepClock(self._address, create=True)
        self._server: asyncio.Server | None = None
        self._engine: EngineConnection | None = None

    async def listen(self) -> None:
        """Before the engine's process starts. Raises OSError."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(lambda: EngineConnection(self, self._key), self._address)

    @property
    def environment(self) -> Mapping[str, str]:
        """What the engine's process must find in its environment."""
        return {LINK: self._address, KEY: self._key.hex()}

    @property
    def step_started(self) -> float:
        """When the step under way began, in seconds of time.monotonic; 0 between steps."""
        return self._clock.started

    def linked(self, engine: EngineConnection) -> None:
        """An engine has shown the key."""
        self._engine = engine

    def send(self, commands: Sequence[LinkCommand]) -> None:
        """To the scheduler, before its next step. Raises OSError once the engine is gone."""
        if self._engine is None or self._engine.transport.is_closing():
            raise ConnectionError("the engine is not linked")
        self._engine.transport.write(framed(commands))

    def close(self) -> None:
        """Ends it, untold; the engine goes on plainly. A second call does nothing."""
        self.on_end = lambda: None
        if self._server is not None:
            self._server.close()
        if self._engine is not None:
            self._engine.transport.close()
        self._folder.cleanup()


class EngineConnection(asyncio.Protocol):
    """What comes from an engine: the key, then events."""

    def __init__(self, link: EngineLink, key: bytes) -> None:
        self.transport: asyncio.Transport
        self._link, self._key = link, key
        self._shown = bytearray()
        self._received = Unframing()
        self._is_linked = False

    def connection_made(self, transport: Any) -> None:
        """Somebody is there."""
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        """Hands on what is whole."""
        if not self._is_linked:
            self._shown += data
            if len(self._shown) < len(self._key):
                return
            if not hmac.compare_digest(self._shown[: len(self._key)], self._key):
                self.transport.close()
                return
            self._is_linked, data = True, bytes(self._shown[len(self._key) :])
            self._link.linked(self)
        for event in self._received.feed(data):
            self._link.on_event(event)

    def connection_lost(self, error: Exception | None) -> None:
        """The scheduler's process is gone."""
        if self._is_linked:
            self._link.on_end()
