"""The HTTP application: which path is answered by what."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib import metadata

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from outrider.gateway.http_chat import ChatEndpoint
from outrider.gateway.http_completions import CompletionsEndpoint
from outrider.gateway.http_errors import on_bug, on_http_exception, on_outrider_error, plain_error
from outrider.gateway.http_live import LiveEndpoint, page
from outrider.gateway.http_models import ModelsEndpoint
from outrider.gateway.http_options import HttpOptions
from outrider.gateway.metrics import GatewayMetrics, MeteredEngine
from outrider.gateway.service import GenerationEngine
from outrider.wire.errors import OutriderError


def build_app(
    engine: GenerationEngine, ready: Callable[[], bool] = lambda: True, options: HttpOptions | None = None
) -> Starlette:
    """The application; `ready` says what readiness answers. An engine that counts nothing has no /metrics."""
    models = ModelsEndpoint(engine)

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
        Route("/", page),
        Route("/live", LiveEndpoint(engine).stream),
        Route("/v1/completions", CompletionsEndpoint(engine).create, methods=["POST"]),
        Route("/v1/chat/completions", ChatEndpoint(engine).create, methods=["POST"]),
        Route("/v1/models", models.list),
        Route("/v1/models/{model:path}", models.retrieve),
        Route("/livez", livez),
        Route("/readyz", readyz),
        Route("/health", readyz),  # vLLM's name
        Route("/version", version),
    ]
    if isinstance(engine, MeteredEngine):
        routes.append(Route("/metrics", _metrics_route(engine.metrics)))
    handlers = {OutriderError: on_outrider_error, HTTPException: on_http_exception, Exception: on_bug}
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.state.options = options or HttpOptions()
    return app


def _metrics_route(metrics: GatewayMetrics) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        text, content_type = metrics.render(request.headers.get("accept", ""))
        return Response(text, headers={"content-type": content_type})

    return answer
