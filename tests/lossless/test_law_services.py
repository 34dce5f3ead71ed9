"""What services that speculate may make of a right acceptance rule, each as a law of its own that must be plain
decoding's exactly: no peeking.

Whatever the clock, the credit, the load and what was committed decide leaves the law alone: where a chain is cut, which
of two drafts is kept, which weights are sent, which method drafts, what is verified again. What a drawn token decides
does not, but for one-hot drafts. (tests/mutation/mutants.py has such faults of production.)

Chains that arrive in pieces and are cut go through the target's own buffer, round by round, with every coin and next
token."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cache
from itertools import product

import pytest
import torch
from lossless.law import (
    FULL_WEIGHTS,
    LENGTH,
    NUM_DRAFTED,
    PARTS,
    TRUNCATED_WEIGHTS,
    VOCAB_SIZE,
    Ending,
    Law,
    Proposal,
    Tokens,
    Vector,
    Weights,
    context_index,
    distance,
    endings_of,
    law_of,
    one_hot,
    proportional,
    proposals_of,
    sparse,
    target_law,
)

from outrider.kernels.sampling.reference import draw_integer
from outrider.rpc.messages import DraftTokens, TokenWeights
from outrider.target_service.draft_buffer import ChainBuffer


def weights_at(context: Tokens) -> Weights:
    return FULL_WEIGHTS[context_index(context, len(FULL_WEIGHTS))]


# A drafted token and what judges it


def drafts_by_words() -> list[Proposal]:
    """Production's draw from the integers, for every cell of the words."""
    proposals = []
    for cells in product(range(PARTS), repeat=NUM_DRAFTED):
        words = torch.tensor([[cell << 28, 0, 0, 0] for cell in cells])  # [drafted, 4]
        ids: Tokens = ()
        for place in range(NUM_DRAFTED):
            weights = torch.tensor(weights_at(ids))
            starts = torch.tensor([0, len(weights)])
            ids = (*ids, int(draw_integer(torch.arange(len(weights)), weights, starts, words[place : place + 1])))
        vectors = tuple(sparse(weights_at(ids[:place])) for place in range(NUM_DRAFTED))
        proposals.append(Proposal(Fraction(1, PARTS**NUM_DRAFTED), ids, vectors))
    return proposals


def test_words_of_their_own_are_exact() -> None:
    assert distance(law_of(endings_of(drafts_by_words()))) == 0


@dataclass(frozen=True, slots=True)
class Round:
    """What the target knows and may do when it verifies once."""

    num_arrived: int  # tokens of the chain that have come
    limit: int = 8  # of the window
    room: int = 8  # tokens that may be committed
    more: bool = True  # whether the draft says that missing tokens will come


Plan = Callable[..., Sequence[Round]]  # the rounds of a chain


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
            self.buffer.add(DraftTokens(1, 0, start, self.chain.ids[start:end], weights, more=more))
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


def left_early_by_its_law(chain: Proposal) -> list[Round]:
    """The second piece leaves with its first token where the draft is sure of none there."""
    vector = chain.vectors[1]
    return [Round(1), Round(2)] if vector is not None and max(vector[1]) < 4 else [Round(1), Round(1), Round(2)]


def test_a_piece_that_leaves_early_by_its_law_is_exact() -> None:
    assert len({len(left_early_by_its_law(chain)) for chain in DRAFTS["weights"]}) == 2
    assert distance(law_by_rounds(DRAFTS["weights"], left_early_by_its_law)) == 0


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


def left_early_if_unlikely(chain: Proposal) -> list[Round]:
    """A piece ends with its first token, and is there in time, where that is unlikely; a full one takes longer: the
    target has decoded a plain token."""
    ids, weights = chain.vectors[0] or ((), ())
    weight = dict(zip(ids, weights, strict=True))[chain.ids[0]]
    return [Round(1, more=False)] if weight < max(weights) else [Round(0), Round(2)]


PEEKING = [
    sent_if_likely, sent_late_if_unlikely, admitted_if_likely, bytes_bound_the_piece, left_early_if_unlikely,
]  # fmt: skip


