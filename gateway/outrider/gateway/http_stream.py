"""Answers that follow the client: server-sent events, and work that ends at once when the client goes away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from outrider.wire.errors import Cancelled

T = TypeVar("T")

DONE = "data: [DONE]\n\n"


def data(value: dict[str, Any]) -> str:
    """One event without a name."""
    return f"data: {dumps(value)}\n\n"


def event(name: str, value: dict[str, Any]) -> str:
    """One event with a name."""
    return f"event: {name}\ndata: {dumps(value)}\n\n"


def dumps(value: dict[str, Any]) -> str:
    """JSON on one line."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The work's result; Cancelled, and the work with it, when the client goes away first."""
    task, gone = asyncio.create_task(work), asyncio.create_task(_wait_gone(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Cancelled("the client went away")
        return task.result()
    finally:
        await _end(task, gone)


class EventStream(Response):
    """Server-sent events. A client that reads slowly holds its source up; one that goes away ends it at once."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[str, None]) -> None:
        self._events = events
        self.status_code, self.background = 200, None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends until the source or the client has ended."""
        task, gone = asyncio.create_task(self._send_all(send)), asyncio.create_task(_wait_gone(receive))
        try:
            await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
        finally:
            await _end(task, gone)
            await self._events.aclose()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for text in self._events:
            await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _wait_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
