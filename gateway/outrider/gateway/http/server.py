"""The HTTP server inside the gateway's own event loop, beside the gRPC server: its paths, its start and its end.
Nothing of HTTP is imported unless this module is."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Iterator
from importlib import metadata

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from outrider.gateway.auth import Tokens
from outrider.gateway.http.errors import on_bug, on_http_exception, on_outrider_error, plain_error
from outrider.gateway.http.hardening import Authorized, CalledLocal, Framed, bounded_protocol, over_tls
from outrider.gateway.http.live import LiveEndpoint, page
from outrider.gateway.http.models import ModelsEndpoint
from outrider.gateway.http.protocol import HttpOptions, read_chat, read_completion
from outrider.gateway.http.responses import responses_endpoint
from outrider.gateway.http.serving import ChatResponseBuilder, CompletionResponseBuilder, endpoint
from outrider.gateway.http.shares import Shares
from outrider.gateway.http.slow_clients import probe_peers
from outrider.gateway.http.tokenize import TokenizeEndpoints
from outrider.gateway.models import Models
from outrider.rpc.errors import InvalidArgument, OutriderError, Violation
from outrider.rpc.metrics import Series
from outrider.rpc.security import ServerTls
from outrider.rpc.server import bind
from outrider.rpc.settings import is_loopback

CONNECTIONS_BESIDE = 1024  # connections that wait for nothing: idle ones, scrapes, probes
BODIES_AT_ONCE = 64  # of the largest kind, that may be under way; far more of others
BACKLOG = 1024  # connections that the system holds until they are accepted
ACCEPTED_AT_ONCE = 16  # of these, in one turn of the loop, which others wait for
KEEP_ALIVE_S = 30  # between two requests of a connection
_SETTLE_S = 0.02


def build_app(
    models: Models,
    ready: Callable[[], bool] = lambda: True,
    options: HttpOptions | None = None,
    series: Series | None = None,
    tokens: Tokens | None = None,
    local: bool = False,
) -> Starlette:
    """The application; `ready` says what readiness answers, and `series` what /metrics does, unless the options leave
    the operator's paths out. With `tokens` their callers alone are served; `local`: those alone who call this machine
    by a name of its own."""
    options = options or HttpOptions()
    routes = [*_api_routes(models), *_probe_routes(ready)]
    if options.operator_paths:
        routes += [Route("/", page), Route("/live", LiveEndpoint(models).stream)]
    if options.operator_paths and series is not None:
        routes.append(Route("/metrics", _metrics_route(series)))
    handlers = {OutriderError: on_outrider_error, HTTPException: on_http_exception, Exception: on_bug}
    app = Starlette(routes=routes, exception_handlers=handlers)
    if tokens is not None:
        app.add_middleware(Authorized, tokens=tokens)
    if options.allowed_origins:  # before tokens: a browser asks whether it may ask, and shows none
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.allowed_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["retry-after", "retry-after-ms"],
        )
    if local:
        app.add_middleware(CalledLocal)
    app.add_middleware(Framed)
    app.state.options = options
    app.state.bodies = Shares("bytes of bodies under way", BODIES_AT_ONCE * options.max_body_bytes)
    return app


def _api_routes(models: Models) -> list[Route]:
    """What clients ask for."""
    cards, texts = ModelsEndpoint(models), TokenizeEndpoints(models)
    return [
        Route("/v1/completions", endpoint(models, read_completion, CompletionResponseBuilder), methods=["POST"]),
        Route("/v1/chat/completions", endpoint(models, read_chat, ChatResponseBuilder), methods=["POST"]),
        Route("/v1/responses", responses_endpoint(models), methods=["POST"]),
        Route("/tokenize", texts.tokenize, methods=["POST"]),
        Route("/detokenize", texts.detokenize, methods=["POST"]),
        Route("/v1/models", cards.list),
        Route("/v1/models/{model:path}", cards.retrieve),
    ]


def _probe_routes(ready: Callable[[], bool]) -> list[Route]:
    """What whoever runs the process asks for."""

    async def livez(request: Request) -> Response:
        """200 from a process that answers: nothing would be better after a restart."""
        return Response()

    async def readyz(request: Request) -> Response:
        """200 where generation can be asked for."""
        return Response() if ready() else plain_error(503, "not ready: no target, or draining")

    async def version(request: Request) -> Response:
        return JSONResponse({"version": metadata.version("outrider")})

    health = Route("/health", readyz)  # vLLM's name
    return [Route("/livez", livez), Route("/readyz", readyz), health, Route("/version", version)]


def _metrics_route(series: Series) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        text, content_type = await asyncio.to_thread(series.render, request.headers.get("accept", ""))
        return Response(text, headers={"content-type": content_type})

    return answer


class HttpServer:
    """Serves an engine, or several models', over HTTP. It is bound when it is made: `address` holds the port."""

    def __init__(
        self,
        models: Models,
        listen: str,
        *,
        ready: Callable[[], bool] = lambda: True,
        grace_s: float = 30.0,
        options: HttpOptions | None = None,
        series: Series | None = None,  # that /metrics shows
        shares_port: bool = False,  # with other processes, which serve at the same address
        tls: ServerTls | None = None,
        tokens: Tokens | None = None,
    ) -> None:
        self._socket, self.address = _bind(listen, reuse_port=shares_port)
        most = sum(one.config.max_active + one.config.max_waiting for one in models.engines) + CONNECTIONS_BESIDE
        # With TLS the certificate's names are those that a browser calls it by.
        local = is_loopback(listen) and tokens is None and tls is None
        config = uvicorn.Config(
            build_app(models, ready, options, series, tokens, local),
            loop="none",  # the gateway's runs already
            http=bounded_protocol(tls, (options or HttpOptions()).stall_s, Shares("connections", most)),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=ACCEPTED_AT_ONCE,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=max(1, round(grace_s)),
        )
        config.load()
        self._handshakes = Shares("handshakes", most)
        if tls is not None:
            config.http_protocol_class = over_tls(tls, config.http_protocol_class, self._handshakes)
        self._server = _Embedded(config)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Accepts requests from now on."""
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        while not self._server.started and not self._task.done():  # noqa: ASYNC110 (uvicorn has no event for it)
            await asyncio.sleep(_SETTLE_S)
        if self._task.done():
            self._task.result()
        self._socket.listen(BACKLOG)  # uvicorn has told the system its own

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
    """uvicorn's server without its signal handlers, which are the gateway's business."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _bind(listen: str, reuse_port: bool) -> tuple[socket.socket, str]:
    if listen.startswith("unix:"):
        raise InvalidArgument.of([Violation("http", f'is {listen[:100]!r}; allowed: "host:port" or ":port"')])
    bound, address = bind(listen, BACKLOG, reuse_port)
    bound.setblocking(False)
    # asyncio turns Nagle's algorithm off only for sockets whose protocol is named, and ours names none: an answer's
    # body would wait for the acknowledgement of its head, 40 ms. Accepted sockets inherit the option.
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    probe_peers(bound)
    return bound, address
