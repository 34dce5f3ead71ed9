"""Losslessness by enumeration: production acceptance, summed over every draft and coin, is the target's law exactly.

Half of the toy's contexts have a token of probability zero. The joint law of three tokens must equal plain decoding's
with distance exactly 0. (tests/exactness/test_mutants*.py show that a wrong rule, draft or service is seen.)
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from exactness.law import (
    FULL_WEIGHTS,
    LENGTH,
    NUM_DRAFTED,
    ONE_HOT_WEIGHTS,
    TRUNCATED_WEIGHTS,
    VOCAB_SIZE,
    AcceptRule,
    Law,
    Proposal,
    Send,
    Tokens,
    Vector,
    Weights,
    distance,
    endings_of,
    law_of,
    one_hot,
    proposals_of,
    sparse,
    target_law,
)

from outrider.kernels.verify.reference import accept, cut_at_vocabulary


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Small tensors gain nothing from threads, and lose much when the processor is shared."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def law_with(proposals: Sequence[Proposal], rule: AcceptRule = accept, bonus: bool = True, length: int = LENGTH) -> Law:
    return law_of(endings_of([replace(p, takes_next=bonus) for p in proposals], rule), length=length)


def everything(weights: Weights, token: int) -> Vector:
    return tuple(range(len(weights))), weights


HONEST_DRAFTS: dict[str, tuple[list[Weights], Send]] = {
    "integer weights": (FULL_WEIGHTS, sparse),
    "truncated weights": (TRUNCATED_WEIGHTS, sparse),
    "one-hot": (ONE_HOT_WEIGHTS, one_hot),
    "one-hot with its weight": (ONE_HOT_WEIGHTS, sparse),
    "a total that is no power of two": ([(1, 2, 4, 2), (4, 0, 1, 8), (2, 2, 1, 0)], sparse),
    "ids in descending order": (FULL_WEIGHTS, lambda w, _: ((3, 2, 1, 0), w[::-1])),
}


@pytest.mark.parametrize("draft", HONEST_DRAFTS)
@pytest.mark.parametrize("bonus", [True, False], ids=["with bonus row", "chain goes on"])
def test_joint_law_is_plain_decodings(draft: str, bonus: bool) -> None:
    assert distance(law_with(proposals_of(*HONEST_DRAFTS[draft]), bonus=bonus)) == 0


@pytest.mark.slow
@pytest.mark.parametrize("draft", [name for name in HONEST_DRAFTS if "no power of two" not in name])  # of few coins
def test_joint_law_of_four_tokens_with_three_drafted(draft: str) -> None:
    law = law_with(proposals_of(*HONEST_DRAFTS[draft], num_drafted=NUM_DRAFTED + 1), length=LENGTH + 1)
    assert distance(law, length=LENGTH + 1) == 0


def least_probable(context: Tokens) -> Weights:
    """A draft that knows the target and drafts what is refused most: of probability zero, if there is such a token."""
    law = target_law(context)
    return tuple(int(token == law.index(min(law))) for token in range(VOCAB_SIZE))


ONE_HOT_DRAFTS: dict[str, list[Proposal]] = {
    "sends no weights of what it drew from": proposals_of(FULL_WEIGHTS, one_hot),
    "adversarial": proposals_of(least_probable, one_hot),
    "adversarial, with its weight": proposals_of(least_probable, sparse),
    "some positions without weights": proposals_of(FULL_WEIGHTS, lambda w, _: None if w[0] == 1 else sparse(w)),
    "a duplicate id": proposals_of(FULL_WEIGHTS, lambda w, _: ((0, 0, 1, 2, 3), (1, *w))),
    "a zero weight": proposals_of(TRUNCATED_WEIGHTS, everything),
    "an id outside the vocabulary": proposals_of(FULL_WEIGHTS, lambda w, _: ((0, 1, 2, 3, 4), (*w, 1))),
    "too great a total": proposals_of(FULL_WEIGHTS, lambda w, _: ((0, 1, 2, 3), tuple(part << 22 for part in w))),
    "more ids than weights": proposals_of(FULL_WEIGHTS, lambda w, _: ((0, 1, 2, 3), w[:3])),
    "an empty vector": proposals_of(FULL_WEIGHTS, lambda w, _: ((), ())),
    "weights of every id but the drafted one": proposals_of(
        FULL_WEIGHTS, lambda w, t: (tuple(i for i in range(4) if i != t), (5, 7, 9))
    ),
}


@pytest.mark.parametrize("draft", ONE_HOT_DRAFTS)
@pytest.mark.parametrize("bonus", [True, False], ids=["with bonus row", "chain goes on"])
def test_unusable_weights_are_one_hot_and_exact_for_any_draft(draft: str, bonus: bool) -> None:
    assert distance(law_with(ONE_HOT_DRAFTS[draft], bonus=bonus)) == 0


def test_a_one_hot_draft_may_follow_any_law() -> None:
    """Exact for every single chain, so that it does not matter how often each is drafted."""
    for chain in proposals_of(FULL_WEIGHTS, one_hot):
        assert distance(law_with([replace(chain, mass=Fraction(1))])) == 0


@pytest.mark.parametrize("send", [sparse, one_hot], ids=["weights", "one-hot"])
def test_chains_end_at_an_id_outside_the_vocabulary(send: Send) -> None:
    """A draft of five ids for a target of four."""
    wider = [(1, 1, 2, 2, 2), (4, 1, 0, 1, 2), (0, 0, 0, 4, 4), (2, 2, 4, 0, 0)]
    chains = [
        replace(chain, ids=chain.ids[:count], vectors=chain.vectors[:count])
        for chain in proposals_of(wider, send)
        for count in [cut_at_vocabulary(chain.ids, VOCAB_SIZE)]
    ]
    assert {len(chain.ids) for chain in chains} == {0, 1, 2}
    assert distance(law_with(chains)) == 0