@pytest.mark.parametrize("plan", PEEKING, ids=lambda plan: plan.__name__)
def test_one_hot_chains_may_be_cut_by_anything(plan: Plan) -> None:
    assert distance(law_by_rounds(DRAFTS["weights"], plan, send_weights=False)) == 0


@pytest.mark.slow
@pytest.mark.parametrize("draft", DRAFTS)
def test_every_plan_of_three_rounds_is_exact(draft: str) -> None:
    steps = {step for plan in PLANS.values() for step in plan}
    for plan in product(sorted(steps, key=repr), repeat=3):
        assert distance(law_by_rounds(DRAFTS[draft], lambda chain, plan=plan: plan)) == 0, plan


def judged(proposals: Iterable[Proposal]) -> Law:
    return law_of(endings_of(proposals))


def weight_of(vector: Vector, token: int) -> int:
    """What a draft drew a token with; these drafts send all of it."""
    ids, weights = vector or ((), ())
    return dict(zip(ids, weights, strict=True))[token]


# How many tokens are drafted


def cut(proposals: Iterable[Proposal], likely: Callable[[Vector, int], bool]) -> list[Proposal]:
    """A chain ends before its first token that is not likely."""
    shorter = []
    for chain in proposals:
        flags = [likely(vector, token) for vector, token in zip(chain.vectors, chain.ids, strict=True)]
        count = [*flags, False].index(False)
        shorter.append(replace(chain, ids=chain.ids[:count], vectors=chain.vectors[:count]))
    return shorter


def likely_by_its_token(vector: Vector, token: int) -> bool:
    return weight_of(vector, token) >= 2


def likely_by_its_law(vector: Vector, token: int) -> bool:
    return vector is not None and max(vector[1]) >= 4


def cut_before_the_token_is_drawn() -> Law:
    return judged(cut(proposals_of(FULL_WEIGHTS), likely_by_its_law))


def cut_after_a_one_hot_token_was_seen() -> Law:
    """One-hot drafts may be cut by anything."""
    chains = cut(proposals_of(FULL_WEIGHTS), likely_by_its_token)
    return judged(replace(chain, vectors=(None,) * len(chain.ids)) for chain in chains)


# Which of two drafts is kept


def better_of_two(score: Callable[[Proposal], int], send_weights: bool = True) -> Law:
    first, second = proposals_of(FULL_WEIGHTS), proposals_of(TRUNCATED_WEIGHTS)
    kept = [replace(a if score(a) >= score(b) else b, mass=a.mass * b.mass) for a in first for b in second]
    return judged(kept if send_weights else [replace(chain, vectors=(None,) * NUM_DRAFTED) for chain in kept])


def by_its_tokens(chain: Proposal) -> int:
    weights = [weight_of(vector, token) for vector, token in zip(chain.vectors, chain.ids, strict=True)]
    return weights[0] * weights[1]


def by_its_first_law(chain: Proposal) -> int:
    return max(chain.vectors[0][1]) if chain.vectors[0] else 0


def better_of_two_by_their_first_laws() -> Law:
    return better_of_two(by_its_first_law)


def better_of_two_one_hot_drafts() -> Law:
    return better_of_two(by_its_tokens, send_weights=False)


def first_of_two_to_arrive() -> Law:
    drafts = (proposals_of(FULL_WEIGHTS), Fraction(2, 3)), (proposals_of(TRUNCATED_WEIGHTS), Fraction(1, 3))
    return judged(replace(chain, mass=chain.mass * share) for draft, share in drafts for chain in draft)


# Whether a position is judged with its weights or as one-hot


def mode_by_the_law() -> Law:
    return judged(proposals_of(FULL_WEIGHTS, lambda weights, token: sparse(weights) if max(weights) >= 4 else None))


def mode_by_the_tokens_before() -> Law:
    chains = proposals_of(FULL_WEIGHTS)
    return judged(replace(c, vectors=(c.vectors[0], c.vectors[1] if c.ids[0] % 2 else None)) for c in chains)


