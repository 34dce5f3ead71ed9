"""Losslessness by enumeration: production acceptance, summed over every draft and coin, is the target's law exactly.

Half of the toy's contexts have a token of probability zero. The joint law of three tokens must equal plain decoding's
with distance exactly 0. (tests/mutation/mutants.py has the faults
of production that it sees, tests/lossless/test_law_services.py what services may make of the rule.)

A target that samples under top-p: all that acceptance sees must be cut alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cache

import pytest
import torch
from lossless.law import (
    FULL_WEIGHTS,
    LENGTH,
    NUM_DRAFTED,
    ONE_HOT_WEIGHTS,
    PARTS,
    TRUNCATED_WEIGHTS,
    VOCAB_SIZE,
    AcceptRule,
    Law,
    Proposal,
    Send,
    Tokens,
    Vector,
    Weights,
    context_index,
    distance,
    endings_of,
    law_of,
    one_hot,
    proposals_of,
    sparse,
    target_law,
)
from torch import Tensor

from outrider.kernels.sampling.reference import draft_sample, logits_to_probs, most_probable
from outrider.kernels.types import DraftWeights, RowSampling, Windows
from outrider.kernels.verify.reference import accept
from outrider.proposers.drawing import DrawnVocabulary
from outrider.proposers.vocabulary_map import VocabularyMap
from outrider.rpc.words.lexicon import Lexicon, Token

pytestmark = pytest.mark.usefixtures("one_thread")


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


OWN_TOKENS, TARGET_TOKENS = "dxbyaz", "abcd"  # a draft of another vocabulary lacks c, and has three of its own
OWN_WEIGHTS = [(1, 8, 2, 4, 1, 16), (4, 1, 1, 32, 2, 8), (2, 64, 2, 2, 2, 1), (8, 2, 1, 1, 8, 4)]


def vocabulary() -> DrawnVocabulary:
    lexicons = [
        Lexicon(letters, tuple(Token("text", letter.encode()) for letter in letters), {})
        for letters in (TARGET_TOKENS, OWN_TOKENS)
    ]
    return DrawnVocabulary.of(VocabularyMap.between(*lexicons), len(OWN_TOKENS), torch.device("cpu"))


def mapped_weights(context: Tokens) -> Weights:
    """What production sends of the draft's own law at a context."""
    own = torch.tensor([OWN_WEIGHTS[context_index(context, len(OWN_WEIGHTS))]], dtype=torch.float32)  # [1, own tokens]
    probs, _ = logits_to_probs(vocabulary().logits(own.log()), RowSampling())
    samples = draft_sample(probs, torch.zeros(1, 4, dtype=torch.int64))
    weights = dict(zip(samples.entry_ids.tolist(), samples.entry_weights.tolist(), strict=True))
    return tuple(weights.get(token, 0) for token in range(VOCAB_SIZE))


@pytest.mark.parametrize("bonus", [True, False], ids=["with bonus row", "chain goes on"])
def test_a_draft_of_another_vocabulary(bonus: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.kernels.sampling.reference.MAX_WEIGHT", 1 << 15)  # so that thresholds are on the grid
    assert {mapped_weights((token,))[2] for token in range(VOCAB_SIZE)} == {0}
    assert distance(law_with(proposals_of(mapped_weights), bonus=bonus)) == 0


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
        for count in [next((at for at, token in enumerate(chain.ids) if token >= VOCAB_SIZE), len(chain.ids))]
    ]
    assert {len(chain.ids) for chain in chains} == {0, 1, 2}
    assert distance(law_with(chains)) == 0


def judged(proposals: Sequence[Proposal], rule: AcceptRule = accept) -> Law:
    return law_of(endings_of(proposals, rule))


# Eighths of these are FULL_WEIGHTS.
FINE_WEIGHTS: list[Weights] = [(7, 9, 15, 33), (33, 15, 7, 9), (17, 16, 15, 16), (9, 31, 17, 7)]
BFLOAT_WEIGHTS = [tuple((w << 11) + step for w, step in zip(row, (1, -1, 1, -1), strict=True)) for row in FULL_WEIGHTS]


