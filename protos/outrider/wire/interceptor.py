"""Turns exceptions of any handler into gRPC statuses with details, once for every method of every service."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn

import grpc
import grpc.aio
from grpc_status import rpc_status

from outrider.wire.errors import DeadlineExceeded, Internal, OutriderError, from_rpc_error, to_status

log = logging.getLogger(__name__)

Handler = Callable[..., Any]
_KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
_FACTORIES = {
    "unary_unary": grpc.unary_unary_rpc_method_handler,
    "unary_stream": grpc.unary_stream_rpc_method_handler,
    "stream_unary": grpc.stream_unary_rpc_method_handler,
    "stream_stream": grpc.stream_stream_rpc_method_handler,
}


class ErrorInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpcio ships no types
    """OutriderError becomes its status; anything unexpected becomes INTERNAL, is logged here and not described to
    the caller (a traceback's text may hold a prompt)."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        """Wraps the handler that serves this call."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        kind = next(kind for kind in _KINDS if getattr(handler, kind) is not None)
        guarded = _guard(getattr(handler, kind), str(handler_call_details.method))
        return _FACTORIES[kind](guarded, handler.request_deserializer, handler.response_serializer)


def _guard(behavior: Handler, method: str) -> Handler:
    # grpc.aio looks at the function's kind to choose how it is driven, so each kind gets a wrapper of its own.
    if inspect.isasyncgenfunction(behavior):

        async def generate(request: Any, context: Any) -> AsyncIterator[Any]:
            try:
                async for response in behavior(request, context):
                    yield response
            except Exception as error:
                await _abort(context, error, method)

        return generate
    if inspect.iscoroutinefunction(behavior):

        async def call(request: Any, context: Any) -> Any:
            try:
                return await behavior(request, context)
            except Exception as error:
                await _abort(context, error, method)

        return call
    return behavior  # a synchronous handler runs in a thread pool, where aio's context cannot be awaited


async def _abort(context: Any, error: Exception, method: str) -> NoReturn:
    if isinstance(error, grpc.aio.AbortError):
        raise error  # the handler has set its status already
    status = rpc_status.to_status(to_status(_translate(error, method)))
    await context.abort_with_status(status)
    raise error  # abort_with_status always raises; this tells the type checker so


def _translate(error: Exception, method: str) -> OutriderError:
    if isinstance(error, OutriderError):
        return error
    if isinstance(error, grpc.aio.AioRpcError):
        return from_rpc_error(error)  # a peer's error, passed on
    if isinstance(error, asyncio.TimeoutError):
        return DeadlineExceeded("the request's time ran out")
    log.error("unexpected error in %s", method, exc_info=error)
    return Internal(f"unexpected {type(error).__name__}; see the server's log")
