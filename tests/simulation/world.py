"""A world: two services, a network and some clients, all drawn from one seed; it runs until everything has ended."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from unittest.mock import patch

from simulation.checks import Violation, Watch, require
from simulation.clients import Client, Plan
from simulation.clock import Clock
from simulation.faults import Climate, Faults
from simulation.honesty import honesty_of
from simulation.hosts import DeviceDraftHost, DraftHost, TargetHost
from simulation.network import Peer, Weather
from simulation.reference import plain_outputs
from simulation.tables import Table

from outrider.gateway.speculation import loop

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
        self.num_rounds += other.num_rounds
        self.num_drafted += other.num_drafted
        self.num_accepted += other.num_accepted
        self.num_failed += other.num_failed
        self.virtual_s += other.virtual_s
        self.outputs += other.outputs
        self.faults += other.faults
        self.notes += other.notes


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
            with patch.object(loop, "time", self.clock), patch.object(loop, "DRAFT_RETRY_S", 0.03):
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
            self.clock.at(client.plan.arrives, lambda client=client, parent=parent: client.start(parent))
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
