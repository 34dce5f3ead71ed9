"""A thread with an event loop of its own, so that a blocking call works anywhere, a running loop (a notebook)
included."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")

JOIN_S = 30.0


class LoopThread:
    """Runs coroutines for threads that have no loop."""

    def __init__(self, name: str = "llm-loop") -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Starts a coroutine."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine to its end; Ctrl-C cancels it."""
        future = self.submit(coroutine)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def call(self, function: Callable[[], T]) -> T:
        """Runs a function on the loop."""

        async def once() -> T:
            return function()

        return self.run(once())

    def iterate(self, start: Callable[[Callable[[T], None]], Coroutine[Any, Any, None]]) -> Generator[T, None, None]:
        """Runs `start(put)` and yields what it puts, as it comes; raises what it raises. Whoever stops reading (Ctrl-C)
        closes this: it ends, and has ended then."""
        items: queue.SimpleQueue[tuple[T] | None] = queue.SimpleQueue()
        tasks: list[asyncio.Task[None]] = []
        ended = threading.Event()

        def end(_: asyncio.Task[None]) -> None:
            ended.set()
            items.put(None)

        def begin() -> None:
            tasks.append(self.loop.create_task(start(lambda item: items.put((item,)))))
            tasks[0].add_done_callback(end)

        self.loop.call_soon_threadsafe(begin)
        try:
            while (item := items.get()) is not None:
                yield item[0]
            if tasks[0].cancelled():
                raise RuntimeError("closed while it ran")
            tasks[0].result()
        finally:
            if not ended.is_set():
                self.loop.call_soon_threadsafe(lambda: tasks[0].cancel())
                ended.wait(JOIN_S)

    def close(self) -> None:
        """Cancels what runs and ends the thread. A second call does nothing."""
        if self.loop.is_closed():
            return
        with suppress(RuntimeError):  # another call was first
            self.loop.call_soon_threadsafe(self.loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join(JOIN_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
            tasks = asyncio.all_tasks(self.loop)
            for task in tasks:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.run_until_complete(self.loop.shutdown_default_executor())
        finally:
            self.loop.close()