# Which weights a token is drawn from that a refused chain has drawn, with the same word


def drawn_again(is_truncated: Callable[[Proposal], bool]) -> Law:
    """Where a chain's first token is refused, the next one draws the second place anew: with a table of weights that
    the refused chain decides, which are sent. Of a constraint whose masks are dropped once one of them took long."""
    chains = [replace(chain, origin=cell % PARTS) for cell, chain in enumerate(drafts_by_words())]
    endings = endings_of(chains)
    again: list[Proposal] = []
    for end in (end for end in endings if not end.num_accepted):
        tables = TRUNCATED_WEIGHTS if is_truncated(end.proposal) else FULL_WEIGHTS
        for tokens, mass in committed_by(end):
            weights = tables[context_index(tokens, len(tables))]
            token = drawn_at(weights, end.proposal.origin)
            again.append(Proposal(mass, (token,), (sparse(weights),), context=tokens))
    return law_of([end for end in endings if end.num_accepted] + endings_of(again))


@cache
def drawn_at(weights: Weights, cell: int) -> int:
    """What stands in one of a word's cells."""
    word = torch.tensor([[cell << 28, 0, 0, 0]])
    starts = torch.tensor([0, len(weights)])
    return int(draw_integer(torch.arange(len(weights)), torch.tensor(weights), starts, word))


def weights_by_what_was_refused_before() -> Law:
    return drawn_again(lambda refused: refused.ids[0] >= 2)


# Which of several methods drafts


LOOKED_UP = 2  # what the lookup has, wherever it is asked


def drafted_in_turn(by_model: Callable[[Tokens, Weights, int], bool]) -> Law:
    """The model draws with its weights, or the lookup's token stands there, one-hot."""
    chains = [Proposal(Fraction(1), (), ())]
    for _ in range(NUM_DRAFTED):
        chains = [
            replace(
                chain,
                mass=chain.mass * Fraction(weight, sum(weights)),
                ids=(*chain.ids, drawn if by_model(chain.ids, weights, drawn) else LOOKED_UP),
                vectors=(*chain.vectors, sparse(weights) if by_model(chain.ids, weights, drawn) else None),
            )
            for chain in chains
            for weights in [weights_at(chain.ids)]
            for drawn, weight in enumerate(weights)
            if weight
        ]
    return judged(chains)


def lookup_by_what_was_committed() -> Law:
    """Before anything of the window is drawn: the lookup has one token, and the model goes on."""
    return drafted_in_turn(lambda before, weights, drawn: len(before) > 0)


def lookup_by_the_models_law() -> Law:
    return drafted_in_turn(lambda before, weights, drawn: max(weights) >= 4)


# What happens when the answer to a fully accepted window is lost

LOST = Fraction(1, 10)


def retried(is_lost: Callable[[Ending], bool], again: Callable[[Proposal, tuple[float, ...]], Proposal]) -> Law:
    """A tenth of the answers that may be lost are, and the window is verified again."""
    endings = endings_of(proposals_of(FULL_WEIGHTS))
    kept = [replace(end, mass=end.mass * (1 - LOST)) if is_lost(end) else end for end in endings]
    second = [replace(again(end.proposal, end.uniforms), mass=end.mass * LOST) for end in endings if is_lost(end)]
    return law_of(kept + endings_of(second))


def is_full(end: Ending) -> bool:
    return end.num_accepted == NUM_DRAFTED


def retried_with_the_same_randomness() -> Law:
    return retried(is_full, lambda window, uniforms: replace(window, uniforms=uniforms))


def retried_with_fresh_randomness_whatever_was_accepted() -> Law:
    """A loss that does not depend on the answer does no harm."""
    return retried(lambda end: True, lambda window, uniforms: window)


# Whether a refused token is forgotten


# What is drafted for a seed that comes again, from a store that learns


