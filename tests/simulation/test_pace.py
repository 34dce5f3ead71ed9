"""The pipeline in virtual time: what a delay costs where nothing but the delay, the draft's passes and the
verifications take time, and no two of them share a machine.

Promise 2 in virtual time: many requests at once, steps that cost by their rows, and no machine but theirs. What the
controller chooses for each must not make all slower than plain decoding."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from simulation.network import Stretch, Weather
from simulation.tables import Table
from simulation.world import Client, Climate, Plan, Setting, World

from outrider.draft_service import engine as draft_engine
from outrider.gateway.speculation.contest import SharedTrials
from outrider.gateway.speculation.controller import Controller
from outrider.planner.estimates import StepTime
from outrider.planner.forecast import SharedStats, VerifyCosts
from outrider.planner.policy import Policy, PolicyLimits
from outrider.rpc.messages import Open
from outrider.rpc.words.sampling_params import AcceptanceRule, SamplingParams
from outrider.target_service.goodput import Goodput

VERIFY_S, BLOCKS = 0.02, 512
SLOW = 0.2  # a draft's pass over a verification
OVERHEAD_S = 0.0005  # of each message
TOKENS = 200
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
    world.clock.at(0.0, partial(client.start, None))
    world._until(partial(getattr, client, "over"), 60.0)
    assert len(client.output) == TOKENS
    return world


def pace(policy: Policy, cost: float, delay: float, prove: bool) -> float:
    """Milliseconds a token."""
    seeds = range(3 if prove else 2)
    return 1e3 * sum(run(policy, cost, delay, seed).clock.now for seed in seeds) / (TOKENS * len(seeds))


def test_the_targets_credit_cuts_no_window_short() -> None:
    """Credit takes 0.4 verifications to come back; where windows lie at hand the target uses two meanwhile."""
    tally = run(DEEP, 0.05, 0.2, seed=1).clients[0].tally
    assert tally.num_draft_tokens / tally.num_rounds > 3.85


@pytest.mark.parametrize("cost", [0.05, SLOW])
def test_without_delay_branches_keep_the_target_busy(cost: float, prove: bool) -> None:
    found = {
        name: pace(policy, cost, 0.0, prove) for name, policy in {"sequential": SEQUENTIAL, "branches": FLAT}.items()
    }
    print(found)
    rounds = VERIFY_S * 1e3 / 3.4  # milliseconds a token, if the target did nothing but verify
    assert found["branches"] < 1.15 * rounds and found["sequential"] > 1.25 * rounds


@pytest.mark.parametrize(("cost", "gain", "kept"), [(0.05, 1.04, 0.9), (SLOW, 1.08, 0.8)])
def test_branches_of_branches_hide_what_lies_further_than_a_verification(
    cost: float, gain: float, kept: float, prove: bool
) -> None:
    """Four delays of 0.2 verifications and five passes of the draft: a branch of the next one comes too late."""
    here = pace(DEEP, cost, 0.0, prove)
    flat, deep, chains, sequential = (pace(policy, cost, 0.2, prove) for policy in (FLAT, DEEP, CHAINS, SEQUENTIAL))
    print(f"{here=:.2f} {flat=:.2f} {deep=:.2f} {chains=:.2f} {sequential=:.2f}")
    assert flat / deep > gain and here / deep > kept
    assert deep < flat < chains < sequential


CROWD_TOKENS, PROMPT_LEN, ARRIVALS_S = 48, 24, 0.002
BURSTS = 4  # one after the other; what one learned the next one knows
PROFILES = {  # milliseconds of a step by its rows, on four cores of a server in a fast and in a slow hour
    "fast": ((1, 19.5), (4, 20.3), (8, 24.3), (16, 28.8), (32, 38.5), (64, 81.3), (128, 163.2), (512, 540.0)),
    "slow": ((1, 22.5), (4, 26.8), (8, 26.4), (16, 31.7), (32, 52.7), (64, 91.3), (128, 205.0), (512, 700.0)),
}
PASS_MS, ROW_MS = 0.6, 0.08  # of the draft
WAY_S = 0.0005  # of a message


def bursts(profile: Sequence[tuple[int, float]], num_requests: int, *, speculates: bool) -> list[float]:
    """The tokens a second of each burst."""
    known = SharedStats(VerifyCosts([(rows, 1e3 * ms) for rows, ms in profile]))
    trials = SharedTrials()
    return [burst(known, trials, profile, num_requests, number, speculates) for number in range(BURSTS)]


def burst(
    known: SharedStats,
    trials: SharedTrials,
    profile: Sequence[tuple[int, float]],
    num_requests: int,
    number: int,
    speculates: bool,
) -> float:
    """Tokens a second of requests that come together, to the end of the last."""
    limits = PolicyLimits(Policy(4), most=8)

    def num_running() -> int:
        return sum(client.plan.arrives <= world.clock.now and not client.over for client in world.clients)

    def new_controller() -> Controller:
        return Controller(limits, known, trials, lambda: 1e3, num_running)

    policy, controller = (Policy(4), new_controller) if speculates else (Policy(0), None)
    world = crowd_of(policy, controller, num_requests, number)
    run_crowd(world, profile)
    return num_requests * CROWD_TOKENS / world.clock.now


def run_crowd(world: World, profile: Sequence[tuple[int, float]]) -> None:
    """To the end of the last request, with steps that cost by their rows."""
    costs, clock = StepTime(profile), world.clock
    world.target.seconds = lambda rows: 1e-3 * costs.at(rows)
    world.draft.seconds = lambda rows: 1e-3 * (PASS_MS + ROW_MS * rows)
    world.target.engine.scheduler.goodput = Goodput([(rows, round(1e3 * ms)) for rows, ms in profile])
    drafts_clock = SimpleNamespace(perf_counter_ns=lambda: round(1e9 * world.draft.monotonic()), monotonic=clock.time)
    with patch.object(draft_engine, "time", drafts_clock):
        for client in world.clients:
            clock.at(client.plan.arrives, partial(client.start, None))
        world._until(lambda: all(client.over for client in world.clients), 600.0)


def crowd_of(
    policy: Policy,
    new_controller: Callable[[], Controller] | None,
    num_requests: int,
    number: int,
    num_tokens: int = CROWD_TOKENS,
    is_foreign: bool = False,
) -> World:
    """Coupled requests; about three quarters of the drafted tokens are accepted, or, of a foreign draft, all have an id
    that the target does not know."""
    target = Table.random(number, 40, 2.0)
    draft = target.near(number + 1, 0.45, num_more_ids=int(is_foreign))
    draft.logits[:, target.vocab_size :] = 100.0
    sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    plans = [
        Plan(
            request=Open(0, prompt_of(index), sampling, seed=index, acceptance=AcceptanceRule.COUPLED),
            policy=policy,
            arrives=ARRIVALS_S * index,
            think_s=0.0,
            stretch=Stretch(),
            new_controller=new_controller,
        )
        for index in range(num_requests)
    ]
    setting = Setting(
        replay=f"burst {number}",
        target=target,
        draft=draft,
        plans=tuple(plans),
        weather=Weather(WAY_S),
        climate=Climate(0.0, 0.0),
        target_blocks=4096,
        draft_blocks=4096,
        exact=False,
        simple=False,
        max_rows=512,
    )
    with patch("random.Random", Steady):
        return World(setting, number)


def prompt_of(index: int) -> tuple[int, ...]:
    return tuple((7 * index + 3 * position) % 40 for position in range(PROMPT_LEN))


@pytest.mark.parametrize(
    ("profile", "num_requests", "least"), [("fast", 1, 2.0), ("slow", 1, 2.0), ("fast", 16, 1.05), ("slow", 16, 0.94)]
)
def test_auto_is_not_slower_than_plain_decoding(profile: str, num_requests: int, least: float) -> None:
    """Where nothing is to be gained (16 requests in slow steps) the first ones pay to find that out, and a burst ends
    with its least lucky stream while plain streams end together: hence not quite 1."""
    plain = bursts(PROFILES[profile], num_requests, speculates=False)
    auto = bursts(PROFILES[profile], num_requests, speculates=True)
    ratios = [fast / slow for fast, slow in zip(auto, plain, strict=True)]
    print(profile, num_requests, [f"{ratio:.3f}" for ratio in ratios])
    assert min(ratios) > 0.87 and sum(ratios) / len(ratios) > least


LEARNING = 64  # tokens that do not count


def foreign_pace(policy: Policy, num_tokens: int, *, num_requests: int = 1, chooses: bool = False) -> list[float]:
    """Milliseconds a token behind the first ones, of requests one after another, beside a foreign draft."""
    profile, known, trials = PROFILES["fast"], SharedStats(VerifyCosts()), SharedTrials()
    found = []
    for number in range(num_requests):
        controller = partial(Controller, PolicyLimits(Policy(4), most=8), known, trials, lambda: 1e3)
        world = crowd_of(policy, controller if chooses else None, 1, number, num_tokens, is_foreign=True)
        (client,) = world.clients
        learned_at: list[float] = []

        def note(now: float, client: Client = client, learned_at: list[float] = learned_at) -> None:
            if len(client.output) >= LEARNING and not learned_at:
                learned_at.append(now)

        client.on_tokens = note
        run_crowd(world, profile)
        assert client.tally.num_draft_tokens == 0
        found.append(1e3 * (world.clock.now - learned_at[0]) / (num_tokens - LEARNING))
    return found


@pytest.mark.parametrize("policy", [SEQUENTIAL, CHAINS, FLAT], ids=lambda policy: policy.mode)
def test_a_foreign_draft_costs_a_round_its_way_and_no_patience(policy: Policy) -> None:
    """Where each id that is drafted is none of the target's: 500 ms would be waited for a chain."""
    (plain,), (beside,) = foreign_pace(Policy(0), 96), foreign_pace(policy, 96)
    print(plain, beside)
    assert beside < plain + 1e3 * (8 * WAY_S) + 5 * (PASS_MS + ROW_MS)


def test_a_foreign_draft_is_left_soon() -> None:
    (plain,) = foreign_pace(Policy(0), 256)
    shares = [plain / auto for auto in foreign_pace(Policy(4), 256, num_requests=3, chooses=True)]
    print(shares)
    assert min(shares) > 0.95
