"""Log probabilities to report: the chosen token first, then the most probable ones, each with its rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.kernels.logits_to_probs import RowSampling, processed_logits

ALL = -1  # as many logprobs as the vocabulary has ids


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """Reported ids of one row: the chosen one first, the others by falling value, ties by lowest id."""

    ids: list[int]
    values: list[float]
    ranks: list[int]  # 1 plus how many values are strictly greater


def reported_values(
    mode: str,  # raw_logprobs, raw_logits, processed_logprobs or processed_logits
    logits: Tensor,  # [rows, vocab]
    sampling: RowSampling,
    probs: Tensor,  # [rows, vocab] float32: logits_to_probs of the same
) -> Tensor:  # [rows, vocab] float32
    """What the values are of. Processed values of a greedy row end before temperature, as its arg max does."""
    stage, _, kind = mode.partition("_")
    if stage not in ("raw", "processed") or kind not in ("logprobs", "logits"):
        raise ValueError(f"unknown logprobs mode {mode!r}")
    values = logits.float() if stage == "raw" else processed_logits(logits, sampling, probs)
    return torch.log_softmax(values, dim=-1) if kind == "logprobs" else values


def top_logprobs(
    values: Tensor,  # [rows, vocab] float32
    chosen: Sequence[int],  # [rows]
    counts: Sequence[int],  # [rows]: how many of the most probable ids besides the chosen one; -1: all
) -> list[RowLogprobs]:
    """Ranks the rows of a batch. A chosen id that is among the most probable ones is not repeated."""
    table = values.cpu().numpy()
    return [_rank_row(row, *wanted) for row, *wanted in zip(table, chosen, counts, strict=True)]


def _rank_row(values: NDArray[np.float32], chosen: int, count: int) -> RowLogprobs:
    top = _top_ids(values, len(values) if count == ALL else min(count, len(values)))  # [count]
    top_values = values[top]
    ranks = np.searchsorted(-top_values, -top_values, side="left") + 1  # equal values share the first one's rank
    chosen_rank = int(np.count_nonzero(values > values[chosen])) + 1
    others = top != chosen
    return RowLogprobs(
        [chosen, *top[others].tolist()],
        [float(values[chosen]), *top_values[others].tolist()],
        [chosen_rank, *ranks[others].tolist()],
    )


def _top_ids(values: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """Ids of the greatest values in falling order, ties by lowest id."""
    if count == 0:
        return np.empty(0, dtype=np.int64)
    threshold = np.partition(values, len(values) - count)[len(values) - count]
    ids = np.flatnonzero(values >= threshold)  # ascending
    return ids[np.argsort(-values[ids], kind="stable")][:count]
