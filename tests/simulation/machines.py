"""Gateway, draft and target of one or two requests as deterministic machines: an event in, frames out, and a snapshot
that says all that later events can depend on. What runs is the production code: the driver and its core, the draft's
engine with its sequences, the target's with its chains. Fakes are the models alone, which are functions of a prefix,
and the target's verifier.

Every drafted token carries, in the place of its weights, the tokens behind which it was drafted. So a target that
verifies one in another context is seen, whichever rule it broke."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple, cast

from simulation.checks import Violation, require
from support.prefix_models import PrefixProposer, PrefixVerifier, draft_engine, new_cache, target_engine

from outrider.draft_service.engine import DraftEngine
from outrider.draft_service.sequence import DraftSequence
from outrider.engine.token_tree import TokenTree, depths_of
from outrider.gateway.speculation.backends import Lost
from outrider.gateway.speculation.core import SpeculationCore
from outrider.gateway.speculation.loop import SpeculationDriver
from outrider.planner.policy import Policy, Round
from outrider.rpc.messages import (
    Close,
    Closed,
    Commit,
    Credit,
    DraftTokens,
    Failure,
    ModelInfo,
    Open,
    is_last,
)
from outrider.rpc.servicer import Deliver, Detach
from outrider.rpc.words.sampling_params import AcceptanceRule, SamplingParams
from outrider.target_service.engine import TargetEngine
from outrider.target_service.outputs import VerifiedWindow, _up_to_stop
from outrider.target_service.scheduler import ScheduledSequence
from outrider.target_service.sequence import TargetLimits

TARGET, DRAFT = "target", "draft"
SIDES = (TARGET, DRAFT)
EOS, VOCAB, MAX_LEN, NUM_BLOCKS = 0, 200, 64, 64
PROMPT = (1,)
FIRST, OTHERS = 10, 112  # tokens of a place: two that may be drafted, and two that may stand there instead
LATE = 1e6  # seconds: every patience has ended by then
NEVER = 1e9


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is explored: everything that is fixed before the first event."""

    name: str
    policy: Policy
    draft_is_right: tuple[bool, ...]  # of each position behind the prompt
    turns: tuple[Policy, ...] = ()  # that follow, one with each round, and then the first again
    num_faults: int = 1
    num_requests: int = 1
    ends_at: int | None = None  # the position behind the prompt of the target's end of text
    rejects: bool = False  # windows are judged by rejection: weights count, and some end without a token of the target
    reads_late: bool = False  # the client takes a round when it likes; else at once
    examines_text: bool = False  # stop strings: credit reaches one window past what was read
    may_leave: bool = False  # the client goes away, whenever
    draft_room: int = 256  # sequences that the draft takes
    learns: bool = False  # the draft hears of every commit, also where it is not to draft
    piece_faults: bool = False  # single pieces are lost, doubled and delayed, too
    gateway_dies: bool = False  # a fault, too: the client goes on at another one, with what it has
    forks: bool = False  # the requests are completions of one: the others fork from the first
    tree: TokenTree | None = None  # what is drafted in the place of chains
    takes_trees: bool = True  # the target does; else it drops them

    @property
    def output(self) -> tuple[int, ...]:
        """What the target alone says."""
        tokens = [*PROMPT]
        while len(tokens) < len(PROMPT) + len(self.draft_is_right) and tokens[-1] != EOS:
            tokens.append(self.target_token(tokens))
        return tuple(tokens[len(PROMPT) :])

    def target_token(self, prefix: Sequence[int]) -> int:
        """The target's next token: another one at each position."""
        place = len(prefix) - len(PROMPT)
        return EOS if place == self.ends_at else FIRST + 2 * place

    def draft_token(self, prefix: Sequence[int]) -> int:
        """The draft's."""
        place = len(prefix) - len(PROMPT)
        right = place < len(self.draft_is_right) and self.draft_is_right[place]
        return self.target_token(prefix) if right else FIRST + 1 + 2 * place

    def ranked(self, prefix: Sequence[int]) -> tuple[int, ...]:
        """What the draft says, and what may stand there instead: where it is wrong, the target's own token is among
        them."""
        drafted, other = self.draft_token(prefix), OTHERS + 2 * (len(prefix) - len(PROMPT))
        own = self.target_token(prefix)
        return drafted, own if own != drafted else other, other + 1

    def request(self, index: int, output: Sequence[int] = ()) -> Open:
        """As a gateway gets it from a client that has some of the output."""
        sampling = SamplingParams(temperature=float(self.rejects), max_tokens=len(self.draft_is_right))
        return Open(0, PROMPT, sampling, tuple(output), completion=index, acceptance=AcceptanceRule.REJECTION)


