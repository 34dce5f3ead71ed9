"""The production loop for virtual machines: the gateway's core, driver and controller, and the target's way to choose
what a step verifies and how long it waits, as the crowds of the planner take them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from outrider.gateway.speculation.contest import SharedTrials
from outrider.gateway.speculation.controller import Controller
from outrider.gateway.speculation.core import SpeculationCore
from outrider.gateway.speculation.loop import SpeculationDriver
from outrider.planner.crowd import Door, Driver, Machines, NewDriver, VirtualFleet
from outrider.planner.estimates import Acceptance, StepTime
from outrider.planner.forecast import SharedStats, VerifyCosts
from outrider.planner.policy import Mode, Policy, PolicyLimits
from outrider.planner.simulate import Clock
from outrider.planner.virtual_services import TargetStream
from outrider.rpc.messages import Open
from outrider.target_service.cohort import CohortHold
from outrider.target_service.goodput import Goodput, GoodputRequest

USUAL_WINDOW, MOST_DRAFTED = 4, 8  # as a gateway starts by default


class StepChoices:
    """Which windows a step verifies, as a target chooses."""

    def __init__(self, costs: Sequence[tuple[int, float]]) -> None:
        self._goodput = Goodput([(rows, round(step_us)) for rows, step_us in costs])
        self._delay = CohortHold()

    def cut(self, windows: Sequence[tuple[Acceptance, int]], max_rows: int) -> list[int]:
        """How many of its drafted tokens each sequence verifies. A sequence's first window is whole."""
        if len(windows) < 2:
            return [window for _, window in windows]
        further = [window if acceptance.tested else 0 for acceptance, window in windows]
        requests = [
            GoodputRequest(acceptance, 1 + window - most, window - most, most)
            for (acceptance, window), most in zip(windows, further, strict=True)
        ]
        chosen = self._goodput.choose(requests, max_rows)
        return [request.num_sure + count for request, count in zip(requests, chosen, strict=True)]

    def verified(self, acceptance: Acceptance, num_drafted: int, num_accepted: int) -> None:
        """Learns from a window that was verified."""
        self._goodput.add_verified(acceptance, num_drafted, num_accepted)

    def hold(self, ready: Sequence[TargetStream], missing: Sequence[TargetStream], now: float) -> float:
        """How long a step that could run now still waits for streams due later, in seconds."""
        return self._delay.hold(ready, missing, self._goodput.time, now)

    def stepped(self, num_rows: int, seconds: float, pause_s: float) -> None:
        """Learns from a step that ran, so long after the one before."""
        self._delay.stepped()
        self._goodput.add_step(num_rows, 1e6 * seconds, 1e6 * pause_s)


def new_crowd(machines: Machines) -> VirtualFleet:
    """Virtual machines whose targets choose as real ones do."""
    return VirtualFleet(machines, StepChoices)


def gateway_loop(
    costs: Sequence[tuple[int, float]],
    modes: Iterable[Mode] = Mode,
    num_draft_tokens: int | None = None,
    draft_costs: Sequence[tuple[int, float]] = (),
    known: tuple[SharedStats, SharedTrials] | None = None,
) -> NewDriver:
    """What one gateway's streams share, for a request that names these modes (all of them: `auto`) and, where it says
    so, a number of drafted tokens. `costs` are what the target says of its steps; `known` is what requests of this kind
    have learned, if any did."""
    stats, trials = known or (SharedStats(VerifyCosts(costs), StepTime(draft_costs)), SharedTrials())
    base = Policy(USUAL_WINDOW if num_draft_tokens is None else num_draft_tokens)
    most = MOST_DRAFTED if num_draft_tokens is None else num_draft_tokens
    limits = PolicyLimits(base, most, fixed=num_draft_tokens is not None, modes=tuple(modes))

    def new_driver(drafter: Door, verifier: Door, request: Open, clock: Clock, running: Callable[[], int]) -> Driver:
        controller = Controller(limits, stats, trials, lambda: drafter.round_trip_us, running)
        core = SpeculationCore(request, base, controller=controller)
        # A door is a drafter or a verifier, and the clock has what the driver needs of an event loop.
        draft: Any = drafter
        target: Any = verifier
        loop: Any = clock
        return SpeculationDriver(draft, target, core, loop, None, lambda reason: None)

    return new_driver
