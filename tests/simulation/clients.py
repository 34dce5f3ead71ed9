"""A client of the gateway: it opens a request, reads at its own pace, and may go away."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from simulation.checks import Watch, require
from simulation.clock import Clock
from simulation.network import Door, Peer, Stretch

from outrider.gateway.speculation.core import SpeculationCore
from outrider.gateway.speculation.loop import SpeculationDriver
from outrider.planner.policy import Chooser, Policy, Round, SpeculationTally
from outrider.rpc.messages import Failure, Open
from outrider.rpc.sampling_params import FinishReason, TokenOrigin


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
    new_chooser: Callable[[], Chooser] | None = None


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
    _reading: bool = False

    def start(self, parent: Client | None) -> None:
        """Opens the request, as soon as there is a target: a new one would be refused without."""
        if self.verifier.stream is None:
            self.clock.call_later(0.01, lambda: self.start(parent))
            return
        plan = self.plan
        chooser = None if plan.new_chooser is None else plan.new_chooser()
        core = SpeculationCore(plan.request, plan.policy, plan.examines_text, chooser)
        self.watch.gateway, self.watch.seen = core.committed, list(core.committed)
        fork_of = parent.driver if parent is not None and not parent.over else None
        doors = [Door(peer, self.watch, plan.stretch) for peer in (self.drafter, self.verifier)]
        self.driver = SpeculationDriver(*doors, core, self.clock, fork_of, lambda reason: None)  # type: ignore[arg-type]
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