class Wire:
    """Frames by number: two of equal messages are one."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self.frames: list[tuple[Any, ...]] = []
        self.pieces: list[tuple[int, ...]] = []  # places of the frame's pieces

    def number(self, messages: Sequence[Any]) -> int:
        """Of a frame with these messages."""
        key = snapshot(tuple(messages))
        number = self._numbers.setdefault(key, len(self.frames))
        if number == len(self.frames):
            self.frames.append(tuple(messages))
            self.pieces.append(
                tuple(i for i, message in enumerate(messages) if isinstance(message, DraftTokens) and message.ids)
            )
        return number


class LinkAt(NamedTuple):
    """Where a request is open at the target; a stream of 0 is nowhere."""

    stream: int = 0
    sequence_id: int = 0


class Event(NamedTuple):
    """What happens to a machine, or to the network."""

    kind: str
    side: str = ""  # the service, or the one whose stream it is
    stream: int = 0
    frame: int = -1
    item: int = 0  # the request; of a fault the place in a queue
    place: int = 0  # of a piece in its frame
    parent: LinkAt = LinkAt()  # of the completion that a fork is one of


class Sent(NamedTuple):
    """A frame that a machine sends."""

    side: str
    stream: int
    frame: int


IGNORED = {  # times, counts, and what follows from the scenario or from another field
    "timings", "load", "draft_us", "encoded", "sink", "clock", "loop", "on_event", "sampling", "sampler", "model",
    "draft_sampling", "acceptance", "random_ahead", "random_key", "policy", "controller", "most_drafted", "request",
    "arrival", "seniority", "last_commit", "ready_since", "last_step", "num_cached_ids", "block_keys", "choice",
    "_round_start", "_started", "_now", "_draft_us", "_num_rounds", "_model", "_opened_at", "_near_ties", "_effects",
    "_draft_epoch", "_target_epoch", "_draft_retry_at", "_give_up_at", "_refused_by", "_timer",
    "drafter", "verifier", "on_draft_stop", "_tokens", "_knows_live", "_live", "top_tokens", "prompt_ids",
    "_verifying_since", "rates", "verified_method", "deadline", "grammar", "lookups", "methods", "machine",
    "retry_after_ms", "traceparent", "_num_bytes", "_most_ahead",
}  # fmt: skip
_fields: dict[type, tuple[str, ...]] = {}


def snapshot(value: Any) -> Hashable:
    """All of a value that matters, by content."""
    kind = type(value)
    if kind is int or kind is str or kind is bool or value is None or kind is float or kind is bytes:
        return value  # type: ignore[no-any-return]
    if kind is tuple or kind is list:
        return tuple([snapshot(one) for one in value])
    if kind is dict:
        return tuple([(key, snapshot(one)) for key, one in value.items()])
    names = _fields.get(kind)
    if names is None:
        names = _fields[kind] = tuple(_names(kind, value))
    if not names:
        return str(value)
    return (kind.__name__, *[snapshot(getattr(value, name)) for name in names])


def snapshot_of_rates(sequence: DraftSequence) -> Hashable:
    """What the choice of branches follows from."""
    rates = sequence.branches.rates
    return tuple(rates.ranked), rates.corrections, tuple(rates.acceptance.accepted), tuple(rates.acceptance.tested)


def _names(kind: type, value: Any) -> Iterator[str]:
    slots = [name for base in reversed(kind.__mro__) for name in getattr(base, "__slots__", ())]
    if isinstance(value, str | int):  # an enum's
        return
    for name in dict.fromkeys([*slots, *getattr(value, "__dict__", {})]):
        if name not in IGNORED and name != "__weakref__":
            yield name


class Loop:
    """In the place of the event loop: time stands still until an event says that it passes."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[Callable[[], None]] = []

    def time(self) -> float:
        """Seconds."""
        return self.now

    def call_later(self, delay: float, callback: Callable[[], None]) -> Any:
        """The timer is an event of its own."""
        self.timers.append(callback)
        return SimpleNamespace(cancel=lambda: self.timers.remove(callback) if callback in self.timers else None)


