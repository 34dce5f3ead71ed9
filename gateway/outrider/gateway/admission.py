"""How many requests run at once and how many wait: a bound with a queue, the lowest priority number first."""

from __future__ import annotations

import asyncio
import heapq

from outrider.wire.errors import ResourceExhausted

RETRY_AFTER_MS = 1000


class Admission:
    """Lets `max_active` requests run and `max_waiting` wait; refuses more at once."""

    def __init__(self, max_active: int, max_waiting: int) -> None:
        self._max_active, self._max_waiting = max_active, max_waiting
        self._num_active = 0
        self._num_arrived = 0
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []

    @property
    def num_active(self) -> int:
        """Requests that run."""
        return self._num_active

    @property
    def num_waiting(self) -> int:
        """Requests that wait."""
        return sum(not future.done() for _, _, future in self._waiting)

    def require_room(self) -> None:
        """ResourceExhausted with a time to come back if too many wait."""
        if self._num_active >= self._max_active and self.num_waiting >= self._max_waiting:
            raise ResourceExhausted(
                f"{self._num_active} requests run and {self._max_waiting} wait; allowed: no more",
                reason="TOO_MANY_REQUESTS",
                retry_after_ms=RETRY_AFTER_MS,
            )

    async def enter(self, priority: int = 0) -> None:
        """Waits for a place; who got one gives it back by `leave`."""
        self.require_room()
        if self._num_active < self._max_active:
            self._num_active += 1
            return
        self._num_arrived += 1
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (priority, self._num_arrived, future))
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.leave()  # the place was handed over in the same turn
            elif len(self._waiting) > 2 * self.num_waiting:
                self._waiting = [entry for entry in self._waiting if not entry[2].done()]
                heapq.heapify(self._waiting)
            raise

    def leave(self) -> None:
        """Hands the place to who waits, or gives it back."""
        while self._waiting:
            _, _, future = heapq.heappop(self._waiting)
            if not future.done():
                future.set_result(None)
                return
        self._num_active -= 1
