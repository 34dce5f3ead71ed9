"""Virtual time: a heap of events. It also plays the event loop that the gateway's driver asks for timers."""

from __future__ import annotations

import heapq
from collections.abc import Callable

Action = Callable[[], None]


class Event:
    """Something that happens later, unless it is cancelled."""

    __slots__ = ("action",)

    def __init__(self, action: Action | None) -> None:
        self.action = action

    def cancel(self) -> None:
        """It will not happen."""
        self.action = None


class Clock:
    """Runs events in the order of their times; equal times in the order they were asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self._serial = 0
        self._heap: list[tuple[float, int, Event]] = []

    def time(self) -> float:
        """As an event loop's."""
        return self.now

    def monotonic(self) -> float:
        """As the module `time`'s: the driver's clock is this one while a world runs."""
        return self.now

    def call_later(self, delay: float, action: Action) -> Event:
        """As an event loop's."""
        return self.at(self.now + delay, action)

    def at(self, when: float, action: Action) -> Event:
        """Does something at a time; at once, after what is due already, if that is past."""
        event = Event(action)
        self._serial += 1
        heapq.heappush(self._heap, (max(when, self.now), self._serial, event))
        return event

    def step(self) -> bool:
        """Runs the next event; False if there is none."""
        while self._heap:
            when, _, event = heapq.heappop(self._heap)
            if event.action is not None:
                self.now = when
                event.action()
                return True
        return False
