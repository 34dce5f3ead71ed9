"""A target and a draft in virtual time, made of costs alone: they speak the protocol, and what they compute is a count.

Token 0 is always the target's own, and any other id is a token that the target refuses. Whether the draft's first
guess at a position is right, or its second, third, ... is drawn once for each position of a stream (`Text`), whatever
the mode: so every mode decodes the same text. What a sequence holds of a chain is then two lengths: to where it is
drafted, and to where it is right.

The services keep to the production engines in all that takes time: a step takes every sequence that may run, answers
leave when it is over, a chain leaves by windows, branches for likely refusals grow beside it. Which drafted tokens a
step verifies and how long it waits for windows is the target's own code, handed in by the caller (`StepPolicy`).
Prompts cost nothing, and blocks are never short."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol

from outrider.planner.estimates import Acceptance, Lag, StepTime
from outrider.planner.simulate import Device, Timers
from outrider.rpc.messages import Close, Commit, Credit, DraftTokens, Open, StepTimings
from outrider.rpc.words.sampling_params import FinishReason

RIGHT = 0  # the target's own token, at every position
MAX_ROWS = 512  # of a target's step
MAX_BRANCH_STEPS = 64  # branches that grow in one pass of the draft, over all sequences
LEAST_CHANCE = 0.004  # of an outcome that is worth a branch


@dataclass(frozen=True, slots=True)
class DraftQuality:
    """How good a draft's guesses are: the chance that its token is the target's, and, where it is not, that its first,
    second, ... other guess is."""

    acceptance: float
    corrections: tuple[float, ...] = (0.47, 0.19, 0.1)  # of the embedded pair, coupled, at temperature 1

    def outcomes(self, window: int) -> list[tuple[float, int, int]]:
        """What two windows may come to: (chance, offset, rank of the guess that is right), the likeliest first."""
        return sorted(
            (
                (self.acceptance**offset * (1 - self.acceptance) * chance, offset, rank)
                for offset in range(2 * (window + 1))
                for rank, chance in enumerate(self.corrections, 1)
            ),
            reverse=True,
        )


class Text:
    """The tokens of one stream as the draft sees them: for each position the rank of its guess that is right; 0 is its
    first one."""

    def __init__(self, quality: DraftQuality, seed: int) -> None:
        self._dice = random.Random(seed)
        wrong = 1 - quality.acceptance
        self._bounds = list(accumulate((wrong * chance for chance in quality.corrections), initial=quality.acceptance))
        self._ranks: list[int] = []

    def rank(self, position: int) -> int:
        """At one position; a rank past the last guess is never right."""
        while len(self._ranks) <= position:
            drawn = self._dice.random()
            self._ranks.append(sum(drawn >= bound for bound in self._bounds))
        return self._ranks[position]


Reply = Callable[[object, float], None]  # an event, and how long from now the step that made it is over


class StepPolicy(Protocol):
    """The target's own choices, from its production code."""

    def cut(self, windows: Sequence[tuple[Acceptance, int]], max_rows: int) -> list[int]:
        """How many of its drafted tokens each sequence of a step verifies."""

    def verified(self, acceptance: Acceptance, num_drafted: int, num_accepted: int) -> None:
        """A window was verified."""

    def hold(self, ready: Sequence[TargetStream], missing: Sequence[TargetStream], now: float) -> float:
        """How long a step that could run now still waits for streams due later, in seconds."""

    def stepped(self, num_rows: int, seconds: float, pause_s: float) -> None:
        """A step ran, so long after the one before."""


@dataclass(slots=True, eq=False)
class HeldChain:
    """Drafted tokens at the target: to where they reach, and to where they are right."""

    number: int
    end: int
    right: int


