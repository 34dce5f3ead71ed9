"""A circuit breaker: a replica that fails again and again is left alone for a while, then tried with one sequence."""

from __future__ import annotations

from dataclasses import dataclass

MAX_FAILURES = 3  # in a row
FIRST_REST_S, MAX_REST_S = 1.0, 30.0


@dataclass(slots=True)
class Breaker:
    """Closed: all may go. Open: nobody, until the rest is over; then one sequence each rest, until one goes well. The
    clock is given."""

    _failures: int = 0
    _rest_s: float = 0.0  # 0: closed
    _next_trial: float = 0.0
    _tried: bool = False  # a trial is under way

    @property
    def open(self) -> bool:
        """Whether it has tripped, and nothing has gone well since."""
        return self._rest_s > 0

    def allows(self, now: float) -> bool:
        """Whether a sequence may start."""
        return not self.open or now >= self._next_trial

    def started(self, now: float) -> None:
        """A sequence starts: while open, it is the trial, and the next has to wait."""
        self._next_trial, self._tried = now + self._rest_s, self.open

    def succeeded(self) -> None:
        """The replica has done what it is there for."""
        self._failures, self._rest_s, self._tried = 0, 0.0, False

    def failed(self, now: float) -> None:
        """A sequence failed by the replica's fault. The rest doubles with each trial that fails; what else was there
        when it broke says nothing new."""
        self._failures += 1
        if self.open and not self._tried:
            return
        if self.open:
            self._rest_s = min(2 * self._rest_s, MAX_REST_S)
        elif self._failures >= MAX_FAILURES:
            self._rest_s = FIRST_REST_S
        self._next_trial, self._tried = now + self._rest_s, False