@dataclass(slots=True, eq=False)
class Link:
    """One sequence on a stream, as the gateway sees it, and what it was granted there."""

    machine: GatewayMachine
    side: str
    stream: int
    sequence_id: int
    on_event: Callable[[Any], None]
    first_chain: int
    model: ClassVar = ModelInfo("fake", "", VOCAB, MAX_LEN, batch_invariant=True)
    alive: bool = True
    until: int = 0  # the highest credit that was sent

    def send(self, *messages: Any) -> None:
        """Leaves with the frame of this turn."""
        for message in messages if self.alive else ():
            if isinstance(message, Credit):
                self.machine.check_credit(self, message)
                self.until = max(self.until, message.until)
            self.machine.put(self, replace(message, sequence_id=self.sequence_id))

    def close(self) -> None:
        """Ends the sequence."""
        if self.alive:
            self.alive = False
            self.machine.put(self, Close(self.sequence_id))


@dataclass(slots=True, eq=False)
class Door:
    """A Verifier, or a Drafter."""

    machine: GatewayMachine
    side: str

    @property
    def info(self) -> object | None:
        """None while there is no stream."""
        return self.machine.streams[self.side] or None

    def open(self, request: Open, on_event: Callable[[Any], None], *how: Any) -> Link | None:
        """Starts a sequence, if there is a stream; as a fork where its parent is open on the same."""
        return self.machine.open(self.side, request, on_event, *how[:1])


class Turns:
    """In the place of the controller: another policy with every round."""

    def __init__(self, policies: Sequence[Policy]) -> None:
        self.policies, self.index = policies, 0

    @property
    def policy(self) -> Policy:
        """The present one."""
        return self.policies[self.index]

    def inputs(self) -> Mapping[str, float]:
        """It rests on nothing."""
        return {}

    def on_piece(self, num_ids: int, draft_us: int) -> None:
        """A piece is no round."""

    def on_round(self, closed: Round) -> bool:
        """The next one."""
        self.index = (self.index + 1) % len(self.policies)
        return len(self.policies) > 1


