"""The HTTP server inside the gateway's own event loop, beside the gRPC server. Nothing of HTTP is imported unless this
module is.

The HTTP application: which path is answered by what.

GET /v1/models: the one model that is served, and its adapters.

The live page and the events that it shows: a completion with each round's tokens, their origins, and what the
round's time went to."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import socket
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing
from importlib import metadata, resources
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from outrider.gateway.auth import AUTHORIZATION, CALLER, OPEN_PATHS, Tokens
from outrider.gateway.engine import GenerationEngine
from outrider.gateway.http import sse
from outrider.gateway.http.errors import (
    error_body,
    error_response,
    on_bug,
    on_http_exception,
    on_outrider_error,
    plain_error,
)
from outrider.gateway.http.handshakes import Handshake
from outrider.gateway.http.protocol import HttpOptions, options_of, read_chat, read_completion
from outrider.gateway.http.responses import responses_endpoint
from outrider.gateway.http.serving import (
    ChatResponseBuilder,
    CompletionResponseBuilder,
    endpoint,
    generate,
    stats_shape,
)
from outrider.gateway.http.shares import LOCAL, Shares, last_words
from outrider.gateway.http.slow_clients import StallProtocol, probe_peers
from outrider.gateway.http.tokenize import TokenizeEndpoints
from outrider.gateway.metered import MeteredEngine
from outrider.gateway.methods import offered
from outrider.gateway.siblings import Siblings
from outrider.gateway.text.tokenizer import Detokenizer, make_detokenizer
from outrider.planner.policy import Round
from outrider.rpc.channel import listen_target
from outrider.rpc.errors import (
    InvalidArgument,
    OutriderError,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
    Violation,
    quoted,
)
from outrider.rpc.messages import Adapter
from outrider.rpc.metrics import Series
from outrider.rpc.security import ServerTls
from outrider.rpc.settings import is_loopback
from outrider.rpc.words.answer import GenerationDelta
from outrider.rpc.words.request import GenerationRequest
from outrider.rpc.words.sampling_params import SamplingParams


class ModelsEndpoint:
    """What is served here."""

    def __init__(self, engine: GenerationEngine) -> None:
        self._engine = engine
        self._created = int(time.time())

    async def list(self, request: Request) -> Response:
        """The model, and its adapters as models of their own."""
        adapters = self._engine.verifier.info.adapters
        return JSONResponse({"object": "list", "data": [self._card(), *map(self._card, adapters)]})

    async def retrieve(self, request: Request) -> Response:
        """One model."""
        name = self._engine.adapter_called(request.path_params["model"])
        adapters = {adapter.name: adapter for adapter in self._engine.verifier.info.adapters}
        return JSONResponse(self._card(adapters.get(name)))

    def _card(self, adapter: Adapter | None = None) -> dict[str, object]:
        """As vLLM has it. Where an adapter's files lie is nobody's business: its root is its name."""
        engine = self._engine
        target, draft = engine.verifier.info, None if engine.drafter is None else engine.drafter.info
        methods = offered(target, draft)
        own = {} if adapter is None else {"rank": adapter.rank}
        name = engine.model_name if adapter is None else adapter.name
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "outrider",
            "root": name,
            "parent": None if adapter is None else engine.model_name,
            **own,
            "modalities": ["text", *(["image"] if engine.media_types else [])],
            "max_model_len": target.model.max_model_len,
            "speculation": {
                "num_draft_tokens": engine.num_draft_tokens,
                "mode": engine.config.mode,
                "draft": None if draft is None else draft.model.name,
                "methods": list(methods),
                "default_methods": list(methods[:1] if draft is None else draft.defaults),
            },
        }


_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"
_NUMBERS = {"max_tokens": int, "seed": int, "temperature": float, "top_p": float}


async def page(request: Request) -> Response:
    """The one static file."""
    text = resources.files("outrider.gateway.http").joinpath("page/index.html").read_text(encoding="utf-8")
    return HTMLResponse(text, headers={"content-security-policy": _POLICY, "cache-control": "no-cache"})


class LiveEndpoint:
    """GET /live?prompt=...: events `start`, `round` for each verification, then `end` or `failure`."""

    def __init__(self, engine: GenerationEngine) -> None:
        self._engine = engine

    async def stream(self, request: Request) -> Response:
        """Always a stream: an EventSource cannot read the body of a refusal."""
        if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            return plain_error(403, "the live page alone may ask for this")
        events = self._events(dict(request.query_params))
        return sse.EventStream(events, options_of(request).sse_keep_alive_s)

    async def _events(self, query: dict[str, str]) -> AsyncGenerator[str, None]:
        try:
            ask = read_completion(_body(query), None, self._engine)
            view = _View(self._engine, ask.requests[0])
            async with aclosing(generate(self._engine, ask)) as deltas:
                async for delta in deltas:
                    for text in view.events(delta):
                        yield text
        except OutriderError as error:
            yield sse.event("failure", error_body(error)["error"])


class _View:
    """Turns the deltas of one completion into events."""

    def __init__(self, engine: GenerationEngine, request: GenerationRequest) -> None:
        self._engine, self._request = engine, request
        self._detokenizer: Detokenizer | None = None
        self._started = 0.0

    def events(self, delta: GenerationDelta) -> list[str]:
        """What the page learns of one delta."""
        out = []
        if self._detokenizer is None:
            out.append(sse.event("start", self._start(delta)))
        if delta.round is not None:
            out.append(sse.event("round", {"tokens": self._tokens(delta), **self._times(delta.round)}))
        if delta.finish_reason is not None and delta.speculation is not None:
            end = {"finish_reason": delta.finish_reason.name.lower(), **stats_shape(delta.speculation)}
            out.append(sse.event("end", end))
        return out

    def _start(self, delta: GenerationDelta) -> dict[str, Any]:
        engine, speculation = self._engine, self._request.speculation
        sampling = self._request.sampling or SamplingParams()
        self._detokenizer = make_detokenizer(engine.tokenizer, sampling, delta.prompt_token_ids)
        self._started = delta.round.started if delta.round is not None else 0.0
        draft = None if engine.drafter is None else engine.drafter.info
        return {
            "model": self._request.adapter or engine.model_name,
            "draft": None if draft is None or not speculation.enabled else draft.model.name,
            "prompt_tokens": len(delta.prompt_token_ids),
            "constraint": None if sampling.structured_output is None else sampling.structured_output.kind,
        }

    def _tokens(self, delta: GenerationDelta) -> list[dict[str, str]]:
        if self._detokenizer is None:
            return []
        texts = [self._detokenizer.step(token_id) for token_id in delta.token_ids]
        return [
            {"text": text, "origin": origin.name.lower()} for text, origin in zip(texts, delta.origins, strict=True)
        ]

    def _times(self, closed: Round) -> dict[str, Any]:
        commit, timings = closed.commit, closed.commit.timings
        return {
            "index": closed.index,
            "mode": closed.mode,
            "k": closed.num_draft_tokens,
            "drafted": commit.num_drafted,
            "accepted": commit.num_accepted,
            "forced": commit.num_forced,
            "forced_accepted": commit.num_accepted_forced,
            "methods": [share.method for share in closed.drafted_by],
            "start_us": round((closed.started - self._started) * 1e6),
            "end_us": round((closed.ended - self._started) * 1e6),
            "draft_us": closed.draft_us,
            "wire_us": closed.wire_us,
            "queue_us": timings.queue_us,
            "verify_us": timings.verify_us,
            "sample_us": timings.sample_us,
            "mask_us": timings.mask_us,
            "compile_us": timings.compile_us,
        }


def _body(query: dict[str, str]) -> dict[str, Any]:
    """A query's fields as the completions endpoint has them."""
    values: dict[str, Any] = {name: query[name] for name in ("prompt", "model") if name in query}
    values.update({name: _number(kind, query[name]) for name, kind in _NUMBERS.items() if query.get(name)})
    if constraint := query.get("constraint"):
        values["structured_outputs"] = {constraint: constraint == "json_object" or query.get("match", "")}
    speculation: dict[str, Any] = {"enabled": query.get("speculate", "1") != "0"}
    if query.get("k"):
        speculation["num_draft_tokens"] = _number(int, query["k"])
    speculation |= {name: query[name] for name in ("acceptance", "mode", "method") if query.get(name)}
    return {**values, "speculation": speculation}


