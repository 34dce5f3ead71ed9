"""From logits to probabilities in Triton.

Single ids are scattered into a float32 copy of the logits, one launch for each kind that any row asks for, in the fixed
order; a batch that asks for none is read where it lies. Then one program per row makes two passes: the first keeps a
running maximum and a sum relative to it, the second writes probabilities (min_p needs the kept sum between, one more).
Rows with top_k or top_p are cut in place, without a sort: see `cut_triton`.

A row's result depends on that row alone: its tiles are taken in order, whatever the batch. Invalid rows come out as
zeros, so that nothing can be drawn from them.
"""

# mypy: allow-untyped-decorators, disable-error-code="import-untyped,import-not-found"

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.adjust_logits_triton import adjust_logits
from outrider.kernels.cut_triton import CUT_TILE, find_cut, kept_of_tile, load_probs, share_of

if TYPE_CHECKING:
    from outrider.kernels.logits_to_probs import RowSampling, Truncation

TILE = 4096


def logits_to_probs(
    raw: Tensor,  # [rows, vocab]
    sampling: RowSampling,
    tile: int = TILE,
    cut_tile: int = CUT_TILE,
) -> tuple[Tensor, Tensor]:
    """Launches `logits_to_probs.logits_to_probs`: [rows, vocab] float32 and [rows] bool."""
    adjusted = adjust_logits(raw, sampling)
    num_rows, vocab_size = raw.shape
    probs = torch.empty(num_rows, vocab_size, dtype=torch.float32, device=raw.device)
    invalid = torch.empty(num_rows, dtype=torch.bool, device=raw.device)
    if num_rows == 0:
        return probs, invalid
    greedy = invalid
    if sampling.greedy_rows is not None:
        greedy = torch.zeros_like(invalid).index_fill_(0, sampling.greedy_rows, True)
    temperature = probs if sampling.temperature is None else sampling.temperature
    min_p = probs if sampling.min_p is None else sampling.min_p
    _probs_kernel[(num_rows,)](
        raw, adjusted, temperature, min_p, greedy, probs, invalid, raw.stride(0), adjusted.stride(0), vocab_size,
        adjusted is not raw, sampling.temperature is not None, sampling.min_p is not None,
        sampling.greedy_rows is not None, _tile_for(vocab_size, tile), num_warps=8,
    )  # fmt: skip
    if sampling.truncation is not None:
        truncate(probs, sampling.truncation, None if sampling.greedy_rows is None else greedy, cut_tile)
    return probs, invalid


def greedy_choice(
    raw: Tensor,  # [rows, vocab]
    sampling: RowSampling,
    tile: int = TILE,
) -> tuple[Tensor, Tensor]:
    """Launches `logits_to_probs.greedy_choice`: [rows] int64 and [rows] bool."""
    adjusted = adjust_logits(raw, sampling)
    num_rows, vocab_size = raw.shape
    ids = torch.empty(num_rows, dtype=torch.int64, device=raw.device)
    invalid = torch.empty(num_rows, dtype=torch.bool, device=raw.device)
    if num_rows:
        _greedy_kernel[(num_rows,)](
            raw, adjusted, ids, invalid, raw.stride(0), adjusted.stride(0), vocab_size, adjusted is not raw,
            _tile_for(vocab_size, tile), num_warps=8,
        )  # fmt: skip
    return ids, invalid