class GatewayMachine:
    """One request at the gateway: its driver, its core and its client."""

    def __init__(self, scenario: Scenario, wire: Wire, index: int) -> None:
        self.scenario, self.wire, self.index = scenario, wire, index
        self.loop = Loop()
        self.streams = dict.fromkeys(SIDES, 0)  # the present ones; 0: none
        self.num_opened = dict.fromkeys(SIDES, 0)  # on the present stream
        self.links: list[Link] = []  # alive
        self.output: list[int] = []  # what the client has
        self.seen: list[int] = []  # a copy of what was committed at the last event
        self.highest_chain = -1
        self.over = self.waits = False  # waits: the client has asked another gateway, which has not begun
        self._outbox: dict[tuple[str, int], list[Any]] = {}
        policy = scenario.policy
        self._window = (1 + policy.windows_ahead) * (policy.num_draft_tokens + 1) or policy.plain_ahead
        self._parent = SimpleNamespace(target_link=None) if scenario.forks and index else None
        self.driver, self._turns = self._new_driver()

    def _new_driver(self) -> tuple[SpeculationDriver, Turns]:
        """For the request as the client asks it now."""
        scenario = self.scenario
        turns = Turns([scenario.policy, *scenario.turns])
        core = SpeculationCore(
            scenario.request(self.index, self.output),
            scenario.policy,
            scenario.examines_text,
            turns if scenario.turns else None,
            scenario.learns,
        )
        fork_of: Any = self._parent
        draft, target, loop = (cast(Any, one) for one in (Door(self, DRAFT), Door(self, TARGET), self.loop))
        return SpeculationDriver(draft, target, core, loop, fork_of, lambda reason: None), turns

    def take(self, event: Event) -> list[Sent]:
        """Raises Violation."""
        if self._parent is not None:
            self._parent.target_link = event.parent
        match event.kind:
            case "start":
                self.waits = False
                self.driver.start()
            case "die":
                self._die()
            case "connect":
                self.streams[event.side], self.num_opened[event.side] = event.stream, 0
            case "frame":
                for message in self.wire.frames[event.frame]:
                    self._hear(event, message)
            case "lost":
                self._lose(event)
            case "timer":
                self.loop.timers.pop(0)()
            case "second":
                self.loop.now += 1.0
            case "read":
                self._read()
            case "leave":
                self._end()
        while not self.scenario.reads_late and not self.over and not self.driver.items.empty():
            self._read()
        self._check()
        outbox, self._outbox = self._outbox, {}
        return [Sent(*where, self.wire.number(messages)) for where, messages in outbox.items()]

    def events(self) -> list[Event]:
        """What may happen next without anybody else."""
        if self.over:
            return []
        if self.waits:
            return [Event("start", item=self.index)] * bool(self.streams[TARGET])
        kinds = ["timer"] * bool(self.loop.timers)
        retry_at = self.driver._draft_retry_at
        kinds += ["second"] * (retry_at is not None and retry_at > self.loop.now)
        kinds += ["read"] * (not self.driver.items.empty()) + ["leave"] * self.scenario.may_leave
        return [Event(kind, item=self.index) for kind in kinds]

    def snapshot(self) -> Hashable:
        """All that matters later."""
        if self.over:
            return "over", bool(self.links)
        retry_at, core = self.driver._draft_retry_at, self.driver.core
        links: tuple[Any, ...] = self.driver.target_link, self.driver.draft_link
        return (
            snapshot(core),
            snapshot(self.links),
            tuple(self.streams.values()),
            tuple(self.num_opened.values()),
            len(self.output),
            self.highest_chain,
            self._turns.index,
            None if retry_at is None else retry_at <= self.loop.now,
            len(self.loop.timers),
            self.driver.items.qsize(),
            self.waits,
            *[None if link is None else link.alive for link in links],
        )

    @property
    def is_idle(self) -> bool:
        """Whether it has ended, and holds nothing."""
        return self.over and not self.links

    @property
    def target_link(self) -> LinkAt:
        """Where another completion may fork from this one."""
        link: Any = self.driver.target_link
        return LinkAt(link.stream, link.sequence_id) if link is not None and link.alive else LinkAt()

    def open(
        self, side: str, request: Open, on_event: Callable[[Any], None], parent: LinkAt | None = None
    ) -> Link | None:
        """A sequence on the present stream."""
        stream = self.streams[side]
        if not stream:
            return None
        self.num_opened[side] += 1
        number = 10 * self.index + self.num_opened[side]
        link = Link(self, side, stream, number, on_event, self.highest_chain + 1)
        self.links.append(link)
        if parent is not None and parent.stream == stream:
            request = replace(request, fork_of=parent.sequence_id, prompt_ids=())
        self.put(link, replace(request, sequence_id=number))
        return link

    def put(self, link: Link, message: Any) -> None:
        """What is said to one service in one turn is one frame."""
        self._outbox.setdefault((link.side, link.stream), []).append(message)
        self.links = [link for link in self.links if link.alive]

    def check_credit(self, link: Link, credit: Credit) -> None:
        """It never falls, and a slow client holds it back."""
        require(credit.until >= link.until, f"credit at the {link.side} falls from {link.until} to {credit.until}")
        ahead = self._window if self.scenario.examines_text else self.scenario.policy.max_unread
        read = len(PROMPT) + len(self.output)
        require(credit.until <= read + ahead, f"credit reaches {credit.until}, the client has read {read} tokens")

    def _hear(self, event: Event, message: Any) -> None:
        where = event.side, event.stream, message.sequence_id
        link = next((link for link in self.links if (link.side, link.stream, link.sequence_id) == where), None)
        if link is None:
            return
        if is_last(message):
            link.alive = False
            self.links.remove(link)
        if isinstance(message, Commit):
            committed = len(self.driver.core.committed)
            require(message.position == committed, f"a commit at {message.position}, the journal ends at {committed}")
            require(message.ids or message.dropped, "a round without a token")
        elif isinstance(message, DraftTokens):
            require(message.chain >= link.first_chain, f"chain {message.chain} was used by a draft before")
            self.highest_chain = max(self.highest_chain, message.chain)
        link.on_event(message)

    def _lose(self, event: Event) -> None:
        if self.streams[event.side] == event.stream:
            self.streams[event.side] = 0
        lost = [link for link in self.links if (link.side, link.stream) == (event.side, event.stream)]
        for link in lost:
            link.alive = False
        self.links = [link for link in self.links if link.alive]
        for link in lost:
            link.on_event(Lost("the stream broke"))

    def _read(self) -> None:
        item = self.driver.items.get_nowait()
        if isinstance(item, Failure):
            raise Violation(f"the request fails: {item.message}")
        if not isinstance(item, Round):
            return
        commit = item.commit
        require(commit.position == len(PROMPT) + len(self.output), "the client misses tokens")
        self.output += commit.ids
        if commit.finish_reason is not None:
            require(tuple(self.output) == self.scenario.output, f"the client has {self.output} in the end")
            self._end()
        else:
            self.driver.read(len(PROMPT) + len(self.output))

    def _end(self) -> None:
        self.over = True
        self.driver.close()

    def _die(self) -> None:
        """Nobody closes anything, and what the client has not got is lost. It asks another gateway, which numbers its
        chains anew."""
        if self.over:
            return
        self.links, self.loop.timers, self.highest_chain = [], [], -1
        self.streams = dict.fromkeys(SIDES, 0)
        self.seen, self.waits = [*PROMPT, *self.output], True
        self.driver, self._turns = self._new_driver()

    def _check(self) -> None:
        committed = self.driver.core.committed
        require(committed[: len(self.seen)] == self.seen, f"committed tokens change: {self.seen}, then {committed}")
        self.seen, output = list(committed), tuple(committed[len(PROMPT) :])
        plain = self.scenario.output[: len(output)]
        require(output == plain, f"committed are {output}, the target alone says {plain}")


