"""The controller against worlds of known costs: it ends at the mode that is cheapest there, and finds back."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import pytest
from conftest import SEED

from outrider.gateway.controller import OFF, Controller, Limits, Mode, Plan
from outrider.gateway.core import Policy
from outrider.gateway.estimates import Acceptance, Mean, StepCosts, VerifyCosts
from outrider.gateway.rounds import Round
from outrider.wire.messages import Commit, StepTimings

BASE = Policy(4)


@dataclass
class World:
    """What rounds take, in microseconds."""

    verify: float = 40_000
    per_row: float = 0.0
    draft_pass: float = 700
    between: float = 2_000
    acceptance: float = 0.75
    hits: float = 0.8
    slower_ahead: float = 1.0  # verification while the draft works, where both share cores
    other_rows: int = 0

    def cost(self, k: int) -> float:
        return self.verify + self.per_row * (self.other_rows + k + 1)

    def round(self, plan: Plan, index: int, dice: random.Random) -> Round:
        k, accepted = plan.num_draft_tokens, 0
        while accepted < k and dice.random() < self.acceptance:
            accepted += 1
        ahead = plan.mode in (Mode.CHAINS, Mode.BRANCHES)
        verify = self.cost(k) * (self.slower_ahead if ahead else 1.0)
        hits = self.hits if plan.mode is Mode.BRANCHES else self.acceptance ** (k + 1)
        late = self.between + k * self.draft_pass
        waited = 0.0 if plan is OFF else max(0.0, late - verify) if ahead and dice.random() < hits else late
        drafting = 0 if plan is OFF else round(k * self.draft_pass)
        timings = StepTimings(0, round(verify), 0, self.other_rows + k + 1, 1)
        ids = tuple(range(accepted + 1))
        commit = Commit(0, 0, ids, num_drafted=k, num_accepted=accepted, timings=timings)
        return Round(index, commit, k, 0.0, (verify + waited) * 1e-6, drafting)


def play(world: World, controller: Controller, num_rounds: int = 400) -> list[Plan]:
    dice, plans = random.Random(SEED), []
    for index in range(1, num_rounds + 1):
        closed = world.round(controller.plan, index, dice)
        if controller.plan is not OFF:
            controller.on_piece(closed.commit.num_drafted, closed.draft_us)
        controller.on_round(closed)
        plans.append(controller.plan)
    return plans


def new(profile: Iterable[tuple[int, float]] = (), **limits: object) -> Controller:
    return Controller(Limits(BASE, 8, **limits), VerifyCosts(profile), lambda: 500.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("world", "modes"),
    [
        (World(draft_pass=8_000, between=10_000), {Mode.BRANCHES}),  # a slow draft far away is hidden by branches
        (World(draft_pass=8_000, hits=0.05), {Mode.SEQUENTIAL, Mode.CHAINS, Mode.BRANCHES}),  # no guess is right
        (World(slower_ahead=1.4), {Mode.SEQUENTIAL}),  # both sides share their cores
        (World(acceptance=0.05, between=8_000, draft_pass=6_000), {Mode.OFF}),  # a useless draft
        (World(per_row=40_000, verify=1_000), {Mode.OFF}),  # every row costs: the target is saturated
    ],
    ids=["branches", "any speculation", "sequential", "bad draft", "saturated"],
)
def test_it_settles_at_the_cheapest_mode(world: World, modes: set[Mode]) -> None:
    plans = play(world, new([(k + 1, world.cost(k)) for k in (0, 1, 3, 7, 15)]))
    assert sum(plan.mode in modes for plan in plans[200:]) > 0.8 * len(plans[200:])


def test_fewer_tokens_where_few_are_accepted() -> None:
    few = play(World(acceptance=0.3, draft_pass=12_000), new())[-1]
    many = play(World(acceptance=0.95, draft_pass=3_000), new())[-1]
    assert few.num_draft_tokens <= 3 and many.num_draft_tokens >= 6


def test_off_is_left_once_speculation_pays_again() -> None:
    controller = new()
    assert play(World(acceptance=0.02, draft_pass=9_000), controller)[-1] is OFF or controller._rest > 32
    later = play(World(acceptance=0.9), controller, 1200)
    assert sum(plan is not OFF for plan in later[-200:]) > 180


def test_it_does_not_flutter() -> None:
    plans = play(World(), new(), 1000)
    assert sum(before != after for before, after in pairwise(plans[200:])) <= 6


def test_what_a_request_fixes_stays() -> None:
    controller = new(fixed=True, modes=(Mode.SEQUENTIAL, Mode.BRANCHES))
    plans = play(World(acceptance=0.02), controller)
    assert {plan.num_draft_tokens for plan in plans} == {8} and OFF not in plans
    policy = Plan(Mode.BRANCHES, 3).policy(BASE, 5)
    assert (policy.num_draft_tokens, policy.windows_ahead, policy.max_branches, policy.mode) == (3, 1, 5, "branches")
    assert OFF.policy(BASE, 5).mode == "off"


def test_estimates() -> None:
    acceptance = Acceptance()
    for _ in range(500):
        acceptance.add(4, 2)
    assert acceptance.at(0) > 0.95 and acceptance.at(2) < 0.05 and 2.8 < acceptance.tokens(4) < 3.1
    costs = StepCosts()
    assert costs.at(5) == 0.0
    costs.add(1, 10.0)
    costs.add(9, 50.0)
    costs.add(5, 8.0)  # never cheaper than fewer rows
    assert costs.at(1) == 10.0 and costs.at(5) == 10.0 and costs.at(7) == 30.0 and costs.at(500) > 50.0
    mean = Mean(memory=4)
    for value in (1.0, 3.0):
        mean.add(value)
    assert mean.value == 2.0 and Mean().or_else(7.0) == 7.0
