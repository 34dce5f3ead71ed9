"""Answers that follow the client: server-sent events, and work that ends at once when the client goes away."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from outrider.gateway.http.json_text import dumps, dumps_in_pieces
from outrider.rpc.errors import Cancelled, OutriderError, Unavailable, unexpected

log = logging.getLogger(__name__)

T = TypeVar("T")

DONE = "data: [DONE]\n\n"
KEEP_ALIVE = ": keep-alive\n\n"  # a comment: clients skip it, and no proxy takes the connection for idle


def data(value: dict[str, Any], *, is_long: bool = False) -> str:
    """One event without a name; a long one is written for other threads to run."""
    return f"data: {dumps_in_pieces(value) if is_long else dumps(value)}\n\n"


def event(name: str, value: dict[str, Any], *, is_long: bool = False) -> str:
    """An event with a name, and its data."""
    return f"event: {name}\n{data(value, is_long=is_long)}"


def told(error: BaseException) -> OutriderError:
    """What a stream says that cannot go on: an error that was raised on purpose; that the gateway stops, which cancels
    what is under way; or that there is a bug, which the log tells."""
    if isinstance(error, OutriderError):
        return error
    if isinstance(error, asyncio.CancelledError):
        return Unavailable("the gateway stops; ask again", reason="DRAINING", retry_after_ms=1000)
    log.error("a stream ends by an unexpected error", exc_info=error)
    return unexpected(error)


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The work's result; Cancelled, and the work with it, when the client goes away first."""
    task, gone = asyncio.create_task(work), asyncio.create_task(_wait_gone(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Cancelled("the client went away")
        return task.result()
    finally:
        await end(task, gone)


class EventStream(Response):
    """Server-sent events, and a comment after every `keep_alive_s` seconds without one (0: none). A client that reads
    slowly holds its source up; one that goes away ends it at once."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[str, None], keep_alive_s: float) -> None:
        self._events, self._keep_alive_s = events, keep_alive_s
        self._sending = False
        self._sent_at = 0.0
        self.status_code, self.background = 200, None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends until the source or the client has ended."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        task, gone = asyncio.create_task(self._send_all(send)), asyncio.create_task(_wait_gone(receive))
        alive = asyncio.create_task(self._keep_alive(send))
        try:
            await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
        finally:
            await end(task, gone, alive)
            await self._events.aclose()

    async def _send_all(self, send: Send) -> None:
        async for text in self._events:
            await self._send(send, text)
        await self._send(send, "", more=False)

    async def _keep_alive(self, send: Send) -> None:
        """Beside the source, which needs no task for each event then."""
        loop = asyncio.get_running_loop()
        self._sent_at = loop.time()
        while self._keep_alive_s:
            silent_s = 0.0 if self._sending else loop.time() - self._sent_at
            if silent_s >= self._keep_alive_s:
                await self._send(send, KEEP_ALIVE)
                silent_s = 0.0
            await asyncio.sleep(self._keep_alive_s - silent_s)

    async def _send(self, send: Send, text: str, more: bool = True) -> None:
        self._sending = True
        await send({"type": "http.response.body", "body": text.encode(), "more_body": more})
        self._sending, self._sent_at = not more, asyncio.get_running_loop().time()  # nothing may follow the last


async def _wait_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def end(*tasks: asyncio.Future[Any]) -> None:
    """Cancels them, and waits until they are over."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
