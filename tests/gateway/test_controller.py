"""The controller against worlds of known costs: it ends at the mode that is cheapest there, and finds back."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil

import pytest
from support.environment import SEED

from outrider.gateway.speculation.contest import SharedTrials
from outrider.gateway.speculation.controller import Controller
from outrider.planner.forecast import SharedStats, VerifyCosts
from outrider.planner.policy import OFF, Mode, Plan, Policy, PolicyLimits, Round
from outrider.rpc.messages import Commit, StepTimings

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
    sequences: int = 1  # in each step
    cut: int = 99  # drafted tokens that the target verifies at most
    _at_hand: bool = True
    _late: float = 0.0  # until a chain is there, where the target does not wait

    def cost(self, k: int) -> float:
        return self.verify + self.per_row * self.sequences * (k + 1)

    def round(self, plan: Plan, index: int, dice: random.Random) -> Round:
        k = plan.num_draft_tokens
        ahead = plan.mode in (Mode.CHAINS, Mode.BRANCHES)
        if not self._at_hand and not plan.waits and self._late > 0:
            spent = self.cost(0) * self.slower_ahead
            self._late -= spent
            if self._late <= 0 and dice.random() > self.acceptance ** ceil((self._late + spent) / spent):
                self._late += self.between + k * self.draft_pass  # it parts from the plain tokens
            return self.closed(index, 0, 0, spent, 0.0, 0.0)
        k = min(k, self.cut)
        accepted = 0
        while accepted < k and dice.random() < self.acceptance:
            accepted += 1
        verify = self.cost(k) * (self.slower_ahead if ahead else 1.0)
        hits = self.hits if plan.mode is Mode.BRANCHES else self.acceptance ** (k + 1)
        late = 0.0 if plan is OFF else self.between + k * self.draft_pass
        waited, queued = late, 0.0
        if ahead:
            waited = max(0.0, late - verify) if self._at_hand or not plan.waits else late
            if self.sequences > 1 and waited == late:  # the others make a step meanwhile
                queued = ceil(late / verify) * verify - late
            self._at_hand = dice.random() < hits
            self._late = late
        return self.closed(index, k, accepted, verify, waited, k * self.draft_pass, queued)

    def closed(
        self, index: int, k: int, accepted: int, verify: float, waited: float, drafting: float, queued: float = 0.0
    ) -> Round:
        timings = StepTimings(round(queued), round(verify), 0, self.sequences * (k + 1), self.sequences)
        ids = tuple(range(accepted + 1))
        commit = Commit(0, 0, ids, num_drafted=k, num_accepted=accepted, timings=timings)
        return Round(index, commit, k, 0.0, (verify + waited + queued) * 1e-6, round(drafting))


def play(world: World, controller: Controller, num_rounds: int = 400) -> list[Plan]:
    return [plan for plan, _ in played(world, controller, num_rounds)]


def played(world: World, controller: Controller, num_rounds: int = 400) -> list[tuple[Plan, Round]]:
    """The rounds, with the plan that each was under."""
    dice, rounds = random.Random(SEED), []
    for index in range(1, num_rounds + 1):
        closed = world.round(controller.plan, index, dice)
        rounds.append((controller.plan, closed))
        if closed.commit.num_drafted:
            controller.on_piece(closed.commit.num_drafted, closed.draft_us)
        controller.on_round(closed)
    return rounds


def us_per_token(rounds: list[tuple[Plan, Round]]) -> float:
    return sum(closed.total_us for _, closed in rounds) / sum(len(closed.commit.ids) for _, closed in rounds)


def new(profile: Iterable[tuple[int, float]] = (), **limits: object) -> Controller:
    return alone(PolicyLimits(BASE, 8, **limits), SharedStats(VerifyCosts(profile)))  # type: ignore[arg-type]


def alone(limits: PolicyLimits, known: SharedStats, trials: SharedTrials | None = None) -> Controller:
    return Controller(limits, known, trials or SharedTrials(), lambda: 500.0)


@pytest.mark.parametrize(
    ("world", "modes"),
    [
        (World(draft_pass=8_000, between=10_000), {Mode.BRANCHES}),  # a slow draft far away is hidden by branches
        (World(draft_pass=8_000, hits=0.05), {Mode.SEQUENTIAL, Mode.CHAINS, Mode.BRANCHES}),  # no guess is right
        (World(slower_ahead=1.4), {Mode.SEQUENTIAL}),  # both sides share their cores
        (World(acceptance=0.05, hits=0.2, between=8_000, draft_pass=6_000), {Mode.OFF}),  # a useless draft
        (World(per_row=40_000, verify=1_000), {Mode.OFF}),  # every row costs: the target is saturated
        (World(sequences=8, draft_pass=1_500, hits=0.5), {Mode.SEQUENTIAL, Mode.BRANCHES}),  # the late miss a step
    ],
    ids=["branches", "any speculation", "sequential", "bad draft", "saturated", "shared steps"],
)
def test_it_settles_at_the_cheapest_mode(world: World, modes: set[Mode]) -> None:
    profile = [(rows, world.verify + world.per_row * rows) for rows in (1, 2, 4, 8, 16, 32)]
    rounds = played(replace(world), new(profile), 1200)[400:]
    fixed = [us_per_token(played(replace(world), new(profile, modes=(mode,)), 1200)[400:]) for mode in Mode]
    assert us_per_token(rounds) < 1.12 * min(fixed)
    assert sum(plan.mode in modes for plan, _ in rounds) > 0.6 * len(rounds)


def test_a_target_that_would_wait_long_decodes_meanwhile() -> None:
    def four_in_branches() -> Controller:
        limits = PolicyLimits(BASE, 4, fixed=True, modes=(Mode.BRANCHES,))
        return alone(limits, SharedStats(VerifyCosts()))

    far = play(World(verify=25_000, per_row=1_500, between=23_000, hits=0.0), four_in_branches())
    near = play(World(), four_in_branches())
    assert sum(not plan.waits for plan in far[200:]) > 160 and sum(plan.waits for plan in near[200:]) > 160
    assert Plan(Mode.BRANCHES, 3, waits=False).policy(BASE, 5).patience_ms == 0
    assert all(plan.waits for plan in PolicyLimits(BASE, 8, weighs=True).plans)  # the law of rejection sampling


def test_what_one_request_learned_the_next_one_starts_with() -> None:
    controller = new()
    play(World(acceptance=0.02, hits=0.2, draft_pass=9_000), controller)
    after = alone(controller.limits, controller.stats, controller.shared_trials)
    assert after.trials.at(after.common).leader is OFF and after.forecast.acceptance.at(0) < 0.2
    looks = play(World(acceptance=0.02, hits=0.2, draft_pass=9_000), after, 300)
    assert sum(plan is OFF for plan in looks) > 240


def test_what_pays_for_one_alone_is_not_what_pays_for_all() -> None:
    crowded = World(per_row=2_000, verify=4_000, sequences=16)
    plans = play(crowded, new([(rows, 4_000 + 2_000 * rows) for rows in (1, 4, 16, 64, 128)]), 1200)
    assert sum(plan is OFF for plan in plans[400:]) > 640


def test_a_window_that_the_target_cuts_is_worth_what_it_verified() -> None:
    """65 ms for 1.5 tokens, where four drafted ones would make 1.94: a plain token takes 40."""
    cutting = World(acceptance=0.5, between=25_000, draft_pass=10, cut=1)
    plans = play(cutting, new(modes=(Mode.OFF, Mode.SEQUENTIAL)), 1200)
    assert sum(plan is OFF for plan in plans[400:]) > 640


def test_it_counts_on_those_who_run_now() -> None:
    """One stream after sixteen, or sixteen after one: what a step will hold is not what it held last."""
    known, trials = SharedStats(VerifyCosts([(1, 4_000.0), (16, 30_000.0), (64, 120_000.0)])), SharedTrials()
    running = [16]

    def one_more() -> Controller:
        return Controller(PolicyLimits(BASE, 4), known, trials, lambda: 500.0, lambda: running[0])

    play(World(per_row=1_900, verify=2_100, sequences=16), one_more(), 600)
    assert one_more().plan is OFF
    running[0] = 1
    controller = one_more()
    assert controller.plan is not OFF
    running[0] = 16  # fifteen more came in the same moment
    assert controller.on_round(Round(0, Commit(0, 0, (1,)), 0, 0.0, 0.1, 0)) and controller.plan is OFF


def test_what_is_tried_is_compared_with_the_leader_at_that_time() -> None:
    """The machine is half as fast from some moment on: a trial at that moment errs, but is repeated. Mostly: two trials
    by bad luck are followed by long pauses."""
    worlds = {True: World(), False: World(verify=80_000, draft_pass=1_400, between=4_000)}
    ends, dice = [], random.Random(SEED)
    for moment in (10, 30, 50) * 4:
        controller = new(modes=(Mode.OFF, Mode.SEQUENTIAL, Mode.BRANCHES))
        for index in range(1, 1500):
            controller.on_round(worlds[index < moment].round(controller.plan, index, dice))
        ends.append(controller.plan.mode)
    assert ends.count(Mode.BRANCHES) >= 8 and Mode.OFF not in ends


def test_all_try_a_plan_together() -> None:
    """Of four requests that share their steps each follows the others' trial at its next round."""
    known, trials, dice = SharedStats(VerifyCosts([(1, 40_000.0), (32, 44_000.0)])), SharedTrials(), random.Random(SEED)
    four = [Controller(PolicyLimits(BASE, 4), known, trials, lambda: 500.0, lambda: 4) for _ in range(4)]
    together = []
    for index in range(1, 120):
        for controller in four:
            controller.on_round(World(sequences=4).round(controller.plan, index, dice))
        together.append(len({controller.plan for controller in four}) == 1)
    assert sum(together) > 80 and len(four[0].trials.at(four[0].common)._tried) >= 3