@dataclass(slots=True, eq=False)
class TargetStream:
    """One sequence at the target."""

    reply: Reply
    committed: int
    last: int  # nothing past it is committed
    start: int = field(init=False)  # the committed length at first
    acceptance: Acceptance = field(default_factory=lambda: Acceptance(forgets_untested=True))
    chains: dict[int, HeldChain] = field(default_factory=dict)
    parted: dict[int, int] = field(default_factory=dict)  # chains that take no more, and from where on they are wrong
    dropped: list[int] = field(default_factory=list)  # of these, those not named yet
    until: int = 0
    max_window: int = 0
    patience: float = 0.0
    patience_spent: bool = True
    idle_at: int = -1  # where the draft said that it has nothing to propose
    last_commit: float = 0.0
    ready_since: float = 0.0
    last_step: int = 0
    last_rows: int = 1
    lag: Lag = field(default_factory=Lag)
    live: HeldChain | None = None  # that the next window is cut from

    def __post_init__(self) -> None:
        self.start = self.committed

    def due(self, now: float) -> float | None:
        """As the target's sequence."""
        if self.until <= self.committed:
            return None
        if self.live is not None or self.idle_at == self.committed or self.patience_spent:
            return now
        return self.last_commit + self.patience

    def window(self) -> int:
        """Drafted tokens that may be verified next."""
        if self.live is None:
            return 0
        room = min(self.until, self.last) - self.committed
        return max(0, min(self.live.end - self.committed, self.max_window, room))

    def hold(self, piece: DraftTokens, now: float) -> None:
        """Holds a piece, or refuses its chain."""
        if not piece.ids:
            self.idle_at = max(self.idle_at, piece.position)
            return
        if piece.chain in self.parted:
            return
        chain, was_waiting = self.chains.get(piece.chain), self.live is None
        if chain is None:
            chain = self._begin(piece)
        elif piece.position > max(chain.end, self.committed):
            self._refuse(piece.chain)
            return
        if chain is None:
            return
        for position, token in enumerate(piece.ids, piece.position):
            if token == RIGHT and chain.right == position:
                chain.right += 1
        chain.end = max(chain.end, piece.position + len(piece.ids))
        self.choose()
        self.patience_spent = self.patience_spent and self.committed == self.start
        if was_waiting:
            self.ready_since = max(self.ready_since, now)
            if self.live is not None and now > self.last_commit:
                self.lag.add(now - self.last_commit)

    def choose(self) -> None:
        """Forgets chains that end at the committed length, or are wrong before it, and finds the next window's."""
        for chain in [chain for chain in self.chains.values() if min(chain.right, chain.end - 1) < self.committed]:
            if chain.right < min(chain.end, self.committed):
                del self.chains[chain.number]
                self.parted[chain.number] = chain.right
            elif chain.end <= self.committed:
                del self.chains[chain.number]
        self.live = min(self.chains.values(), key=lambda chain: chain.number, default=None)

    def _begin(self, piece: DraftTokens) -> HeldChain | None:
        parent = self.chains.get(piece.parent) if piece.parent is not None else None
        parted = self.parted.get(piece.parent) if piece.parent is not None else None
        if parted is not None and piece.position > parted:
            self.parted[piece.chain] = parted
            return None
        if piece.position <= self.committed:
            right = piece.position
        elif parent is not None and piece.position <= parent.end:
            right = min(piece.position, parent.right)
        else:
            self._refuse(piece.chain)
            return None
        chain = self.chains[piece.chain] = HeldChain(piece.chain, piece.position, right)
        return chain

    def _refuse(self, number: int) -> None:
        """Takes nothing more of a chain: tokens before those that came are missing."""
        self.chains.pop(number, None)
        self.parted[number] = self.committed
        self.dropped.append(number)


