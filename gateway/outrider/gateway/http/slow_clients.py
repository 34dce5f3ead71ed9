"""Clients that read nothing of what they are sent, and hosts that have vanished without a word: until they are ended
they hold a connection and bounded buffers, and no more."""

from __future__ import annotations

import asyncio
import socket
from typing import ClassVar

from uvicorn.protocols.http.h11_impl import H11Protocol

# A host that has vanished is noticed in a minute, also where nothing is sent to it.
PROBE_AFTER_S, PROBE_EVERY_S, NUM_PROBES = 30, 10, 3


class StallProtocol(H11Protocol):
    """HTTP/1.1 whose connections end where the client reads nothing for `stall_s`, though more is held back for it."""

    stall_s: ClassVar[float] = 60.0
    _stall: asyncio.TimerHandle | None = None

    def pause_writing(self) -> None:
        """More is written than the client reads."""
        super().pause_writing()
        self._stall = self.loop.call_later(self.stall_s, self.transport.abort)

    def resume_writing(self) -> None:
        """It has read."""
        super().resume_writing()
        self._read_on()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nobody reads any more."""
        self._read_on()
        super().connection_lost(exc)

    def _read_on(self) -> None:
        if self._stall is not None:
            self._stall.cancel()


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
