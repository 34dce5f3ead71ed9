"""From a seed to a world's setting; many worlds, on as many processes as wanted; the law of what the law worlds
gave."""

from __future__ import annotations

import logging
import multiprocessing
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from typing import Any, cast

import numpy as np
import torch
from scipy.stats import chi2
from simulation.checks import Violation
from simulation.network import Stretch, Weather
from simulation.tables import Table
from simulation.world import Climate, Plan, Result, Setting, World

from outrider.planner.policy import Policy
from outrider.rpc.messages import Open
from outrider.rpc.words.request import DRAFT_OPTIONS
from outrider.rpc.words.sampling_params import AcceptanceRule, SamplingParams

LAW_PROMPT = (1, 3, 2, 0, 1)
LAW_TABLE_SEED = 5
LAW_LAWS = 5  # different laws of the next token
LAW_LEN = 5  # tokens of each output
LAW_CONFIDENCE = 0.0, 0.0, 0.0, 0.38  # in some worlds a draft ends where it is unsure, as it is in two states of five
WEIGHING = AcceptanceRule.REJECTION, AcceptanceRule.BLOCK
OPENS = 1_000_000  # as good as no limit to how often a lost target is replaced


class Mode(Enum):
    """What a world is about."""

    COUPLED = "coupled"
    GREEDY = "greedy"
    REJECTION = "rejection"  # everything but the law
    LAW = "law"  # rejection, token by token and by blocks in turn, many requests of one prompt


def setting_of(mode: Mode, seed: int) -> Setting:
    """The setting of a seed."""
    dice = random.Random(f"{mode.value} {seed}")
    return _law(seed, dice) if mode is Mode.LAW else _mixed(mode, seed, dice)


def law_table() -> Table:
    """The target of every law world: a vocabulary of four."""
    return Table.random(LAW_TABLE_SEED, 4, 1.0, LAW_LAWS)


def law_draft(num_more_ids: int) -> Table:
    """Always the same draft, so that a bias has one direction; it wants nearly the opposite of the target."""
    other = Table.random(LAW_TABLE_SEED + 1, 4 + num_more_ids, 0.5, LAW_LAWS).logits
    other[:, :4] -= 0.7 * law_table().logits
    return Table(other)


def _replay(mode: Mode, seed: int) -> str:
    return f"python tests/simulation/run.py --mode {mode.value} --seed {seed}"


def _weather(dice: random.Random) -> Weather:
    return Weather(dice.choice((0.0002, 0.002, 0.01)), dice.choice((0.0, 0.0, 0.1, 0.4)), dice.choice((0.01, 0.05)))


def _policy(dice: random.Random, max_unread: int = 256, max_target_opens: int = OPENS, reopen_s: float = 30) -> Policy:
    return Policy(
        num_draft_tokens=dice.choice((0, 1, 2, 3, 3, 4, 5, 6, 8)),
        patience_ms=dice.choice((0, 3, 20, 40, 40)),
        windows_ahead=dice.choice((0, 0, 0, 1, 2)),
        max_branches=dice.choice((0, 0, 2, 6, 16)),
        plain_ahead=dice.choice((1, 4, 16)),
        max_unread=max_unread,
        max_target_opens=max_target_opens,
        reopen_s=reopen_s,
    )


def _stretch(dice: random.Random) -> Stretch:
    return Stretch(dice.choice((128, 1, 2, 3)), dice.choice((0, 0, 2, 5)))


def _law(seed: int, dice: random.Random) -> Setting:
    target = law_table()
    draft = law_draft(num_more_ids=dice.choice((0, 0, 0, 0, 2)))
    sampling = SamplingParams(max_tokens=LAW_LEN, ignore_eos=True)
    policy = replace(_policy(dice), num_draft_tokens=dice.choice((1, 2, 3, 4)), patience_ms=dice.choice((40, 100)))
    stretch = Stretch(dice.choice((128, 128, 128, 1, 2)), dice.choice((0, 0, 2)))
    plans = tuple(
        Plan(
            request=Open(
                0,
                LAW_PROMPT,
                sampling,
                acceptance=WEIGHING[index % 2],
                seed=dice.getrandbits(64),
                completion=dice.randrange(4),
                **cast(Any, dict.fromkeys(DRAFT_OPTIONS, LAW_CONFIDENCE[seed % len(LAW_CONFIDENCE)])),
            ),
            policy=policy,
            arrives=dice.uniform(0, 0.05),
            think_s=0.002,
            stretch=stretch,
        )
        for index in range(48)
    )
    return Setting(
        replay=_replay(Mode.LAW, seed),
        target=target,
        draft=draft,
        plans=plans,
        weather=_weather(dice),
        climate=Climate(dice.choice((0.02, 0.05, 0.2)), 0.4),
        target_blocks=dice.choice((12, 64)),
        draft_blocks=dice.choice((12, 64)),
        exact=False,
        simple=True,
        several_at_once=seed % 3 == 2,
    )


