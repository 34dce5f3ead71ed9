"""What a controller chooses: the ways to decode a request, and how far each lets the two services go. And what it sees
of that: what one verification did, and the sums over a completion's rounds."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple, Protocol

from outrider.rpc.messages import Commit
from outrider.rpc.words.answer import MethodStats, SpeculationStats

MODES_AHEAD = ("chains", "branches")


class MethodShare(NamedTuple):
    """What of a window one method drafted."""

    method: str
    num_drafted: int
    num_accepted: int


@dataclass(slots=True)
class Round:
    """One commit with its times. Seconds are on the gateway's monotonic clock, microseconds are durations."""

    index: int
    commit: Commit
    num_draft_tokens: int  # k of the policy; 0: plain decoding
    started: float
    ended: float
    draft_us: int  # device time of the pieces that arrived in this round
    mode: str = ""  # off, sequential, chains or branches
    chosen: bool = False  # by a controller
    inputs: Mapping[str, float] = field(default_factory=dict)  # what it chose by, where that is recorded
    at_end: bool = False  # no more drafted tokens would have fitted before max_tokens
    moved: bool = False  # since the round before, which another target (or stream) committed
    drafted_by: tuple[MethodShare, ...] = ()  # in the order of the window, as far as it is known
    near_ties: bool = False  # this round or one before moved to a target whose logits need not be equal to the bit
    total_us: int = field(init=False)  # from the commit before to this one
    forward_us: int = field(init=False)  # forward passes: one after the other, or, ahead, both at the same time

    def __post_init__(self) -> None:
        verify_us = self.commit.timings.verify_us
        self.total_us = round((self.ended - self.started) * 1e6)
        self.forward_us = max(self.draft_us, verify_us) if self.mode in MODES_AHEAD else self.draft_us + verify_us

    @property
    def wire_us(self) -> int:
        """What is neither draft, queue, verify nor sample: transport, event loops, the gateway itself."""
        timings = self.commit.timings
        return max(0, self.total_us - self.forward_us - timings.queue_us - timings.sample_us)

    @property
    def overhead_us(self) -> int:
        """The control overhead: the round's time less its forward passes (draft and verify)."""
        return max(0, self.total_us - self.forward_us)


@dataclass(slots=True)
class SpeculationTally(SpeculationStats):
    """The sums of a completion as its rounds come in."""

    num_rounds_by_mode: dict[str, int] = field(default_factory=dict)
    by_method: dict[str, MethodStats] = field(default_factory=dict)
    overheads_us: list[int] = field(default_factory=list)  # of its rounds, rising

    def add(self, closed: Round) -> None:
        """Counts a round; a plain step is a round without a draft."""
        commit = closed.commit
        self.num_rounds += 1
        self.num_forced_tokens += commit.num_forced
        self.num_accepted_forced_tokens += commit.num_accepted_forced
        self.mode = closed.mode
        self.num_rounds_by_mode[closed.mode] = self.num_rounds_by_mode.get(closed.mode, 0) + 1
        if closed.index > 0:  # the first round holds the prompt
            self._add_overhead(closed.overhead_us)
        if commit.num_drafted == 0:
            return
        self.num_drafts += 1
        self.num_draft_tokens += commit.num_drafted
        self.num_accepted_tokens += commit.num_accepted
        for share in closed.drafted_by:
            of_method = self.by_method.setdefault(share.method, MethodStats())
            of_method.num_drafts += 1
            of_method.num_draft_tokens += share.num_drafted
            of_method.num_accepted_tokens += share.num_accepted
        num_tested = min(commit.num_drafted, commit.num_accepted + 1)
        tested, accepted = self.num_tested_per_position, self.num_accepted_per_position
        self.num_tested_per_position = _with_round(tested, num_tested, commit.num_drafted)
        self.num_accepted_per_position = _with_round(accepted, commit.num_accepted, commit.num_drafted)

    def _add_overhead(self, overhead_us: int) -> None:
        insort(self.overheads_us, overhead_us)
        middle, is_odd = divmod(len(self.overheads_us), 2)
        upper = self.overheads_us[middle]
        self.overhead_us = upper if is_odd else round((self.overheads_us[middle - 1] + upper) / 2)