def test_a_number_of_sequences_that_goes_up_and_down_ends_no_trial() -> None:
    known, trials, dice = SharedStats(VerifyCosts([(1, 40_000.0), (64, 44_000.0)])), SharedTrials(), random.Random(SEED)
    running = [4]
    four = [Controller(PolicyLimits(BASE, 4), known, trials, lambda: 500.0, lambda: running[0]) for _ in range(4)]
    for index in range(1, 160):
        running[0] = 4 + index // 10 % 2
        for controller in four:
            controller.on_round(World(sequences=4).round(controller.plan, index, dice))
    running[0] = 4
    assert len(four[0].trials.at(four[0].common)._tried) >= 3


def test_a_draft_that_never_has_anything_is_left() -> None:
    """N-grams of a text that repeats nothing: each wait ends with one token."""
    controller = new(modes=(Mode.OFF, Mode.SEQUENTIAL))
    for index in range(1, 60):
        late = 0.0 if controller.plan is OFF else 0.004
        timings = StepTimings(0, 40_000, 0, 1, 1)
        controller.on_round(Round(index, Commit(0, 0, (1,), timings=timings), 0, 0.0, 0.04 + late, 0))
    assert controller.plan is OFF


def test_a_draft_that_says_nothing_is_seldom_waited_for() -> None:
    """A look at it ends after two rounds of the target's patience, and the next one is far; a draft that speaks again
    is found then."""
    controller, waits = new(), []
    for index in range(1, 20_000):
        silent_s = BASE.patience_ms / 1000 if controller.plan.waits and controller.plan is not OFF else 0.0
        waits.append(silent_s)
        commit = Commit(0, 0, (1,), timings=StepTimings(0, 2_000, 0, 1, 1))
        controller.on_round(Round(index, commit, controller.plan.num_draft_tokens, 0.0, 0.002 + silent_s, 0))
    assert sum(waits[64:]) <= 2 * 2 * BASE.patience_ms / 1000 and controller.plan is OFF
    later = play(World(), controller, 17_000)
    assert sum(plan is not OFF for plan in later[-200:]) > 180


