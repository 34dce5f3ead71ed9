"""Many streams over several targets and drafts in virtual time: what a token takes, and how busy every device is.

The loop between them is the gateway's own: the caller hands in how a stream's driver is made of a drafter, a verifier
and an Open (`NewDriver`), and the target's own way to choose what a step verifies (`NewStepPolicy`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, Protocol

from outrider.planner.estimates import StepTime
from outrider.planner.policy import Round
from outrider.planner.simulate import Clock, OneWayLink
from outrider.planner.virtual_services import DraftQuality, StepPolicy, Text, VirtualDraft, VirtualTarget
from outrider.rpc.messages import Close, DraftInfo, ModelInfo, Open, TargetInfo, is_last
from outrider.rpc.words.sampling_params import AcceptanceRule, SamplingParams

MODEL = ModelInfo("virtual", "", vocab_size=2, max_model_len=1 << 30, batch_invariant=True)
ENDLESS = 1 << 20  # tokens of a stream that nobody ends


@dataclass(frozen=True, slots=True)
class Machines:
    """What runs, and what it takes. The costs are microseconds by rows."""

    target_costs: Sequence[tuple[int, float]]
    draft_costs: Sequence[tuple[int, float]]
    quality: DraftQuality
    way_s: float  # of a message, each way between a gateway and a service
    num_targets: int = 1
    num_drafts: int = 1
    event_s: float = 0.0  # that the gateway's one core computes for each event of a service


class Readable(Protocol):
    """A queue of what a driver has for its client."""

    def empty(self) -> bool:
        """Whether there is nothing."""

    def get_nowait(self) -> Any:
        """A Round, or what ended the stream."""


class Driver(Protocol):
    """The gateway's, of one stream."""

    @property
    def items(self) -> Readable:
        """What the client gets."""

    def start(self) -> None:
        """Opens both sides."""

    def read(self, position: int) -> None:
        """The client has every token below `position`."""


# of the virtual drafter and verifier, the Open, the clock, and how many streams the gateway runs
NewDriver = Callable[["Door", "Door", Open, Clock, Callable[[], int]], Driver]
NewStepPolicy = Callable[[Sequence[tuple[int, float]]], StepPolicy]  # of the target's costs


@dataclass(slots=True)
class StreamRecord:
    """What one stream did after its first round, which the prompt is part of."""

    num_tokens: int = 0
    num_rounds: int = 0
    first_at: float = 0.0
    last_at: float = 0.0
    over: bool = False
    modes: Counter[str] = field(default_factory=Counter)

    def add(self, closed: Round) -> None:
        """Counts a round."""
        self.over = closed.commit.finish_reason is not None
        if not closed.index:
            self.first_at = self.last_at = closed.ended
            return
        self.num_tokens += len(closed.commit.ids)
        self.num_rounds += 1
        self.last_at = closed.ended
        self.modes[closed.mode] += 1

    def forget(self, now: float) -> None:
        """Counts from now on."""
        self.num_tokens = self.num_rounds = 0
        self.first_at = self.last_at = now
        self.modes.clear()


@dataclass(slots=True)
class VirtualGateway:
    """What the streams of one gateway share."""

    new_driver: NewDriver
    num_running: int


class VirtualLink:
    """One sequence at a service, as the gateway sees it. `deliver` takes messages to the service."""

    model = MODEL

    def __init__(self, fleet: VirtualFleet, deliver: Callable[..., None], on_event: Callable[[Any], None]) -> None:
        self._there, self._back = (OneWayLink(fleet.clock, lambda: fleet.machines.way_s) for _ in range(2))
        self._deliver, self._on_event, self._compute = deliver, on_event, fleet.compute
        self._alive = True

    def send(self, *messages: Any) -> None:
        """In one frame."""
        if self._alive:
            self._there.send(lambda: self._deliver(messages))

    def close(self) -> None:
        """Ends the sequence; no event follows."""
        self.send(Close(0))
        self._alive = False

    def reply(self, event: Any, after: float) -> None:
        """From the service, once the step that made it is over."""
        self._back.send(lambda: self._compute(lambda: self._arrive(event)), after)

    def _arrive(self, event: Any) -> None:
        if self._alive:
            self._alive = not is_last(event)
            self._on_event(event)


