"""From the device thread to the event loop: what one step says to one stream leaves in one frame."""

from __future__ import annotations

import asyncio
import logging
from threading import Lock
from typing import Any

from outrider.wire.errors import OutriderError, to_failure
from outrider.wire.stream import FrameStream

log = logging.getLogger(__name__)


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
        self._loop.call_soon_threadsafe(self._send)

    def _send(self) -> None:
        with self._lock:
            pending, self._pending = self._pending, {}
            self._scheduled = False
        for stream, messages in pending.items():
            for message in messages:  # all that one turn sends shares frames
                try:
                    stream.send(message)
                except OutriderError as error:  # no frame can hold it: the others still leave
                    log.error("a message of sequence %d cannot be sent: %s", message.sequence_id, error)
                    stream.send(to_failure(message.sequence_id, error))
