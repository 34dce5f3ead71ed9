"""What stands around the handlers of every method of every service: exceptions become gRPC statuses with details, and a
call that may not be made ends before its handler runs."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, NoReturn

import grpc
import grpc.aio
from grpc_status import rpc_status

from outrider.rpc.errors import DeadlineExceeded, InvalidArgument, ResourceExhausted, Violation
from outrider.rpc.status import FULL_RETRY_MS, to_status, translate

Handler = Callable[..., Any]
_Take = Callable[[Any, Any], Awaitable[Any]]  # of gRPC's requests and the context: what a handler is given
HANDLER_FACTORIES = {
    "unary_unary": grpc.unary_unary_rpc_method_handler,
    "unary_stream": grpc.unary_stream_rpc_method_handler,
    "stream_unary": grpc.stream_unary_rpc_method_handler,
    "stream_stream": grpc.stream_stream_rpc_method_handler,
}
MESSAGE_S = 30.0  # in which a call's one request has to come


class CallInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpcio ships no types
    """Runs every handler inside `around`, and there reads a unary request: what it raises is seen, who may not call is
    refused before it comes, and it is not waited for without end (gRPC would, and count the call all the while)."""

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
        requests, _, responses = kind.partition("_")
        is_unary = requests == "unary"  # then gRPC is told of a stream, of which one message is read here
        take = _one_request(read) if is_unary else _all_requests
        wrapped = self._wrap(getattr(handler, kind), str(handler_call_details.method), take)
        return HANDLER_FACTORIES[f"stream_{responses}"](
            wrapped, None if is_unary else read, handler.response_serializer
        )

    def _wrap(self, behavior: Handler, method: str, take: _Take) -> Handler:
        # grpc.aio looks at the function's kind to choose how it is driven, so each kind gets a wrapper of its own.
        if inspect.isasyncgenfunction(behavior):

            async def generate(requests: Any, context: Any) -> AsyncGenerator[Any, None]:
                async with self.around(method, context):
                    async for response in behavior(await take(requests, context), context):
                        yield response

            return generate
        if inspect.iscoroutinefunction(behavior):

            async def call(requests: Any, context: Any) -> Any:
                async with self.around(method, context):
                    return await behavior(await take(requests, context), context)

            return call
        raise TypeError(f"{method} has a handler that cannot be guarded: neither a coroutine nor a generator of one")


def _one_request(read: Handler | None) -> _Take:
    async def take(requests: Any, context: Any) -> Any:
        try:
            async with asyncio.timeout(MESSAGE_S):
                message = await context.read()
        except TimeoutError:
            raise DeadlineExceeded(f"no request came within {MESSAGE_S:g} s", reason="NO_REQUEST") from None
        if message is grpc.aio.EOF:
            raise InvalidArgument.of([Violation("request", "does not come; allowed: one message")])
        return message if read is None else read(message)

    return take


async def _all_requests(requests: Any, context: Any) -> Any:
    return requests  # what one of these raises is raised where it is read


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


class Crowd(CallInterceptor):
    """Lets so many calls run at once, and tells others when to come back, before their requests come. Those of methods
    that begin with `beside` have room of their own. It stands behind the gates: who may not call takes nobody's."""

    def __init__(self, most: int, beside: str, most_beside: int) -> None:
        self._beside = beside
        self._room = {False: most, True: most_beside}  # by whether they are beside

    @asynccontextmanager
    async def around(self, method: str, context: Any) -> AsyncIterator[None]:
        """As the base's."""
        kind = method.startswith(self._beside)
        if not self._room[kind]:
            raise ResourceExhausted("no room for another call", reason="TOO_MANY_CALLS", retry_after_ms=FULL_RETRY_MS)
        self._room[kind] -= 1
        try:
            yield
        finally:
            self._room[kind] += 1


async def _abort(context: Any, error: Exception, method: str) -> NoReturn:
    if isinstance(error, grpc.aio.AbortError):
        raise error  # the handler has set its status already
    status = rpc_status.to_status(to_status(translate(error, method)))
    await context.abort_with_status(status)
    raise error  # abort_with_status always raises; this tells the type checker so
