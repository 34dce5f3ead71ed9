"""The joint law of a sequence's first tokens, by enumeration: every draft, every coin, every next token, in fractions.

A toy of four tokens. A target's probabilities are sixteenths and the drafted ids' weights powers of two, so that every
threshold of the acceptance test lies on a grid of few coins: one coin of each cell stands for the cell, and float32 and
float64 hold every product. A draft is a list of proposals, each with its exact probability; production acceptance
judges them all in one batch; the next token is drawn from the weights it returns, the rest by plain decoding."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from itertools import product

import torch
from support.kernels import packed
from torch import Tensor

from outrider.kernels.types import DraftWeights, Windows
from outrider.kernels.verify.reference import accept

VOCAB_SIZE, NUM_DRAFTED = 4, 2
LENGTH = NUM_DRAFTED + 1
PARTS = 16  # of a target's probabilities
TARGET_SIXTEENTHS = [(8, 4, 2, 2), (4, 4, 8, 0), (1, 3, 5, 7), (0, 6, 4, 6), (2, 2, 2, 10), (9, 0, 7, 0)]
FULL_WEIGHTS: list[Weights] = [(1, 1, 2, 4), (4, 2, 1, 1), (2, 2, 2, 2), (1, 4, 2, 1)]
TRUNCATED_WEIGHTS: list[Weights] = [(4, 4, 0, 0), (0, 2, 2, 4), (4, 0, 2, 2), (0, 0, 0, 8)]
ONE_HOT_WEIGHTS: list[Weights] = [(8, 0, 0, 0), (0, 0, 8, 0), (0, 8, 0, 0), (0, 0, 0, 8)]

Tokens = tuple[int, ...]
Weights = tuple[int, ...]  # of every id, what a draft draws from
Law = dict[Tokens, Fraction]
Target = Callable[..., Sequence[Fraction]]  # behind tokens
Vector = tuple[Sequence[int], Sequence[int]] | None
Send = Callable[[Weights, int], Vector]  # what is sent of the weights, and of the token drawn from them
AcceptRule = Callable[[Tensor, Windows, Tensor, DraftWeights, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Proposal:
    """A window of drafted tokens as the target sees it, and how likely it is."""

    mass: Fraction
    ids: Tokens
    vectors: tuple[Vector, ...]
    context: Tokens = ()  # committed before it
    takes_next: bool = True  # whether the token after a full window is drawn
    uniforms: tuple[float, ...] | None = None  # None: all of them
    origin: int = 0  # tells apart what is equal otherwise


@dataclass(frozen=True, slots=True)
class Ending:
    """What acceptance says of a proposal for one cell of coins."""

    proposal: Proposal
    uniforms: tuple[float, ...]
    mass: Fraction
    num_accepted: int
    weights: tuple[float, ...]  # of the next draw; all 0 where there is none

    @property
    def tokens(self) -> Tokens:
        """Committed and accepted."""
        return self.proposal.context + self.proposal.ids[: self.num_accepted]

    @property
    def refused(self) -> int | None:
        """The refused token, if there is one."""
        return self.proposal.ids[self.num_accepted] if self.num_accepted < len(self.proposal.ids) else None


NextLaw = Callable[[Ending], Sequence[Fraction]]
Continuation = Callable[[Ending, Tokens], Tokens]  # what the target attends to, given what is committed


def context_index(context: Tokens, count: int) -> int:
    return int(sum((token + 1) * 7**place for place, token in enumerate(context)) % count)


@cache
def target_law(context: Tokens) -> tuple[Fraction, ...]:
    sixteenths = TARGET_SIXTEENTHS[context_index(context, len(TARGET_SIXTEENTHS))]
    return tuple(Fraction(part, PARTS) for part in sixteenths)


def sparse(weights: Weights, token: int = 0) -> Vector:
    """The ids of some weight, and their weights: an honest draft's."""
    return tuple(i for i, w in enumerate(weights) if w), tuple(w for w in weights if w)


def one_hot(weights: Weights, token: int = 0) -> Vector:
    """Nothing is sent but the token."""
    return None


def proposals_of(
    tables: Sequence[Weights] | Callable[[Tokens], Weights], send: Send = sparse, num_drafted: int = NUM_DRAFTED
) -> list[Proposal]:
    """Every chain that a draft may draw from tables of weights, by context."""
    weights_at = tables if callable(tables) else lambda context: tables[context_index(context, len(tables))]
    proposals = [Proposal(Fraction(1), (), ())]
    for _ in range(num_drafted):
        proposals = [
            replace(
                chain,
                mass=chain.mass * Fraction(weight, sum(weights)),
                ids=(*chain.ids, token),
                vectors=(*chain.vectors, send(weights, token)),
            )
            for chain in proposals
            for weights in [weights_at(chain.ids)]
            for token, weight in enumerate(weights)
            if weight
        ]
    return proposals


