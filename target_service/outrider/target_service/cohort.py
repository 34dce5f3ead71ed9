"""How long a step that could run is held back for sequences whose next windows are on their way.

A step takes nearly the same for many sequences as for one. Who misses it waits until it is over, and then keeps those
that were in it waiting for a step of its own: two cohorts lock in, and a round of each takes the steps of both. In one
step it takes that step and the time from a commit to the next window, the lag. So the ready ones wait for those of the
missing whose usual lag ends within a step, where that gains more than it costs:

* the missing are in this step, not in the next one, and all that wait lose the wait and what the step takes longer,
* and while the ready ones had to wait for the device, every round to come is shorter by what one step takes less than
  two, but by no more than they waited: a device with time to spare gains nothing by it.

Nobody waits for a window that is later than its sequence's windows usually are, and who waits for no draft is not kept
waiting. It looks at clocks and counts alone, never at drafted tokens or what they were drawn from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from outrider.planner.estimates import Lag, StepTime

SLACK = 1.2  # of the 90th percentile of a lag: those that are all alike come a little sooner or later, too
ROUNDS = 2  # to come, that a shorter round counts for
PARTS = 4  # of the missing, after each of which the wait may end


class Member(Protocol):
    """A sequence past its first token, as the hold sees it. Times are seconds on the scheduler's clock."""

    lag: Lag  # from its commits to its next windows
    last_commit: float  # when that was
    last_rows: int  # in the step that it was in last
    ready_since: float  # when its next round could have started
    patience: float  # how long it waits for a draft at most; 0: for none


class CohortHold:
    """Decides once a step for whom it waits."""

    def __init__(self) -> None:
        self._is_decided = False
        self._awaited: Sequence[Member] = ()

    def hold(self, ready: Sequence[Member], missing: Sequence[Member], time: StepTime, now: float) -> float:
        """How many seconds the step of those that are ready still waits for those that are missing; 0: it runs. `time`
        says what a step takes by its rows."""
        if not self._is_decided:
            may_wait = bool(missing) and all(member.patience > 0 for member in ready)
            self._awaited = _worth_waiting(ready, missing, time, now) if may_wait else ()
            self._is_decided = True
        if not self._awaited:
            return 0.0
        still = {id(member) for member in missing}
        return max([0.0, *(_late(member) - now for member in self._awaited if id(member) in still)])

    def stepped(self) -> None:
        """A step ran."""
        self._is_decided, self._awaited = False, ()


def _worth_waiting(ready: Sequence[Member], missing: Sequence[Member], time: StepTime, now: float) -> Sequence[Member]:
    """Those of the missing for whom waiting gains most: all that come before the last of them."""
    num_ready, rows = len(ready), sum(member.last_rows for member in ready)
    step_s = 1e-6 * time.at(rows)
    coming = sorted((one for one in missing if now < _late(one) < now + step_s), key=_expected)
    waited_s = min(now - member.ready_since for member in ready)
    best, most_s = 0, 0.0
    for count in sorted({len(coming) * part // PARTS for part in range(1, PARTS + 1)} - {0}):
        wait_s = max(0.0, _expected(coming[count - 1]) - now)
        further = sum(member.last_rows for member in coming[:count])
        together_s = 1e-6 * time.at(rows + further)
        saved_s = min(step_s + 1e-6 * time.at(further), waited_s + step_s) - together_s
        gain_s = count * (step_s - wait_s) - num_ready * wait_s - (num_ready + count) * (together_s - step_s)
        gain_s += ROUNDS * (num_ready + count) * max(0.0, saved_s)
        if gain_s > most_s:
            best, most_s = count, gain_s
    return coming[:best]


def _expected(member: Member) -> float:
    return member.last_commit + member.lag.usual_s


def _late(member: Member) -> float:
    return member.last_commit + SLACK * member.lag.late_s
