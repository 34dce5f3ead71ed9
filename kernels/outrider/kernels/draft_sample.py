"""Draws drafted tokens from the very integers that cross the wire, so that the target knows their law without rounding.

Truncate, round to integer weights, and only then draw: a vector rounded after the draw would not be the law drawn from,
and rejection acceptance would be biased by the difference.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from outrider.kernels import dispatch
from outrider.kernels.logits_to_probs import most_probable

MAX_WEIGHT = 32767
MAX_ENTRIES = 512  # 512 x 32767 is below 2^24
DEFAULT_MASS = 0.995


@dataclass(frozen=True, slots=True)
class DraftSamples:
    """Drawn tokens and the integer weights they were drawn from, packed; ids ascend within a vector."""

    token_ids: Tensor  # [rows] int64; -1 where a row has no weight
    entry_ids: Tensor  # [entries] int64
    entry_weights: Tensor  # [entries] int64, 1 to 32767
    entry_starts: Tensor  # [rows + 1] int64


def draft_sample(
    draft_probs: Tensor,  # [rows, vocab] float32
    words: Tensor,  # [rows, 4] int64, under Purpose.DRAFT
    mass: float = DEFAULT_MASS,
    max_entries: int = MAX_ENTRIES,
) -> DraftSamples:
    """Keeps the smallest set that holds `mass`, at most `max_entries` ids, and draws from its integer weights."""
    if not 1 <= max_entries <= MAX_ENTRIES:
        raise ValueError(f"max_entries must be 1 to {MAX_ENTRIES}, not {max_entries}")
    if dispatch.runs_triton(draft_probs):
        from outrider.kernels import draft_sample_triton

        token_ids, ids, sent, starts = draft_sample_triton.draft_sample(draft_probs, words, mass, max_entries)
        num_entries = int(starts[-1])  # what crosses the wire is read on the host next
        return DraftSamples(token_ids, ids[:num_entries], sent[:num_entries], starts)
    weights = integer_weights(draft_probs, mass, max_entries)  # [rows, vocab]
    positive = _positive(weights)  # [entries], by row, then id
    entry_weights = weights.flatten()[positive].long()
    row_bounds = torch.arange(len(weights) + 1, device=weights.device) * weights.shape[1]  # [rows + 1]
    entry_starts = torch.searchsorted(positive, row_bounds)
    entry_ids = positive % weights.shape[1]
    token_ids = draw_integer(entry_ids, entry_weights, entry_starts, words)
    return DraftSamples(token_ids, entry_ids, entry_weights, entry_starts)


def integer_weights(draft_probs: Tensor, mass: float, max_entries: int) -> Tensor:
    """round(32767 x prob / max prob) of the kept ids, 0 elsewhere, [rows, vocab] float32."""
    num_rows, device = len(draft_probs), draft_probs.device
    limits = torch.full((num_rows,), max_entries, device=device)
    masses = torch.full((num_rows,), mass, dtype=torch.float64, device=device)
    kept = most_probable(draft_probs, limits, masses, draft_probs.sum(dim=-1, dtype=torch.float64))
    return (kept * (MAX_WEIGHT / kept.amax(dim=-1, keepdim=True))).round_()


def draw_integer(
    entry_ids: Tensor,  # [entries] int64
    entry_weights: Tensor,  # [entries] int64, above 0
    entry_starts: Tensor,  # [rows + 1] int64
    words: Tensor,  # [rows, 4] int64
) -> Tensor:  # [rows] int64; -1 where a row has no entries
    """Draws an id per row by floor(total x r / 2^64), r the 64 bits of the row's first two words; exact in int64."""
    cumulative = torch.cat((entry_weights.new_zeros(1), entry_weights.cumsum(0)))  # [entries + 1]
    bounds = cumulative[entry_starts]  # [rows + 1]
    totals = bounds.diff()  # [rows], below 2^24
    points = (totals * words[:, 0] + (totals * words[:, 1] >> 32)) >> 32  # [rows]
    entries = torch.searchsorted(cumulative[1:], bounds[:-1] + points, right=True)  # [rows]
    drawn = entry_ids[entries.clamp(max=max(len(entry_ids) - 1, 0))] if len(entry_ids) else entries
    return torch.where(totals > 0, drawn, -1)


def _positive(weights: Tensor) -> Tensor:
    """Flat indices of weights above 0, [entries] int64, ascending; numpy's are far faster on a CPU."""
    if weights.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(weights.numpy() > 0))
    return (weights.flatten() > 0).nonzero().squeeze(1)
