"""Block verification by enumeration: production's judging of whole windows, summed over every draft and coin, is the
target's law exactly.

The thresholds of a block's coins are ratios that no grid holds, so they are computed a second time, in fractions: a
coin lies right before its threshold, or right behind it, with the mass of its side. A law that is exact says that the
formulas are right, and that production agrees with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from fractions import Fraction
from itertools import product

import pytest
import torch
from lossless.block_law import judge
from lossless.law import (
    FULL_WEIGHTS,
    LENGTH,
    NUM_DRAFTED,
    AcceptRule,
    Proposal,
    Target,
    Tokens,
    Vector,
    distance,
    endings_of,
    law_of,
    one_hot,
    proposals_of,
    sparse,
    target_law,
)
from lossless.test_law import HONEST_DRAFTS, ONE_HOT_DRAFTS
from torch import Tensor

from outrider.kernels.types import DraftWeights, Windows
from outrider.kernels.verify.reference import accept

Judged = tuple[Tensor, Tensor]
NEAR = 2.0**-40  # of a threshold
LAST_COIN = 1 - 2.0**-24


Apart = Callable[[Tokens, int], bool]  # whether the drafted token at a place is a block of its own


def with_coins(
    proposals: Iterable[Proposal],
    is_one_block: bool = True,
    target: Target = target_law,
    apart: Apart = lambda ids, place: False,
) -> list[Proposal]:
    """Each with every combination of coins on either side of its thresholds."""
    found = []
    for proposal in proposals:
        sides = [
            [(share, coin) for share, coin in ((h, max(float(h) - NEAR, 0)), (1 - h, float(h) + NEAR)) if share]
            if 0 < h < 1
            else [(Fraction(1), LAST_COIN if h else 0.0)]
            for h in judge(proposal, target, is_one_block, apart).thresholds
        ]
        for chosen in product(*sides):
            mass = proposal.mass
            for share, _ in chosen:
                mass *= share
            found.append(replace(proposal, mass=mass, uniforms=tuple(coin for _, coin in chosen)))
    return found


def accept_by_block(
    target_probs: Tensor, windows: Windows, draft_ids: Tensor, draft_weights: DraftWeights, uniforms: Tensor
) -> Judged:
    every = torch.ones(len(windows.num_drafted), dtype=torch.bool)
    return accept(target_probs, windows, draft_ids, draft_weights, uniforms, every)


def gap(
    proposals: Iterable[Proposal],
    rule: AcceptRule = accept_by_block,
    bonus: bool = True,
    is_one_block: bool = True,
    length: int = LENGTH,
) -> Fraction:
    """Total variation from plain decoding's law."""
    chains = with_coins((replace(proposal, takes_next=bonus) for proposal in proposals), is_one_block)
    return distance(law_of(endings_of(chains, rule), length=length), length=length)


DRAFTS = {name: proposals_of(*draft) for name, draft in HONEST_DRAFTS.items()} | ONE_HOT_DRAFTS


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("bonus", [True, False], ids=["with bonus row", "chain goes on"])
def test_joint_law_is_plain_decodings(draft: str, bonus: bool) -> None:
    assert gap(DRAFTS[draft], bonus=bonus) == 0


THREE = NUM_DRAFTED + 1
SOME_ONE_HOT = proposals_of(FULL_WEIGHTS, lambda w, _: None if w[0] in (2, 4) else sparse(w), THREE)


@pytest.mark.parametrize("send", [sparse, one_hot], ids=["weights", "one-hot"])
def test_joint_law_of_three_drafted_tokens(send: Callable[..., Vector]) -> None:
    assert gap(proposals_of(FULL_WEIGHTS, send, THREE), length=LENGTH + 1) == 0


def test_blocks_between_one_hot_tokens() -> None:
    assert {tuple(v is None for v in c.vectors) for c in SOME_ONE_HOT} > {(False, False, True), (False, True, False)}
    assert gap(SOME_ONE_HOT, length=LENGTH + 1) == 0


