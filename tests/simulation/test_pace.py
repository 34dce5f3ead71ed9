"""The pipeline in virtual time: what a delay costs where nothing but the delay, the draft's passes and the
verifications take time, and no two of them share a machine."""

from __future__ import annotations

import random
from functools import partial
from unittest.mock import patch

import pytest
from simulation.clients import Plan
from simulation.faults import Climate
from simulation.network import Stretch, Weather
from simulation.tables import Table
from simulation.world import Setting, World

from outrider.gateway.speculation import loop
from outrider.planner.policy import Policy
from outrider.rpc.messages import Open
from outrider.rpc.sampling_params import AcceptanceRule, SamplingParams

VERIFY_S, BLOCKS = 0.02, 512
SLOW = 0.2  # a draft's pass over a verification
OVERHEAD_S = 0.0005  # of each message
TOKENS, SEEDS = 200, (0, 1, 2)
FLAT, DEEP = Policy(4, windows_ahead=1, max_branches=12), Policy(4, windows_ahead=2, max_branches=24)
SEQUENTIAL, CHAINS = Policy(4), Policy(4, windows_ahead=1)


class Steady(random.Random):
    """Every duration at its longest, no accident."""

    def uniform(self, a: float, b: float) -> float:
        return b

    def random(self) -> float:
        return 0.9999


def world_of(policy: Policy, cost: float, delay: float, seed: int) -> World:
    """One coupled request; about three quarters of the drafted tokens are accepted."""
    target = Table.random(seed, 40, 2.0)
    draft = target.near(seed + 1, 0.45)
    sampling = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    request = Open(0, (1, 2, 3), sampling, seed=seed, acceptance=AcceptanceRule.COUPLED)
    setting = Setting(
        replay=f"seed {seed}",
        target=target,
        draft=draft,
        plans=(Plan(request, policy, arrives=0.0, think_s=0.0, stretch=Stretch()),),
        weather=Weather(delay * VERIFY_S + OVERHEAD_S),
        climate=Climate(0.0, 0.0),
        target_blocks=BLOCKS,
        draft_blocks=BLOCKS,
        exact=False,
        simple=False,
    )
    with patch("random.Random", Steady):
        world = World(setting, seed)
    world.target.step_s, world.draft.step_s = VERIFY_S, cost * VERIFY_S
    return world


def run(policy: Policy, cost: float, delay: float, seed: int) -> World:
    """To the end; `delay` each way on each link, as a share of a verification."""
    world = world_of(policy, cost, delay, seed)
    (client,) = world.clients
    with patch.object(loop, "time", world.clock):
        world.clock.at(0.0, partial(client.start, None))
        world._until(partial(getattr, client, "over"), 60.0)
    assert len(client.output) == TOKENS
    return world


def pace(policy: Policy, cost: float, delay: float) -> float:
    """Milliseconds a token."""
    spent = sum(run(policy, cost, delay, seed).clock.now for seed in SEEDS)
    return 1e3 * spent / (TOKENS * len(SEEDS))


def test_the_targets_credit_cuts_no_window_short() -> None:
    """Credit takes 0.4 verifications to come back; where windows lie at hand the target uses two meanwhile."""
    tally = run(DEEP, 0.05, 0.2, seed=1).clients[0].tally
    assert tally.num_draft_tokens / tally.num_rounds > 3.85


@pytest.mark.parametrize("cost", [0.05, SLOW])
def test_without_delay_branches_keep_the_target_busy(cost: float) -> None:
    found = {name: pace(policy, cost, 0.0) for name, policy in {"sequential": SEQUENTIAL, "branches": FLAT}.items()}
    print(found)
    rounds = VERIFY_S * 1e3 / 3.4  # milliseconds a token, if the target did nothing but verify
    assert found["branches"] < 1.15 * rounds and found["sequential"] > 1.25 * rounds


@pytest.mark.parametrize(("cost", "gain", "kept"), [(0.05, 1.04, 0.9), (SLOW, 1.08, 0.8)])
def test_branches_of_branches_hide_what_lies_further_than_a_verification(cost: float, gain: float, kept: float) -> None:
    """Four delays of 0.2 verifications and five passes of the draft: a branch of the next one comes too late."""
    here, flat, deep = pace(DEEP, cost, 0.0), pace(FLAT, cost, 0.2), pace(DEEP, cost, 0.2)
    chains, sequential = pace(CHAINS, cost, 0.2), pace(SEQUENTIAL, cost, 0.2)
    print(f"{here=:.2f} {flat=:.2f} {deep=:.2f} {chains=:.2f} {sequential=:.2f}")
    assert flat / deep > gain and here / deep > kept
    assert deep < flat < chains < sequential
