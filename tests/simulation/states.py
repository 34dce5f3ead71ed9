"""Explicit-state exploration: every order in which gateway, draft and target may act on one scenario, with every place
for a few faults, breadth first, so that the trace of what goes wrong is among the shortest.

A state is what the machines hold and what is on its way between them. A machine's states have numbers; what an event
makes of one is computed once, by the production code, and looked up from then on. Streams keep the order of their
frames until they break, and are independent of one another. Faults: a stream breaks, which either end notices in its
own time, with what was on its way lost from any point on; a service dies and starts anew; a piece is lost, doubled or
late. Time is no number here: what waits for it may happen whenever it waits."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from simulation.checks import Violation
from simulation.machines import (
    DRAFT,
    SIDES,
    TARGET,
    DraftMachine,
    Event,
    GatewayMachine,
    LinkAt,
    Scenario,
    Sent,
    TargetMachine,
    Wire,
)

from outrider.rpc.messages import Close, Commit, Credit, DraftTokens, Open


class Machine(Protocol):
    """What a machine has to offer: the same events always bring it to the same state."""

    def take(self, event: Event) -> list[Sent]:
        """Applies an event and says what is sent for it. Raises Violation."""

    def events(self) -> list[Event]:
        """What may happen by itself."""

    def snapshot(self) -> Hashable:
        """All that its later answers depend on."""

    @property
    def is_idle(self) -> bool:
        """Whether it has nothing to do, and holds nothing."""

    @property
    def target_link(self) -> LinkAt:
        """Where it is open at the target, for those that fork from it."""


MOST_ALIVE = 4096  # machines that are kept as they are, for the next event; others take theirs again from the start


class States:
    """The states of one machine by number; 0 is the first. A state is entered again by the events that led there."""

    def __init__(self, new: Callable[[], Machine]) -> None:
        self._new = new
        self._numbers: dict[Hashable, int] = {}
        self._origins: list[tuple[int, Event] | None] = []
        self._after: dict[tuple[int, Event], tuple[int, tuple[Sent, ...]]] = {}
        self._alive: OrderedDict[int, Machine] = OrderedDict()
        self._merged: list[tuple[int, tuple[int, Event]]] = []  # states, and other ways to them
        self.events: list[list[Event]] = []
        self.is_idle: list[bool] = []
        self.target_link: list[LinkAt] = []
        self._number(new(), None)

    def __len__(self) -> int:
        return len(self.events)

    def after(self, state: int, event: Event) -> tuple[int, tuple[Sent, ...]]:
        """The state that an event leads to, and what is sent. Raises Violation."""
        known = self._after.get((state, event))
        if known is None:
            machine = self._alive.pop(state, None) or self._enter(state)
            sent = tuple(machine.take(event))
            known = self._after[state, event] = self._number(machine, (state, event)), sent
        return known

    def merged(self) -> Iterator[tuple[int, Event, bool]]:
        """Of states that were reached in several ways: whether an event does after another way what it does after the
        first."""
        events: dict[int, list[Event]] = {}
        for state, event in self._after:
            events.setdefault(state, []).append(event)
        for state, origin in self._merged:
            for event in events.get(state, ()):
                machine = self._enter(origin[0])
                machine.take(origin[1])
                sent = tuple(machine.take(event))
                yield state, event, (self._numbers.get(machine.snapshot()), sent) == self._after[state, event]

    def _enter(self, state: int) -> Machine:
        events: list[Event] = []
        while (origin := self._origins[state]) is not None:
            state, event = origin
            events.append(event)
        machine = self._new()
        for event in reversed(events):
            machine.take(event)
        return machine

    def _number(self, machine: Machine, origin: tuple[int, Event] | None) -> int:
        number = self._numbers.setdefault(machine.snapshot(), len(self._origins))
        if number == len(self._origins):
            self._origins.append(origin)
            self.events.append(machine.events())
            self.is_idle.append(machine.is_idle)
            self.target_link.append(machine.target_link)
        elif origin is not None and origin != self._origins[number]:
            self._merged.append((number, origin))
        self._alive[number] = machine
        if len(self._alive) > MOST_ALIVE:
            self._alive.popitem(last=False)
        return number


class Stream(NamedTuple):
    """A connection: what is on its way up to the service and down from it, by the numbers of frames."""

    side: str
    number: int
    up: tuple[int, ...] = ()
    down: tuple[int, ...] = ()
    late: tuple[int, ...] = ()  # single pieces that lost their place, on the way that pieces take
    is_whole: bool = True
    gateway_hears: bool = True
    service_hears: bool = True

    @property
    def pieces(self) -> tuple[int, ...]:
        """The frames of the way that pieces take: up to a target, down from a draft."""
        return self.up if self.side == TARGET else self.down

    def with_pieces(self, frames: tuple[int, ...]) -> Stream:
        """The same with others there."""
        return self._replace(up=frames) if self.side == TARGET else self._replace(down=frames)

    def unheard_by_gateway(self) -> Stream:
        """The gateway has left it: what is on its way there is lost."""
        late = self.late if self.side == TARGET else ()
        return self._replace(is_whole=False, gateway_hears=False, down=(), late=late)

    def unheard_by_service(self) -> Stream:
        """The same of the service."""
        late = self.late if self.side == DRAFT else ()
        return self._replace(is_whole=False, service_hears=False, up=(), late=late)

    def events(self) -> Iterator[Event]:
        """What it brings."""
        side, number = self.side, self.number
        if self.up and self.service_hears:
            yield Event("up", side, number, self.up[0])
        if self.down and self.gateway_hears:
            yield Event("down", side, number, self.down[0])
        for frame in dict.fromkeys(self.late):
            yield Event("late", side, number, frame)
        if not self.is_whole and self.service_hears:
            yield Event("detach", side, number)
        if not self.is_whole and self.gateway_hears:
            yield Event("lost", side, number)


PIECE_FAULTS = {"lose", "double", "delay"}
FAULTS = {"break", "crash", "die"} | PIECE_FAULTS
Streams = tuple[Stream, ...]  # in order


class Network:
    """The streams that are not forgotten, all of them together by number, as the states of a machine."""

    def __init__(self, wire: Wire, scenario: Scenario) -> None:
        self._wire, self._piece_faults, self._gateway_dies = wire, scenario.piece_faults, scenario.gateway_dies
        self._numbers: dict[Streams, int] = {}
        self._after: dict[tuple[int, Event | tuple[Sent, ...], bool], int] = {}
        self.streams: list[Streams] = []
        self.events: list[list[Event]] = []
        self.missing: list[list[str]] = []  # sides to which there is no stream that is whole
        self.faults: list[list[Event]] = []
        self.is_empty: list[bool] = []
        self._number(tuple(Stream(side, 1) for side in sorted(SIDES)))

    def after(self, network: int, event: Event) -> int:
        """What an event does to the streams, before a machine is told of it."""
        known = self._after.get((network, event, False))
        if known is None:
            known = self._after[network, event, False] = self._number(self._changed(self.streams[network], event))
        return known

    def sent(self, network: int, sent: tuple[Sent, ...], up: bool) -> int:
        """With what was sent: nothing on a broken stream."""
        known = self._after.get((network, sent, up))
        if known is None:
            streams = self.streams[network]
            for one in sent:
                streams = tuple(_with_frame(stream, one, up) for stream in streams)
            known = self._after[network, sent, up] = self._number(streams)
        return known

    def _number(self, streams: Streams) -> int:
        streams = tuple(stream for stream in streams if stream.gateway_hears or stream.service_hears)
        number = self._numbers.setdefault(streams, len(self.streams))
        if number == len(self.streams):
            self.streams.append(streams)
            self.events.append([event for stream in streams for event in stream.events()])
            whole = {stream.side for stream in streams if stream.is_whole}
            self.missing.append([side for side in SIDES if side not in whole])
            self.faults.append(list(self._faults_of(streams)))
            self.is_empty.append(not any(stream.up or stream.down for stream in streams))
        return number

    def _faults_of(self, streams: Streams) -> Iterator[Event]:
        for side in SIDES:
            yield Event("crash", side)
        if self._gateway_dies:
            yield Event("die")
        for stream in streams:
            if not stream.is_whole:
                continue
            yield Event("break", stream.side, stream.number)
            for index, frame in enumerate(stream.pieces if self._piece_faults else ()):
                for place in self._wire.pieces[frame]:
                    for kind in ("lose", "double", "delay"):
                        yield Event(kind, stream.side, stream.number, item=index, place=place)

    def _changed(self, streams: Streams, event: Event) -> Streams:
        if event.kind == "connect":
            return tuple(sorted((*streams, Stream(event.side, event.stream))))
        if event.kind == "die":
            return tuple(stream.unheard_by_gateway() for stream in streams)
        return tuple(
            self._changed_stream(stream, event)
            if stream.side == event.side and event.stream in (0, stream.number)
            else stream
            for stream in streams
        )

    def _changed_stream(self, stream: Stream, event: Event) -> Stream:
        match event.kind:
            case "up":
                return stream._replace(up=stream.up[1:])
            case "down":
                return stream._replace(down=stream.down[1:])
            case "late":
                place = stream.late.index(event.frame)
                return stream._replace(late=stream.late[:place] + stream.late[place + 1 :])
            case "detach" | "crash":
                return stream.unheard_by_service()
            case "lost":
                return stream.unheard_by_gateway()
            case "break":
                return stream._replace(is_whole=False)
        return self._disturbed(stream, event)

    def _disturbed(self, stream: Stream, event: Event) -> Stream:
        """One piece of a frame is lost, comes twice, or comes later."""
        frames = list(stream.pieces)
        messages = list(self._wire.frames[frames[event.item]])
        piece = messages[event.place]
        if event.kind != "double":
            del messages[event.place]
            frames[event.item : event.item + 1] = [self._wire.number(messages)] if messages else []
        if event.kind != "lose":
            stream = stream._replace(late=tuple(sorted((*stream.late, self._wire.number([piece])))))
        return stream.with_pieces(tuple(frames))


def _with_frame(stream: Stream, sent: Sent, up: bool) -> Stream:
    if (stream.side, stream.number) != (sent.side, sent.stream) or not stream.is_whole:
        return stream
    if up:
        return stream._replace(up=(*stream.up, sent.frame))
    return stream._replace(down=(*stream.down, sent.frame))


class State(NamedTuple):
    """Everything, by numbers: the state of each machine, the streams, and how many faults may still come."""

    gateways: tuple[int, ...]
    target: int
    draft: int
    network: int
    num_faults: int


class World:
    """The transitions of one scenario."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.wire = Wire()
        requests = range(scenario.num_requests)
        self.gateways = [States(lambda i=i: GatewayMachine(scenario, self.wire, i)) for i in requests]  # type: ignore[misc]
        self.target = States(lambda: TargetMachine(scenario, self.wire))
        self.draft = States(lambda: DraftMachine(scenario, self.wire))
        self.network = Network(self.wire, scenario)
        self.sent: list[Sent] = []  # by the last event

    def first(self) -> State:
        """Both services are reached, and every request has started."""
        state = State((0,) * self.scenario.num_requests, 0, 0, 0, self.scenario.num_faults)
        for side in SIDES:
            state = self._to_gateways(state, Event("connect", side, 1))
        for index in range(self.scenario.num_requests):
            state = self._to_gateway(state, Event("start", item=index))
        return state

    def is_over(self, state: State) -> bool:
        """Whether every request has ended."""
        return all(states.is_idle[number] for states, number in zip(self.gateways, state.gateways, strict=True))

    def is_done(self, state: State) -> bool:
        """Whether every request has ended, and nothing is held or on its way."""
        idle = self.target.is_idle[state.target] and self.draft.is_idle[state.draft]
        return idle and self.network.is_empty[state.network] and self.is_over(state)

    def events(self, state: State) -> list[Event]:
        """All that may happen next; nothing is disturbed and reached again any more where all is over."""
        events = [event for states, g in zip(self.gateways, state.gateways, strict=True) for event in states.events[g]]
        events += self.target.events[state.target] + self.draft.events[state.draft]
        events += self.network.events[state.network]
        if not self.is_over(state):
            number = 1 + self.scenario.num_faults - state.num_faults  # no side had one of this number
            events += [Event("connect", side, number) for side in self.network.missing[state.network]]
            if state.num_faults:
                events += self.network.faults[state.network]
        return events

    def apply(self, state: State, event: Event) -> State:
        """What an event leads to. Raises Violation."""
        self.sent.clear()
        kind, side = event.kind, event.side
        if kind in OF_SERVICES:
            return self._to_service(state, event)
        if kind in OF_GATEWAYS:
            return self._to_gateway(state, event)
        gateways, target, draft, network, num_faults = state
        network = self.network.after(network, event)
        if kind not in FAULTS:
            state = State(gateways, target, draft, network, num_faults)
            return self._tell(state, event)
        if kind == "crash":  # another one stands in its place
            target, draft = (0, draft) if side == TARGET else (target, 0)
        state = State(gateways, target, draft, network, num_faults - 1)
        return self._to_gateways(state, event) if kind == "die" else state

    def describe(self, state: State, event: Event) -> str:
        """An event in words, and what was sent for it."""
        violation = ""
        try:
            self.apply(state, event)
        except Violation as found:
            violation = f": {found}"
        words = [TELLING[event.kind].format(side=event.side, number=event.stream, request=event.item)]
        if event.kind in ("up", "down", "late"):
            words.append(_named(self.wire.frames[event.frame]))
        elif event.kind in ("lose", "double", "delay"):
            where = event.side, event.stream
            stream = next(one for one in self.network.streams[state.network] if (one.side, one.number) == where)
            words.append(_named([self.wire.frames[stream.pieces[event.item]][event.place]]))
        told = [f"{sent.side} {sent.stream}: {_named(self.wire.frames[sent.frame])}" for sent in self.sent]
        return " ".join(words) + "".join(f"\n        -> {line}" for line in told) + violation

    def _tell(self, state: State, event: Event) -> State:
        """The machines that an event of a stream concerns."""
        kind, side = event.kind, event.side
        if kind in ("connect", "lost"):
            return self._to_gateways(state, event)
        if kind == "detach":
            return self._to_service(state, event)
        arrived = Event("frame", side, event.stream, event.frame)
        up = kind == "up" or (kind == "late" and side == TARGET)
        return self._to_service(state, arrived) if up else self._to_gateways(state, arrived)

    def _to_gateways(self, state: State, event: Event) -> State:
        """What comes over a stream concerns every request."""
        if len(self.gateways) == 1:
            return self._to_gateway(state, event)
        for index in range(len(self.gateways)):
            state = self._to_gateway(state, event._replace(item=index))
        return state

    def _to_gateway(self, state: State, event: Event) -> State:
        gateways, target, draft, network, num_faults = state
        index = event.item
        if index and self.scenario.forks:
            event = event._replace(parent=self.gateways[0].target_link[gateways[0]])
        number, sent = self.gateways[index].after(gateways[index], event)
        if sent:
            self.sent += sent
            network = self.network.sent(network, sent, up=True)
        return State((*gateways[:index], number, *gateways[index + 1 :]), target, draft, network, num_faults)

    def _to_service(self, state: State, event: Event) -> State:
        gateways, target, draft, network, num_faults = state
        if event.side == TARGET:
            target, sent = self.target.after(target, event)
        else:
            draft, sent = self.draft.after(draft, event)
        if sent:
            self.sent += sent
            network = self.network.sent(network, sent, up=False)
        return State(gateways, target, draft, network, num_faults)


