"""What stands around the handlers of every method of every service: exceptions become gRPC statuses with details, and a
call that may not be made ends before its handler runs."""

from __future__ import annotations

import asyncio
import inspect
from abc import abstractmethod
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import Any, NoReturn
from urllib.parse import unquote

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
HEALTH = "/grpc.health.v1.Health/"  # what its methods begin with
MESSAGE_S, PROBE_S = 30.0, 2.0  # in which a call's one request has to come; that of one for health, which anybody makes


class CallInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpcio ships no types
    """Runs every handler inside `around`, and there reads a unary request: what it raises is seen, who may not call is
    refused before it comes, and it is not waited for without end (gRPC would, and count the call all the while)."""

    @abstractmethod
    def around(self, method: str, context: Any) -> AbstractAsyncContextManager[None]:
        """What a call of "/package.Service/Method" runs in."""

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
        method = str(handler_call_details.method)
        seconds = PROBE_S if method.startswith(HEALTH) else MESSAGE_S
        take = _one_request(read, seconds) if is_unary else _all_requests
        wrapped = self._wrap(getattr(handler, kind), method, take)
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


def _one_request(read: Handler | None, seconds: float) -> _Take:
    async def take(requests: Any, context: Any) -> Any:
        try:
            async with asyncio.timeout(seconds):
                message = await context.read()
        except TimeoutError:
            raise DeadlineExceeded(f"no request came within {seconds:g} s", reason="NO_REQUEST") from None
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
        await self._check(method, context)
        yield


class Room:
    """For `most` calls at once, of which one caller has no more than its share of what others leave, but may have one:
    so there is room for who comes next. `more` is what one is told that wants more than that."""

    def __init__(self, most: int, share: float = 1.0, more: str = "") -> None:
        self._most, self._share, self._more, self._held = most, share, more, 0
        self._of: Counter[str] = Counter()

    @contextmanager
    def place(self, who: str) -> Iterator[None]:
        """Taken while within. ResourceExhausted, with a time to come back, where there is none."""
        self._check(self._of[who])
        self._held += 1
        self._of[who] += 1
        try:
            yield
        finally:
            self._held -= 1
            self._of[who] -= 1
            if not self._of[who]:
                del self._of[who]

    def _check(self, mine: int) -> None:
        share = max(1, int(self._share * (self._most - self._held + mine)))
        if self._held >= self._most:
            problem, reason = "no room for another call", "TOO_MANY_CALLS"
        elif mine >= share:
            allowed = f"allowed: at most {share}, its share of what others leave{self._more}"
            problem, reason = f"the caller has {mine} calls; {allowed}", "CALLER_SHARE"
        else:
            return
        raise ResourceExhausted(problem, reason=reason, retry_after_ms=FULL_RETRY_MS)


class Crowd(CallInterceptor):
    """Gives each call a place, by what its method begins with, of the first such room; tells others when to come back,
    before their requests come. It stands behind the gates: who may not call takes nobody's."""

    def __init__(self, rooms: Mapping[str, Room], caller_of: Callable[[Any], str]) -> None:
        self._rooms, self._caller_of = rooms, caller_of

    @asynccontextmanager
    async def around(self, method: str, context: Any) -> AsyncIterator[None]:
        room = next(room for start, room in self._rooms.items() if method.startswith(start))
        with room.place(self._caller_of(context)):
            yield


def host_of(context: Any) -> str:
    """Of a call's peer, "ipv4:HOST:PORT" and its like, as HTTP has it; a Unix socket's is its name."""
    peer = str(context.peer())
    kind, _, address = peer.partition(":")
    return peer if kind == "unix" else unquote(address.rpartition(":")[0]).strip("[]")


async def _abort(context: Any, error: Exception, method: str) -> NoReturn:
    if isinstance(error, grpc.aio.AbortError):
        raise error  # the handler has set its status already
    status = rpc_status.to_status(to_status(translate(error, method)))
    await context.abort_with_status(status)
    raise error  # abort_with_status always raises; this tells the type checker so
