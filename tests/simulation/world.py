"""A world: two services, a network, clients and faults, all drawn from one seed; it runs until everything has ended.
Times and kinds of faults are drawn before it starts: none can depend on a token."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast
from unittest.mock import patch

from simulation.checks import Violation, Watch, require
from simulation.hosts import DeviceDraftHost, DraftHost, EngineHost, TargetHost
from simulation.network import Door, Peer, Stretch, Weather
from simulation.tables import MAX_LEN, Table, TableRunner, honesty_of

from outrider.gateway.speculation import loop
from outrider.gateway.speculation.core import SpeculationCore
from outrider.gateway.speculation.loop import SpeculationDriver
from outrider.planner.policy import Policy, PolicyController, Round, SpeculationTally
from outrider.planner.simulate import Clock
from outrider.rpc.messages import Commit, Credit, Failure, Open, TargetEvent
from outrider.rpc.servicer import Deliver
from outrider.rpc.words.sampling_params import FinishReason, TokenOrigin
from outrider.target_service.engine import TargetEngine
from outrider.target_service.sequence import TargetLimits


@dataclass(frozen=True, slots=True)
class Plan:
    """One request as a world plans it."""

    request: Open
    policy: Policy
    arrives: float
    think_s: float  # the longest time between two reads
    stretch: Stretch
    examines_text: bool = False
    leaves: float | None = None  # when the client goes away
    min_read: int = 0  # not before it has read so many tokens
    fork_of: int | None = None  # index of the request whose prompt it shares
    may_fail: bool = False
    new_controller: Callable[[], PolicyController] | None = None


@dataclass(slots=True, eq=False)
class Client:
    """Runs the production driver of one request."""

    plan: Plan
    watch: Watch
    clock: Clock
    dice: random.Random
    verifier: Peer
    drafter: Peer
    driver: SpeculationDriver | None = None
    output: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    failure: Failure | None = None
    over: bool = False
    tally: SpeculationTally = field(default_factory=SpeculationTally)
    on_tokens: Callable[[float], None] = lambda now: None
    _reading: bool = False

    def start(self, parent: Client | None) -> None:
        """Opens the request, as soon as there is a target: a new one would be refused without."""
        if self.verifier.stream is None:
            self.clock.call_later(0.01, lambda: self.start(parent))
            return
        plan = self.plan
        controller = None if plan.new_controller is None else plan.new_controller()
        core = SpeculationCore(plan.request, plan.policy, plan.examines_text, controller)
        self.watch.gateway, self.watch.seen = core.committed, list(core.committed)
        fork_of = parent.driver if parent is not None and not parent.over else None
        draft, target = (cast(Any, Door(peer, self.watch, plan.stretch)) for peer in (self.drafter, self.verifier))
        self.driver = SpeculationDriver(draft, target, core, cast(Any, self.clock), fork_of, lambda reason: None)
        self.driver.start()
        self.watch.after_event()

    def notice(self) -> None:
        """Reads what has come, after some thought."""
        if self._reading or self.over or self.driver is None or self.driver.items.empty():
            return
        self._reading = True
        self.clock.call_later(self.dice.uniform(0, self.plan.think_s), self._read)

    def leave(self) -> None:
        """Goes away, whatever is under way."""
        if self.over:
            return
        if len(self.output) < self.plan.min_read or self.driver is None:
            self.clock.call_later(0.01, self.leave)
            return
        self._end()

    def _read(self) -> None:
        self._reading = False
        if self.over or self.driver is None:
            return
        try:
            item = self.driver.items.get_nowait()
        except asyncio.QueueEmpty:
            return
        if isinstance(item, Failure):
            self.failure = item
            require(self.plan.may_fail, f"{self.watch.name} failed: {item.message}")
            self._end()
        elif isinstance(item, Round):
            self._take(item)

    def _take(self, closed: Round) -> None:
        commit, watch = closed.commit, self.watch
        require(commit.position == watch.start + len(self.output), f"{watch.name}: the client misses tokens")
        require(closed.index == self.tally.num_rounds, f"{watch.name}: the client misses a round")
        self.tally.add(closed)
        watch.num_accepted += sum(origin == TokenOrigin.ACCEPTED for origin in commit.origins)
        self.output += commit.ids
        self.on_tokens(self.clock.now)
        watch.num_read = len(self.output)
        if commit.finish_reason is not None:
            self.finish_reason = commit.finish_reason
            self._check_whole()
            self._end()
            return
        assert self.driver is not None
        self.driver.read(commit.position + len(commit.ids))
        watch.after_event()

    def _check_whole(self) -> None:
        """Usage equals tokens, and nothing is missing at the end."""
        watch, sampling = self.watch, self.plan.request.sampling
        require(self.output == watch.seen[watch.start :], f"{watch.name}: the client's tokens are not the gateway's")
        room = sampling.max_tokens - len(self.plan.request.output_ids)
        require(len(self.output) <= room, f"{watch.name}: more than max_tokens")
        own = len(self.output) - watch.num_accepted
        require(0 <= own <= self.tally.num_rounds, f"{watch.name}: {own} own tokens in {self.tally.num_rounds} rounds")
        require(self.tally.num_accepted_tokens >= watch.num_accepted, f"{watch.name}: the tally misses tokens")
        if watch.reference is not None:
            require(self.output == list(watch.reference), f"{watch.name}: ended early or late")

    def _end(self) -> None:
        self.over = True
        if self.driver is not None:
            self.driver.close()


@dataclass(frozen=True, slots=True)
class Climate:
    """How often things go wrong, while they do."""

    every_s: float  # mean time between two faults; 0: none
    until: float  # no fault after it, so that everything can end
    steps_fail: bool = False  # device errors end requests


class Faults:
    """Brings faults over both services."""

    def __init__(
        self, clock: Clock, dice: random.Random, climate: Climate, targets: tuple[TargetHost, Peer],
        drafts: tuple[DraftHost, Peer],
    ) -> None:  # fmt: skip
        self.counts: Counter[str] = Counter()
        self._clock, self._dice = clock, dice
        kinds: list[tuple[str, Callable[..., None]]] = []
        for name, (host, peer) in (("target", targets), ("draft", drafts)):
            kinds += [
                (f"{name} stream broken", lambda peer=peer: peer.break_stream()),
                (f"{name} crashed", lambda host=host, peer=peer: self._crash(host, peer)),
                (f"{name} stalled", lambda host=host: host.stall(dice.uniform(0, 0.05))),
            ]
            if climate.steps_fail:
                kinds.append((f"{name} step failed", lambda host=host: self._fail_step(host)))
        when = dice.expovariate(1 / climate.every_s) if climate.every_s else climate.until
        while when < climate.until:
            name, bring = dice.choice(kinds)
            clock.at(when, partial(self._happen, name, bring))
            when += dice.expovariate(1 / climate.every_s)

    def _happen(self, name: str, bring: Callable[[], None]) -> None:
        self.counts[name] += 1
        bring()

    def _crash(self, host: EngineHost, peer: Peer) -> None:
        if host.up:
            host.crash(self._dice.uniform(0, 0.05))
            peer.break_stream(host_is_down=True)

    @staticmethod
    def _fail_step(host: EngineHost) -> None:
        host.runner.fails_next = True


def plain_outputs(table: Table, requests: Sequence[Open]) -> list[list[int]]:
    """What the target alone gives to each request."""
    outputs: list[list[int]] = [[] for _ in requests]
    num_blocks = 8 * len(requests)
    limits = TargetLimits(table.vocab_size, MAX_LEN, (0,), num_blocks, max_sequences=len(requests))
    engine = TargetEngine(TableRunner(table, num_blocks), limits, clock=lambda: 0.0)  # type: ignore[arg-type]

    def sink(event: TargetEvent) -> None:
        assert isinstance(event, Commit), event
        outputs[event.sequence_id].extend(event.ids)

    for index, request in enumerate(requests):
        opened = replace(request, sequence_id=index, fork_of=None)
        engine.handle(Deliver(0, (opened, Credit(index, MAX_LEN, 0)), sink))
    while engine.step(0.0) is not None:
        pass
    return outputs


MAX_VIRTUAL_S = 60.0  # by then everything has ended
SETTLE_S = 1.0  # for the last closes


@dataclass(frozen=True, slots=True)
class Setting:
    """Everything that a seed decides before the first event."""

    replay: str  # the command line that runs it again
    target: Table
    draft: Table
    plans: tuple[Plan, ...]
    weather: Weather
    climate: Climate
    target_blocks: int
    draft_blocks: int
    exact: bool  # the output is a function of the seed
    simple: bool  # no processors but the temperature, which is 0 or 1
    max_rows: int = 24  # of a step
    several_at_once: bool = False  # the draft draws several tokens before it looks at what has arrived


@dataclass(slots=True)
class Result:
    """What a world did."""

    num_rounds: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_failed: int = 0
    virtual_s: float = 0.0
    outputs: list[tuple[int, ...]] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)  # what the protocol did about them

    def add(self, other: Result) -> None:
        """Sums up."""
        for name in self.__dataclass_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class World:
    """Runs one setting."""

    def __init__(self, setting: Setting, seed: int) -> None:
        self.setting = setting
        self.clock = Clock()
        self.dice = random.Random(seed)
        step_s = self.dice.choice((0.001, 0.004, 0.01))
        rows = setting.max_rows
        self.target = TargetHost(self.clock, self.dice, setting.target, setting.target_blocks, step_s, rows)
        draft = DeviceDraftHost if setting.several_at_once else DraftHost
        self.draft = draft(self.clock, self.dice, setting.draft, setting.draft_blocks, step_s / 4, rows)
        self.target_peer, self.draft_peer = (
            Peer(self.clock, self.dice, setting.weather, host) for host in (self.target, self.draft)
        )
        ends = (self.target, self.target_peer), (self.draft, self.draft_peer)
        self.faults = Faults(self.clock, self.dice, setting.climate, *ends)
        references = plain_outputs(setting.target, [plan.request for plan in setting.plans]) if setting.exact else None
        self.clients = [
            self._client(index, plan, None if references is None else references[index])
            for index, plan in enumerate(setting.plans)
        ]

    def run(self) -> Result:
        """To the end. Raises Violation, with the line that replays it."""
        try:
            with patch.object(loop, "DRAFT_RETRY_S", 0.03):
                self._run()
        except (Violation, Exception) as error:
            what = str(error) if isinstance(error, Violation) else repr(error)
            raise Violation(f"at {self.clock.now:.6f} s: {what}\nreplay: {self.setting.replay}") from error
        return self._result()

    def _client(self, index: int, plan: Plan, plain: list[int] | None) -> Client:
        policy = plan.policy
        window = max((1 + policy.windows_ahead) * (policy.num_draft_tokens + 1), policy.plain_ahead)
        watch = Watch(
            name=f"request {index}",
            request=plan.request,
            ahead=window if plan.examines_text else policy.max_unread,
            draft_table=self.setting.draft,
            is_honest=honesty_of(self.setting.draft, plan.request) if self.setting.simple else None,
            reference=plain,
        )
        return Client(plan, watch, self.clock, self.dice, self.target_peer, self.draft_peer)

    def _run(self) -> None:
        for client in self.clients:
            parent = None if client.plan.fork_of is None else self.clients[client.plan.fork_of]
            self.clock.at(client.plan.arrives, partial(client.start, parent))
            if client.plan.leaves is not None:
                self.clock.at(client.plan.leaves, client.leave)
        self._until(lambda: all(client.over for client in self.clients), MAX_VIRTUAL_S)
        require(all(client.over for client in self.clients), "not everything ended")
        for peer in (self.target_peer, self.draft_peer):
            require(peer.stream is None or not peer.stream.links, "a link is left open at the gateway")
        end = self.clock.now + SETTLE_S
        self._until(lambda: False, end)
        self.target.check_empty()
        self.draft.check_empty()

    def _until(self, done: Callable[[], bool], deadline: float) -> None:
        present = [client for client in self.clients if not client.over]
        while not done() and self.clock.now < deadline and self.clock.step():
            for client in present:
                client.notice()

    def _result(self) -> Result:
        notes = sum((client.watch.notes for client in self.clients), self.target.notes + self.draft.notes)
        result = Result(virtual_s=self.clock.now, faults=self.faults.counts, notes=notes)
        for client in self.clients:
            result.num_rounds += client.tally.num_rounds
            result.num_drafted += client.tally.num_draft_tokens
            result.num_accepted += client.tally.num_accepted_tokens
            result.num_failed += client.failure is not None
            result.outputs.append(tuple(client.output))
        return result