OF_SERVICES, OF_GATEWAYS = {"step", "late step"}, {"start", "timer", "second", "read", "leave"}
TELLING = {
    "start": "request {request}: another gateway takes it",
    "die": "the gateway dies",
    "timer": "request {request}: the target is sought again",
    "second": "request {request}: a second passes",
    "read": "request {request}: the client reads",
    "leave": "request {request}: the client leaves",
    "step": "the {side} steps",
    "late step": "the {side}'s patience ends, and it steps",
    "connect": "stream {number} to the {side} opens",
    "crash": "the {side} dies, and starts anew",
    "up": "the {side} gets",
    "down": "the gateway gets from the {side}",
    "late": "late on the stream to the {side} comes",
    "detach": "the {side} notices that stream {number} is broken",
    "lost": "the gateway notices that stream {number} to the {side} is broken",
    "break": "stream {number} to the {side} breaks",
    "lose": "on the stream to the {side} is lost",
    "double": "on the stream to the {side} is doubled",
    "delay": "on the stream to the {side} is delayed",
}


def _named(messages: Any) -> str:
    """Messages in a few words."""
    return ", ".join(_name(message) for message in messages)


def _name(message: Any) -> str:
    match message:
        case Open():
            fork = f" as a fork of {message.fork_of}" if message.fork_of is not None else ""
            return f"open {message.sequence_id}{fork} behind {list(message.output_ids)}"
        case Credit():
            return f"credit to {message.until} for windows of {message.max_window}"
        case Commit():
            dropped = f", drops {list(message.dropped)}" if message.dropped else ""
            window = f" of {message.num_drafted} of chain {message.chain}" if message.num_drafted else ""
            end = ", the end" if message.finish_reason is not None else ""
            return f"commit {list(message.ids)} at {message.position}{window}{dropped}{end}"
        case DraftTokens():
            parent = f" from {message.parent}" if message.parent is not None else ""
            return f"chain {message.chain}{parent}: {list(message.ids)} at {message.position}"
        case Close():
            return f"close {message.sequence_id}"
    return type(message).__name__


