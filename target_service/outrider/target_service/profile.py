"""What is measured of passes: their time by the number of rows, before anything is served; and in the first steps,
since it depends on who shares the machine, whether all cores shall compute them or one fewer, for a draft that works
beside. The latter changes no bit where the C kernels compute."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial

import torch

from outrider.engine.batch import BatchEntry
from outrider.engine.kv_cache_manager import BlockPool
from outrider.engine.model_runner import ModelRunner
from outrider.planner.estimates import StepTime
from outrider.rpc.settings import usable_cores, usable_threads

log = logging.getLogger(__name__)

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXT = 128  # tokens before the rows
REPEATS = 3  # the best of them counts
SHAPE_S = 0.25  # a number of rows is not repeated any more once it took so long
BUDGET_S = 3.0  # for all together

StepProfile = tuple[tuple[int, int], ...]  # rows and microseconds, by rising rows


def measure_steps(
    runner: ModelRunner,
    pool: BlockPool,
    max_rows: int,
    max_model_len: int,
    clock: Callable[[], float] = time.perf_counter,
) -> StepProfile:
    """Times forward passes of one sequence in blocks of its own, which are given back as they were. One row is measured
    however long it takes, more only while the budget lasts. Runs on the device thread while nothing is open."""
    room = min(max_model_len, pool.num_free * runner.block_size)
    context = min(CONTEXT, room // 2)
    costs: list[tuple[int, int]] = []
    table = pool.allocate(-(-min(room, context + ROWS[-1]) // runner.block_size))
    try:
        _pass(runner, context, 1, table)  # what is compiled or allocated once is not held against the budget
        started, last = clock(), 0.0
        for num_rows in ROWS:
            # At worst a pass takes twice as long as one of half as many rows, and it is run twice.
            if num_rows > min(max_rows, room - context) or clock() - started + 4 * last > BUDGET_S:
                break
            last = _best(partial(_pass, runner, context, num_rows, table), clock)
            costs.append((num_rows, max(1, round(last * 1e6))))
    except Exception:
        log.exception("steps of more rows than these could not be measured: %s", costs)
    finally:
        for tensor in (*runner.cache.keys, *runner.cache.values):
            tensor[table] = 0
        pool.release(table)
    return tuple(costs)


def _pass(runner: ModelRunner, context: int, num_rows: int, table: list[int]) -> None:
    # Different ids, or a mixture of experts would send all rows to the same ones.
    ids = [7919 * index % runner.model.vocab_size for index in range(num_rows)]
    num_blocks = -(-(context + num_rows) // runner.block_size)
    logits = runner.forward([BatchEntry(ids, context, table[:num_blocks], num_rows)])
    logits[-1, 0].item()  # waits for the device


def _best(run: Callable[[], None], clock: Callable[[], float]) -> float:
    """Seconds of the fastest run after one that warms up."""
    first, best = clock(), float("inf")
    for repeat in range(REPEATS + 1):
        began = clock()
        run()
        if repeat:
            best = min(best, clock() - began)
            if clock() - first > SHAPE_S:
                break
    return best


LEAST_CORES = 3  # of two, one would be half the machine
TURN, TURNS = 8, 3  # steps with one number of threads; of each number
GAIN = 0.97  # one thread fewer takes at most this share of the time


class ThreadSplit:
    """Called on the device thread, whose setting it changes."""

    def __init__(self, cores: int, costs: StepProfile, use: Callable[[int], None] = torch.set_num_threads) -> None:
        self._choices = (cores, cores - 1)
        self._time = StepTime(costs)  # as profiled: what is measured here corrects the choice alone
        self._use = use
        self._steps = 0
        self._shares = {cores: 0.0, cores - 1: 0.0}  # sums of measured over profiled times

    def add_step(self, num_rows: int, seconds: float) -> None:
        """Counts a step that judged drafted tokens: somebody drafts meanwhile."""
        if self._steps >= 2 * TURN * TURNS:
            return
        self._shares[self._choices[self._steps // TURN % 2]] += 1e6 * seconds / self._time.at(num_rows)
        self._steps += 1
        if self._steps == 2 * TURN * TURNS:
            every, fewer = self._choices
            self._use(fewer if self._shares[fewer] < GAIN * self._shares[every] else every)
        elif self._steps % TURN == 0:
            self._use(self._choices[self._steps // TURN % 2])


def thread_split(threads: int | None, kernels: str, costs: StepProfile) -> ThreadSplit | None:
    """None where the number of threads is given, would change bits, or leaves no choice."""
    cores = usable_cores()
    free = threads is None and usable_threads() == cores
    return ThreadSplit(cores, costs) if free and cores >= LEAST_CORES and costs and kernels.startswith("c-") else None
