"""TLS handshakes under way: connections that the server's protocol does not know of yet. They are bounded in number, in
all and of one host, and in time; else whoever opens connections and says nothing would take all descriptors."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from outrider.gateway.http.shares import Shares
from outrider.rpc.errors import ResourceExhausted


class Handshakes(socket.socket):
    """A listening socket, in the place of the one that it is made of: a connection has so many seconds for its
    handshake, and one that is more than a share is closed unheard."""

    def __init__(self, listening: socket.socket, shares: Shares, seconds: float) -> None:
        super().__init__(listening.family, listening.type, listening.proto, fileno=listening.detach())
        self.setblocking(False)
        self._shares, self._seconds = shares, seconds
        self._under_way: dict[int, tuple[str, asyncio.TimerHandle]] = {}  # by descriptor: whose, and its end

    def accept(self) -> tuple[socket.socket, Any]:
        """The next connection. ConnectionAbortedError for one too many, as where it has gone before."""
        accepted, address = super().accept()
        connection = _Connection(accepted.family, accepted.type, accepted.proto, fileno=accepted.detach())
        who = address[0]
        try:
            self._shares.take(who)
        except ResourceExhausted as error:
            connection.close()
            raise ConnectionAbortedError(error.message) from None
        timer = asyncio.get_running_loop().call_later(self._seconds, connection.end)
        self._under_way[connection.fileno()] = who, timer
        connection.on_close = self.over
        return connection, address

    def over(self, descriptor: int) -> None:
        """That connection's handshake has ended, well or not."""
        if descriptor in self._under_way:
            who, timer = self._under_way.pop(descriptor)
            timer.cancel()
            self._shares.give(who)


class _Connection(socket.socket):
    """One that tells of its end."""

    on_close: Callable[[int], None] | None = None

    def end(self) -> None:
        """Nothing more is heard or said; its transport sees that, and closes it."""
        with suppress(OSError):
            self.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Once."""
        if self.on_close is not None:
            self.on_close(self.fileno())
            self.on_close = None
        super().close()
