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


@dataclass(frozen=True, slots=True)
class Reported:
    """What is reported of every id of a batch of rows: its score less the row's offset."""

    scores: Tensor  # [rows, vocab] float32
    offsets: Tensor  # [rows] float32


def reported_values(
    mode: str,  # raw_logprobs, raw_logits, processed_logprobs or processed_logits
    logits: Tensor,  # [rows, vocab]
    sampling: RowSampling,
    probs: Tensor,  # [rows, vocab] float32: logits_to_probs of the same
) -> Reported:
    """What the values are of. Processed values of a greedy row end before temperature, as its arg max does."""
    stage, _, kind = mode.partition("_")
    if stage not in ("raw", "processed") or kind not in ("logprobs", "logits"):
        raise ValueError(f"unknown logprobs mode {mode!r}")
    scores = logits.float() if stage == "raw" else processed_logits(logits, sampling, probs)
    offsets = scores.logsumexp(dim=-1) if kind == "logprobs" else scores.new_zeros(len(scores))
    return Reported(scores, offsets)


def top_logprobs(
    reported: Reported,
    chosen: Sequence[int],  # [rows]
    counts: Sequence[int],  # [rows]: how many of the most probable ids besides the chosen one; -1: all
) -> list[RowLogprobs]:
    """Ranks the rows of a batch, all at once where they are: what leaves a device is what is reported. A chosen id that
    is among the most probable ones is not repeated."""
    if not chosen:
        return []
    scores = reported.scores
    vocab_size = scores.shape[1]
    ids = torch.tensor(chosen, device=scores.device)[:, None]  # [rows, 1]
    own = scores.gather(1, ids)  # [rows, 1]
    above = torch.gt(scores, own, out=torch.empty_like(scores)).sum(dim=-1)  # [rows]; boolean tensors are slow on a CPU
    # One more than is wanted: it tells whether ids beyond the last wanted one have the same score.
    best, best_ids = scores.topk(min(max(0, *counts) + 1, vocab_size), dim=-1)  # [rows, width] each
    columns = torch.stack((reported.offsets, own.squeeze(1), above)).cpu().numpy()  # [3, rows]
    values, tokens = best.cpu().numpy(), best_ids.cpu().numpy()
    order = np.lexsort((tokens, -values), axis=-1)
    values, tokens = np.take_along_axis(values, order, axis=-1), np.take_along_axis(tokens, order, axis=-1)
    rows: list[RowLogprobs] = []
    for row, (token, count) in enumerate(zip(chosen, counts, strict=True)):
        top_values, top = values[row], tokens[row]
        if count == ALL or (count and count < len(top) and top_values[count - 1] == top_values[count]):
            every = scores[row].cpu().numpy()
            top = _top_ids(every, vocab_size if count == ALL else count)
            top_values = every[top]
        elif count < len(top):
            top_values, top = top_values[:count], top[:count]
        offset, value, num_above = columns[:, row]
        rows.append(_row(token, value, int(num_above) + 1, top, top_values, offset))
    return rows


def _row(
    chosen: int,
    value: np.float32,
    rank: int,
    top: NDArray[np.int64],  # [count] by falling value, ties by lowest id
    top_values: NDArray[np.float32],  # [count]
    offset: np.float32,
) -> RowLogprobs:
    ranks = np.searchsorted(-top_values, -top_values, side="left") + 1  # equal values share the first one's rank
    others = top != chosen
    return RowLogprobs(
        [chosen, *top[others].tolist()],
        [float(value - offset), *(top_values[others] - offset).tolist()],
        [rank, *ranks[others].tolist()],
    )


def _top_ids(values: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """Ids of the greatest values in falling order, ties by lowest id. At least one."""
    threshold = np.partition(values, len(values) - count)[len(values) - count]
    ids = np.flatnonzero(values >= threshold)  # ascending
    return ids[np.argsort(-values[ids], kind="stable")][:count]
