"""The time of passes by their number of rows, by the tokens that they look back on, and by the experts that their rows
wake, measured before anything is served."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from math import log1p
from typing import NamedTuple

from outrider.engine.batch import BatchEntry
from outrider.engine.kv_cache_manager import BlockPool
from outrider.engine.model_runner import ModelRunner
from outrider.rpc.words.expert_costs import ExpertCosts

log = logging.getLogger(__name__)

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
EXPERT_ROWS = 8  # at most: of a pass that tells what an expert costs
LEAST_ASLEEP = 1e-3  # of all experts: where none is, more rows would wake no more
CONTEXT, LONG_CONTEXT = 128, 2048  # tokens before the rows
STRIDE = 7919  # of ids: a mixture of experts would send rows of one id to the same ones
REPEATS = 3  # the best of them counts
SHAPE_S = 0.25  # a number of rows is not repeated any more once it took so long
BUDGET_S = 3.0  # for all together

StepProfile = tuple[tuple[int, int], ...]  # rows and microseconds, by rising rows


class Profile(NamedTuple):
    """What passes take."""

    steps: StepProfile  # by their rows
    context_us: float  # more for each token that they look back on
    experts: ExpertCosts | None  # more for each expert that they wake


def measure(runner: ModelRunner, pool: BlockPool, max_rows: int, max_model_len: int) -> Profile:
    """All of it."""
    steps = measure_steps(runner, pool, max_rows, max_model_len)
    context_us = measure_context(runner, pool, steps, max_model_len)
    return Profile(steps, context_us, measure_experts(runner, pool, steps))


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
        _give_back(runner, pool, table)
    return tuple(costs)


def measure_context(
    runner: ModelRunner,
    pool: BlockPool,
    costs: StepProfile,
    max_model_len: int,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Microseconds that a pass takes more for every token in the cache that it looks back on: by one row behind a long
    context. 0 where a sequence can't be long enough to tell, where one row takes too long, and where that fails. As
    `measure_steps` else."""
    room = min(LONG_CONTEXT, max_model_len - 1, (pool.num_free - 1) * runner.block_size)
    if room < 2 * CONTEXT or not costs or 1e-6 * costs[0][1] > SHAPE_S:
        return 0.0
    table = pool.allocate(room // runner.block_size + 1)
    try:
        long_us, short_us = (
            1e6 * _best(partial(_pass, runner, context, 1, table), clock) for context in (room, CONTEXT)
        )
    except Exception:
        log.exception("what a context of %d tokens costs could not be measured", room)
        return 0.0
    finally:
        _give_back(runner, pool, table)
    return max(0.0, long_us - short_us) / (room - CONTEXT)


def measure_experts(
    runner: ModelRunner,
    pool: BlockPool,
    costs: StepProfile,
    clock: Callable[[], float] = time.perf_counter,
) -> ExpertCosts | None:
    """What a pass takes more for each expert that its rows wake: rows of different tokens against as many of one token,
    which go to the same ones. None where the model has none, where they cannot be told apart, and where that fails. As
    `measure_steps` else, which it follows."""
    num_rows = max((rows for rows, us in costs if rows <= EXPERT_ROWS and 1e-6 * us <= SHAPE_S), default=1)
    if runner.census is None or num_rows < 2:
        return None
    mixture = runner.census.mixture
    table = pool.allocate(-(-num_rows // runner.block_size))  # nothing before the rows: so many had room already
    try:
        (alike, alike_us), (apart, apart_us) = (
            _woken(runner, partial(_pass, runner, 0, num_rows, table, stride), clock) for stride in (0, STRIDE)
        )
    except Exception:
        log.exception("what an expert costs could not be measured")
        return None
    finally:
        _give_back(runner, pool, table)
    num_layers, share = len(mixture.layers), mixture.num_chosen / mixture.num_experts
    if apart <= alike or share >= 1:
        return None
    asleep = max(1 - apart / (num_layers * mixture.num_experts), LEAST_ASLEEP)
    along = min(1.0, (log1p(asleep - 1) / log1p(-share) - 1) / (num_rows - 1))
    expert_us = max(0.0, apart_us - alike_us) / (apart - alike)
    return ExpertCosts(num_layers, mixture.num_experts, mixture.num_chosen, expert_us, along)


def _woken(runner: ModelRunner, run: Callable[[], None], clock: Callable[[], float]) -> tuple[int, float]:
    """Experts that a pass wakes, and its microseconds."""
    seconds = _best(run, clock)
    return runner.last_woken(), 1e6 * seconds


def _give_back(runner: ModelRunner, pool: BlockPool, table: list[int]) -> None:
    for tensor in (*runner.cache.keys, *runner.cache.values):
        tensor[table] = 0
    pool.release(table)


def _pass(runner: ModelRunner, context: int, num_rows: int, table: list[int], stride: int = STRIDE) -> None:
    ids = [stride * index % runner.model.vocab_size for index in range(num_rows)]
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