def asked_again(learns: Sequence[bool], coins_come_again: bool = True) -> Law:
    """Another's answer is drafted for a seed's first call, of each call the latest that the store has, and the last
    one's law is told. `learns`: from each call before that."""
    first = target_law(())
    asked = [
        Proposal(mass / PARTS, (token,), (None,), uniforms=(cell / PARTS,))
        for token, mass in enumerate(first)
        if mass
        for cell in range(PARTS)
    ]
    for is_learned in learns:
        asked = [
            Proposal(
                mass,
                tokens[:1] if is_learned else end.proposal.ids,
                (None,),
                uniforms=end.uniforms if coins_come_again else None,
            )
            for end in endings_of(asked)
            for tokens, mass in committed_by(end)
        ]
    return judged(asked)


def recalled_for_other_seeds() -> Law:
    return asked_again([True, True], coins_come_again=False)


def others_recalled_for_a_seed_that_teaches_nothing() -> Law:
    return asked_again([False, False])


# Which version of learned weights a token is drawn from, and of what it learned


def put_in_use_behind_a_token(by_the_one_that_drew: bool) -> Law:
    """Behind a chain's first token other weights draw."""
    chains: list[Proposal] = []
    for first, mass in enumerate(weights := weights_at(())):
        before, after = (table[context_index((first,), len(table))] for table in (FULL_WEIGHTS, TRUNCATED_WEIGHTS))
        told = sparse(weights), sparse(after if by_the_one_that_drew else before)
        for second, more in enumerate(after):
            chance = Fraction(mass, sum(weights)) * Fraction(more, sum(after))
            chains.append(Proposal(chance, (first, second), told))
    return judged(chain for chain in chains if chain.mass)


def other_weights_behind_a_token() -> Law:
    return put_in_use_behind_a_token(by_the_one_that_drew=True)


def weights_of_a_version_that_did_not_draw() -> Law:
    return put_in_use_behind_a_token(by_the_one_that_drew=False)


def learned_of_a_call(coins_come_again: bool) -> Law:
    """A call's own answer decides by what weights the next one's draft is drawn."""
    calls = [
        Proposal(mass / PARTS, (token,), (None,), uniforms=(cell / PARTS,))
        for token, mass in enumerate(target_law(()))
        if mass
        for cell in range(PARTS)
    ]
    again: list[Proposal] = []
    for end in endings_of(calls):
        for tokens, mass in committed_by(end):
            table = FULL_WEIGHTS if tokens[0] >= 2 else TRUNCATED_WEIGHTS
            weights = table[context_index((), len(table))]
            again += [
                Proposal(
                    mass * Fraction(weight, sum(weights)),
                    (token,),
                    (sparse(weights),),
                    uniforms=end.uniforms if coins_come_again else None,
                )
                for token, weight in enumerate(weights)
                if weight
            ]
    return judged(again)


def learned_of_other_seeds() -> Law:
    return learned_of_a_call(coins_come_again=False)


def learned_of_its_own_seed() -> Law:
    return learned_of_a_call(coins_come_again=True)


@pytest.mark.parametrize(
    "fault", [weights_of_a_version_that_did_not_draw, learned_of_its_own_seed], ids=lambda law: law.__name__
)
def test_what_a_draft_that_learns_must_not_do_is_found(fault: Callable[[], Law]) -> None:
    assert distance(fault()) > Fraction(1, 1000)


REMEDIES = [
    cut_before_the_token_is_drawn,
    cut_after_a_one_hot_token_was_seen,
    better_of_two_by_their_first_laws,
    better_of_two_one_hot_drafts,
    first_of_two_to_arrive,
    mode_by_the_law,
    mode_by_the_tokens_before,
    weights_by_what_was_refused_before,
    lookup_by_what_was_committed,
    lookup_by_the_models_law,
    retried_with_the_same_randomness,
    retried_with_fresh_randomness_whatever_was_accepted,
    recalled_for_other_seeds,
    others_recalled_for_a_seed_that_teaches_nothing,
    other_weights_behind_a_token,
    learned_of_other_seeds,
]


@pytest.mark.parametrize("remedy", REMEDIES, ids=lambda law: law.__name__)
def test_a_remedy_is_exact(remedy: Callable[[], Law]) -> None:
    assert distance(remedy()) == 0