class VirtualTarget:
    """The target service: `costs` are a step's microseconds by its rows."""

    def __init__(self, clock: Timers, costs: StepTime, policy: StepPolicy) -> None:
        self._clock, self._costs, self._policy = clock, costs, policy
        self.device = Device(clock, self._step)
        self.streams: dict[int, TargetStream] = {}
        self.lag = Lag()  # of all streams
        self.num_rows = self.num_steps = 0
        self._ended = 0.0

    def deliver(self, number: int, messages: Sequence[object], reply: Reply) -> None:
        """Messages of a stream arrive."""
        received = self._clock.now
        self.device.put(lambda: self._handle(number, messages, reply, received))

    def _handle(self, number: int, messages: Sequence[object], reply: Reply, now: float) -> None:
        for message in messages:
            stream = self.streams.get(number)
            match message:
                case Open():
                    length = len(message.prompt_ids) + len(message.output_ids)
                    last = len(message.prompt_ids) + message.sampling.max_tokens
                    self.streams[number] = TargetStream(
                        reply, length, last, last_commit=now, ready_since=now, lag=Lag(self.lag)
                    )
                case Close():
                    self.streams.pop(number, None)
                case Credit() if stream is not None:
                    if stream.until <= stream.committed:
                        stream.ready_since = max(stream.ready_since, now)
                    stream.until = max(stream.until, min(message.until, stream.last))
                    stream.max_window, stream.patience = message.max_window, message.patience_ms / 1e3
                case DraftTokens() if stream is not None:
                    stream.hold(message, now)
                    if stream.dropped:
                        self._tell_dropped(stream)

    @staticmethod
    def _tell_dropped(stream: TargetStream) -> None:
        stream.reply(Commit(0, stream.committed, (), dropped=tuple(stream.dropped)), 0.0)
        stream.dropped.clear()

    def _step(self) -> tuple[float, float | None]:
        now = self._clock.now
        dues = [(due, stream) for stream in self.streams.values() if (due := stream.due(now)) is not None]
        ready = [stream for due, stream in dues if due <= now]
        if not ready:
            return 0.0, max(0.0, min(due for due, _ in dues) - now) if dues else None
        has_first = any(stream.committed == stream.start for stream in ready)  # a first token waits for nobody
        missing = [] if has_first else [stream for due, stream in dues if due > now]
        if hold := self._policy.hold(ready, missing, now):
            return 0.0, hold
        ready.sort(key=lambda stream: stream.last_step)
        windows = self._windows(ready[:MAX_ROWS])
        num_rows = sum(window + 1 for _, window in windows)
        took = 1e-6 * self._costs.at(num_rows)
        self.num_steps += 1
        self.num_rows += num_rows
        self._policy.stepped(num_rows, took, now - self._ended)
        self._ended = now + took
        timings = round(1e6 * took), num_rows, len(windows)
        for stream, window in windows:
            self._commit(stream, window, timings)
        return took, 0.0

    def _windows(self, ready: Sequence[TargetStream]) -> list[tuple[TargetStream, int]]:
        """Who is in the step, with how many drafted tokens: as many as there are rows for."""
        cut = self._policy.cut([(stream.acceptance, stream.window()) for stream in ready], MAX_ROWS)
        windows, left = [], MAX_ROWS
        for stream, window in zip(ready, cut, strict=True):
            if left <= 0:
                break
            windows.append((stream, min(window, left - 1)))
            left -= windows[-1][1] + 1
        return windows

    def _commit(self, stream: TargetStream, window: int, timings: tuple[int, int, int]) -> None:
        start, (step_us, num_rows, num_sequences) = stream.committed, timings
        chain = stream.live if window else None
        accepted = 0 if chain is None else max(0, min(chain.right - start, window))
        room = min(stream.until, stream.last) - start
        count = min(accepted + 1, room)
        queue_us = max(0, round(1e6 * (self._clock.now - stream.ready_since)))
        stream.committed += count
        if window:
            self._policy.verified(stream.acceptance, window, accepted)
        elif stream.live is not None:  # a held token holds by being the target's own
            self._policy.verified(stream.acceptance, 1, int(stream.live.right > start))
        # The first token waits for no draft; later a wait that ran out is not repeated until a piece arrives.
        waited = stream.live is None and stream.idle_at != start and stream.patience > 0
        stream.patience_spent = start != stream.start and (stream.patience_spent or waited)
        stream.last_step, stream.last_rows = self.num_steps, window + 1
        stream.choose()
        stream.last_commit = stream.ready_since = self._ended
        finished = stream.committed >= stream.last
        committed = Commit(
            0,
            start,
            (RIGHT,) * count,
            chain=None if chain is None else chain.number,
            num_drafted=window,
            num_accepted=accepted,
            finish_reason=FinishReason.LENGTH if finished else None,
            dropped=tuple(stream.dropped),
            timings=StepTimings(queue_us, step_us, 0, num_rows, num_sequences),
        )
        stream.dropped.clear()
        stream.reply(committed, self._ended - self._clock.now)


