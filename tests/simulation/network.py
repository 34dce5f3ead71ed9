"""The network between the gateway and one service: streams that are FIFO until they break, and pieces that may be
lost, doubled, delayed and reordered on top of that."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Protocol

from simulation.checks import Watch

from outrider.gateway.speculation.backends import Lost
from outrider.planner.simulate import Clock, OneWayLink
from outrider.rpc.messages import Arithmetic, Close, Closed, Commit, Credit, DraftTokens, Failure, ModelInfo, Open


@dataclass(frozen=True, slots=True)
class Weather:
    """How the network treats frames."""

    delay_s: float = 0.002  # the longest
    disturbed: float = 0.0  # share of pieces that are lost, doubled, delayed or overtaken
    reconnect_s: float = 0.03  # the longest time without a stream


@dataclass(frozen=True, slots=True)
class Stretch:
    """Another policy than the core's own: shorter pieces and windows, and credit further ahead, as a gateway grants it
    that pipelines. Any such credit is allowed by the protocol."""

    most: int = 128  # tokens of a piece or window
    ahead: int = 0  # more credit than the core gives

    def __call__(self, credit: Credit) -> Credit:
        """The credit that leaves."""
        return replace(credit, until=credit.until + self.ahead, max_window=min(credit.max_window, self.most))


class Host(Protocol):
    """What a stream needs of the service at its end."""

    up: bool

    def attach(self, stream: Stream) -> None:
        """A stream begins."""

    def detach(self, stream: Stream) -> None:
        """A stream ended here."""

    def deliver(self, stream: Stream, messages: Sequence[Any]) -> None:
        """Messages arrive."""


@dataclass(slots=True, eq=False)
class SimLink:
    """One sequence on a stream, as the gateway sees it."""

    model: ClassVar = ModelInfo("simulated", "", 0, 0, batch_invariant=True)
    stream: Stream
    sequence_id: int
    on_event: Callable[[Any], None]
    watch: Watch
    stretch: Stretch
    until: int = 0  # the highest credit sent
    max_window: int = 0

    @property
    def alive(self) -> bool:
        """Whether the gateway still listens."""
        return self.stream.links.get(self.sequence_id) is self

    def send(self, *messages: Any) -> None:
        """Sends in one frame."""
        if not self.alive:
            return
        sent = [self._granted(message) if isinstance(message, Credit) else message for message in messages]
        self.stream.up([replace(message, sequence_id=self.sequence_id) for message in sent], self.watch)

    def _granted(self, credit: Credit) -> Credit:
        self.watch.on_credit(credit, self.until - self.stretch.ahead)
        granted = self.stretch(credit)
        self.until, self.max_window = max(self.until, granted.until), max(self.max_window, granted.max_window)
        return granted

    def close(self) -> None:
        """Ends the sequence."""
        if self.alive:
            del self.stream.links[self.sequence_id]
            self.stream.up([Close(self.sequence_id)], self.watch)


@dataclass(slots=True, eq=False)
class Stream:
    """One connection. Each end learns of its end in its own time."""

    peer: Peer
    number: int
    links: dict[int, SimLink] = field(default_factory=dict)
    all_links: dict[int, SimLink] = field(default_factory=dict)
    up_until: float = float("inf")  # frames that arrive later are lost
    down_until: float = float("inf")
    _upwards: OneWayLink = field(init=False)
    _downwards: OneWayLink = field(init=False)

    def __post_init__(self) -> None:
        self._upwards, self._downwards = (OneWayLink(self.peer.clock, self.peer.delay) for _ in range(2))

    def open(self, request: Open, on_event: Callable[[Any], None], door: Door, parent: SimLink | None) -> SimLink:
        """Starts a sequence; a parent that is alive here shares its prompt."""
        number = len(self.all_links) + 1
        link = SimLink(self, number, on_event, door.watch, door.stretch)
        if parent is not None and parent.alive and parent.stream is self:
            request = replace(request, fork_of=parent.sequence_id, prompt_ids=())
        self.links[number] = self.all_links[number] = link
        self.up([replace(request, sequence_id=number)], door.watch)
        return link

    def up(self, messages: list[Any], watch: Watch) -> None:
        """From the gateway to the service."""
        for frame in self._disturb(messages, watch, self._arrive_up):
            self._upwards.send(partial(self._arrive_up, frame))

    def down(self, events: Sequence[Any], after: float) -> None:
        """From the service to the gateway, once the step that made it is over."""
        for event in events:
            watch = self.all_links[event.sequence_id].watch
            for frame in self._disturb([event], watch, self._arrive_down):
                self._downwards.send(partial(self._arrive_down, frame), after)

    def break_off(self, at_host: float, at_gateway: float) -> None:
        """Both ends notice, one after the other; what is under way until then still arrives."""
        self.up_until, self.down_until = min(self.up_until, at_host), min(self.down_until, at_gateway)
        self.peer.clock.at(at_host, lambda: self.peer.host.detach(self))
        self.peer.clock.at(at_gateway, self._lose)

    def _disturb(self, messages: list[Any], watch: Watch, arrive: Callable[[list[Any]], None]) -> list[list[Any]]:
        """The frames that keep the order; a disturbed piece goes its own way."""
        dice, weather = self.peer.dice, self.peer.weather
        frame: list[Any] = []
        for message in messages:
            if not (isinstance(message, DraftTokens) and dice.random() < weather.disturbed):
                frame.append(message)
                continue
            watch.disturbed = True
            for _ in range(dice.choice((0, 1, 1, 2))):
                late = self.peer.clock.now + dice.uniform(0, 6 * weather.delay_s)
                self.peer.clock.at(late, partial(arrive, [message]))
        return [frame] if frame else []

    def _arrive_up(self, frame: list[Any]) -> None:
        if self.peer.clock.now <= self.up_until and self.peer.host.up:
            self.peer.host.deliver(self, frame)

    def _arrive_down(self, frame: list[Any]) -> None:
        for event in frame:
            link = self.links.get(event.sequence_id)
            if link is None or self.peer.clock.now > self.down_until:
                continue
            if isinstance(event, Closed | Failure) or (isinstance(event, Commit) and event.finish_reason is not None):
                del self.links[event.sequence_id]
            link.watch.on_arrival(link, event)
            link.on_event(event)
            link.watch.after_event()

    def _lose(self) -> None:
        self.peer.lost(self)
        links = list(self.links.values())
        self.links.clear()
        for link in links:
            link.on_event(Lost("the stream broke"))
            link.watch.after_event()


class Peer:
    """The gateway's view of one service: at most one stream at a time, opened again after a while."""

    def __init__(self, clock: Clock, dice: random.Random, weather: Weather, host: Host) -> None:
        self.clock, self.dice, self.weather, self.host = clock, dice, weather, host
        self.stream: Stream | None = None
        self._num_streams = 0
        self.connect()

    def delay(self) -> float:
        """Of one frame."""
        return self.dice.uniform(0, self.weather.delay_s)

    def connect(self) -> None:
        """Opens a stream, or tries again later while the service is down."""
        if not self.host.up:
            self.clock.call_later(self.weather.reconnect_s, self.connect)
            return
        self._num_streams += 1
        self.stream = Stream(self, self._num_streams)
        self.host.attach(self.stream)

    def lost(self, stream: Stream) -> None:
        """The gateway has noticed that a stream is broken."""
        if self.stream is stream:
            self.stream = None
            self.clock.call_later(self.dice.uniform(0, self.weather.reconnect_s), self.connect)

    def break_stream(self, host_is_down: bool = False) -> None:
        """Breaks the present stream."""
        if self.stream is not None:
            now, longest = self.clock.now, 3 * self.weather.delay_s
            at_host = now if host_is_down else now + self.dice.uniform(0, longest)
            self.stream.break_off(at_host, now + self.dice.uniform(0, longest))


@dataclass(slots=True, eq=False)
class Door:
    """A Verifier or Drafter for one client."""

    peer: Peer
    watch: Watch
    stretch: Stretch

    @property
    def info(self) -> object | None:
        """None while the peer is not reached."""
        return self.peer.stream

    def open(
        self,
        request: Open,
        on_event: Callable[[Any], None],
        fork_of: SimLink | None = None,
        like: Arithmetic | None = None,
        refused_by: Sequence[SimLink] = (),
    ) -> SimLink | None:
        """Starts a sequence, if there is a stream."""
        if self.peer.stream is None or refused_by:
            return None
        return self.peer.stream.open(request, on_event, self, fork_of)
