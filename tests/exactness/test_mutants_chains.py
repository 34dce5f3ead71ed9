"""Chains that arrive in pieces and are cut: the target's own buffer, round by round, with every coin and next token.

Whatever the clock, the credit and the load decide leaves the law alone. Whatever a drawn token decides does not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import product

import pytest
from exactness.law import (
    FULL_WEIGHTS,
    LENGTH,
    NUM_DRAFTED,
    TRUNCATED_WEIGHTS,
    VOCAB_SIZE,
    Ending,
    Law,
    Proposal,
    Tokens,
    Vector,
    distance,
    endings_of,
    one_hot,
    proportional,
    proposals_of,
    sparse,
)

from outrider.rpc.messages import Piece, TokenWeights
from outrider.target_service.draft_buffer import ChainBuffer


@dataclass(frozen=True, slots=True)
class Round:
    """What the target knows and may do when it verifies once."""

    num_arrived: int  # tokens of the chain that have come
    limit: int = 8  # of the window
    room: int = 8  # tokens that may be committed
    more: bool = True  # whether the draft says that missing tokens will come


Plan = Callable[[Proposal], Sequence[Round]]  # the rounds of a chain


@dataclass(slots=True)
class State:
    """A sequence in the target after some rounds."""

    mass: Fraction
    chain: Proposal
    rounds: Sequence[Round]  # the last is repeated
    tokens: list[int] = field(default_factory=list)
    num_arrived: int = 0
    buffer: ChainBuffer = field(init=False)

    def __post_init__(self) -> None:
        self.buffer = ChainBuffer(self.tokens, VOCAB_SIZE)

    def receive(self, step: Round) -> None:
        """Takes the piece that is new."""
        start, end = self.num_arrived, step.num_arrived
        if end > start:
            more = step.more and end < len(self.chain.ids)
            weights = tuple(map(as_sent, self.chain.vectors[start:end]))
            self.buffer.add(Piece(1, 0, start, self.chain.ids[start:end], weights, more=more))
            self.num_arrived = end

    def window(self, step: Round, origin: int) -> Proposal:
        """What the next step verifies, shaped as the target's scheduler does it under rejection."""
        window = self.buffer.window(min(step.limit, step.room))
        takes_next = step.room > len(window.ids) and not (window.ids and window.goes_on)
        vectors = self.chain.vectors[len(self.tokens) : len(self.tokens) + len(window.ids)]
        if [entry and (entry.ids, entry.weights) for entry in window.weights] != [
            entry and (entry.ids, entry.weights) for entry in map(as_sent, vectors)
        ]:
            raise ValueError("the window's weights are not those that its ids were drawn from")
        return Proposal(self.mass, window.ids, vectors, tuple(self.tokens), takes_next, origin=origin)

    def after(self, tokens: Tokens, mass: Fraction) -> State:
        """The same sequence with the round's tokens committed."""
        state = deepcopy(self)
        state.mass = mass
        state.tokens.extend(tokens[len(self.tokens) :])
        state.buffer.advance()
        return state


def as_sent(vector: Vector) -> TokenWeights | None:
    return None if vector is None else TokenWeights.of(*vector)


def committed_by(end: Ending) -> Iterator[tuple[Tokens, Fraction]]:
    """The tokens after a round, and their probability."""
    drawn = proportional(end)
    if not drawn:
        yield end.tokens, end.mass
    for token, share in enumerate(drawn):
        if share:
            yield (*end.tokens, token), end.mass * share


def law_by_rounds(chains: Sequence[Proposal], plan: Plan, send_weights: bool = True) -> Law:
    law: Law = defaultdict(Fraction)
    none: tuple[Vector, ...] = (None,) * NUM_DRAFTED
    states = [State(c.mass, c if send_weights else replace(c, vectors=none), plan(c)) for c in chains]
    round_number = 0
    while states:
        windows = []
        for origin, state in enumerate(states):
            step = state.rounds[min(round_number, len(state.rounds) - 1)]
            state.receive(step)
            windows.append(state.window(step, origin))
        following: dict[tuple[int, Tokens], Fraction] = defaultdict(Fraction)
        for end in endings_of(windows):
            for tokens, mass in committed_by(end):
                following[end.proposal.origin, tokens] += mass
        for (_, tokens), mass in following.items():
            if len(tokens) >= LENGTH:
                law[tokens[:LENGTH]] += mass
        going_on = [(key, mass) for key, mass in following.items() if len(key[1]) < LENGTH]
        states = [states[origin].after(tokens, mass) for (origin, tokens), mass in going_on]
        round_number += 1
    return law


