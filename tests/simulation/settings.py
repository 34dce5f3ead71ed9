"""From a seed to a world's setting: how many requests, how they sample, how the network and the services behave."""

from __future__ import annotations

import random
from dataclasses import replace
from enum import Enum

from simulation.clients import Plan
from simulation.faults import Climate
from simulation.network import Stretch, Weather
from simulation.tables import Table
from simulation.world import Setting

from outrider.planner.policy import Policy
from outrider.rpc.messages import Open
from outrider.rpc.sampling_params import AcceptanceRule, SamplingParams

LAW_PROMPT = (1, 3, 2, 0, 1)
LAW_TABLE_SEED = 5
LAW_LAWS = 5  # different laws of the next token
LAW_LEN = 5  # tokens of each output
OPENS = 1_000_000  # as good as no limit to how often a lost target is replaced


class Mode(Enum):
    """What a world is about."""

    COUPLED = "coupled"
    GREEDY = "greedy"
    REJECTION = "rejection"  # everything but the law
    LAW = "law"  # rejection, many requests of one prompt


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
            request=Open(0, LAW_PROMPT, sampling, seed=dice.getrandbits(64), completion=dice.randrange(4)),
            policy=policy,
            arrives=dice.uniform(0, 0.05),
            think_s=0.002,
            stretch=stretch,
        )
        for _ in range(48)
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