def _with_round(counts: tuple[int, ...], num_reached: int, num_drafted: int) -> tuple[int, ...]:
    """Counts by position, and one more for each of the first `num_reached`."""
    padded = counts + (0,) * (num_drafted - len(counts))
    return tuple([count + (position < num_reached) for position, count in enumerate(padded)])


@dataclass(frozen=True, slots=True)
class Policy:
    """How far each side may go."""

    num_draft_tokens: int  # k; 0: plain decoding
    patience_ms: int = 500  # how long the target waits for a chain
    windows_ahead: int = 0  # drafted past the verification under way; 0: sequential
    max_branches: int = 0  # that the draft may hold for other outcomes of it
    plain_ahead: int = 16  # plain tokens that the target may commit beyond what the gateway has seen
    max_unread: int = 256  # committed tokens that a slow client may leave unread before credit stops
    max_target_opens: int = 3  # times in a row without a commit, the last one alone in its steps, before it is given up
    reopen_s: float = 15.0  # how long a sequence whose target was lost waits for another
    room_s: float = 0.0  # that a new sequence waits for a target that is not full
    away_s: float = 0.0  # that it waits for any: one whose connection was cut is there again in a moment

    @property
    def mode(self) -> str:
        """Its name."""
        if not self.num_draft_tokens:
            return "off"
        return ("branches" if self.max_branches else "chains") if self.windows_ahead else "sequential"


class PolicyController(Protocol):
    """Chooses the policy anew as rounds end (the controller)."""

    @property
    def policy(self) -> Policy:
        """The present choice."""

    def inputs(self) -> Mapping[str, float]:
        """What the choice rests on, for traces."""

    def on_piece(self, num_ids: int, draft_us: int) -> None:
        """A piece arrived."""

    def on_round(self, closed: Round) -> bool:
        """A round ended; returns whether the choice changed."""


class Mode(Enum):
    """How a request is decoded."""

    OFF = "off"
    SEQUENTIAL = "sequential"
    CHAINS = "chains"
    BRANCHES = "branches"


AHEAD = (Mode.CHAINS, Mode.BRANCHES)


@dataclass(frozen=True, slots=True)
class Plan:
    """One choice."""

    mode: Mode
    num_draft_tokens: int
    waits: bool = True  # for a chain where none is at hand; else the target decodes plain tokens until one is

    @property
    def style(self) -> tuple[Mode, bool]:
        """What its measurements hold for, whatever the number of tokens."""
        return self.mode, self.waits

    def policy(self, base: Policy, max_branches: int, deep: bool = False) -> Policy:
        """As credit and patience. Branches of branches reach into a second window, and need room beside the others."""
        branching = self.mode is Mode.BRANCHES
        return replace(
            base,
            num_draft_tokens=self.num_draft_tokens,
            patience_ms=base.patience_ms if self.waits else 0,
            windows_ahead=(self.mode in AHEAD) + (branching and deep),
            max_branches=max_branches * (1 + deep) if branching else 0,
        )


OFF = Plan(Mode.OFF, 0)


@dataclass(frozen=True, slots=True)
class PolicyLimits:
    """What a request lets the controller choose."""

    base: Policy
    most: int  # tokens drafted a round, at most
    fixed: bool = False  # exactly so many: the request says so
    modes: tuple[Mode, ...] = (Mode.OFF, Mode.SEQUENTIAL, Mode.CHAINS, Mode.BRANCHES)
    max_branches: int = 12
    weighs: bool = False  # rejection with weights: no token of the target's own where the chain goes on
    waits: bool = False  # the target always waits for a chain

    plans: tuple[Plan, ...] = field(init=False)  # everything allowed

    def __post_init__(self) -> None:
        object.__setattr__(self, "plans", tuple(self._allowed()))

    def _allowed(self) -> Iterator[Plan]:
        """Under rejection the target must wait: when a chain comes is no business of the law's."""
        if Mode.OFF in self.modes:
            yield OFF
        for mode in self.modes:
            if mode is not Mode.OFF:
                for k in [self.most] if self.fixed else range(1, self.most + 1):
                    yield Plan(mode, k)
                    if mode in AHEAD and not (self.weighs or self.waits):
                        yield Plan(mode, k, waits=False)