def truncate(
    probs: Tensor,  # [rows, vocab] float32; changed in place
    cut: Truncation,
    greedy: Tensor | None = None,  # [rows] bool: rows left alone
    tile: int = CUT_TILE,
) -> None:
    """Launches top_k and top_p. A row that has either comes out as what is kept over its sum, also where that is all of
    it; one that has neither (top_k 0 and top_p 1), and a greedy one, keeps its bits, normalised or not."""
    num_cut = len(cut.rows)
    if num_cut:
        scratch = torch.empty(num_cut, tile, dtype=torch.int32, device=probs.device)
        _truncate_kernel[(num_cut,)](
            probs, cut.rows.contiguous(), cut.top_k.contiguous(), cut.top_p.contiguous(),
            probs if greedy is None else greedy, scratch, probs.stride(0), probs.shape[1], greedy is not None, tile,
            num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip


def _tile_for(vocab_size: int, tile: int) -> int:
    return min(tile, max(16, 1 << (vocab_size - 1).bit_length()))


@triton.jit
def _load_logits(row: tl.tensor, ids: tl.tensor, vocab_size: tl.tensor) -> tl.tensor:
    return tl.load(row + ids, ids < vocab_size, float("-inf")).to(tl.float32)


@triton.jit
def _is_bad(logits: tl.tensor) -> tl.tensor:
    """1 where a value is NaN or infinity above, int32."""
    return ((logits != logits) | (logits == float("inf"))).to(tl.int32)


@triton.jit
def _scan(
    raw: tl.tensor,
    row: tl.tensor,
    vocab_size: tl.tensor,
    temperature: tl.tensor,
    HAS_RAW: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """One pass: the highest logit, its lowest id, the sum of exp((logit - highest) / temperature), and whether the row
    is invalid."""
    highest = temperature * 0.0 + float("-inf")
    best = tl.zeros_like(temperature).to(tl.int32)
    total = temperature * 0.0
    bad = tl.zeros([TILE], tl.int32)
    for start in range(0, vocab_size, TILE):
        ids = start + tl.arange(0, TILE)
        logits = _load_logits(row, ids, vocab_size)
        bad |= _is_bad(logits)
        if HAS_RAW:  # a mask may hide what is wrong with a row
            bad |= _is_bad(_load_logits(raw, ids, vocab_size))
        logits = tl.where(_is_bad(logits) != 0, float("-inf"), logits)
        higher = tl.max(logits, axis=0)
        best = tl.where(higher > highest, start + tl.argmax(logits, axis=0, tie_break_left=True), best)
        reached = tl.maximum(highest, higher)
        base = tl.where(reached == float("-inf"), 0.0, reached)
        total = total * tl.exp(tl.div_rn(highest - base, temperature))
        total += tl.sum(tl.exp(tl.div_rn(logits - base, temperature)), axis=0)
        highest = reached
    return highest, best, total, (tl.max(bad, axis=0) != 0) | (highest == float("-inf"))


@triton.jit
def _probs_kernel(
    raw: tl.tensor,
    adjusted: tl.tensor,
    temperatures: tl.tensor,
    min_ps: tl.tensor,
    greedy: tl.tensor,
    probs: tl.tensor,
    invalid: tl.tensor,
    raw_stride: tl.tensor,
    adjusted_stride: tl.tensor,
    vocab_size: tl.tensor,
    HAS_RAW: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
    HAS_MIN_P: tl.constexpr,
    HAS_GREEDY: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    index = tl.program_id(0).to(tl.int64)
    row, out = adjusted + index * adjusted_stride, probs + index * vocab_size
    temperature = tl.load(temperatures + index) if HAS_TEMPERATURE else tl.full([], 1.0, tl.float32)
    highest, best, total, bad = _scan(raw + index * raw_stride, row, vocab_size, temperature, HAS_RAW, TILE)
    tl.store(invalid + index, bad)
    one_hot = tl.load(greedy + index) != 0 if HAS_GREEDY else best < 0
    least, kept = total * 0.0, total * 0.0 + 1.0
    if HAS_MIN_P:
        least = tl.load(min_ps + index) * tl.div_rn(1.0, total)
        if least > 0:  # a row that has it off is left as it is, whatever the others have
            kept = kept * 0.0
            for start in range(0, vocab_size, TILE):
                logits = _load_logits(row, start + tl.arange(0, TILE), vocab_size)
                prob = tl.div_rn(tl.exp(tl.div_rn(logits - highest, temperature)), total)
                kept += tl.sum(tl.where(prob >= least, prob, 0.0), axis=0)
    for start in range(0, vocab_size, TILE):
        ids = start + tl.arange(0, TILE)
        logits = _load_logits(row, ids, vocab_size)
        prob = tl.div_rn(tl.exp(tl.div_rn(logits - highest, temperature)), total)
        if HAS_MIN_P:
            prob = tl.where(prob >= least, tl.div_rn(prob, kept), 0.0)
        prob = tl.where(one_hot, (ids == best).to(tl.float32), prob)
        tl.store(out + ids, tl.where(bad, 0.0, prob), ids < vocab_size)


@triton.jit
def _greedy_kernel(
    raw: tl.tensor,
    adjusted: tl.tensor,
    best_ids: tl.tensor,
    invalid: tl.tensor,
    raw_stride: tl.tensor,
    adjusted_stride: tl.tensor,
    vocab_size: tl.tensor,
    HAS_RAW: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    index = tl.program_id(0).to(tl.int64)
    one = tl.full([], 1.0, tl.float32)
    row = adjusted + index * adjusted_stride
    _, best, _, bad = _scan(raw + index * raw_stride, row, vocab_size, one, HAS_RAW, TILE)
    tl.store(best_ids + index, best.to(tl.int64))
    tl.store(invalid + index, bad)


@triton.jit
def _truncate_kernel(
    probs: tl.tensor,
    rows: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    greedy: tl.tensor,
    scratch: tl.tensor,  # [cut, TILE]
    stride: tl.tensor,
    vocab_size: tl.tensor,
    HAS_GREEDY: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    index = tl.program_id(0).to(tl.int64)
    row_index = tl.load(rows + index)
    row = probs + row_index * stride
    top_k, top_p = tl.load(top_ks + index), tl.load(top_ps + index)
    left_alone = (top_k <= 0) & (top_p >= 1)
    if HAS_GREEDY:
        left_alone = left_alone | (tl.load(greedy + row_index) != 0)
    if left_alone == 0:
        top_k = tl.where(top_k > 0, top_k, vocab_size)
        threshold, ties, mass = find_cut(row, scratch + index * TILE, vocab_size, top_k, top_p, False, TILE)
        total = share_of(mass)
        num_ties = ties * 0
        for start in range(0, vocab_size, TILE):
            ids = start + tl.arange(0, TILE)
            prob = load_probs(row, ids, vocab_size)
            kept, num_ties = kept_of_tile(prob, threshold, ties, num_ties)
            tl.store(row + ids, tl.where(kept, tl.div_rn(prob, total), 0.0), ids < vocab_size)