class Counterexample(AssertionError):
    """An invariant does not hold; the message is the trace that leads there."""


@dataclass(slots=True)
class Explored:
    """What was found of a scenario."""

    num_states: int = 0
    num_events: int = 0
    num_done: int = 0
    num_faulty: int = 0  # states behind a fault
    num_local: int = 0  # states of machines: what the production code computed
    is_whole: bool = True  # every state was reached
    depth: int = 0
    kinds: set[str] = field(default_factory=set)  # of events that happened


class Explorer:
    """Breadth first through one scenario."""

    def __init__(self, scenario: Scenario) -> None:
        self.world = World(scenario)
        self._states: list[State] = []
        self._numbers: dict[State, int] = {}
        self._parents = array("l")
        self._events: list[Event | None] = []
        self._sources, self._ends = array("l"), array("l")  # of the events that are no faults

    def run(self, most: int = 10_000_000) -> Explored:
        """Visits every state, or so many. Raises Counterexample, the shortest first; last of all where a state is met
        from which a request can go on for ever, or nowhere, without a fault."""
        explored, world = Explored(), self.world
        try:
            self._reach(world.first(), -1, None)
        except Violation as violation:
            raise Counterexample(f"{world.scenario.name}: {violation}, at the start") from violation
        number = 0
        while number < len(self._states):
            if len(self._states) >= most:
                explored.is_whole = False
                break
            self._expand(number, explored)
            number += 1
        explored.num_states, explored.depth = len(self._states), self._depth(len(self._states) - 1)
        explored.num_faulty = sum(state.num_faults < world.scenario.num_faults for state in self._states)
        explored.num_local = sum(len(states) for states in (*world.gateways, world.target, world.draft))
        if explored.is_whole:
            self._require_progress()
        return explored

    def _expand(self, number: int, explored: Explored) -> None:
        state, world, goes_on = self._states[number], self.world, False
        for event in world.events(state):
            try:
                after = world.apply(state, event)
            except Violation as violation:
                raise self._counterexample(number, str(violation), event) from violation
            if after == state:
                continue
            explored.num_events += 1
            explored.kinds.add(event.kind)
            reached = self._reach(after, number, event)
            if event.kind not in FAULTS:
                goes_on = True
                self._sources.append(number)
                self._ends.append(reached)
        is_done = world.is_done(state)
        explored.num_done += is_done
        if not goes_on and not is_done:
            raise self._counterexample(number, "nothing can happen any more, and it is not done")

    def _reach(self, state: State, parent: int, event: Event | None) -> int:
        number = self._numbers.setdefault(state, len(self._states))
        if number == len(self._states):
            self._states.append(state)
            self._parents.append(parent)
            self._events.append(event)
        return number

    def _require_progress(self) -> None:
        """Without faults no state is met twice: whatever the order of events, everything ends."""
        missing = array("l", bytes(8 * len(self._states)))  # events out of each state that may go on for ever
        before: list[list[int]] = [[] for _ in self._states]
        for source, end in zip(self._sources, self._ends, strict=True):
            missing[source] += 1
            before[end].append(source)
        ending = [number for number, count in enumerate(missing) if not count]
        for number in ending:
            for source in before[number]:
                missing[source] -= 1
                if not missing[source]:
                    ending.append(source)
        if len(ending) < len(self._states):
            first = next(number for number, count in enumerate(missing) if count)
            raise self._counterexample(first, "from here on it can go round for ever")

    def _depth(self, number: int) -> int:
        depth = 0
        while (number := self._parents[number]) >= 0:
            depth += 1
        return depth

    def _counterexample(self, number: int, what: str, last: Event | None = None) -> Counterexample:
        """The way there, in words."""
        steps: list[tuple[State, Event]] = [(self._states[number], last)] if last is not None else []
        while (event := self._events[number]) is not None:
            number = self._parents[number]
            steps.append((self._states[number], event))
        lines = [f"{place:4} {self.world.describe(*step)}" for place, step in enumerate(reversed(steps), 1)]
        return Counterexample("\n".join([f"{self.world.scenario.name}: {what}", *lines]))
