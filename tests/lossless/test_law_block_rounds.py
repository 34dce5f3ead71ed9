"""Block verification over consecutive rounds, by enumeration: the draft's engine draws chains, the target's judges
them, each under the counters that it really asks for.

A world knows, of every counter that decided something, in which stretch of the unit interval its words lie; it starts
without knowing anything. The engines run all worlds at once, as sequences of their own. Where what a world knows does
not settle a decision, it is parted into one world for each outcome, with the mass of its stretch: a counter that
decides twice is known the second time. The worlds that are left have the law of the output, in fractions.

What counters must hold is shown by leaving it out of them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from lossless.block_law import judge
from lossless.law import Law, Proposal, Tokens, distance
from lossless.law import _extend as extend
from simulation.tables import MAX_LEN, NUM_STATES, Table, TableRunner
from torch import Tensor

from outrider.draft_service.admission import ModelMethod, make_methods
from outrider.draft_service.engine import DraftEngine
from outrider.engine import random as engine_random
from outrider.engine.kv_cache_manager import BlockPool, KVCacheManager
from outrider.kernels.random.reference import Purpose
from outrider.proposers.draft_model import DraftModelProposer
from outrider.rpc.messages import Close, Closed, Commit, Credit, DraftTokens, Open
from outrider.rpc.servicer import Deliver
from outrider.rpc.words.sampling_params import AcceptanceRule, SamplingParams
from outrider.target_service import verifier
from outrider.target_service.engine import TargetEngine
from outrider.target_service.sequence import TargetLimits

K = 2  # drafted tokens of a window
NUM_ROUNDS = 2
LENGTH = 4  # of the output whose law is compared; what two rounds leave open is plain decoding's
PROMPT = (1, 0)
TARGET_SIXTEENTHS = [(3, 13), (10, 6), (14, 2), (13, 3), (13, 3)]
DRAFT_EIGHTHS = [(1, 7), (7, 1), (1, 7)]  # their integer weights have the same ratios

Key = tuple[Purpose, int, int]  # purpose, position, draw
Scheme = Callable[[Purpose, int, int], Key]  # what of it tells two counters apart
Stretch = tuple[Fraction, Fraction]


def table_of(parts: Sequence[tuple[int, int]]) -> Table:
    rows = torch.tensor([parts[state % len(parts)] for state in range(NUM_STATES)], dtype=torch.float64)
    return Table((rows / rows.sum(dim=1, keepdim=True)).log().float())


TARGET, DRAFT = table_of(TARGET_SIXTEENTHS), table_of(DRAFT_EIGHTHS)


def law_in(parts: Sequence[tuple[int, int]], output: Tokens) -> list[Fraction]:
    of_state = parts[TARGET.state_after((*PROMPT, *output)) % len(parts)]
    return [Fraction(part, sum(of_state)) for part in of_state]


def target_law(output: Tokens) -> list[Fraction]:
    return law_in(TARGET_SIXTEENTHS, output)


@dataclass(frozen=True, slots=True)
class World:
    mass: Fraction
    known: Mapping[Key, Stretch] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Decision:
    """One that the engines took by a counter: its outcomes lie side by side in the unit interval."""

    key: Key
    law: list[Fraction]

    def outcomes(self, world: World) -> list[World]:
        """The worlds that it parts this one into."""
        low, high = world.known.get(self.key, (Fraction(0), Fraction(1)))
        bounds = pairwise([Fraction(0), *accumulate(self.law)])
        parts = [(max(low, start), min(high, end)) for start, end in bounds]
        return [
            World(world.mass * (end - start) / (high - low), {**world.known, self.key: (start, end)})
            for start, end in parts
            if start < end
        ]


@dataclass(slots=True)
class Trace:
    """What the engines did with one world."""

    output: Tokens = ()
    latest: dict[tuple[Purpose, int], Key] = field(default_factory=dict)  # that was asked for
    drawn: dict[tuple[int, int], tuple[int, Key]] = field(default_factory=dict)  # by chain and position
    decisions: list[Decision] = field(default_factory=list)

    def note_piece(self, piece: DraftTokens) -> None:
        for position, token in enumerate(piece.ids, piece.position):
            self.drawn[piece.chain, position] = token, self.latest[Purpose.DRAFT, position]

    def note_commit(self, commit: Commit) -> None:
        """The decisions of its round, in their order."""
        start, places = commit.position, range(commit.position, commit.position + commit.num_drafted)
        drawn = [self.drawn[commit.chain, place] for place in places] if commit.chain is not None else []
        ids = tuple(token for token, _ in drawn)
        eighths = [law_in(DRAFT_EIGHTHS, self.output + ids[:place]) for place in range(len(ids))]
        vectors = tuple(((0, 1), tuple(int(8 * share) for share in law)) for law in eighths)
        proposal = Proposal(Fraction(1), ids, vectors, self.output)
        judged = judge(proposal, target_law)
        self.decisions += [Decision(key, law) for (_, key), law in zip(drawn, eighths, strict=True)]
        self.decisions += [
            Decision(self.latest[Purpose.ACCEPT, place], [h, 1 - h])
            for place, h in zip(places, judged.thresholds, strict=True)
        ]
        if len(commit.ids) > commit.num_accepted:
            purpose = Purpose.BONUS if commit.num_accepted == commit.num_drafted else Purpose.RECOVERED
            key = self.latest[purpose, start + commit.num_accepted]
            self.decisions.append(Decision(key, judged.next_law(proposal, commit.num_accepted, target_law)))
        self.output += commit.ids


class Engines:
    """A draft and a target, whose words are what each world knows. A sequence's seed is its world's index."""

    def __init__(self, worlds: Sequence[World], scheme: Scheme, monkeypatch: pytest.MonkeyPatch) -> None:
        self._worlds, self._scheme = worlds, scheme
        self.traces = [Trace() for _ in worlds]
        monkeypatch.setattr(engine_random, "words", self._words)
        monkeypatch.setattr(verifier, "words", self._words)
        count = 2 * len(worlds)  # a sequence may be opened again
        self._pieces: list[DraftTokens] = []
        proposer = DraftModelProposer(TableRunner(DRAFT, count))  # type: ignore[arg-type]
        method = ModelMethod(proposer, KVCacheManager(BlockPool(count)), (0,))
        self._draft = DraftEngine(make_methods([method]), count, 8 * count)
        limits = TargetLimits(TARGET.vocab_size, MAX_LEN, (), count, max_sequences=count)
        runner: Any = TableRunner(TARGET, count)
        self._target = TargetEngine(runner, limits, max_rows=8 * count, clock=lambda: 0.0)
        self._commits: list[Commit] = []

    def open(self, first: int = 0) -> None:
        """One sequence for each world, from what was committed of it before."""
        for number in range(len(self.traces)):
            request = Open(
                first + number, PROMPT, SamplingParams(max_tokens=12, ignore_eos=True),
                output_ids=self.traces[number].output, acceptance=AcceptanceRule.BLOCK, seed=number, first_chain=1,
            )  # fmt: skip
            self._tell_draft(number, request)
            self._tell_target(number, request)

    def close(self, first: int = 0) -> None:
        for number in range(len(self.traces)):
            self._tell_draft(number, Close(first + number))
            self._tell_target(number, Close(first + number))

    def round(self, first: int = 0, ahead: int = 0) -> None:
        """Every world drafts, `ahead` tokens past a window, and verifies."""
        for number, trace in enumerate(self.traces):
            committed = len(PROMPT) + len(trace.output)
            self._tell_draft(number, Credit(first + number, committed + K + ahead, K))
        while self._draft.step(0.0) == 0.0:
            pass
        pieces, self._pieces = self._pieces, []
        for piece in pieces:
            self._tell_target(piece.sequence_id - first, piece)
        for number, trace in enumerate(self.traces):
            until = len(PROMPT) + len(trace.output) + K + 1
            self._tell_target(number, Credit(first + number, until, K, 60_000))
        while len(self._commits) < len(self.traces):
            self._target.step(0.0)
        for commit in self._commits:
            self._tell_draft(commit.sequence_id - first, commit)
        self._commits.clear()

    def _tell_draft(self, number: int, message: Any) -> None:
        def sink(event: Any) -> None:
            assert isinstance(event, DraftTokens | Closed), event
            if isinstance(event, DraftTokens):
                self.traces[number].note_piece(event)
                self._pieces.append(event)

        self._draft.handle(Deliver(1, [message], sink))

    def _tell_target(self, number: int, message: Any) -> None:
        def sink(event: Any) -> None:
            assert isinstance(event, Commit | Closed), event
            if isinstance(event, Commit):
                self.traces[number].note_commit(event)
                self._commits.append(event)

        self._target.handle(Deliver(1, [message], sink))

    def _words(self, seeds: Tensor, positions: Tensor, purpose: Any, completions: Tensor, draws: Tensor) -> Tensor:
        purposes = purpose.tolist() if isinstance(purpose, Tensor) else [int(purpose)] * len(seeds)
        rows = zip(seeds.tolist(), positions.tolist(), map(Purpose, purposes), draws.tolist(), strict=True)
        return torch.tensor([self._word(*row) for row in rows])

    def _word(self, number: int, position: int, purpose: Purpose, draw: int) -> tuple[int, int, int, int]:
        """The middle of what is known of it."""
        key = self._scheme(purpose, position, draw)
        self.traces[number].latest[purpose, position] = key
        low, high = self._worlds[number].known.get(key, (Fraction(0), Fraction(1)))
        point = math.floor((low + high) / 2 * (1 << 64))
        return point >> 32, point & 0xFFFFFFFF, 0, 0


Play = Callable[[Engines], None]


def in_turn(engines: Engines) -> None:
    engines.open()
    for _ in range(NUM_ROUNDS):
        engines.round()


def running_ahead(engines: Engines) -> None:
    """A whole window is followed by none of the target's own: its chain goes on."""
    engines.open()
    for _ in range(NUM_ROUNDS):
        engines.round(ahead=K)


