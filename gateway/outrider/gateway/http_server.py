"""The HTTP server inside the gateway's own event loop, beside the gRPC server. Nothing of HTTP is imported unless this
module is."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Iterator

import uvicorn

from outrider.gateway.http_app import build_app
from outrider.gateway.http_options import HttpOptions
from outrider.gateway.service import GenerationEngine
from outrider.wire.address import listen_target
from outrider.wire.errors import InvalidArgument, Unavailable, Violation

log = logging.getLogger(__name__)

CONNECTIONS_BESIDE = 1024  # connections that wait for nothing: idle ones, scrapes, probes
KEEP_ALIVE_S = 30
_SETTLE_S = 0.02


class HttpServer:
    """Serves an engine over HTTP. It is bound when it is made: `address` holds the port."""

    def __init__(
        self,
        engine: GenerationEngine,
        listen: str,
        *,
        ready: Callable[[], bool] = lambda: True,
        grace_s: float = 30.0,
        options: HttpOptions | None = None,
    ) -> None:
        self._socket, self.address = _bind(listen)
        config = uvicorn.Config(
            build_app(engine, ready, options),
            loop="none",  # the gateway's runs already
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=max(1, round(grace_s)),
            limit_concurrency=engine.config.max_active + engine.config.max_waiting + CONNECTIONS_BESIDE,
        )
        self._server = _Embedded(config)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Accepts requests."""
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        while not self._server.started and not self._task.done():  # noqa: ASYNC110 (uvicorn has no event for it)
            await asyncio.sleep(_SETTLE_S)
        if self._task.done():
            self._task.result()

    def drain(self) -> None:
        """Takes no new connection; what runs goes on, up to the grace period."""
        self._server.should_exit = True

    async def stop(self, grace_s: float | None = None) -> None:
        """Drains, and returns when the last request has ended, or the grace period (None: as it was made)."""
        self.drain()
        if grace_s is not None:
            self._server.config.timeout_graceful_shutdown = max(1, round(grace_s))
        if self._task is None:
            self._socket.close()
            return
        await asyncio.gather(self._task, return_exceptions=True)


class _Embedded(uvicorn.Server):
    """Signals are the gateway's business."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _bind(listen: str) -> tuple[socket.socket, str]:
    target = listen_target(listen)
    host, _, port = target.rpartition(":")
    if target.startswith("unix:"):
        raise InvalidArgument.of([Violation("http", f'is {listen[:100]!r}; allowed: "host:port" or ":port"')])
    host = host.removeprefix("[").removesuffix("]")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
        bound = socket.create_server(
            address[:2], family=family, backlog=1024, dualstack_ipv6=family == socket.AF_INET6 and host == "::"
        )
    except OSError as error:
        raise Unavailable(f"cannot listen on {listen}: {error}", reason="ADDRESS_IN_USE") from error
    bound.setblocking(False)
    # asyncio turns Nagle's algorithm off only for sockets whose protocol is named, and create_server names none: an
    # answer's body would wait for the acknowledgement of its head, 40 ms. Accepted sockets inherit the option.
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    shown = listen.rpartition(":")[0]
    return bound, f"{shown}:{bound.getsockname()[1]}"
