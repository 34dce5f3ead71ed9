"""The contests of a gateway: for each set of choices one for each order of the number of sequences."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.gateway.contest import Contest
from outrider.gateway.forecast import Forecast
from outrider.gateway.plans import OFF, Limits

MOST_AWAY = 64  # rounds of every sequence: the number of sequences may go up and down


@dataclass(slots=True)
class League:
    """Of requests with the same choices."""

    limits: Limits
    _contests: dict[int, Contest] = field(default_factory=dict)  # by the bits of the number of sequences
    _used: dict[int, int] = field(default_factory=dict)  # the turn when each was asked for last
    _turn: int = 0

    def at(self, forecast: Forecast) -> Contest:
        """The one for the present number of sequences."""
        sequences = forecast.num_running()
        bits = (sequences - 1).bit_length()
        contest = self._contests.get(bits)
        if contest is None:
            contest = self._contests[bits] = self._begin(bits, forecast)
        self._turn += 1
        if self._turn - self._used.get(bits, 0) > MOST_AWAY * sequences:
            contest.restart()
        self._used[bits] = self._turn
        return contest

    def _begin(self, bits: int, forecast: Forecast) -> Contest:
        """It starts from what was measured at the nearest number of sequences, else in turn with the draft: that shows
        what both sides and the way between them take."""
        plans, usual = self.limits.plans, self.limits.base.num_draft_tokens
        known = [number for number, found in self._contests.items() if found.knows]
        if not known:
            waiting = [plan for plan in plans if plan is not OFF and plan.waits]
            wanted = [plan for plan in waiting if plan.num_draft_tokens == usual] or waiting
            return Contest(plans, wanted[0] if wanted else OFF)
        begun = Contest(plans, OFF, self._contests[min(known, key=lambda number: abs(number - bits))])
        begun.leader = min(plans, key=lambda plan: begun.us_per_token(plan, forecast))
        return begun


@dataclass(slots=True)
class Contests:
    """Shared by all requests."""

    _leagues: dict[Limits, League] = field(default_factory=dict)

    def of(self, limits: Limits) -> League:
        """That of requests with these choices."""
        return self._leagues.setdefault(limits, League(limits))
