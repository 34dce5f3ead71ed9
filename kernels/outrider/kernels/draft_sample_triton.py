"""Draft draws in Triton: truncate, round to integer weights, draw from them, and pack them for the wire.

One program per row finds the cut (see `cut_triton`), writes the positive weights in the order of their ids to the row's
slots, adds them up, and takes the first id whose sum is above floor(total x r / 2^64): integers throughout after the
rounding, which multiplies, rounds and breaks ties to even as the reference does. A second launch moves the entries
of all rows together. Both have grids of fixed shape; only the packed view's length is read on the host.
"""

# mypy: allow-untyped-decorators, disable-error-code="import-untyped,import-not-found"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.cut_triton import CUT_TILE, find_cut, kept_of_tile, load_probs

ROUNDING = tl.constexpr(12582912.0)  # 1.5 x 2^23: adding and taking it off again rounds to even
PACK_ROWS = 128


def draft_sample(
    draft_probs: Tensor,  # [rows, vocab] float32
    words: Tensor,  # [rows, 4] int64
    mass: float,
    max_entries: int,
    tile: int = CUT_TILE,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launches `draft_sample.draft_sample`. The entries are in buffers of rows x max_entries, valid up to the last of
    the starts, so that nothing is read on the host: token ids [rows], entry ids, entry weights, starts [rows + 1]."""
    token_ids, counts, row_ids, row_weights = sample_rows(draft_probs, words, mass, max_entries, tile)
    (num_rows, slots), device = row_ids.shape, draft_probs.device
    entry_ids, entry_weights = torch.empty(2, num_rows * slots, dtype=torch.int64, device=device).unbind(0)
    starts = torch.zeros(num_rows + 1, dtype=torch.int64, device=device)
    if num_rows:
        _pack_kernel[(num_rows,)](
            counts, row_ids, row_weights, starts, entry_ids, entry_weights, slots, triton.next_power_of_2(slots),
            PACK_ROWS,
        )  # fmt: skip
    return token_ids, entry_ids, entry_weights, starts


def sample_rows(
    draft_probs: Tensor,  # [rows, vocab] float32
    words: Tensor,  # [rows, 4] int64
    mass: float,
    max_entries: int,
    tile: int = CUT_TILE,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same, not packed: token ids and numbers of entries, [rows] int64 each, and entry ids and weights, [rows,
    slots] int32 each, with the entries of a row at its start."""
    num_rows, vocab_size = draft_probs.shape
    slots = min(max_entries, vocab_size)
    device = draft_probs.device
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=device)
    counts = torch.empty(num_rows, dtype=torch.int64, device=device)
    row_ids, row_weights = torch.empty(2, num_rows, slots, dtype=torch.int32, device=device).unbind(0)
    if num_rows:
        scratch = torch.empty(num_rows, tile, dtype=torch.int32, device=device)
        masses = torch.full((1,), mass, dtype=torch.float64, device=device)  # as an argument it would be float32
        _sample_kernel[(num_rows,)](
            draft_probs, words, token_ids, counts, row_ids, row_weights, scratch, draft_probs.stride(0),
            words.stride(0), vocab_size, slots, masses, max_entries, tile, triton.next_power_of_2(slots), num_warps=8,
            enable_fp_fusion=False,
        )  # fmt: skip
    return token_ids, counts, row_ids, row_weights


@triton.jit
def _sample_kernel(
    probs: tl.tensor,
    words: tl.tensor,
    token_ids: tl.tensor,
    counts: tl.tensor,
    row_ids: tl.tensor,  # [rows, slots]
    row_weights: tl.tensor,  # [rows, slots]
    scratch: tl.tensor,  # [rows, TILE]
    stride: tl.tensor,
    words_stride: tl.tensor,
    vocab_size: tl.tensor,
    slots: tl.tensor,
    masses: tl.tensor,  # [1] float64
    max_entries: tl.tensor,
    TILE: tl.constexpr,
    SLOTS: tl.constexpr,
) -> None:
    index = tl.program_id(0).to(tl.int64)
    row = probs + index * stride
    highest, spoilt = _highest(row, vocab_size, TILE)
    top_k, top_p = tl.zeros_like(index) + max_entries, tl.load(masses)
    threshold, ties, _ = find_cut(row, scratch + index * TILE, vocab_size, top_k, top_p, True, TILE)
    scale = tl.div_rn(32767.0, tl.where(spoilt, 1.0, highest))
    count, num_ties = tl.zeros_like(index), tl.zeros_like(index)
    for start in range(0, vocab_size, TILE):
        ids = start + tl.arange(0, TILE)
        prob = load_probs(row, ids, vocab_size)
        kept, num_ties = kept_of_tile(prob, threshold, ties, num_ties)
        weight = ((tl.where(kept, prob, 0.0) * scale + ROUNDING) - ROUNDING).to(tl.int32)
        sent = (weight > 0) & (spoilt == 0)
        slot = index * slots + count + tl.cumsum(sent.to(tl.int64), axis=0) - 1
        tl.store(row_ids + slot, ids, sent)
        tl.store(row_weights + slot, weight, sent)
        count += tl.sum(sent.to(tl.int64), axis=0)
    tl.store(counts + index, count)
    tl.debug_barrier()  # what follows reads what other threads wrote
    places = tl.arange(0, SLOTS)
    weight = tl.load(row_weights + index * slots + places, places < count, 0).to(tl.int64)
    total = tl.sum(weight, axis=0)
    high, low = tl.load(words + index * words_stride), tl.load(words + index * words_stride + 1)
    point = (total * high + ((total * low) >> 32)) >> 32
    place = tl.sum((tl.cumsum(weight, axis=0) <= point).to(tl.int32), axis=0)  # the first sum above the point
    drawn = tl.load(row_ids + index * slots + tl.minimum(place, slots - 1), count > 0, -1)
    tl.store(token_ids + index, drawn.to(tl.int64))


@triton.jit
def _highest(row: tl.tensor, vocab_size: tl.tensor, TILE: tl.constexpr) -> tl.tensor:
    """The greatest probability, and whether the row has a NaN or nothing above 0."""
    highest = tl.zeros([TILE], tl.float32)
    spoilt = tl.zeros([TILE], tl.int32)
    for start in range(0, vocab_size, TILE):
        ids = start + tl.arange(0, TILE)
        value = tl.load(row + ids, ids < vocab_size, 0.0)
        spoilt |= (value != value).to(tl.int32)
        highest = tl.maximum(highest, tl.where(value > 0, value, 0.0))
    greatest = tl.max(highest, axis=0)
    return greatest, (tl.max(spoilt, axis=0) != 0) | (greatest == 0)


@triton.jit
def _pack_kernel(
    counts: tl.tensor,
    row_ids: tl.tensor,
    row_weights: tl.tensor,
    starts: tl.tensor,
    entry_ids: tl.tensor,
    entry_weights: tl.tensor,
    slots: tl.tensor,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    index = tl.program_id(0)
    before = tl.zeros([ROWS], tl.int64)
    for start in range(0, index, ROWS):
        rows = start + tl.arange(0, ROWS)
        before += tl.load(counts + rows, rows < index, 0)
    first, count = tl.sum(before, axis=0), tl.load(counts + index)
    tl.store(starts + index + 1, first + count)
    places = tl.arange(0, SLOTS)
    slot = index.to(tl.int64) * slots + places
    tl.store(entry_ids + first + places, tl.load(row_ids + slot, places < count, 0).to(tl.int64), places < count)
    tl.store(
        entry_weights + first + places, tl.load(row_weights + slot, places < count, 0).to(tl.int64), places < count
    )
