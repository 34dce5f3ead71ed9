"""Services made of costs against the production engines: the same loop, texts and costs, and models that compute
nothing. What a crowd of the planner says of rounds and times, these say, too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from support.prefix_models import PrefixProposer, PrefixVerifier, draft_engine, new_cache, target_engine

from outrider.cli.virtual_loop import new_crowd
from outrider.gateway.speculation.core import SpeculationCore
from outrider.gateway.speculation.loop import SpeculationDriver
from outrider.planner.crowd import Machines, VirtualFleet
from outrider.planner.estimates import StepTime
from outrider.planner.policy import Policy
from outrider.planner.simulate import Clock, Device
from outrider.planner.virtual_services import MAX_ROWS, RIGHT, DraftQuality, Text
from outrider.rpc.messages import Open
from outrider.rpc.servicer import Deliver
from outrider.target_service.goodput import Goodput
from outrider.target_service.sequence import TargetLimits

STEPS = ((1, 19.5e3), (8, 24.3e3), (16, 28.8e3), (32, 38.5e3), (64, 81.3e3), (128, 163.2e3), (MAX_ROWS, 540e3))
PASSES = ((1, 1e3), (MAX_ROWS, 1e3))  # branches take rows in passes that run anyway
WAY_S = 0.0005
TOKENS, NUM_BLOCKS, MAX_LEN, VOCAB = 96, 4096, 4096, 256
FIRST_PROMPT = 100  # a prompt's token names its stream; those that may be drafted are below
GUESSES = 6
SEQUENTIAL, CHAINS = Policy(4), Policy(4, windows_ahead=1)
BRANCHES = Policy(4, windows_ahead=1, max_branches=12)


class EngineService:
    """A production engine on a virtual device, as a crowd has a service: `new_engine` is told whom to tell of the rows
    of each pass, and the clock, which within a step that has run its pass says that this is over."""

    def __init__(self, clock: Clock, costs: Sequence[tuple[int, float]], new_engine: Callable[..., Any]) -> None:
        self._clock, self._costs = clock, StepTime(costs)
        self._outbox: list[tuple[Callable[[Any, float], None], Any]] = []
        self._rows = self.num_rows = self.num_steps = 0
        self._prompts: dict[int, int] = {}  # by stream
        self.texts: dict[int, Text] = {}  # by prompt
        self.device = Device(clock, self._step)
        self.engine = new_engine(self._on_pass, lambda: clock.now + self._took())

    def deliver(self, number: int, messages: Sequence[Any], reply: Any, text: Text | None = None) -> None:
        """Messages of a stream arrive."""
        prompt = self._prompts.setdefault(number, FIRST_PROMPT + len(self._prompts))
        if text is not None:
            self.texts[prompt] = text
        named = [replace(one, prompt_ids=(prompt,)) if isinstance(one, Open) else one for one in messages]
        sink: Callable[[Any], None] = lambda event: self._outbox.append((reply, event))  # noqa: E731
        delivered = Deliver(number, named, sink, self._clock.now)
        self.device.put(lambda: self.engine.handle(delivered))

    def _on_pass(self, rows: int) -> None:
        self._rows += rows

    def _took(self) -> float:
        return 1e-6 * self._costs.at(self._rows) if self._rows else 0.0

    def _step(self) -> tuple[float, float | None]:
        self._rows = 0
        wait, took = self.engine.step(self._clock.now), self._took()
        self.num_steps, self.num_rows = self.num_steps + bool(self._rows), self.num_rows + self._rows
        outbox, self._outbox, self._rows = self._outbox, [], 0
        for reply, event in outbox:
            reply(event, took)
        return took, wait


def crowd_of_engines(machines: Machines) -> VirtualFleet:
    """A crowd over production engines."""
    crowd: Any = new_crowd(machines)
    crowd.targets = [EngineService(crowd.clock, STEPS, new_target)]
    crowd.drafts = [EngineService(crowd.clock, PASSES, lambda *how: new_draft(crowd, *how))]
    return crowd  # type: ignore[no-any-return]


def new_target(on_pass: Callable[[int], None], clock: Callable[[], float]) -> Any:
    limits = TargetLimits(VOCAB, MAX_LEN, (), NUM_BLOCKS)
    verifier = PrefixVerifier(lambda prefix: RIGHT)
    engine = target_engine(limits, verifier, on_pass=on_pass, clock=clock, max_rows=MAX_ROWS)
    engine.scheduler.goodput = Goodput([(rows, round(step_us)) for rows, step_us in STEPS])
    return engine


def new_draft(crowd: Any, on_pass: Callable[[int], None], clock: object) -> Any:
    def ranked(prefix: Sequence[int]) -> tuple[int, ...]:
        """One of the guesses is right behind what is right so far, which one the text says."""
        rank = crowd.drafts[0].texts[prefix[0]].rank(len(prefix))
        right = not any(prefix[1:])
        return tuple(RIGHT if right and place == rank else 1 + place for place in range(GUESSES))

    return draft_engine(PrefixProposer(ranked, VOCAB, MAX_LEN, on_pass), new_cache(NUM_BLOCKS), (), max_rows=MAX_ROWS)


def decode(crowd: VirtualFleet, policy: Policy, num_streams: int) -> tuple[int, float]:
    """Rounds, and milliseconds a token."""

    def new_driver(drafter: Any, verifier: Any, request: Open, clock: Any, running: object) -> SpeculationDriver:
        return SpeculationDriver(drafter, verifier, SpeculationCore(request, policy), clock, None, lambda reason: None)

    crowd.add(new_driver, num_streams, TOKENS, spread_s=0.002 * num_streams)
    crowd.run(60.0)
    assert all(record.over for record in crowd.records)
    return sum(record.num_rounds for record in crowd.records), crowd.ms_per_token()


CASES = ((Policy(0), 16), (SEQUENTIAL, 1), (SEQUENTIAL, 16), (CHAINS, 4), (BRANCHES, 1), (BRANCHES, 4), (BRANCHES, 16))


@pytest.mark.parametrize(("policy", "num_streams"), CASES)
def test_counts_are_the_engines(policy: Policy, num_streams: int) -> None:
    machines = Machines(STEPS, PASSES, DraftQuality(0.72), WAY_S)
    rounds, ms = decode(new_crowd(machines), policy, num_streams)
    engine_rounds, engine_ms = decode(crowd_of_engines(machines), policy, num_streams)
    print(
        f"{num_streams} of {policy.mode}: {rounds} and {engine_rounds} rounds, {ms:.2f} and {engine_ms:.2f} ms a token"
    )
    assert rounds == pytest.approx(engine_rounds, rel=0.04)  # what a step holds differs, and with it what is cut
    assert ms == pytest.approx(engine_ms, rel=0.05)