class Oracle(PrefixVerifier):
    """In the place of the target's verifier. Raises Violation for a token of another context."""

    def __init__(self, scenario: Scenario, machine: TargetMachine) -> None:
        super().__init__(scenario.target_token)
        self.scenario, self.machine = scenario, machine

    def verify_one(self, scheduled: ScheduledSequence) -> VerifiedWindow:
        """As many drafted tokens as the target says, too."""
        window, target = scheduled.window, scheduled.target
        prefix = target.sequence.tokens[: scheduled.committed]
        held = self.machine.refused.get((*target.key, window.chain if window.chain is not None else -1))
        end = scheduled.committed + len(window.ids)
        require(held is None or end <= held, f"chain {window.chain}, which has a gap at {held}, is verified to {end}")
        for index, weights in enumerate(window.weights):
            behind = bytes([*prefix, *window.ids[:index]])
            known = scheduled.committed if self.scenario.piece_faults else 0  # what was lost was never compared
            if weights is not None and weights.ids[known:] != behind[known:]:
                what = f"token {window.ids[index]} of chain {window.chain}, drafted behind {list(weights.ids)}"
                raise Violation(f"{what}, is verified behind {list(behind)}")
        return self._verify_tree(scheduled) if window.parents else PrefixVerifier.verify_one(self, scheduled)

    def _verify_tree(self, scheduled: ScheduledSequence) -> VerifiedWindow:
        """Up the tree as far as it says what the target says, and the target's own token behind."""
        window, prefix = scheduled.window, scheduled.target.sequence.tokens[: scheduled.committed]
        for token, depth in zip(window.ids, depths_of(window.parents), strict=True):
            place = scheduled.committed - len(PROMPT) + depth - 1
            drafted = (token - (OTHERS if token >= OTHERS else FIRST)) // 2
            require(drafted == place, f"token {token} of a tree, drafted for place {drafted}, is verified in {place}")
        path: list[int] = []
        while True:
            at = path[-1] + 1 if path else 0
            token = self.scenario.target_token(prefix)
            prefix.append(token)
            node = next((n for n, up in enumerate(window.parents) if up == at and window.ids[n] == token), None)
            if node is None:
                return _up_to_stop(scheduled, len(path), tuple(path), (token,))
            path.append(node)