def test_what_drafts_nothing_is_not_better_than_off() -> None:
    """Though it is measured to be so: where a chain is not waited for, plain tokens are decoded meanwhile."""
    dice, controller = random.Random(SEED), new([(1, 2_400.0), (16, 4_000.0)])
    plans = []
    for index in range(1, 800):
        plans.append(controller.plan)
        token_ms = 2.6 if controller.plan is OFF else dice.uniform(2.3, 2.6)
        commit = Commit(0, 0, (1,), timings=StepTimings(0, 2_300, 100, 1, 1))
        controller.on_round(Round(index, commit, controller.plan.num_draft_tokens, 0.0, token_ms * 1e-3, 0))
    assert plans[100:].count(OFF) > 0.9 * len(plans[100:])


@pytest.mark.parametrize("seed", range(6))
def test_commits_that_were_read_together_make_no_plan_look_fast(seed: int) -> None:
    """N-grams that find nothing, and a gateway that is held up now and then: what the target decoded ahead of it, it
    then reads in a moment, whatever plan it has just begun to try."""
    dice, controller = random.Random(seed), new([(1, 2_400.0), (16, 4_000.0)])
    computed = read = 0.0  # milliseconds: when the target had a token, and when the gateway read it
    plans = []
    for index in range(1, 1600):
        plan = controller.plan
        plans.append(plan)
        ahead, token_ms = (40.0, 2.5) if plan is OFF else (0.0, 4.0) if plan.waits else (20.0, 3.5)
        computed = max(computed, read - ahead) + token_ms
        before, read = read, max(read + 0.05, computed, (read + 30.0) * (dice.random() < 0.03))
        commit = Commit(0, 0, (1,), timings=StepTimings(0, 2_300, 100, 1, 1))
        controller.on_round(Round(index, commit, plan.num_draft_tokens, before * 1e-3, read * 1e-3, 0))
    assert plans[800:].count(OFF) > 0.95 * len(plans[800:])


