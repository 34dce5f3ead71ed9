"""Wrong rules of acceptance, and drafts that report weights they did not draw from: the enumeration must see each."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from exactness.law import (
    FULL_WEIGHTS,
    TRUNCATED_WEIGHTS,
    AcceptRule,
    Law,
    Proposal,
    Send,
    Vector,
    Weights,
    distance,
    endings_of,
    law_of,
    one_hot,
    proposals_of,
    sparse,
)
from torch import Tensor

from outrider.kernels.types import DraftWeights, Windows
from outrider.kernels.verify.reference import accept


def judged(proposals: Sequence[Proposal], rule: AcceptRule = accept) -> Law:
    return law_of(endings_of(proposals, rule))


def accept_or_equal(
    target_probs: Tensor, windows: Windows, draft_ids: Tensor, draft_weights: DraftWeights, uniforms: Tensor
) -> tuple[Tensor, Tensor]:
    return accept(target_probs, windows, draft_ids, draft_weights, uniforms - 2.0**-30)


def accept_the_impossible_by_the_least_coin(
    target_probs: Tensor, windows: Windows, draft_ids: Tensor, draft_weights: DraftWeights, uniforms: Tensor
) -> tuple[Tensor, Tensor]:
    """Only a token of probability zero is treated otherwise. On the grid of 2^-24 no sampling would ever see it."""
    return accept(target_probs, windows, draft_ids, draft_weights, torch.where(uniforms == 0, -1e-9, uniforms))


def accept_by_threshold(
    target_probs: Tensor, windows: Windows, draft_ids: Tensor, draft_weights: DraftWeights, uniforms: Tensor
) -> tuple[Tensor, Tensor]:
    return accept(target_probs, windows, draft_ids, draft_weights, uniforms * 0.75)


def residual_is_target(
    target_probs: Tensor, windows: Windows, draft_ids: Tensor, draft_weights: DraftWeights, uniforms: Tensor
) -> tuple[Tensor, Tensor]:
    num_accepted, _ = accept(target_probs, windows, draft_ids, draft_weights, uniforms)
    return num_accepted, target_probs[windows.next_rows(num_accepted)].double()


def residual_is_one_hot(
    target_probs: Tensor, windows: Windows, draft_ids: Tensor, draft_weights: DraftWeights, uniforms: Tensor
) -> tuple[Tensor, Tensor]:
    num_accepted, weights = residual_is_target(target_probs, windows, draft_ids, draft_weights, uniforms)
    refused = (num_accepted < windows.num_drafted).nonzero().squeeze(1)
    weights[refused, draft_ids[(windows.draft_starts + num_accepted)[refused]]] = 0
    return num_accepted, weights


def residual_is_the_absolute_difference(
    target_probs: Tensor, windows: Windows, draft_ids: Tensor, draft_weights: DraftWeights, uniforms: Tensor
) -> tuple[Tensor, Tensor]:
    num_accepted, weights = accept(target_probs, windows, draft_ids, draft_weights, uniforms)
    for window in (num_accepted < windows.num_drafted).nonzero().squeeze(1).tolist():
        of_refused = draft_weights.draft_of == windows.draft_starts[window] + num_accepted[window]
        ids, sent = draft_weights.ids[of_refused], draft_weights.weights[of_refused]
        row = target_probs[windows.row_starts[window] + num_accepted[window]].double() * sent.sum()
        row[ids] = (row[ids] - sent).abs()
        weights[window] = row
    return num_accepted, weights


def residual_from_the_row_after(
    target_probs: Tensor, windows: Windows, draft_ids: Tensor, draft_weights: DraftWeights, uniforms: Tensor
) -> tuple[Tensor, Tensor]:
    num_accepted, correct = accept(target_probs, windows, draft_ids, draft_weights, uniforms)
    row_after = target_probs.roll(-1, 0)
    _, weights = accept(row_after, windows, draft_ids, draft_weights, torch.full_like(uniforms, 1e9))  # all refused
    return num_accepted, torch.where((num_accepted == 0)[:, None], weights, correct)


def bonus_from_the_row_before(
    target_probs: Tensor, windows: Windows, draft_ids: Tensor, draft_weights: DraftWeights, uniforms: Tensor
) -> tuple[Tensor, Tensor]:
    num_accepted, weights = accept(target_probs, windows, draft_ids, draft_weights, uniforms)
    full = num_accepted == windows.num_drafted
    weights[full] = target_probs[windows.row_starts + num_accepted - 1][full].double()
    return num_accepted, weights


def weights_of_the_other_position(
    target_probs: Tensor, windows: Windows, draft_ids: Tensor, draft_weights: DraftWeights, uniforms: Tensor
) -> tuple[Tensor, Tensor]:
    swapped = DraftWeights(draft_weights.ids, draft_weights.weights, draft_weights.draft_of ^ 1)
    return accept(target_probs, windows, draft_ids, swapped, uniforms)


def weights_for_the_residual_alone(
    target_probs: Tensor, windows: Windows, draft_ids: Tensor, draft_weights: DraftWeights, uniforms: Tensor
) -> tuple[Tensor, Tensor]:
    """The ratio takes every draft for a one-hot one."""
    num_accepted, _ = accept(target_probs, windows, draft_ids, DraftWeights.of([]), uniforms)
    at_the_end = num_accepted[windows.window_of_draft] == windows.offset_of_draft
    coins = torch.where(at_the_end, 1e9, -1.0).double()  # accepts and refuses the same tokens
    return accept(target_probs, windows, draft_ids, draft_weights, coins)


RULE_MUTANTS = [
    accept_or_equal,
    accept_the_impossible_by_the_least_coin,
    accept_by_threshold,
    residual_is_target,
    residual_is_one_hot,
    residual_is_the_absolute_difference,
    residual_from_the_row_after,
    bonus_from_the_row_before,
    weights_of_the_other_position,
    weights_for_the_residual_alone,
]


@pytest.mark.parametrize("mutant", RULE_MUTANTS, ids=lambda rule: rule.__name__)
def test_a_wrong_rule_is_seen(mutant: AcceptRule) -> None:
    gap = distance(judged(proposals_of(FULL_WEIGHTS), mutant))
    print(f"{mutant.__name__}: {float(gap):.1e}")
    assert gap > 0


FINE_WEIGHTS = [(7, 9, 15, 33), (33, 15, 7, 9), (17, 16, 15, 16), (9, 31, 17, 7)]  # eighths of these are FULL_WEIGHTS
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
def test_weights_that_were_not_drawn_from_are_seen(lie: str) -> None:
    gap = distance(judged(proposals_of(*LYING_DRAFTS[lie])))
    print(f"{lie}: {float(gap):.1e}")
    assert gap > 0


@pytest.mark.parametrize("lie", LYING_DRAFTS)
def test_lies_are_harmless_where_the_weights_are_left_out(lie: str) -> None:
    assert distance(judged(proposals_of(LYING_DRAFTS[lie][0], one_hot))) == 0


@pytest.mark.parametrize("fine", [(FINE_WEIGHTS, rounded), (BFLOAT_WEIGHTS, to_bfloat16)], ids=["3 bits", "bfloat16"])
def test_rounding_before_the_draw_is_exact(fine: tuple[list[Weights], Send]) -> None:
    tables, send = fine
    coarse = [tuple(vector[1]) for weights in tables if (vector := send(weights, 0)) is not None]
    assert coarse != tables and len(coarse) == len(tables)
    assert distance(judged(proposals_of(coarse))) == 0