def rounded(weights: Weights, token: int = 0) -> Vector:
    total = sum(weights)
    return (0, 1, 2, 3), tuple(round(8 * weight / total) for weight in weights)


def to_bfloat16(weights: Weights, token: int = 0) -> Vector:
    return (0, 1, 2, 3), tuple(torch.tensor(weights).bfloat16().int().tolist())


LYING_DRAFTS: dict[str, tuple[list[Weights], Send]] = {
    "reports another temperature": (TRUNCATED_WEIGHTS, lambda w, _: sparse(tuple(part**2 for part in w))),
    "reports another position": (FULL_WEIGHTS, lambda w, _: ((0, 1, 2, 3), w[::-1])),
    "reports more for what it drew": (
        FULL_WEIGHTS,
        lambda w, t: ((0, 1, 2, 3), tuple(2 * part if i == t else part for i, part in enumerate(w))),
    ),
    "truncates after the draw": (
        FULL_WEIGHTS,
        lambda w, t: sparse(tuple(part if part > 1 or i == t else 0 for i, part in enumerate(w))),
    ),
    "rounds to 3 bits after the draw": (FINE_WEIGHTS, rounded),
    "rounds to bfloat16 after the draw": (BFLOAT_WEIGHTS, to_bfloat16),
}


@pytest.mark.parametrize("lie", LYING_DRAFTS)
def test_lies_are_harmless_where_the_weights_are_left_out(lie: str) -> None:
    assert distance(judged(proposals_of(LYING_DRAFTS[lie][0], one_hot))) == 0


@pytest.mark.parametrize("fine", [(FINE_WEIGHTS, rounded), (BFLOAT_WEIGHTS, to_bfloat16)], ids=["3 bits", "bfloat16"])
def test_rounding_before_the_draw_is_exact(fine: tuple[list[Weights], Send]) -> None:
    tables, send = fine
    coarse = [tuple(vector[1]) for weights in tables if (vector := send(weights, 0)) is not None]
    assert coarse != tables and len(coarse) == len(tables)
    assert distance(judged(proposals_of(coarse))) == 0


Verdict = tuple[Tensor, Tensor]

TOP_P = 0.75
# What is kept has twelve sixteenths, so that its renormalised probabilities are exact as well.
RAW_SIXTEENTHS = [(6, 6, 2, 2), (2, 3, 9, 2), (9, 2, 2, 3), (2, 6, 2, 6), (3, 2, 2, 9), (1, 1, 1, 13)]


@cache
def raw_law(context: Tokens) -> tuple[Fraction, ...]:
    """Before top-p."""
    sixteenths = RAW_SIXTEENTHS[context_index(context, len(RAW_SIXTEENTHS))]
    return tuple(Fraction(part, PARTS) for part in sixteenths)


def truncated(raw: Tensor) -> Tensor:
    """Production's top-p, renormalised, [rows, vocab]."""
    rows = len(raw)
    kept = most_probable(raw, torch.full((rows,), raw.shape[1]), torch.full((rows,), TOP_P, dtype=torch.float64))
    return kept / kept.sum(dim=-1, keepdim=True)


@cache
def truncated_law(context: Tokens) -> tuple[Fraction, ...]:
    row = truncated(torch.tensor([[float(part) for part in raw_law(context)]]))[0]
    return tuple(map(Fraction, row.tolist()))


def truncated_everywhere(raw: Tensor, windows: Windows, ids: Tensor, sent: DraftWeights, uniforms: Tensor) -> Verdict:
    return accept(truncated(raw), windows, ids, sent, uniforms)


def law_under(rule: AcceptRule) -> Law:
    endings = endings_of(proposals_of(FULL_WEIGHTS), rule, target=raw_law)
    return law_of(endings, target=truncated_law)


def test_what_is_cut_alike_is_exact() -> None:
    assert all(0 in truncated_law((token,)) and sum(truncated_law((token,))) == 1 for token in range(4))
    assert distance(law_under(truncated_everywhere), target=truncated_law) == 0