class Service:
    """What both services share: an engine whose answers are collected."""

    side: ClassVar[str]
    engine: Any

    def __init__(self, scenario: Scenario, wire: Wire) -> None:
        self.scenario, self.wire = scenario, wire
        self._granted: dict[tuple[int, int], int] = {}  # by sequence the highest credit that has come
        self._outbox: dict[int, list[Any]] = {}

    def take(self, event: Event) -> list[Sent]:
        """Raises Violation."""
        stream = event.stream
        match event.kind:
            case "frame":
                messages = self.wire.frames[event.frame]
                self._note(stream, messages)
                sink: Callable[[Any], None] = lambda said: self._say(stream, said)  # noqa: E731
                self.engine.handle(Deliver(stream, messages, sink))
            case "detach":
                self.engine.handle(Detach(stream))
            case "step":
                self.engine.step(0.0)
            case "late step":
                self.engine.step(LATE)
        outbox, self._outbox = self._outbox, {}
        return [Sent(self.side, stream, self.wire.number(said)) for stream, said in outbox.items()]

    @property
    def target_link(self) -> LinkAt:
        """Nothing forks from what a service does."""
        return LinkAt()

    def _note(self, stream: int, messages: Sequence[Any]) -> None:
        for message in messages:
            key = stream, message.sequence_id
            if isinstance(message, Open):
                self._granted[key] = 0
            elif isinstance(message, Credit):
                self._granted[key] = max(self._granted.get(key, 0), message.until)

    def _say(self, stream: int, event: Any) -> None:
        if isinstance(event, Failure):
            full = self.side == DRAFT and event.reason == "BUSY"
            parentless = self.scenario.forks and event.reason == "PARENT_GONE"  # it is opened again, with its prompt
            require(full or parentless, f"the {self.side} ends the sequence: {event.message}")
            self._outbox.setdefault(stream, []).append(event)
        elif not isinstance(event, Closed):
            end, granted = event.position + len(event.ids), self._granted[stream, event.sequence_id]
            require(end <= max(granted, event.position), f"the {self.side} goes to {end}, credit ends at {granted}")
            self._outbox.setdefault(stream, []).append(event)


class TargetMachine(Service):
    """The target's engine."""

    side = TARGET

    def __init__(self, scenario: Scenario, wire: Wire) -> None:
        super().__init__(scenario, wire)
        limits = TargetLimits(VOCAB, MAX_LEN, (EOS,), NUM_BLOCKS)
        trees = scenario.tree is not None and scenario.takes_trees
        self.engine: TargetEngine = target_engine(limits, Oracle(scenario, self), takes_trees=trees)
        self.refused: dict[tuple[int, int, int], int] = {}  # by sequence and chain: up to where it was held by then

    @property
    def sequences(self) -> list[Any]:
        """Those that are open."""
        return list(self.engine.scheduler.sequences.values())

    def events(self) -> list[Event]:
        """A step, now or once patience has ended."""
        dues = [due for target in self.sequences if (due := target.due(0.0)) is not None]
        kinds = ["step"] * any(due <= 0 for due in dues) + ["late step"] * any(0 < due <= LATE for due in dues)
        return [Event(kind, TARGET) for kind in kinds]

    def snapshot(self) -> Hashable:
        """All that matters later."""
        refused = tuple([(*key, end) for key, end in self.refused.items()])
        held = self.engine.cache.pool.num_free, len(self.engine._work._tokens)
        return tuple([snapshot(target) for target in self.sequences]), held, refused

    def _say(self, stream: int, event: Any) -> None:
        super()._say(stream, event)
        if not isinstance(event, Commit):
            return
        key = stream, event.sequence_id
        target = self.engine.scheduler.sequences[key]
        for number in event.dropped:
            held = target.chains._chains.get(number)
            self.refused.setdefault((*key, number), 0 if held is None else held.end)
        if event.finish_reason is not None:
            self._forget(key)

    def _forget(self, key: tuple[int, int]) -> None:
        self.refused = {known: end for known, end in self.refused.items() if known[:2] != key}

    @property
    def is_idle(self) -> bool:
        """Whether it holds nothing."""
        nothing = not self.sequences and not self.engine._work._tokens
        return nothing and self.engine.cache.pool.num_free == NUM_BLOCKS


class DraftMachine(Service):
    """The draft's engine."""

    side = DRAFT

    def __init__(self, scenario: Scenario, wire: Wire) -> None:
        super().__init__(scenario, wire)
        self._cache = new_cache(NUM_BLOCKS)
        proposer = PrefixProposer(scenario.ranked, VOCAB, MAX_LEN)
        self.engine: DraftEngine = draft_engine(proposer, self._cache, (EOS,), scenario.draft_room, tree=scenario.tree)

    def events(self) -> list[Event]:
        """A step, which may have nothing to do."""
        return [Event("step", DRAFT)] if self.engine.sequences else []

    def snapshot(self) -> Hashable:
        """All that matters later."""
        held = self.engine.sequences.values()
        rates = [snapshot_of_rates(one) for one in held] if self.scenario.policy.max_branches else []
        num_open = len(self.engine._work._tokens)
        return tuple([snapshot(sequence) for sequence in held]), self._cache.pool.num_free, num_open, tuple(rates)

    @property
    def is_idle(self) -> bool:
        """Whether it holds nothing."""
        nothing = not self.engine.sequences and not self.engine._work._tokens
        return nothing and self._cache.pool.num_free == NUM_BLOCKS