def test_a_request_whose_drafts_fail_goes_its_own_way() -> None:
    """Seven are accepted often, one hardly ever: it is decoded off, with a look at the others' plan now and then."""
    known, trials, dice = SharedStats(VerifyCosts([(1, 40_000.0), (64, 60_000.0)])), SharedTrials(), random.Random(SEED)
    limits = PolicyLimits(BASE, 4, modes=(Mode.OFF, Mode.SEQUENTIAL))
    eight = [Controller(limits, known, trials, lambda: 500.0, lambda: 8) for _ in range(8)]
    own: list[Plan] = []
    for index in range(1, 400):
        for number, controller in enumerate(eight):
            acceptance = 0.02 if number == 0 else 0.8
            controller.on_round(World(sequences=8, acceptance=acceptance).round(controller.plan, index, dice))
        own.append(eight[0].plan)
    assert eight[1].plan is not OFF and own[150:].count(OFF) > 0.5 * len(own[150:])
    changes = sum(before != after for before, after in pairwise(own[150:]))
    assert changes < len(own[150:]) / 12  # not to and fro every few rounds


def test_plain_rounds_between_windows_are_counted_where_none_waits() -> None:
    """Each window here is followed by one plain token, whatever the clocks of the links say."""
    known = SharedStats(VerifyCosts([(1, 20_000.0), (8, 20_000.0)]))
    known.between.add(500_000.0)
    controller = alone(PolicyLimits(BASE, 4, fixed=True, modes=(Mode.CHAINS,)), known)
    controller.plan = plan = Plan(Mode.CHAINS, 4, waits=False)
    far = controller.forecast.us_per_token(plan)
    for index in range(1, 40):
        k = 4 * (index % 2)
        commit = Commit(
            0, 0, (1,) * (k + 1), num_drafted=k, num_accepted=k, timings=StepTimings(0, 20_000, 0, k + 1, 1)
        )
        controller._since_change = 9
        controller._learn(Round(index, commit, 4, 0.0, 0.02, 0))
    assert (
        known.plain_tokens(Mode.CHAINS) == pytest.approx(1.0, abs=0.2)
        and controller.forecast.us_per_token(plan) < 0.6 * far
    )
    for _ in range(300):
        known.decay()
    assert known.plain_tokens(Mode.CHAINS) is None


def test_fewer_tokens_where_few_are_accepted() -> None:
    few = play(World(acceptance=0.3, draft_pass=12_000), new())[-1]
    many = play(World(acceptance=0.95, draft_pass=3_000), new())[-1]
    assert few.num_draft_tokens <= 3 and many.num_draft_tokens >= 6


def test_off_is_left_once_speculation_pays_again() -> None:
    controller = new()
    play(World(acceptance=0.02, hits=0.2, draft_pass=9_000), controller)
    assert controller.trials.at(controller.common).leader is OFF
    later = play(World(acceptance=0.9), controller, 1200)
    assert sum(plan is not OFF for plan in later[-200:]) > 180


def test_it_does_not_flutter() -> None:
    plans = play(World(), new(), 1000)
    assert sum(before != after for before, after in pairwise(plans[200:])) <= 12  # of 800, by any seed


def test_what_a_request_fixes_stays() -> None:
    controller = new(fixed=True, modes=(Mode.SEQUENTIAL, Mode.BRANCHES))
    plans = play(World(acceptance=0.02), controller)
    assert {plan.num_draft_tokens for plan in plans} == {8} and OFF not in plans
    policy = Plan(Mode.BRANCHES, 3).policy(BASE, 5)
    assert (policy.num_draft_tokens, policy.windows_ahead, policy.max_branches, policy.mode) == (3, 1, 5, "branches")
    assert OFF.policy(BASE, 5, deep=True).mode == "off"


@pytest.mark.parametrize(("between", "deep"), [(5_000, False), (40_000, False), (100_000, True), (150_000, True)])
def test_branches_go_deep_where_they_come_late(between: float, deep: bool) -> None:
    """A verification takes 40 ms, five passes of the draft 3.5. Between 60 and 90 ms it is either: a branch that comes
    late looks like a chain that was begun after the commit."""
    controller = alone(PolicyLimits(BASE, 4, fixed=True, modes=(Mode.BRANCHES,)), SharedStats(VerifyCosts()))
    dice, world = random.Random(SEED), World(between=between, hits=0.5)
    changes = [controller.on_round(world.round(controller.plan, index, dice)) for index in range(1, 100)]
    policy = controller.policy
    assert (policy.windows_ahead, policy.max_branches) == ((2, 24) if deep else (1, 12))
    assert any(changes) or not deep  # the loop is told