def merged(proposals: Iterable[Proposal]) -> list[Proposal]:
    """Proposals that differ in nothing but their mass are one."""
    masses: dict[Proposal, Fraction] = defaultdict(Fraction)
    for proposal in proposals:
        masses[replace(proposal, mass=Fraction(0))] += proposal.mass
    return [replace(proposal, mass=mass) for proposal, mass in masses.items()]


def num_cells(vector: Vector, token: int) -> int:
    """So many equal cells of coins that the threshold of the test, with or without the weights, lies between two."""
    ids, weights = vector or ((), ())
    weight = dict(zip(ids, weights, strict=False)).get(token, 0)
    if weight <= 0 or sum(weights) >= 1 << 24:  # one-hot
        return PARTS
    if weight & (weight - 1):
        raise ValueError(f"weight {weight} of a drafted id is no power of two, so no coin would stand on the threshold")
    return max(PARTS, Fraction(sum(weights), PARTS * weight).denominator)


def coins_of(proposal: Proposal) -> Iterable[tuple[float, ...]]:
    """The least coin of every cell; all cells of a proposal are equally likely."""
    if proposal.uniforms is not None:
        return [proposal.uniforms]
    counts = map(num_cells, proposal.vectors, proposal.ids)
    return product(*([cell / count for cell in range(count)] for count in counts))


def endings_of(proposals: Iterable[Proposal], rule: AcceptRule = accept, target: Target = target_law) -> list[Ending]:
    """Judges every proposal with every coin, in one call of `rule`."""
    cases: list[tuple[Proposal, tuple[float, ...], Fraction]] = []
    for proposal in merged(proposals):
        cells = list(coins_of(proposal))
        cases += [(proposal, uniforms, proposal.mass / len(cells)) for uniforms in cells]
    num_drafted = [len(proposal.ids) for proposal, _, _ in cases]
    num_rows = [len(proposal.ids) + proposal.takes_next for proposal, _, _ in cases]
    rows = cache(lambda context: [float(part) for part in target(context)])
    contexts = [
        p.context + p.ids[:row] for (p, _, _), count in zip(cases, num_rows, strict=True) for row in range(count)
    ]
    num_accepted, weights = rule(
        torch.tensor([rows(context) for context in contexts]),
        Windows.of(num_drafted, num_rows),
        torch.tensor([token for proposal, _, _ in cases for token in proposal.ids], dtype=torch.int64),
        DraftWeights.of(packed([vector for proposal, _, _ in cases for vector in proposal.vectors])),
        torch.tensor([coin for _, uniforms, _ in cases for coin in uniforms], dtype=torch.float64),
    )
    results = zip(cases, num_accepted.tolist(), weights.tolist(), strict=True)
    return [Ending(*case, count, tuple(row)) for case, count, row in results]


def proportional(ending: Ending) -> list[Fraction]:
    """The law of a draw from the returned weights; empty where there is none to draw."""
    exact = [Fraction(weight) for weight in ending.weights]
    total = sum(exact)
    if (total > 0) != (ending.proposal.takes_next or ending.refused is not None):
        raise ValueError(f"a draw is missing, or is one too many, after {ending}")
    return [weight / total for weight in exact] if total else []


def law_of(
    endings: Iterable[Ending],
    next_law: NextLaw = proportional,
    attended: Continuation = lambda ending, tokens: tokens,
    target: Target = target_law,
    length: int = LENGTH,
) -> Law:
    """Draws the next token, then what is missing from the target."""
    masses: dict[tuple[Tokens, tuple[Fraction, ...], int | None], Fraction] = defaultdict(Fraction)
    example: dict[tuple[Tokens, tuple[Fraction, ...], int | None], Ending] = {}
    for ending in endings:
        key = ending.tokens, tuple(next_law(ending)), ending.refused
        masses[key] += ending.mass
        example[key] = ending
    law: Law = defaultdict(Fraction)
    for key, mass in masses.items():
        _extend(law, key[0], mass, key[1], lambda tokens, ending=example[key]: target(attended(ending, tokens)), length)
    return law


def _extend(law: Law, tokens: Tokens, mass: Fraction, drawn: Sequence[Fraction], law_at: Target, length: int) -> None:
    """Adds every continuation: its next token has the law `drawn`, if there is one, and the others `law_at`'s."""
    if len(tokens) >= length:
        law[tokens[:length]] += mass
        return
    for token, share in enumerate(drawn or law_at(tokens)):
        if share:
            _extend(law, (*tokens, token), mass * share, (), law_at, length)


def distance(law: Law, target: Target = target_law, length: int = LENGTH) -> Fraction:
    """Total variation between a law and plain decoding's."""
    plain: Law = defaultdict(Fraction)
    _extend(plain, (), Fraction(1), (), target, length)
    return sum((abs(law.get(t, Fraction(0)) - plain[t]) for t in {*law, *plain}), Fraction(0)) / 2
