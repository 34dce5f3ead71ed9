"""A target that samples under top-p: all that acceptance sees must be cut alike."""

from __future__ import annotations

from fractions import Fraction
from functools import cache

import pytest
import torch
from exactness.law import (
    FULL_WEIGHTS,
    PARTS,
    AcceptRule,
    Law,
    Tokens,
    context_index,
    distance,
    endings_of,
    law_of,
    proposals_of,
)
from torch import Tensor

from outrider.kernels.sampling.reference import most_probable
from outrider.kernels.types import DraftWeights, Windows
from outrider.kernels.verify.reference import accept

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


def replayed(num_accepted: Tensor, windows: Windows) -> Tensor:
    """Coins that accept just so many tokens of each window."""
    return torch.where(windows.offset_of_draft < num_accepted[windows.window_of_draft], -1.0, 1e9).double()


def truncated_everywhere(raw: Tensor, windows: Windows, ids: Tensor, sent: DraftWeights, coins: Tensor) -> Verdict:
    return accept(truncated(raw), windows, ids, sent, coins)


def raw_in_the_ratio(raw: Tensor, windows: Windows, ids: Tensor, sent: DraftWeights, coins: Tensor) -> Verdict:
    num_accepted, _ = accept(raw, windows, ids, sent, coins)
    return accept(truncated(raw), windows, ids, sent, replayed(num_accepted, windows))


def raw_in_the_next_draw(raw: Tensor, windows: Windows, ids: Tensor, sent: DraftWeights, coins: Tensor) -> Verdict:
    num_accepted, _ = accept(truncated(raw), windows, ids, sent, coins)
    return accept(raw, windows, ids, sent, replayed(num_accepted, windows))


def truncated_but_not_renormalised(
    raw: Tensor, windows: Windows, ids: Tensor, sent: DraftWeights, coins: Tensor
) -> Verdict:
    return accept(truncated(raw) * TOP_P, windows, ids, sent, coins)


def law_under(rule: AcceptRule) -> Law:
    endings = endings_of(proposals_of(FULL_WEIGHTS), rule, target=raw_law)
    return law_of(endings, target=truncated_law)


def test_what_is_cut_alike_is_exact() -> None:
    assert all(0 in truncated_law((token,)) and sum(truncated_law((token,))) == 1 for token in range(4))
    assert distance(law_under(truncated_everywhere), target=truncated_law) == 0


@pytest.mark.parametrize("mutant", [accept, raw_in_the_ratio, raw_in_the_next_draw, truncated_but_not_renormalised])
def test_a_missing_cut_is_seen(mutant: AcceptRule) -> None:
    gap = distance(law_under(mutant), target=truncated_law)
    print(f"{mutant.__name__}: {float(gap):.1e}")
    assert gap > 0
