"""Iterating over a blocking call in a thread of its own, so that a signal never strikes inside of it: Ctrl-C in the
middle of gRPC's blocking code can leave a lock that its channel waits for, for ever, when it is closed."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

MAX_AHEAD = 64  # items that a slow reader leaves unread before the call is held up
MEMORY_POLL_S = 0.1
JOIN_S = 2.0


class _End:
    """The call ended; `error` is what it raised."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error


class Background(Generic[T]):
    """Runs `iterate(on_stop)` in a thread. The function hands what aborts its blocking call to `on_stop`."""

    def __init__(self, iterate: Callable[[Callable[[Callable[[], object]], None]], Iterator[T]]) -> None:
        self._iterate = iterate
        self._items: queue.Queue[T | _End] = queue.Queue(MAX_AHEAD)
        self._stopped = threading.Event()
        self._aborts: list[Callable[[], object]] = []
        self._thread = threading.Thread(target=self._run, name="outrider-client", daemon=True)

    def items(self) -> Generator[T, None, None]:
        """Yields what the call yields, and raises what it raises. Closing the iterator aborts the call."""
        self._thread.start()
        try:
            while not isinstance(item := self._items.get(), _End):
                yield item
            if item.error is not None:
                raise item.error
        finally:
            self._stop()

    def _run(self) -> None:
        error: Exception | None = None
        try:
            for item in self._iterate(self._aborts.append):
                self._put(item)
                if self._stopped.is_set():
                    return
        except Exception as raised:  # the reader raises it
            error = raised
        self._put(_End(error))

    def _put(self, item: T | _End) -> None:
        while not self._stopped.is_set():
            try:
                self._items.put(item, timeout=MEMORY_POLL_S)
                return
            except queue.Full:
                continue

    def _stop(self) -> None:
        self._stopped.set()
        for abort in self._aborts:
            abort()
        self._thread.join(JOIN_S)
