"""From rows of logits to the log probabilities that are reported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.kernels.sampling.reference import processed_logits
from outrider.kernels.types import RowSampling

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
    """Ranks the rows of a batch, all at once where they are: what leaves a device is what is reported. A chosen id that
    is among the most probable ones is not repeated."""
    if not chosen:
        return []
    vocab_size = values.shape[1]
    own = values.gather(1, torch.tensor(chosen, device=values.device)[:, None])  # [rows, 1]
    above = torch.gt(values, own, out=torch.empty_like(values)).sum(dim=-1)  # [rows]; boolean tensors are slow on a CPU
    # One more than is wanted: it tells whether ids beyond the last wanted one have the same value.
    best, best_ids = values.topk(min(max(0, *counts) + 1, vocab_size), dim=-1)  # [rows, width] each
    own_values, num_above = torch.stack((own.squeeze(1), above)).cpu().numpy()  # [rows] each
    top_values, top = best.cpu().numpy(), best_ids.cpu().numpy()
    order = np.lexsort((top, -top_values), axis=-1)
    top_values, top = np.take_along_axis(top_values, order, axis=-1), np.take_along_axis(top, order, axis=-1)
    rows: list[RowLogprobs] = []
    for row, (token, count) in enumerate(zip(chosen, counts, strict=True)):
        tied = 0 < count < top.shape[1] and top_values[row, count - 1] == top_values[row, count]
        if count == ALL or tied:
            every = values[row].cpu().numpy()
            ids = _top_ids(every, vocab_size if count == ALL else count)
            found = every[ids]
        else:
            ids, found = top[row, :count], top_values[row, :count]
        rows.append(_row(token, float(own_values[row]), int(num_above[row]) + 1, ids, found))
    return rows


def with_listed(row: RowLogprobs, values: Tensor, ids: Sequence[int], ranked: bool = True) -> RowLogprobs:
    """A row's log probabilities, and behind them those of these ids, each once, in their order; `values` are the row's,
    [vocab]. Ranks take a sort of the row, whatever their number: without they are 0."""
    listed = [token for token in dict.fromkeys(ids) if token not in row.ids]
    if not ranked:
        return RowLogprobs(row.ids + listed, row.values + values[listed].tolist(), row.ranks + [0] * len(listed))
    every = values.cpu().numpy()
    own = every[listed]  # [listed]
    num_above = len(every) - np.searchsorted(np.sort(every), own, side="right")  # [listed]
    return RowLogprobs(row.ids + listed, row.values + own.tolist(), row.ranks + (num_above + 1).tolist())


def _row(
    chosen: int,
    value: float,
    rank: int,
    ids: NDArray[np.int64],  # [count] by falling value, ties by lowest id
    values: NDArray[np.float32],  # [count]
) -> RowLogprobs:
    ranks = np.searchsorted(-values, -values, side="left") + 1  # equal values share the first one's rank
    others = ids != chosen
    return RowLogprobs(
        [chosen, *ids[others].tolist()], [value, *values[others].tolist()], [rank, *ranks[others].tolist()]
    )


def _top_ids(values: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """Ids of the greatest values in falling order, ties by lowest id. At least one."""
    threshold = np.partition(values, len(values) - count)[len(values) - count]
    ids = np.flatnonzero(values >= threshold)  # ascending
    return ids[np.argsort(-values[ids], kind="stable")][:count]