@dataclass(slots=True, eq=False)
class Door:
    """A Drafter, or a Verifier, of one stream. `deliver` takes a sequence's number, messages and the way back."""

    crowd: VirtualFleet
    info: DraftInfo | TargetInfo
    deliver: Callable[..., None]
    on_delivered: Callable[[], None] = lambda: None

    @property
    def round_trip_us(self) -> float:
        """Between gateway and service."""
        return 2e6 * self.crowd.machines.way_s

    def open(self, request: Open, on_event: Callable[[Any], None], *_: Any) -> VirtualLink:
        """Starts a sequence; forks and refusals do not occur here."""
        self.crowd.num_opened += 1
        number = self.crowd.num_opened

        def arrive(event: Any) -> None:
            on_event(event)
            self.on_delivered()

        link = VirtualLink(self.crowd, lambda sent: self.deliver(number, sent, link.reply), arrive)
        link.send(request)
        return link


class VirtualFleet:
    """The machines, and streams that are spread evenly over them."""

    def __init__(self, machines: Machines, new_step_policy: NewStepPolicy) -> None:
        self.machines, self.clock = machines, Clock()
        self.num_opened, self._free_at = 0, 0.0  # when the gateway's core has computed all that it has
        self.targets = [
            VirtualTarget(self.clock, StepTime(machines.target_costs), new_step_policy(machines.target_costs))
            for _ in range(machines.num_targets)
        ]
        self.drafts = [
            VirtualDraft(self.clock, StepTime(machines.draft_costs), machines.quality)
            for _ in range(machines.num_drafts)
        ]
        self.records: list[StreamRecord] = []

    def add(self, new_driver: NewDriver, num_streams: int, max_tokens: int = ENDLESS, spread_s: float = 0.0) -> None:
        """Streams of one gateway, which arrive one after the other within a time."""
        gateway = VirtualGateway(new_driver, num_streams)
        for index in range(num_streams):
            start = self._starter(gateway, len(self.records), max_tokens)
            self.clock.at(self.clock.now + spread_s * index / num_streams, start)

    def compute(self, event: Callable[[], None]) -> None:
        """Has the gateway see to an event, once it has seen to those before."""
        if self.machines.event_s:
            self._free_at = max(self._free_at, self.clock.now) + self.machines.event_s
            self.clock.at(self._free_at, event)
        else:
            event()

    def run(self, seconds: float) -> None:
        """So long, or until every stream has ended."""
        end = self.clock.now + seconds
        while self.clock.now < end and not all(record.over for record in self.records):
            self.clock.run(min(end, self.clock.now + seconds / 64))

    def settle(self) -> None:
        """What was until now does not count: the controllers have learned, the streams have spread."""
        for record in self.records:
            record.forget(self.clock.now)
        services: list[VirtualTarget | VirtualDraft] = [*self.targets, *self.drafts]
        for service in services:
            service.device.busy_s, service.num_rows, service.num_steps = 0.0, 0, 0

    def ms_per_token(self) -> float:
        """Of a stream, since `settle`, or since its first round; infinite where no token came."""
        tokens = sum(record.num_tokens for record in self.records)
        ended = sum(record.last_at - record.first_at for record in self.records)
        return 1e3 * ended / tokens if tokens else inf

    def _starter(self, gateway: VirtualGateway, index: int, max_tokens: int) -> Callable[[], None]:
        """A stream, which begins when it is called."""
        target, draft = self.targets[index % len(self.targets)], self.drafts[index % len(self.drafts)]
        record, text = StreamRecord(), Text(self.machines.quality, index)
        self.records.append(record)
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        request = Open(0, (0,), sampling, seed=index, acceptance=AcceptanceRule.COUPLED)

        def drain() -> None:
            while not driver.items.empty():
                item = driver.items.get_nowait()
                if not isinstance(item, Round):
                    raise RuntimeError(f"a stream ended early: {item}")
                record.add(item)
                gateway.num_running -= record.over
                driver.read(item.commit.position + len(item.commit.ids))

        verifier = Door(self, TargetInfo(MODEL, 128), target.deliver, drain)
        drafter = Door(self, DraftInfo(MODEL, ()), lambda number, sent, reply: draft.deliver(number, sent, reply, text))
        driver = gateway.new_driver(drafter, verifier, request, self.clock, lambda: max(1, gateway.num_running))
        return driver.start