def _number(kind: type, text: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        return text  # the validator names it


def build_app(
    engine: GenerationEngine,
    ready: Callable[[], bool] = lambda: True,
    options: HttpOptions | None = None,
    siblings: Siblings | None = None,
    tokens: Tokens | None = None,
    local: bool = False,
) -> Starlette:
    """The application; `ready` says what readiness answers. An engine that counts nothing has no /metrics; among
    siblings they are those of all, and where the options say so they are not here. With `tokens` their callers alone
    are served; `local`: those alone who call this machine by a name of its own."""
    options = options or HttpOptions()
    models, texts = ModelsEndpoint(engine), TokenizeEndpoints(engine)

    async def livez(request: Request) -> Response:
        """200 from a process that answers: nothing would be better after a restart."""
        return Response()

    async def readyz(request: Request) -> Response:
        """200 where generation can be asked for."""
        return Response() if ready() else plain_error(503, "not ready: no target, or draining")

    async def version(request: Request) -> Response:
        """The installed version."""
        return JSONResponse({"version": metadata.version("outrider")})

    routes = [
        Route("/v1/completions", endpoint(engine, read_completion, CompletionResponseBuilder), methods=["POST"]),
        Route("/v1/chat/completions", endpoint(engine, read_chat, ChatResponseBuilder), methods=["POST"]),
        Route("/v1/responses", responses_endpoint(engine), methods=["POST"]),
        Route("/tokenize", texts.tokenize, methods=["POST"]),
        Route("/detokenize", texts.detokenize, methods=["POST"]),
        Route("/v1/models", models.list),
        Route("/v1/models/{model:path}", models.retrieve),
        Route("/livez", livez),
        Route("/readyz", readyz),
        Route("/health", readyz),  # vLLM's name
        Route("/version", version),
    ]
    if options.operator_paths:
        routes += [Route("/", page), Route("/live", LiveEndpoint(engine).stream)]
    if options.operator_paths and isinstance(engine, MeteredEngine):
        routes.append(Route("/metrics", _metrics_route(siblings or engine.metrics)))
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


class Authorized:
    """Before every path but OPEN_PATHS: its task gets the caller of the token, or it is refused."""

    def __init__(self, app: ASGIApp, tokens: Tokens) -> None:
        self._app, self._tokens = app, tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
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
        """One request."""
        headers = Headers(scope=scope) if scope["type"] == "http" else {}
        if "transfer-encoding" in headers and ("content-length" in headers or scope["http_version"] == "1.0"):
            problem = "stands beside content-length, or in HTTP/1.0; allowed: one of both, in HTTP/1.0 content-length"
            refusal = plain_error(400, f"transfer-encoding: {problem}")
            refusal.headers["connection"] = "close"
            await refusal(scope, receive, send)
            return
        await self._app(scope, receive, send)


_LOCAL_HOST = re.compile(r"(localhost|[0-9.]+|\[[0-9a-f:.]+\])(:[0-9]*)?")


class CalledLocal:
    """Before every path: refuses who calls this machine by a name that is not its own. So does a page whose server has
    let its name stand for a loopback address (DNS rebinding): to the browser this would be that page's own server. One
    who names no host is no browser."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        host = Headers(scope=scope).get("host") if scope["type"] == "http" else None
        if host is not None and not _is_local(host):
            allowed = "localhost, 127.0.0.1, [::1], with any port"
            await plain_error(421, f"host: is {quoted(host)}; allowed: {allowed}")(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _is_local(host: str) -> bool:
    found = _LOCAL_HOST.fullmatch(host.lower())
    return found is not None and is_loopback(f"{found[1]}:0")


def _metrics_route(series: Series) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        text, content_type = await asyncio.to_thread(series.render, request.headers.get("accept", ""))
        return Response(text, headers={"content-type": content_type})

    return answer


log = logging.getLogger(__name__)

CONNECTIONS_BESIDE = 1024  # connections that wait for nothing: idle ones, scrapes, probes
BODIES_AT_ONCE = 64  # of the largest kind, that may be under way; far more of others
BACKLOG = 1024  # connections that the system holds until they are accepted
ACCEPTED_AT_ONCE = 16  # of these, in one turn of the loop, which others wait for
KEEP_ALIVE_S = 30  # between two requests of a connection
HEAD_S = 10.0
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
        siblings: Siblings | None = None,  # who serve at the same address
        tls: ServerTls | None = None,
        tokens: Tokens | None = None,
    ) -> None:
        self._socket, self.address = _bind(listen, reuse_port=siblings is not None)
        most = engine.config.max_active + engine.config.max_waiting + CONNECTIONS_BESIDE
        config = uvicorn.Config(
            # With TLS the certificate's names are those that a browser calls it by.
            build_app(engine, ready, options, siblings, tokens, is_loopback(listen) and tokens is None and tls is None),
            loop="none",  # the gateway's runs already
            http=_protocol(tls, (options or HttpOptions()).stall_s, Shares("connections", most)),
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
            config.http_protocol_class = _over_tls(tls, config.http_protocol_class, self._handshakes)
        self._server = _Embedded(config)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Accepts requests."""
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
    """Signals are the gateway's business."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _over_tls(tls: ServerTls, protocol: type[asyncio.Protocol], shares: Shares) -> Any:
    """In its place: makes what shakes hands first. uvicorn's own way is asyncio's TLS."""
    context = tls.http_context()
    return lambda **given: Handshake(lambda: protocol(**given), context, shares, HEAD_S)


def _protocol(tls: ServerTls | None, stall_s: float, connections: Shares) -> type[StallProtocol]:
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


def _bind(listen: str, reuse_port: bool) -> tuple[socket.socket, str]:
    target = listen_target(listen)
    host, _, port = target.rpartition(":")
    if target.startswith("unix:"):
        raise InvalidArgument.of([Violation("http", f'is {listen[:100]!r}; allowed: "host:port" or ":port"')])
    host = host.removeprefix("[").removesuffix("]")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
        bound = socket.create_server(
            address[:2],
            family=family,
            backlog=BACKLOG,
            reuse_port=reuse_port,
            dualstack_ipv6=family == socket.AF_INET6 and host == "::",
        )
    except OSError as error:
        raise Unavailable(f"cannot listen on {listen}: {error}", reason="ADDRESS_IN_USE") from error
    bound.setblocking(False)
    # asyncio turns Nagle's algorithm off only for sockets whose protocol is named, and create_server names none: an
    # answer's body would wait for the acknowledgement of its head, 40 ms. Accepted sockets inherit the option.
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    probe_peers(bound)
    shown = listen.rpartition(":")[0]
    return bound, f"{shown}:{bound.getsockname()[1]}"
