"""Whether all cores shall compute the passes or one fewer, for a draft that works beside: measured in the first steps,
since it depends on who shares the machine. It changes no bit where the C kernels compute."""

from __future__ import annotations

from collections.abc import Callable

import torch

from outrider.engine.profile import StepProfile
from outrider.planner.estimates import StepTime
from outrider.rpc.settings import usable_cores, usable_threads
from outrider.target_service.outputs import ComputedStep
from outrider.target_service.parts import EnginePart

LEAST_CORES = 3  # of two, one would be half the machine
TURN, TURNS = 8, 3  # steps with one number of threads; of each number
GAIN = 0.97  # one thread fewer takes at most this share of the time


class ThreadSplit(EnginePart):
    """Called on the device thread, whose setting it changes."""

    def __init__(self, cores: int, costs: StepProfile, use: Callable[[int], None] = torch.set_num_threads) -> None:
        self._choices = (cores, cores - 1)
        self._time = StepTime(costs)  # as profiled: what is measured here corrects the choice alone
        self._use = use
        self._steps = 0
        self._shares = {cores: 0.0, cores - 1: 0.0}  # sums of measured over profiled times

    def finished(self, step: ComputedStep) -> None:
        """Counts a step that judged drafted tokens: somebody drafts meanwhile."""
        if any(one.window.ids for one in step.scheduled):
            self.add_step(step.timings.num_rows, step.seconds)

    def add_step(self, num_rows: int, seconds: float) -> None:
        """Counts one of so many rows."""
        if self._steps >= 2 * TURN * TURNS:
            return
        self._shares[self._choices[self._steps // TURN % 2]] += 1e6 * seconds / self._time.at(num_rows)
        self._steps += 1
        if self._steps == 2 * TURN * TURNS:
            every, fewer = self._choices
            self._use(fewer if self._shares[fewer] < GAIN * self._shares[every] else every)
        elif self._steps % TURN == 0:
            self._use(self._choices[self._steps // TURN % 2])


def thread_split(threads: int | None, kernels: str, costs: StepProfile) -> list[EnginePart]:
    """The part that chooses; none where the number of threads is given, would change bits, or leaves no choice."""
    cores = usable_cores()
    free = threads is None and usable_threads() == cores
    return [ThreadSplit(cores, costs)] if free and cores >= LEAST_CORES and costs and kernels.startswith("c-") else []
