"""All cores for a pass, or one fewer for a draft that works beside it: measured in the first steps, since it depends on
who shares the machine. It changes no bit where the C kernels compute."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

import torch

from outrider.target.profile import StepCosts
from outrider.wire.cores import usable_cores, usable_threads

LEAST_CORES = 3  # of two, one would be half the machine
TURN, TURNS = 8, 3  # steps with one number of threads; of each number
GAIN = 0.97  # one thread fewer takes at most this share of the time


class ThreadSplit:
    """Called on the device thread, whose setting it changes."""

    def __init__(self, cores: int, costs: StepCosts, use: Callable[[int], None] = torch.set_num_threads) -> None:
        self._choices = (cores, cores - 1)
        self._costs = costs
        self._use = use
        self._steps = 0
        self._shares = {cores: 0.0, cores - 1: 0.0}  # sums of measured over profiled times

    def ran(self, num_rows: int, seconds: float) -> None:
        """Counts a step that judged drafted tokens: somebody drafts meanwhile."""
        if self._steps >= 2 * TURN * TURNS:
            return
        self._shares[self._choices[self._steps // TURN % 2]] += 1e6 * seconds / self._profiled_us(num_rows)
        self._steps += 1
        if self._steps == 2 * TURN * TURNS:
            every, fewer = self._choices
            self._use(fewer if self._shares[fewer] < GAIN * self._shares[every] else every)
        elif self._steps % TURN == 0:
            self._use(self._choices[self._steps // TURN % 2])

    def _profiled_us(self, num_rows: int) -> float:
        """Of the smallest profiled step that is as large."""
        at = min(bisect_left(self._costs, num_rows, key=lambda cost: cost[0]), len(self._costs) - 1)
        return float(self._costs[at][1])


def thread_split(threads: int | None, kernels: str, costs: StepCosts) -> ThreadSplit | None:
    """None where the number of threads is given, would change bits, or leaves no choice."""
    cores = usable_cores()
    free = threads is None and usable_threads() == cores
    return ThreadSplit(cores, costs) if free and cores >= LEAST_CORES and costs and kernels.startswith("c-") else None
