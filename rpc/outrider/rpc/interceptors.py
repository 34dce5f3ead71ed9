"""What stands around the handlers of every method of every service: exceptions become gRPC statuses with details, and a
call that may not be made ends before its handler runs."""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, NoReturn

import grpc
import grpc.aio
from grpc_status import rpc_status

from outrider.rpc.status import to_status, translate

Handler = Callable[..., Any]
HANDLER_FACTORIES = {
    "unary_unary": grpc.unary_unary_rpc_method_handler,
    "unary_stream": grpc.unary_stream_rpc_method_handler,
    "stream_unary": grpc.stream_unary_rpc_method_handler,
    "stream_stream": grpc.stream_stream_rpc_method_handler,
}


class CallInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpcio ships no types
    """Runs every handler inside `around`, and there reads a unary request: what it raises is seen."""

    def around(self, method: str, context: Any) -> AbstractAsyncContextManager[None]:
        """What a call of "/package.Service/Method" runs in."""
        raise NotImplementedError

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        """Wraps the handler that serves this call."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        kind = next(kind for kind in HANDLER_FACTORIES if getattr(handler, kind) is not None)
        read = handler.request_deserializer
        read_here = (
            read if read is not None and kind.startswith("unary") else None
        )  # a stream's raises where it is read
        wrapped = self._wrap(
            getattr(handler, kind), str(handler_call_details.method), read_here or (lambda given: given)
        )
        return HANDLER_FACTORIES[kind](wrapped, None if read_here else read, handler.response_serializer)

    def _wrap(self, behavior: Handler, method: str, read: Handler) -> Handler:
        # grpc.aio looks at the function's kind to choose how it is driven, so each kind gets a wrapper of its own.
        if inspect.isasyncgenfunction(behavior):

            async def generate(request: Any, context: Any) -> AsyncGenerator[Any, None]:
                async with self.around(method, context):
                    async for response in behavior(read(request), context):
                        yield response

            return generate
        if inspect.iscoroutinefunction(behavior):

            async def call(request: Any, context: Any) -> Any:
                async with self.around(method, context):
                    return await behavior(read(request), context)

            return call
        raise TypeError(f"{method} has a handler that cannot be guarded: neither a coroutine nor a generator of one")


class ErrorInterceptor(CallInterceptor):
    """OutriderError becomes its status; anything unexpected becomes INTERNAL, is logged here and not described to
    the caller (a traceback's text may hold a prompt)."""

    @asynccontextmanager
    async def around(self, method: str, context: Any) -> AsyncIterator[None]:
        """As the base's."""
        try:
            yield
        except Exception as error:
            await _abort(context, error, method)


Check = Callable[[str, Any], Awaitable[None]]
"""Of a call's method ("/package.Service/Method") and its context. Raises OutriderError for one that may not be made."""


class Gate(CallInterceptor):
    """Asks a check before each call's handler runs. It stands behind the ErrorInterceptor, which tells the refusal."""

    def __init__(self, check: Check) -> None:
        self._check = check

    @asynccontextmanager
    async def around(self, method: str, context: Any) -> AsyncIterator[None]:
        """As the base's."""
        await self._check(method, context)
        yield


async def _abort(context: Any, error: Exception, method: str) -> NoReturn:
    if isinstance(error, grpc.aio.AbortError):
        raise error  # the handler has set its status already
    status = rpc_status.to_status(to_status(translate(error, method)))
    await context.abort_with_status(status)
    raise error  # abort_with_status always raises; this tells the type checker so
