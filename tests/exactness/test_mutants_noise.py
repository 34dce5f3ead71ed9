"""Draws that share a random number: right under coupling, wrong wherever a ratio is tested.

A word is a point of the unit interval: a draw takes the id in whose stretch it falls, a coin is the point itself. What
a draw becomes once another one is known of the same point is the overlap of stretches, in fractions. Where a draw is a
race, the token of least noise / weight, two races over the same noise have a law in fractions as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise, product

import pytest
import torch
from exactness.law import (
    FULL_WEIGHTS,
    NUM_DRAFTED,
    PARTS,
    Ending,
    Law,
    Proposal,
    Tokens,
    Weights,
    context_index,
    distance,
    endings_of,
    law_of,
    num_cells,
    proportional,
    proposals_of,
    sparse,
)
from torch import Tensor

from outrider.kernels.random.reference import Purpose, exponential_noise
from outrider.kernels.sampling.reference import draw_integer
from outrider.kernels.verify.reference import accept_uniforms, coupled_choice

Stretch = tuple[Fraction, Fraction]  # of the unit interval


def weights_at(context: Tokens) -> Weights:
    return FULL_WEIGHTS[context_index(context, len(FULL_WEIGHTS))]


def stretches(law: Sequence[Fraction]) -> list[Stretch]:
    """Where the point of a draw falls for each id."""
    return list(pairwise([Fraction(0), *accumulate(law)]))


def drawn_within(stretch: Stretch, law: Sequence[Fraction]) -> list[Fraction]:
    """The law of a draw whose point is known to lie in a stretch."""
    low, high = stretch
    overlaps = [max(min(high, end) - max(low, start), Fraction(0)) for start, end in stretches(law)]
    return [overlap / (high - low) for overlap in overlaps]


# A drafted token and what judges it


def drafts_by_words(share: bool) -> list[Proposal]:
    """Production's draw from the integers, for every cell of the words; with `share` the coin is the same word's."""
    proposals = []
    for cells in product(range(PARTS), repeat=NUM_DRAFTED):
        words = torch.tensor([[cell << 28, 0, 0, 0] for cell in cells])  # [drafted, 4]
        ids: Tokens = ()
        for place in range(NUM_DRAFTED):
            weights = torch.tensor(weights_at(ids))
            starts = torch.tensor([0, len(weights)])
            ids = (*ids, int(draw_integer(torch.arange(len(weights)), weights, starts, words[place : place + 1])))
        vectors = tuple(sparse(weights_at(ids[:place])) for place in range(NUM_DRAFTED))
        coins = tuple(accept_uniforms(words).tolist()) if share else None
        proposals.append(Proposal(Fraction(1, PARTS**NUM_DRAFTED), ids, vectors, coins=coins))
    return proposals


def draft_and_coin_share_a_word() -> Law:
    return law_of(endings_of(drafts_by_words(share=True)))


def coin_and_recovered_share_a_word() -> Law:
    def next_law(end: Ending) -> list[Fraction]:
        law, place = proportional(end), end.num_accepted
        if end.refused is None:
            return law
        low = Fraction(end.coins[place])
        return drawn_within((low, low + Fraction(1, num_cells(end.proposal.vectors[place], end.refused))), law)

    return law_of(endings_of(proposals_of(FULL_WEIGHTS)), next_law)


def draft_and_recovered_share_a_word() -> Law:
    def next_law(end: Ending) -> list[Fraction]:
        if end.refused is None:
            return proportional(end)
        weights = weights_at(end.tokens)
        drafted = [Fraction(weight, sum(weights)) for weight in weights]
        return drawn_within(stretches(drafted)[end.refused], proportional(end))

    return law_of(endings_of(proposals_of(FULL_WEIGHTS)), next_law)


def draft_and_recovered_share_noise() -> Law:
    """The draft takes the token of least noise / weight, and so does the draw from the residual."""

    def next_law(end: Ending) -> list[Fraction]:
        if end.refused is None:
            return proportional(end)
        weights = weights_at(end.tokens)
        return second_race([Fraction(weight, sum(weights)) for weight in weights], proportional(end))

    return law_of(endings_of(proposals_of(FULL_WEIGHTS)), next_law)


def second_race(first: Sequence[Fraction], second: Sequence[Fraction]) -> list[Fraction]:
    """The law of a race under the rates `second` over the noise of one that an id of rate 0 in `second` won under
    `first`.

    The first race ends at a time s, exponential of rate 1. The noise of the others exceeds `first` x s by an amount
    that is exponential again: in the second race an id of rate r starts at s x first / r. Between two starts, s x a and
    s x b, with rates that sum to R, the race survives to the one with probability exp(-s x A) and to the other with
    exp(-s x (A + R (b - a))); the integrals over s are fractions.
    """
    starts = {token: first[token] / rate for token, rate in enumerate(second) if rate}
    bounds = sorted(set(starts.values()))
    wins, hazard = [Fraction(0)] * len(second), Fraction(0)
    for index, start in enumerate(bounds):
        running = [token for token in starts if starts[token] <= start]
        total = sum((second[token] for token in running), Fraction(0))
        ended = Fraction(1) / (1 + hazard)
        if index + 1 < len(bounds):
            hazard += total * (bounds[index + 1] - start)
            ended -= Fraction(1) / (1 + hazard)
        for token in running:
            wins[token] += ended * second[token] / total
    return wins


MUTANTS = [
    draft_and_coin_share_a_word,
    coin_and_recovered_share_a_word,
    draft_and_recovered_share_a_word,
    draft_and_recovered_share_noise,
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda law: law.__name__)
def test_shared_randomness_is_seen(mutant: Callable[[], Law]) -> None:
    gap = distance(mutant())
    print(f"{mutant.__name__}: {float(gap):.1e}")
    assert gap > 0


def test_words_of_their_own_are_exact() -> None:
    assert distance(law_of(endings_of(drafts_by_words(share=False)))) == 0


def test_what_is_known_of_a_point_averages_out() -> None:
    law = [Fraction(1, 7), Fraction(0), Fraction(4, 7), Fraction(2, 7)]
    cells = [drawn_within((Fraction(cell, 16), Fraction(cell + 1, 16)), law) for cell in range(16)]
    assert [sum(column) / 16 for column in zip(*cells, strict=True)] == law
    assert all(sum(cell) == 1 for cell in cells) and drawn_within((Fraction(1, 2), Fraction(1)), law)[0] == 0


@pytest.mark.parametrize("refused", [1, 2])
def test_the_law_of_two_races_is_productions(refused: int) -> None:
    """Production's noise and choice, over many seeds, within five standard deviations; with noise of another purpose
    the second race has its own law."""
    num_seeds, first = 100_000, [Fraction(part, 8) for part in (1, 4, 2, 1)]
    second = [Fraction(part, 8) for part in ((2, 0, 5, 1) if refused == 1 else (3, 4, 0, 1))]
    columns = torch.arange(num_seeds), torch.zeros(num_seeds, dtype=torch.int64), torch.zeros(num_seeds).long()
    noise = exponential_noise(*columns, len(first))
    drafted = coupled_choice(rows_of(first, num_seeds), noise)
    won = drafted == refused
    laws = {Purpose.BONUS: second_race(first, second), Purpose.RECOVERED: second}
    for purpose, law in laws.items():
        again = coupled_choice(rows_of(second, num_seeds), exponential_noise(*columns, len(first), purpose))[won]
        count = len(again)
        for share, seen in zip(map(float, law), torch.bincount(again, minlength=len(law)).tolist(), strict=True):
            assert abs(seen - count * share) <= 5 * (count * share * (1 - share)) ** 0.5
    gaps = [abs(a - b) for a, b in zip(*laws.values(), strict=True)]
    assert max(gaps) > Fraction(1, 25)  # so that each test would see the other's law


def rows_of(law: Sequence[Fraction], count: int) -> Tensor:
    """[count, vocab] float32"""
    return torch.tensor([[float(part) for part in law]]).repeat(count, 1)