def resumed(engines: Engines) -> None:
    """After the first round a client goes on elsewhere: with the same seed, and chain numbers that begin again."""
    for first in range(0, NUM_ROUNDS * len(engines.traces), len(engines.traces)):
        engines.open(first)
        engines.round(first)
        engines.close(first)


def law_of(play: Play, scheme: Scheme, monkeypatch: pytest.MonkeyPatch) -> Law:
    law: Law = defaultdict(Fraction)
    worlds = [World(Fraction(1))]
    while worlds:
        engines = Engines(worlds, scheme, monkeypatch)
        play(engines)
        worlds = [
            part for world, trace in zip(worlds, engines.traces, strict=True) for part in parted(world, trace, law)
        ]
    return law


def parted(world: World, trace: Trace, law: Law) -> Iterator[World]:
    """What has to run again: the outcomes of the first decisions that are open, up to one that others rest on. If there
    is none, the world's output counts."""
    parts = [world]
    for decision in trace.decisions:
        parts = [outcome for part in parts for outcome in decision.outcomes(part)]
        if len(parts) > 1 and decision.key[0] is not Purpose.ACCEPT:
            break
    if len(parts) == 1:
        extend(law, trace.output, world.mass, (), target_law, LENGTH)
    else:
        yield from parts


def as_asked(purpose: Purpose, position: int, draw: int) -> Key:
    return purpose, position, draw


@pytest.mark.parametrize("play", [in_turn, running_ahead, resumed], ids=lambda play: play.__name__)
def test_joint_law_is_plain_decodings(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    law = law_of(play, as_asked, monkeypatch)
    assert sum(law.values()) == 1
    assert distance(law, target_law, LENGTH) == 0
