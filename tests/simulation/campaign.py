"""Many worlds, on as many processes as wanted, and the law of what the law worlds gave."""

from __future__ import annotations

import logging
import multiprocessing
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from scipy.stats import chi2
from simulation.checks import Violation
from simulation.settings import LAW_LAWS, LAW_LEN, LAW_PROMPT, Mode, law_table, setting_of
from simulation.tables import Table
from simulation.world import Result, World

LEAST_EXPECTED = 5.0  # cells of fewer expected outputs are merged
MODES = tuple(Mode)

Job = tuple[Mode, int]  # and its seed


@contextmanager
def quiet() -> Iterator[None]:
    """Injected failures are logged by the services; here they are no news."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def run_world(mode: Mode, seed: int) -> Result:
    """One world. Raises Violation."""
    with quiet():
        return World(setting_of(mode, seed), seed).run()


def run_many(jobs: Iterator[Job], num_rounds: int, num_processes: int = 1) -> dict[Mode, Result]:
    """Worlds until they have made that many rounds together. Raises the first Violation."""
    totals = {mode: Result() for mode in MODES}
    done = 0
    with _mapped(jobs, num_processes) as results:
        for mode, result in results:
            if isinstance(result, str):
                raise Violation(result)
            totals[mode].add(result)
            done += result.num_rounds
            if done >= num_rounds:
                break
    return totals


def all_jobs(first_seed: int, modes: Sequence[Mode] = MODES) -> Iterator[Job]:
    """Every mode with one seed after another."""
    seed = first_seed
    while True:
        yield from ((mode, seed) for mode in modes)
        seed += 1


def law_p_values(outputs: Sequence[tuple[int, ...]]) -> list[float]:
    """Chi-square of rejection outputs against the exact law: of the first three tokens, of the last three, which were
    drafted more often, and of every token given those before it."""
    table = law_table()
    law = dict(table.law(LAW_PROMPT, LAW_LEN))
    p_values = [_joint(outputs, law, part) for part in (slice(0, 3), slice(LAW_LEN - 3, LAW_LEN))]
    return [*p_values, _conditional(outputs, table)]


def _joint(outputs: Sequence[tuple[int, ...]], law: dict[tuple[int, ...], float], part: slice) -> float:
    expected: dict[tuple[int, ...], float] = {}
    for output, probability in law.items():
        expected[output[part]] = expected.get(output[part], 0.0) + probability * len(outputs)
    found = Counter(output[part] for output in outputs)
    return _p_value([found[cell] for cell in expected], list(expected.values()), 1)


def _conditional(outputs: Sequence[tuple[int, ...]], table: Table) -> float:
    """Every token, by the law that it was drawn from."""
    probs = torch.softmax(table.logits.double(), dim=-1)
    found: Counter[tuple[int, int]] = Counter()
    drawn: Counter[int] = Counter()
    for output in outputs:
        for index, token in enumerate(output):
            law = table.state_after((*LAW_PROMPT, *output[:index])) % LAW_LAWS
            found[law, token] += 1
            drawn[law] += 1
    cells = [(law, token) for law in sorted(drawn) for token in range(table.vocab_size)]
    expected = [float(probs[law, token]) * drawn[law] for law, token in cells]
    return _p_value([found[cell] for cell in cells], expected, len(drawn))


def _p_value(found: Sequence[float], expected: Sequence[float], num_sums: int) -> float:
    """Rare cells are merged; `num_sums` sums are fixed by the samples."""
    wanted, seen = np.array(expected), np.array(found, float)
    rare = wanted < LEAST_EXPECTED
    wanted, seen = (np.append(values[~rare], values[rare].sum()) for values in (wanted, seen))
    wanted, seen = wanted[wanted > 0], seen[wanted > 0]
    statistic = float(((seen - wanted) ** 2 / wanted).sum())
    return float(chi2.sf(statistic, len(wanted) - num_sums))


@contextmanager
def _mapped(jobs: Iterator[Job], num_processes: int) -> Iterator[Iterator[tuple[Mode, Result | str]]]:
    if num_processes == 1:
        yield map(_try_world, jobs)
        return
    with multiprocessing.get_context("spawn").Pool(
        num_processes, initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        yield _bounded(pool.imap, jobs, 64 * num_processes)


def _bounded(imap: object, jobs: Iterator[Job], size: int) -> Iterator[tuple[Mode, Result | str]]:
    """A pool's imap reads its whole input at once: endless jobs are handed to it in parts."""
    while True:
        yield from imap(_try_world, [next(jobs) for _ in range(size)], chunksize=4)  # type: ignore[operator]


def _try_world(job: Job) -> tuple[Mode, Result | str]:
    mode, seed = job
    try:
        return mode, run_world(mode, seed)
    except Violation as violation:
        return mode, str(violation)
