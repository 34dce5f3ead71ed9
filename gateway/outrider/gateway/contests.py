"""The contests of a gateway: one for each set of choices and each order of the number of sequences."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.gateway.contest import Contest
from outrider.gateway.forecast import Forecast
from outrider.gateway.plans import OFF, Limits, Plan

Key = tuple[tuple[Plan, ...], bool]


@dataclass(slots=True)
class Contests:
    """Shared by all requests."""

    _found: dict[tuple[Key, int], Contest] = field(default_factory=dict)
    _crowds: dict[Key, int] = field(default_factory=dict)  # at present

    def at(self, limits: Limits, forecast: Forecast) -> Contest:
        """What holds for requests with these choices at the present number of sequences."""
        key, crowd = (limits.plans, limits.weighs), (forecast.num_running() - 1).bit_length()
        contest = self._found.get((key, crowd))
        if contest is None:
            contest = self._found[key, crowd] = self._begin(key, crowd, limits, forecast)
        if self._crowds.get(key) != crowd:
            self._crowds[key] = crowd
            contest.restart()
        return contest

    def _begin(self, key: Key, crowd: int, limits: Limits, forecast: Forecast) -> Contest:
        """It starts from what was measured at the nearest number of sequences, else in turn with the draft: that shows
        what both sides and the way between them take."""
        known = {number: found for (other, number), found in self._found.items() if other == key and found.knows}
        prior = known[min(known, key=lambda number: abs(number - crowd))] if known else None
        if prior is None:
            usual = limits.base.num_draft_tokens
            waiting = [plan for plan in limits.plans if plan is not OFF and plan.waits]
            wanted = [plan for plan in waiting if plan.num_draft_tokens == usual] or waiting
            return Contest(limits.plans, wanted[0] if wanted else OFF)
        begun = Contest(limits.plans, OFF, prior)
        begun.leader = min(limits.plans, key=lambda plan: begun.us_per_token(plan, forecast))
        return begun
