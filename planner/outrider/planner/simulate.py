"""Virtual time: a clock that runs events, links that keep the order of what they carry, and the queue before a device.

Whoever uses it brings what runs in it: the tests' worlds the production engines under faults, the crowds of
`outrider plan` (crowd.py) services that are made of costs alone; both of them the gateway's own core and controller.
All times are seconds."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Protocol

Action = Callable[[], None]
LEAST_WAIT_S = 1e-4  # a shorter wait could vanish in the clock's resolution


class Cancellable(Protocol):
    """Something that happens later."""

    def cancel(self) -> None:
        """It will not happen."""


class Timers(Protocol):
    """A clock that does something later: one of virtual time, or the real one (the bench of a gateway's own cost)."""

    @property
    def now(self) -> float:
        """Seconds."""

    def call_later(self, delay: float, action: Action) -> Cancellable:
        """As an event loop's."""


class Event:
    """Something that happens later, unless it is cancelled."""

    __slots__ = ("action",)

    def __init__(self, action: Action | None) -> None:
        self.action = action

    def cancel(self) -> None:
        """It will not happen."""
        self.action = None


class Clock:
    """Runs events in the order of their times; equal times in the order they were asked for. An event loop's timers,
    as far as the loop between draft and target needs one."""

    def __init__(self) -> None:
        self.now = 0.0
        self._serial = 0
        self._heap: list[tuple[float, int, Event]] = []

    def time(self) -> float:
        """As an event loop's."""
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
            if self._next():
                return True
        return False

    def run(self, until: float) -> None:
        """Everything that is due by a time; then it is that time."""
        while self._heap and self._heap[0][0] <= until:
            self._next()
        self.now = max(self.now, until)

    def _next(self) -> bool:
        when, _, event = heapq.heappop(self._heap)
        if event.action is None:
            return False
        self.now = when
        event.action()
        return True


class OneWayLink:
    """One direction of a link: what is sent arrives after a delay, and never before what was sent earlier."""

    __slots__ = ("_clock", "_delay", "_last")

    def __init__(self, clock: Clock, delay: Callable[[], float]) -> None:
        self._clock, self._delay = clock, delay
        self._last = 0.0

    def send(self, arrive: Action, after: float = 0.0) -> None:
        """Leaves after a while, as at the end of the step that made it."""
        self._last = max(self._last, self._clock.now + after + self._delay())
        self._clock.at(self._last, arrive)


class Device:
    """A service's device thread: in turns it takes every command that has come, then one step. `step` returns how long
    the step takes, and how long nothing is due after it (None: until a command comes). While a step is under way,
    commands wait."""

    def __init__(self, clock: Timers, step: Callable[[], tuple[float, float | None]]) -> None:
        self._clock, self._step = clock, step
        self._inbox: list[Action] = []
        self._turn_due: Cancellable | None = None
        self._busy = False
        self.busy_s = 0.0  # of all steps so far

    def put(self, command: Action) -> None:
        """For the next turn."""
        self._inbox.append(command)
        if not self._busy:
            self._wait(0.0)

    def stall(self, duration: float) -> None:
        """It does nothing for a while."""
        self._wait(duration)
        self._busy = True

    def reset(self) -> None:
        """Forgets all commands, and the step under way."""
        self._inbox.clear()
        if self._turn_due is not None:
            self._turn_due.cancel()
        self._busy = False

    def _wait(self, delay: float) -> None:
        if self._turn_due is not None:
            self._turn_due.cancel()
        self._turn_due = self._clock.call_later(delay, self._turn)

    def _turn(self) -> None:
        self._busy, self._turn_due = False, None
        inbox, self._inbox = self._inbox, []
        for command in inbox:
            command()
        took, wait = self._step()
        self.busy_s += took
        if wait is not None:
            self._wait(max(took + wait, LEAST_WAIT_S))
            self._busy = took > 0
