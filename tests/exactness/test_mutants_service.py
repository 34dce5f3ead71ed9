"""What services that speculate get wrong around a right acceptance rule, each as a law of its own beside its remedy.

The mutant must not give plain decoding's law, the remedy must give it exactly. (That of a stale cache is the law of
every honest draft: the target attends to what is committed.) What goes wrong is mostly peeking: that
something is done, or left undone, because of a token that was already drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from fractions import Fraction

import pytest
from exactness.law import (
    FULL_WEIGHTS,
    NUM_DRAFTED,
    TRUNCATED_WEIGHTS,
    Ending,
    Law,
    Proposal,
    Tokens,
    Vector,
    distance,
    endings_of,
    law_of,
    proposals_of,
    sparse,
)


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


def cut_after_the_token_was_seen() -> Law:
    return judged(cut(proposals_of(FULL_WEIGHTS), likely_by_its_token))


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


def better_of_two_by_their_tokens() -> Law:
    return better_of_two(by_its_tokens)


def better_of_two_by_their_first_laws() -> Law:
    return better_of_two(by_its_first_law)


def better_of_two_one_hot_drafts() -> Law:
    return better_of_two(by_its_tokens, send_weights=False)


def first_of_two_to_arrive() -> Law:
    drafts = (proposals_of(FULL_WEIGHTS), Fraction(2, 3)), (proposals_of(TRUNCATED_WEIGHTS), Fraction(1, 3))
    return judged(replace(chain, mass=chain.mass * share) for draft, share in drafts for chain in draft)


# Whether a position is judged with its weights or as one-hot


def mode_by_the_token() -> Law:
    return judged(proposals_of(FULL_WEIGHTS, lambda weights, token: sparse(weights) if weights[token] >= 2 else None))


def mode_by_the_law() -> Law:
    return judged(proposals_of(FULL_WEIGHTS, lambda weights, token: sparse(weights) if max(weights) >= 4 else None))


def mode_by_the_tokens_before() -> Law:
    chains = proposals_of(FULL_WEIGHTS)
    return judged(replace(c, vectors=(c.vectors[0], c.vectors[1] if c.ids[0] % 2 else None)) for c in chains)


# What happens when the answer to a fully accepted window is lost

LOST = Fraction(1, 10)


def retried(is_lost: Callable[[Ending], bool], again: Callable[[Proposal, tuple[float, ...]], Proposal]) -> Law:
    """A tenth of the answers that may be lost are, and the window is verified again."""
    endings = endings_of(proposals_of(FULL_WEIGHTS))
    kept = [replace(end, mass=end.mass * (1 - LOST)) if is_lost(end) else end for end in endings]
    second = [replace(again(end.proposal, end.coins), mass=end.mass * LOST) for end in endings if is_lost(end)]
    return law_of(kept + endings_of(second))


def is_full(end: Ending) -> bool:
    return end.num_accepted == NUM_DRAFTED


def retried_with_fresh_randomness() -> Law:
    return retried(is_full, lambda window, coins: window)


def retried_in_a_shorter_window() -> Law:
    """Even with the same coins: the second token is now drawn where the first time it was accepted."""
    return retried(is_full, lambda w, coins: replace(w, ids=w.ids[:1], vectors=w.vectors[:1], coins=coins[:1]))


def retried_without_the_draft() -> Law:
    return retried(is_full, lambda window, coins: Proposal(window.mass, (), ()))


def retried_with_the_same_randomness() -> Law:
    return retried(is_full, lambda window, coins: replace(window, coins=coins))


def retried_with_fresh_randomness_whatever_was_accepted() -> Law:
    """A loss that does not depend on the answer does no harm."""
    return retried(lambda end: True, lambda window, coins: window)


# Whether a refused token is forgotten


def attending_to_the_refused_token() -> Law:
    """Its keys and values stay in the cache, before those of the token drawn in its place."""

    def attended(end: Ending, tokens: Tokens) -> Tokens:
        stale = () if end.refused is None else (end.refused,)
        return tokens[: end.num_accepted] + stale + tokens[end.num_accepted :]

    return law_of(endings_of(proposals_of(FULL_WEIGHTS)), attended=attended)


def attending_to_the_refused_token_alone() -> Law:
    """The slot of the token drawn in its place still holds its keys and values."""

    def attended(end: Ending, tokens: Tokens) -> Tokens:
        place = end.num_accepted
        return (
            tokens
            if end.refused is None or len(tokens) <= place
            else (*tokens[:place], end.refused, *tokens[place + 1 :])
        )

    return law_of(endings_of(proposals_of(FULL_WEIGHTS)), attended=attended)


MUTANTS = [
    cut_after_the_token_was_seen,
    better_of_two_by_their_tokens,
    mode_by_the_token,
    retried_with_fresh_randomness,
    retried_in_a_shorter_window,
    retried_without_the_draft,
    attending_to_the_refused_token,
    attending_to_the_refused_token_alone,
]
REMEDIES = [
    cut_before_the_token_is_drawn,
    cut_after_a_one_hot_token_was_seen,
    better_of_two_by_their_first_laws,
    better_of_two_one_hot_drafts,
    first_of_two_to_arrive,
    mode_by_the_law,
    mode_by_the_tokens_before,
    retried_with_the_same_randomness,
    retried_with_fresh_randomness_whatever_was_accepted,
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda law: law.__name__)
def test_a_mutant_is_seen(mutant: Callable[[], Law]) -> None:
    gap = distance(mutant())
    print(f"{mutant.__name__}: {float(gap):.1e}")
    assert gap > 0


@pytest.mark.parametrize("remedy", REMEDIES, ids=lambda law: law.__name__)
def test_a_remedy_is_exact(remedy: Callable[[], Law]) -> None:
    assert distance(remedy()) == 0
