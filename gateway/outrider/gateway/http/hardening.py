"""What stands before every path and every connection over HTTP: whose requests are answered, how a body may be framed,
how long a request's head may take, and how many connections there may be."""

from __future__ import annotations

import asyncio
import re
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from outrider.gateway.auth import AUTHORIZATION, CALLER, OPEN_PATHS, Tokens
from outrider.gateway.http.errors import error_response, plain_error
from outrider.gateway.http.handshakes import Handshake
from outrider.gateway.http.shares import LOCAL, Shares, last_words
from outrider.gateway.http.slow_clients import StallProtocol
from outrider.rpc.errors import ResourceExhausted, Unauthenticated, quoted
from outrider.rpc.security import ServerTls
from outrider.rpc.settings import is_loopback

HEAD_S = 10.0  # that the head of a request may take, and a handshake
_LOCAL_HOST = re.compile(r"(localhost|[0-9.]+|\[[0-9a-f:.]+\])(:[0-9]*)?")


class Authorized:
    """Before every path but OPEN_PATHS: its task gets the caller of the token, or it is refused."""

    def __init__(self, app: ASGIApp, tokens: Tokens) -> None:
        self._app, self._tokens = app, tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            try:
                CALLER.set(self._tokens.caller_of(Headers(scope=scope).get(AUTHORIZATION, "")))
            except Unauthenticated as error:
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class Framed:
    """Before all else: refuses a request that says in two ways where its body ends, or by a transfer coding in
    HTTP/1.0, which has none, and ends its connection. A proxy may have gone by the other way: what it sent on as a body
    would be another request here, that nobody has looked at (RFC 9112, 6.1)."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope) if scope["type"] == "http" else {}
        if "transfer-encoding" in headers and ("content-length" in headers or scope["http_version"] == "1.0"):
            problem = "stands beside content-length, or in HTTP/1.0; allowed: one of both, in HTTP/1.0 content-length"
            refusal = plain_error(400, f"transfer-encoding: {problem}")
            refusal.headers["connection"] = "close"
            await refusal(scope, receive, send)
            return
        await self._app(scope, receive, send)


class CalledLocal:
    """Before every path: refuses who calls this machine by a name that is not its own. So does a page whose server has
    let its name stand for a loopback address (DNS rebinding): to the browser this would be that page's own server. One
    who names no host is no browser."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = Headers(scope=scope).get("host") if scope["type"] == "http" else None
        if host is not None and not _is_local(host):
            allowed = "localhost, 127.0.0.1, [::1], with any port"
            await plain_error(421, f"host: is {quoted(host)}; allowed: {allowed}")(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _is_local(host: str) -> bool:
    found = _LOCAL_HOST.fullmatch(host.lower())
    return found is not None and is_loopback(f"{found[1]}:0")


def over_tls(tls: ServerTls, protocol: type[asyncio.Protocol], shares: Shares) -> Any:
    """What makes a protocol whose connections shake hands first, in place of uvicorn's own way, which is asyncio's
    TLS."""
    context = tls.http_context()
    return lambda **given: Handshake(lambda: protocol(**given), context, shares, HEAD_S)


def bounded_protocol(tls: ServerTls | None, stall_s: float, connections: Shares) -> type[StallProtocol]:
    """HTTP/1.1 whose connections end where a request's head takes longer than HEAD_S, from the first on; with TLS those
    of clients that may not call end with the handshake. One too many ends at once: those that are there go on."""

    class Bounded(StallProtocol):
        _late: asyncio.TimerHandle | None = None
        _holder: str | None = None  # of one of the connections

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
            super().connection_made(transport)
            if tls is not None and not tls.admits(transport.get_extra_info("ssl_object").getpeercert()):
                transport.abort()
            host = self.client[0] if self.client else LOCAL
            try:
                connections.take(host)
            except ResourceExhausted as error:
                transport.write(last_words(error_response(error)))
                transport.close()
                return
            self._holder = host
            self._late = self.loop.call_later(HEAD_S, transport.close)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:  # the head is there
                self._forget()
            elif self._late is None:
                self._late = self.loop.call_later(HEAD_S, self.transport.close)

        def connection_lost(self, exc: Exception | None) -> None:
            self._forget()
            if self._holder is not None:
                connections.give(self._holder)
            super().connection_lost(exc)

        def _forget(self) -> None:
            if self._late is not None:
                self._late.cancel()
                self._late = None

    Bounded.stall_s = stall_s
    return Bounded
