"""When to hold a step back for windows that are on their way.

A step costs nearly the same for one sequence as for four, and a sequence that misses it waits for all of it. Waiting w
seconds costs each ready sequence w and saves each missing one a step, if its chain comes. So a step is held back for
no longer than step time x missing / (ready + missing): then waiting in vain costs at most what it could have saved.
"""

from __future__ import annotations

from collections.abc import Iterable

from outrider.target.state import TargetSequence

SMOOTHING = 0.25  # weight of the newest step in the step time


class Gathering:
    """Times are seconds on the scheduler's clock. It looks at clocks and counts alone, never at drafted tokens."""

    def __init__(self) -> None:
        self._step_s = 0.0
        self._since: float | None = None  # when the step that is held back could have run

    def hold(self, sequences: Iterable[TargetSequence], now: float) -> float:
        """How long the step that could run now shall still wait; 0: not at all."""
        dues = [due for target in sequences if (due := target.due(now)) is not None]
        missing = sum(due > now for due in dues)
        if self._since is None:
            self._since = now
        limit = self._step_s * missing / len(dues) if dues else 0.0
        return max(0.0, self._since + limit - now)

    def ran(self, seconds: float, chunked: bool) -> None:
        """A step ran; one with a chunk of a prompt says nothing of the others."""
        self._since = None
        if not chunked:
            known = self._step_s or seconds
            self._step_s = known + SMOOTHING * (seconds - known)