def _mixed(mode: Mode, seed: int, dice: random.Random) -> Setting:
    target = Table.random(dice.randrange(1 << 30), dice.choice((4, 7)))
    target.logits[:, 0] -= 2.5  # the end of sequence is rare
    target = Table(target.logits)
    draft = target.near(dice.randrange(1 << 30), dice.choice((0.0, 0.7, 2.0)), dice.choice((0, 0, 2)))
    simple = mode is Mode.REJECTION or dice.random() < 0.5
    steps_fail = dice.random() < 0.2
    plans: list[Plan] = []
    for index in range(dice.randrange(1, 10)):
        plans.append(_plan(mode, dice, target.vocab_size, simple, steps_fail, plans, index))
    return Setting(
        replay=_replay(mode, seed),
        target=target,
        draft=draft,
        plans=tuple(plans),
        weather=_weather(dice),
        climate=Climate(dice.choice((0.0, 0.03, 0.08, 0.2)), 1.5, steps_fail),
        target_blocks=dice.choice((7, 10, 64)),
        draft_blocks=dice.choice((7, 10, 64)),
        exact=mode is not Mode.REJECTION,
        simple=simple,
        several_at_once=seed % 3 == 2,
    )


def _plan(
    mode: Mode, dice: random.Random, vocab_size: int, simple: bool, steps_fail: bool, before: list[Plan], index: int
) -> Plan:
    arrives = dice.uniform(0, 1.0)
    impatient = dice.random() < 0.1  # a lost target ends the request soon
    parent = dice.randrange(index) if index and dice.random() < 0.2 else None
    prompt = tuple(dice.randrange(vocab_size) for _ in range(dice.choice((1, 5, 20, 40))))
    if parent is not None:
        prompt = before[parent].request.prompt_ids
        arrives = before[parent].arrives + dice.uniform(0, 0.01)
    resumed = () if dice.random() < 0.8 else tuple(dice.randrange(1, vocab_size) for _ in range(3))
    return Plan(
        request=Open(
            0,
            prompt,
            _sampling(mode, dice, vocab_size, simple),
            output_ids=resumed,
            completion=index,
            acceptance=AcceptanceRule.COUPLED if mode is Mode.COUPLED else AcceptanceRule.REJECTION,
            seed=dice.getrandbits(64),
        ),
        policy=_policy(
            dice,
            max_unread=dice.choice((1, 8, 256)),
            max_target_opens=dice.choice((1, 2)) if impatient else OPENS,
            reopen_s=0.0 if impatient else 30,
        ),
        arrives=arrives,
        think_s=dice.choice((0.0, 0.001, 0.1)),
        stretch=_stretch(dice),
        examines_text=dice.random() < 0.3,
        leaves=arrives + dice.uniform(0, 0.4) if dice.random() < 0.15 else None,
        fork_of=parent,
        may_fail=impatient or steps_fail,
    )


def _sampling(mode: Mode, dice: random.Random, vocab_size: int, simple: bool) -> SamplingParams:
    greedy = mode is Mode.GREEDY
    max_tokens = dice.choice((4, 12, 40, 40))
    if simple:
        return SamplingParams(temperature=0.0 if greedy else 1.0, max_tokens=max_tokens, ignore_eos=dice.random() < 0.5)
    return SamplingParams(
        temperature=0.0 if greedy else dice.choice((0.6, 1.0, 1.5)),
        top_p=dice.choice((1.0, 0.9)),
        min_p=dice.choice((0.0, 0.05)),
        presence_penalty=dice.choice((0.0, 0.7)),
        repetition_penalty=dice.choice((1.0, 1.3)),
        min_tokens=dice.choice((0, 1)),
        stop_token_ids=(vocab_size - 1,) if dice.random() < 0.3 else (),
        max_tokens=max_tokens,
    )


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