@dataclass(slots=True, eq=False)
class SimulatedChain:
    """A chain or a branch at the draft: to where it reaches, is right, and has left."""

    number: int
    length: int
    right: int
    sent: int
    draft_us: int = 0
    parent: int = -1  # of a branch: the chain that it leaves,
    position: int = -1  # at which position,
    rank: int = 0  # with which guess
    chance: float = 1.0  # that its outcome comes
    goes_on: bool = False  # whether a second window is worth drafting, too

    def piece(self, count: int) -> DraftTokens:
        """The next tokens that are unsent."""
        position = self.sent
        self.sent += count
        ids = tuple([RIGHT if at < self.right else 1 for at in range(position, self.sent)])
        parent = self.parent if position == self.position else None
        piece = DraftTokens(0, self.number, position, ids, parent=parent, draft_us=self.draft_us)
        self.draft_us = 0
        return piece


@dataclass(slots=True, eq=False)
class DraftStream:
    """One sequence at the draft: its chain, and branches for other outcomes of the verification under way."""

    reply: Reply
    text: Text
    committed: int
    chain: SimulatedChain
    branches: list[SimulatedChain] = field(default_factory=list)
    until: int = 0
    window: int = 0  # tokens of a full piece
    max_branches: int = 0
    last_chain: int = 0
    survived: bool = False  # the last commit left the chain alive
    idle_at: int = -1

    @property
    def wants_tokens(self) -> bool:
        """Whether one more token is to be drafted."""
        return self.window > 0 and self.chain.length < self.until

    def take(self, commit: Commit) -> None:
        """Committed tokens: the chain goes on, a branch takes its place, or a new one begins."""
        before, self.committed = self.committed, max(self.committed, commit.position + len(commit.ids))
        if self.committed > before:
            if self.chain.right < min(self.chain.length, self.committed) or self.chain.length < self.committed:
                self._replace_chain(commit)
            else:
                self.survived = True
        if self.chain.number in commit.dropped:
            self._restart()
        kept = [b for b in self.branches if b.position >= self.committed and b.right >= self.committed]
        self.branches = [branch for branch in kept if branch.number not in commit.dropped]

    def _replace_chain(self, commit: Commit) -> None:
        agreeing = [b for b in self.branches if b.right >= self.committed and b.number not in commit.dropped]
        agreeing = [branch for branch in agreeing if branch.position < self.committed]
        if not agreeing:
            self._restart()
            return
        self.chain, self.survived = min(agreeing, key=lambda branch: branch.number), True
        self.branches.remove(self.chain)

    def _restart(self) -> None:
        self.last_chain += 1
        self.chain = SimulatedChain(self.last_chain, self.committed, self.committed, self.committed)
        self.branches.clear()
        self.survived = False

    def draw(self, chain: SimulatedChain) -> None:
        """The next token of a chain."""
        if chain.right == chain.length and self.text.rank(chain.length) == 0:
            chain.right += 1
        chain.length += 1

    def end_of(self, branch: SimulatedChain) -> int:
        """Where a branch rests until it is chosen: after a window, or after two where all of one may well hold."""
        return min(branch.position + 1 + self.window + branch.goes_on * (self.window + 1), self.until)

    def open_branches(self, most: int, quality: DraftQuality, outcomes: Sequence[tuple[float, int, int]]) -> None:
        """Starts what is missing of the likeliest outcomes, while there are less than `most` branches."""
        known = {(branch.parent, branch.position, branch.rank) for branch in self.branches}
        whole = quality.acceptance ** (self.window + 1)
        lines = [(1.0, self.committed, self.chain)]
        lines += [(branch.chance, branch.position + 1, branch) for branch in self.branches]
        found = (
            [
                (-reached * chance, line.number, first + offset, rank, line)
                for chance, offset, rank in outcomes
                if reached * chance >= LEAST_CHANCE and first + offset < min(line.length, self.until)
            ]
            for reached, first, line in lines
        )
        for chance, number, position, rank, line in heapq.merge(*found, key=lambda outcome: outcome[:4]):
            if len(self.branches) >= most:
                break
            if (number, position, rank) in known:
                continue
            right = min(line.right, position)
            right += right == position and self.text.rank(position) == rank
            self.last_chain += 1
            goes_on = -chance * whole >= LEAST_CHANCE
            branch = SimulatedChain(self.last_chain, position + 1, right, position, 0, number, position, rank, -chance)
            branch.goes_on = goes_on
            self.branches.append(branch)

    def pieces(self) -> Iterator[DraftTokens]:
        """What is due: full pieces, and the rest where nothing more comes, or the target may wait for it."""
        chain, window = self.chain, self.window
        while unsent := chain.length - chain.sent:
            awaited = self.survived and chain.sent < self.committed + window
            if unsent < window and self.wants_tokens and not awaited:
                break
            yield chain.piece(min(unsent, window or unsent))
        self.survived = False
        for branch in self.branches:
            if branch.parent == chain.number and branch.position <= self.committed + window:
                yield from self._pieces_of(branch)
        at_end = window and self.until > self.committed == chain.length and not self.wants_tokens
        if at_end and self.idle_at != self.committed:
            self.idle_at = self.committed
            yield DraftTokens(0, chain.number, self.committed, ())

    def _pieces_of(self, branch: SimulatedChain) -> Iterator[DraftTokens]:
        rests = branch.length >= self.end_of(branch)
        while unsent := branch.length - branch.sent:
            full = self.window + (branch.sent == branch.position)
            if unsent < full and not rests:
                return
            yield branch.piece(min(unsent, full))


