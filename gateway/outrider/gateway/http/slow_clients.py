"""Clients that read nothing of what they are sent, and hosts that have vanished without a word: until they are ended
they hold a connection and bounded buffers, and no more."""

from __future__ import annotations

import asyncio
import socket
from typing import ClassVar

from uvicorn.protocols.http.h11_impl import H11Protocol

from outrider.gateway.admission import MOST_STALLS

# A host that has vanished is noticed in a minute, also where nothing is sent to it.
PROBE_AFTER_S, PROBE_EVERY_S, NUM_PROBES = 30, 10, 3


class StallProtocol(H11Protocol):
    """HTTP/1.1 whose connections end where the client reads nothing for `stall_s`, though more is held back for it, or
    where that takes MOST_STALLS times as long within one answer: else who reads a little now and then would keep what
    its answer holds for ever."""

    stall_s: ClassVar[float] = 60.0
    _stall: asyncio.TimerHandle | None = None
    _stalled_at = _stalled_s = 0.0

    def pause_writing(self) -> None:
        """More is written than the client reads."""
        super().pause_writing()
        self._stalled_at = self.loop.time()
        left_s = min(self.stall_s, MOST_STALLS * self.stall_s - self._stalled_s)
        self._stall = self.loop.call_later(left_s, self.transport.abort)

    def resume_writing(self) -> None:
        """The client has read what was held back for it."""
        super().resume_writing()
        self._read_on()

    def on_response_complete(self) -> None:
        """The next answer begins anew."""
        self._stalled_s = 0.0
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the wait: nobody reads any more."""
        self._read_on()
        super().connection_lost(exc)

    def _read_on(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None
            self._stalled_s += self.loop.time() - self._stalled_at


def probe_peers(listening: socket.socket) -> None:
    """Connections that are accepted there are probed while they are silent."""
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", PROBE_AFTER_S),
        ("TCP_KEEPINTVL", PROBE_EVERY_S),
        ("TCP_KEEPCNT", NUM_PROBES),
    ):
        if hasattr(socket, name):  # not on every system
            listening.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