def gap_with(apart: Apart) -> Fraction:
    """Where the rows that judge these tokens are called invalid, and have probabilities all the same."""

    def rule(probs: Tensor, windows: Windows, ids: Tensor, weights: DraftWeights, uniforms: Tensor) -> Judged:
        every = torch.ones(len(windows.num_drafted), dtype=torch.bool)
        invalid = torch.zeros(len(probs), dtype=torch.bool)
        for row, _, first, count in windows.on_host():
            window = tuple(ids[first : first + count].tolist())
            invalid[row : row + count] = torch.tensor([apart(window, place) for place in range(count)])
        return accept(probs, windows, ids, weights, uniforms, every, invalid)

    chains = with_coins(proposals_of(FULL_WEIGHTS, sparse, THREE), apart=apart)
    return distance(law_of(endings_of(chains, rule), length=LENGTH + 1), length=LENGTH + 1)


def test_a_row_may_be_invalid_by_what_stands_before_it_alone() -> None:
    """Then the law is the target's up to there: blocks end by what was drafted up to there."""
    assert gap_with(lambda ids, place: 0 < place < len(ids) and ids[place - 1] % 2 == 1) == 0
    assert gap_with(lambda ids, place: 0 < place < len(ids) and ids[place] % 2 == 1) > 0


def test_windows_of_blocks_and_others_in_one_batch() -> None:
    """Each as it is alone."""
    chains = with_coins(proposals_of(FULL_WEIGHTS))
    alternate = torch.arange(len(chains)) % 2 == 0

    def rule(probs: Tensor, windows: Windows, ids: Tensor, weights: DraftWeights, uniforms: Tensor) -> Judged:
        mixed = accept(probs, windows, ids, weights, uniforms, alternate)
        by_block, by_token = (
            accept_by_block(probs, windows, ids, weights, uniforms),
            accept(probs, windows, ids, weights, uniforms),
        )
        for got, first, second in zip(mixed, by_block, by_token, strict=True):
            chosen = alternate if got.dim() == 1 else alternate[:, None]
            assert torch.equal(got, torch.where(chosen, first, second))
        return mixed

    endings_of(chains, rule)


def test_it_accepts_more_than_token_by_token() -> None:
    """In the mean, and never less (theorem 2 of the paper)."""
    for draft in (sparse, one_hot):
        chains = proposals_of(FULL_WEIGHTS, draft)
        blocks = sum(end.mass * end.num_accepted for end in endings_of(with_coins(chains), accept_by_block))
        tokens = sum(end.mass * end.num_accepted for end in endings_of(chains))
        print(f"accepted of {NUM_DRAFTED}: {float(blocks):.3f} by blocks, {float(tokens):.3f} token by token")
        assert blocks > tokens if draft is sparse else blocks == tokens


# Wrong rules


def weights_by_the_tokens_before() -> list[Proposal]:
    """The third token has weights where the second is even: what is known before it is drawn decides."""
    chains = proposals_of(FULL_WEIGHTS, num_drafted=THREE)
    return [c if c.ids[1] % 2 else replace(c, vectors=(*c.vectors[:2], None)) for c in chains]


def blocks_of_whole_windows(
    probs: Tensor, windows: Windows, ids: Tensor, sent: DraftWeights, uniforms: Tensor
) -> Judged:
    """A window with any one-hot token is judged token by token."""
    has_weights = torch.zeros(len(ids), dtype=torch.int64).index_fill_(0, sent.draft_of, 1)
    every = has_weights.view(-1, THREE).all(1)
    return accept(probs, windows, ids, sent, uniforms, every)


def test_where_a_block_ends_may_depend_on_the_tokens_in_it() -> None:
    assert gap(weights_by_the_tokens_before(), length=LENGTH + 1) == 0


def test_how_a_window_is_judged_may_not_depend_on_its_tokens() -> None:
    """So a one-hot token makes its own position one-hot, and not the whole window."""
    found = gap(weights_by_the_tokens_before(), blocks_of_whole_windows, is_one_block=False, length=LENGTH + 1)
    print(f"{float(found):.1e}")
    assert found > 0