class VirtualDraft:
    """The draft service: `costs` are a pass's microseconds by its rows, one for each chain and branch."""

    def __init__(self, clock: Timers, costs: StepTime, quality: DraftQuality) -> None:
        self._costs, self._quality = costs, quality
        self.device = Device(clock, self._step)
        self.streams: dict[int, DraftStream] = {}
        self.num_rows = self.num_steps = 0
        self._outcomes: dict[int, list[tuple[float, int, int]]] = {}  # by the window's length

    def deliver(self, number: int, messages: Sequence[object], reply: Reply, text: Text) -> None:
        """Messages of a stream arrive."""
        self.device.put(lambda: self._handle(number, messages, reply, text))

    def _handle(self, number: int, messages: Sequence[object], reply: Reply, text: Text) -> None:
        for message in messages:
            stream = self.streams.get(number)
            match message:
                case Open():
                    length, first = len(message.prompt_ids) + len(message.output_ids), message.first_chain
                    chain = SimulatedChain(first, length, length, length)
                    self.streams[number] = DraftStream(reply, text, length, chain, last_chain=first)
                case Close():
                    self.streams.pop(number, None)
                case Credit() if stream is not None:
                    stream.until = max(stream.until, message.until)
                    stream.window, stream.max_branches = message.max_window, message.max_branches
                case Commit() if stream is not None:
                    stream.take(message)

    def _step(self) -> tuple[float, float | None]:
        steps = [(stream, stream.chain) for stream in self.streams.values() if stream.wants_tokens]
        steps += self._branch_steps()
        took_us = self._costs.at(len(steps)) if steps else 0.0
        for stream, chain in steps:
            stream.draw(chain)
            chain.draft_us += round(took_us)
        self.num_steps += bool(steps)
        self.num_rows += len(steps)
        for stream in self.streams.values():
            for piece in stream.pieces():
                stream.reply(piece, 1e-6 * took_us)
        return 1e-6 * took_us, 0.0 if steps else None

    def _branch_steps(self) -> list[tuple[DraftStream, SimulatedChain]]:
        """The branches of the next pass: those of a sequence begin once its window is drafted."""
        branching = [stream for stream in self.streams.values() if stream.max_branches and stream.window]
        steps: list[tuple[DraftStream, SimulatedChain]] = []
        for stream in branching:
            most = min(stream.max_branches, max(1, MAX_BRANCH_STEPS // len(branching)))
            drafted = stream.chain.length >= min(stream.committed + stream.window, stream.until)
            if drafted and len(stream.branches) < most:
                stream.open_branches(most, self._quality, self._outcomes_of(stream.window))
            growing = [branch for branch in stream.branches if branch.length < stream.end_of(branch)]
            steps += [(stream, branch) for branch in growing[: MAX_BRANCH_STEPS - len(steps)]]
        return steps

    def _outcomes_of(self, window: int) -> list[tuple[float, int, int]]:
        if window not in self._outcomes:
            self._outcomes[window] = self._quality.outcomes(window)
        return self._outcomes[window]