PLANS: dict[str, list[Round]] = {
    "all at once": [Round(2)],
    "cut by the limit": [Round(2, limit=1), Round(2)],
    "cut by the credit": [Round(2, room=1), Round(2)],
    "in two pieces": [Round(1), Round(2)],
    "the second piece is a surprise": [Round(1, more=False), Round(2)],
    "after a plain token": [Round(0), Round(2)],
    "after two plain tokens": [Round(0), Round(0), Round(2)],
    "a plain token under load": [Round(2, limit=0), Round(2)],
    "never more than one": [Round(2, limit=1)],
    "the second piece never comes": [Round(1), Round(1)],
}
DRAFTS = {
    "weights": proposals_of(FULL_WEIGHTS, sparse),
    "truncated": proposals_of(TRUNCATED_WEIGHTS, sparse),
    "one-hot": proposals_of(FULL_WEIGHTS, one_hot),
}


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("plan", PLANS)
def test_chains_cut_before_the_draw_are_exact(draft: str, plan: str) -> None:
    assert distance(law_by_rounds(DRAFTS[draft], lambda chain: PLANS[plan])) == 0


def by_a_law(chain: Proposal) -> list[Round]:
    """What is known before the second token is drawn may decide about it: the first token, and the second's law."""
    vector = chain.vectors[1]
    return [Round(2)] if vector is not None and max(vector[1]) >= 4 and chain.ids[0] != 1 else PLANS["in two pieces"]


def test_a_cut_by_what_is_known_before_is_exact() -> None:
    assert len({len(by_a_law(chain)) for chain in DRAFTS["weights"]}) == 2
    assert distance(law_by_rounds(DRAFTS["weights"], by_a_law)) == 0


def is_likely(chain: Proposal) -> bool:
    ids, weights = chain.vectors[NUM_DRAFTED - 1] or ((), ())
    return dict(zip(ids, weights, strict=True))[chain.ids[NUM_DRAFTED - 1]] >= 2


def sent_if_likely(chain: Proposal) -> list[Round]:
    return [Round(2)] if is_likely(chain) else [Round(1, more=False)]


def sent_late_if_unlikely(chain: Proposal) -> list[Round]:
    """The target decodes a plain token while it waits; in the end every token arrives."""
    return [Round(1), Round(2)] if is_likely(chain) else [Round(1), Round(1), Round(2)]


def admitted_if_likely(chain: Proposal) -> list[Round]:
    return [Round(2)] if is_likely(chain) else [Round(2, limit=1), Round(2, limit=0), Round(2)]


def bytes_bound_the_piece(chain: Proposal) -> list[Round]:
    """Ids are of variable length on the wire: only small ones fit."""
    return [Round(2)] if chain.ids[1] < 2 else [Round(1, more=False), Round(2)]


PEEKING = [sent_if_likely, sent_late_if_unlikely, admitted_if_likely, bytes_bound_the_piece]


@pytest.mark.parametrize("plan", PEEKING, ids=lambda plan: plan.__name__)
def test_a_cut_by_what_was_drawn_is_seen(plan: Plan) -> None:
    gap = distance(law_by_rounds(DRAFTS["weights"], plan))
    print(f"{plan.__name__}: {float(gap):.1e}")
    assert gap > 0


@pytest.mark.parametrize("plan", PEEKING, ids=lambda plan: plan.__name__)
def test_one_hot_chains_may_be_cut_by_anything(plan: Plan) -> None:
    assert distance(law_by_rounds(DRAFTS["weights"], plan, send_weights=False)) == 0


@pytest.mark.slow
@pytest.mark.parametrize("draft", DRAFTS)
def test_every_plan_of_three_rounds_is_exact(draft: str) -> None:
    steps = {step for plan in PLANS.values() for step in plan}
    for plan in product(sorted(steps, key=repr), repeat=3):
        assert distance(law_by_rounds(DRAFTS[draft], lambda chain, plan=plan: plan)) == 0, plan
