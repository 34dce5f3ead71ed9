"""Connections that have yet to shake hands over TLS, and what ends TLS behind that. They are bounded in number, in all
and of one host, in time and in memory; else whoever opens connections and says nothing would take all descriptors, and
with asyncio's own TLS, which holds a quarter of a MiB for each of them until the collector comes, all memory."""

from __future__ import annotations

import asyncio
from asyncio.sslproto import SSLProtocol
from collections.abc import Callable
from ssl import MemoryBIO, SSLContext
from typing import Any, cast

from outrider.gateway.http.shares import LOCAL, Shares
from outrider.rpc.errors import ResourceExhausted

FIRST_BYTES = 512  # of a ClientHello; what is left of it is read next


class Handshake(asyncio.BufferedProtocol):
    """A new connection. TLS begins with its first bytes, so that a silent one costs next to nothing; behind it is what
    `make_protocol` makes. It ends if no hands are shaken in so many seconds, and at once where it is one too many."""

    def __init__(
        self, make_protocol: Callable[[], asyncio.Protocol], context: SSLContext, shares: Shares, seconds: float
    ) -> None:
        self._make_protocol, self._context = make_protocol, context
        self._shares, self._seconds = shares, seconds
        self._holder: str | None = None  # of one of the shares

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begins to count the connection's time."""
        self._transport = cast(asyncio.Transport, transport)
        host = (transport.get_extra_info("peername") or [LOCAL])[0]
        try:
            self._shares.take(host)
        except ResourceExhausted:
            self._transport.abort()
            return
        self._holder = host
        self._late = asyncio.get_running_loop().call_later(self._seconds, self._transport.abort)

    def get_buffer(self, sizehint: int) -> bytearray:
        """Gives a buffer for the first bytes."""
        self._first = bytearray(FIRST_BYTES)
        return self._first

    def buffer_updated(self, nbytes: int) -> None:
        """Lets TLS take the connection over."""
        tls = _Tls(self, self._make_protocol(), self._context)
        self._transport.set_protocol(tls)
        tls.connection_made(self._transport)
        tls.get_buffer(nbytes)[:nbytes] = self._first[:nbytes]
        tls.buffer_updated(nbytes)

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends a connection that has said nothing."""
        self.over()

    def over(self) -> None:
        """Hands are shaken, or will not be."""
        if self._holder is not None:
            self._late.cancel()
            self._shares.give(self._holder)
            self._holder = None


class _Tls(SSLProtocol):
    """asyncio's, with a smaller buffer, and without it once the connection has ended: a handshake that failed lies in
    a cycle with its error, and a connection in one with its last request, until the collector comes."""

    max_size = 16 << 10  # bytes read at once: a record

    def __init__(self, handshake: Handshake, protocol: asyncio.Protocol, context: SSLContext) -> None:
        no_waiter: Any = None
        super().__init__(asyncio.get_running_loop(), protocol, context, no_waiter, server_side=True)
        self._handshake: Handshake | None = handshake

    def buffer_updated(self, nbytes: int) -> None:
        """Reads what has come, and ends the handshake once TLS stands."""
        super().buffer_updated(nbytes)
        if self._handshake is not None and "ssl_object" in self._extra:
            self._handshake.over()
            self._handshake = None

    def connection_lost(self, exc: BaseException | None) -> None:
        """What is large goes with it."""
        super().connection_lost(exc)
        if self._handshake is not None:
            self._handshake.over()
        if exc is not None:
            exc.__traceback__ = None
        self._extra.clear()
        self._ssl_buffer = bytearray()
        self._ssl_buffer_view = memoryview(self._ssl_buffer)
        self._incoming = self._outgoing = MemoryBIO()
        self._sslobj: Any = None