def test_chains_do_not_go_deep() -> None:
    policy = Plan(Mode.CHAINS, 3).policy(BASE, 5, deep=True)
    assert (policy.windows_ahead, policy.max_branches, policy.mode) == (1, 0, "chains")


def test_what_promises_more_than_it_did_is_tried_at_once() -> None:
    """Nearly all was accepted, so that eight tokens a round won, and trials rest. Now few are: fewer are tried before
    that rest, of 672 rounds, is over."""
    controller = new(modes=(Mode.SEQUENTIAL,))
    before = play(World(acceptance=0.97, draft_pass=6_000), controller, 800)[-1]
    later = play(World(acceptance=0.3, draft_pass=6_000), controller, 400)
    assert before.num_draft_tokens >= 6 and sum(plan.num_draft_tokens <= 3 for plan in later) > 150


def test_a_window_that_the_end_of_a_request_cuts_says_nothing_of_its_plan() -> None:
    """Short answers: every fourth window holds one token for want of room."""
    limits, known, trials = PolicyLimits(BASE, 4, modes=(Mode.SEQUENTIAL,)), SharedStats(VerifyCosts()), SharedTrials()
    dice, world = random.Random(SEED), World()
    controller = alone(limits, known, trials)
    for index in range(1, 400):
        closed = world.round(controller.plan, index, dice)
        if index % 4 == 0:
            short = replace(closed.commit, ids=(1,), num_drafted=1, num_accepted=0)
            closed = replace(closed, commit=short, at_end=True)
        controller.on_round(closed)
    rounds = controller.trials.at(controller.common)._recent
    assert set(rounds.windows) == {controller.plan.num_draft_tokens}


def test_a_step_counts_once_whoever_tells_of_it() -> None:
    told, alone = SharedStats(VerifyCosts()), SharedStats(VerifyCosts())
    for queue_us in range(4):
        told.add_step(StepTimings(queue_us, 900, 100, 20, 4), False, 8)
    alone.add_step(StepTimings(0, 900, 100, 20, 4), False, 8)
    assert told.costs.at(20, False) == alone.costs.at(20, False) == 1000
    assert (told.share.value, told.share.weight) == (alone.share.value, alone.share.weight) == (0.5, 1.0)
    told.add_step(StepTimings(0, 901, 100, 20, 4), False, 8)
    assert told.share.weight == 2.0


@pytest.mark.parametrize(
    ("goal_us", "is_plain"),
    [(0.0, False), (60_000.0, True), (46_000.0, False), (10_000.0, False)],
    ids=["none", "loose", "near the pace of off", "out of reach"],
)
def test_a_goal_that_plain_decoding_keeps_leaves_the_draft_to_others(goal_us: float, is_plain: bool) -> None:
    world, known, trials = World(sequences=4), SharedStats(VerifyCosts([(4, 40_000), (64, 40_000)])), SharedTrials()
    limits = PolicyLimits(BASE, 8)
    played(world, Controller(limits, known, trials, lambda: 500.0, lambda: 4), 400)  # they have found what is best
    controller = Controller(limits, known, trials, lambda: 500.0, lambda: 4, goal_us=goal_us)
    rounds = played(world, controller, 400)[20:]
    plain = sum(plan is OFF for plan, _ in rounds) / len(rounds)
    assert plain > 0.6 if is_plain else plain < 0.2
    assert not is_plain or us_per_token(rounds) < goal_us


def test_who_is_behind_its_goal_or_alone_plays_what_is_fastest() -> None:
    world, known, trials = World(sequences=4), SharedStats(VerifyCosts([(4, 40_000), (64, 40_000)])), SharedTrials()
    limits = PolicyLimits(BASE, 8)
    played(world, Controller(limits, known, trials, lambda: 500.0, lambda: 4), 400)
    num_running = 4
    controller = Controller(limits, known, trials, lambda: 500.0, lambda: num_running, goal_us=60_000.0)
    leader = controller.trials.at(controller.common)
    assert controller._enough(leader) is OFF
    controller.on_round(replace(world).closed(1, 0, 0, 100_000, 0.0, 0.0))  # a token in 100 ms
    assert controller._enough(leader) is None
    controller._spent_us, num_running = 0, 1
    assert controller._enough(leader) is None
