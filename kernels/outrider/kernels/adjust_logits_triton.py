"""What precedes temperature, in Triton: allowed and banned ids, bias, penalties, the structured-output mask.

One launch copies the rows to float32 (of a row with allowed ids those alone), one scatters the entries of each kind,
one applies the packed mask. The stream keeps them in order, so that a later kind sees what an earlier one left.
"""

# mypy: allow-untyped-decorators, disable-error-code="import-untyped,import-not-found"

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from outrider.kernels.logits_to_probs import RowSampling

TILE = 2048
ENTRIES = 128  # that a program of a scatter takes
BAN, BIAS = (tl.constexpr(kind) for kind in range(2))


def adjust_logits(logits: Tensor, sampling: RowSampling, tile: int = TILE) -> Tensor:  # [rows, vocab]
    """Launches `logits_to_probs.adjust_logits`: float32, but the argument itself where nothing applies."""
    kinds = (sampling.allowed, sampling.banned, sampling.bias, sampling.penalties, sampling.token_mask)
    if all(kind is None for kind in kinds):
        return logits
    num_rows, vocab_size = logits.shape
    out = torch.empty(num_rows, vocab_size, dtype=torch.float32, device=logits.device)
    if num_rows == 0:
        return out
    allowed, banned, bias, penalties = sampling.allowed, sampling.banned, sampling.bias, sampling.penalties
    mask_of_row = masks = logits
    if allowed is not None:
        mask_of_row = torch.full((num_rows,), -1, device=logits.device).index_copy_(0, allowed.rows, allowed.mask_of)
        masks = allowed.masks.contiguous()
    grid = (num_rows, triton.cdiv(vocab_size, tile))
    _copy_kernel[grid](logits, mask_of_row, masks, out, logits.stride(0), vocab_size, allowed is not None, tile)
    if banned is not None:
        _scatter(banned.rows, banned.ids, logits, out, BAN)
    if bias is not None and sampling.bias_values is not None:
        _scatter(bias.rows, bias.ids, sampling.bias_values, out, BIAS)
    if penalties is not None and len(penalties.ids):
        columns = [getattr(penalties, column.name).contiguous() for column in fields(penalties)]
        num_entries = len(penalties.ids)
        _penalise_kernel[(triton.cdiv(num_entries, ENTRIES),)](
            *columns, out, vocab_size, num_entries, ENTRIES, enable_fp_fusion=False
        )
    if sampling.token_mask is not None:
        mask = sampling.token_mask
        _mask_kernel[grid](mask, out, mask.stride(0), mask.stride(1), vocab_size, tile)
    return out


def _scatter(rows: Tensor, ids: Tensor, values: Tensor, out: Tensor, kind: tl.constexpr) -> None:
    if len(ids):
        _scatter_kernel[(triton.cdiv(len(ids), ENTRIES),)](
            rows.contiguous(), ids.contiguous(), values, out, out.shape[1], len(ids), kind, ENTRIES
        )


@triton.jit
def _copy_kernel(
    logits: tl.tensor,
    mask_of_row: tl.tensor,  # [rows] int64; -1: every id is kept
    masks: tl.tensor,  # [masks, vocab] float32: 0 or minus infinity
    out: tl.tensor,
    stride: tl.tensor,
    vocab_size: tl.tensor,
    HAS_ALLOWED: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * TILE + tl.arange(0, TILE)
    value = tl.load(logits + row * stride + ids, ids < vocab_size, 0.0).to(tl.float32)
    if HAS_ALLOWED:
        mask = tl.load(mask_of_row + row)
        value += tl.load(masks + mask * vocab_size + ids, (ids < vocab_size) & (mask >= 0), 0.0)
    tl.store(out + row * vocab_size + ids, value, ids < vocab_size)


@triton.jit(do_not_specialize=["num_entries"])
def _scatter_kernel(
    rows: tl.tensor,
    ids: tl.tensor,
    values: tl.tensor,  # BIAS: one per entry
    out: tl.tensor,
    vocab_size: tl.tensor,
    num_entries: tl.tensor,
    KIND: tl.constexpr,
    ENTRIES: tl.constexpr,
) -> None:
    entries = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    inside = entries < num_entries
    row, token = tl.load(rows + entries, inside, 0), tl.load(ids + entries, inside, 0)
    place = out + row * vocab_size + token
    if KIND == 0:
        tl.store(place, tl.full([ENTRIES], float("-inf"), tl.float32), inside)
    else:
        tl.atomic_add(place, tl.load(values + entries, inside, 0.0), inside)  # an id named twice gets both


@triton.jit(do_not_specialize=["num_entries"])
def _penalise_kernel(
    rows: tl.tensor,
    ids: tl.tensor,
    output_counts: tl.tensor,
    repetition: tl.tensor,
    presence: tl.tensor,
    frequency: tl.tensor,
    out: tl.tensor,
    vocab_size: tl.tensor,
    num_entries: tl.tensor,
    ENTRIES: tl.constexpr,
) -> None:
    entries = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    inside = entries < num_entries
    place = out + tl.load(rows + entries, inside, 0) * vocab_size + tl.load(ids + entries, inside, 0)
    value = tl.load(place, inside, 0.0)
    count, factor = tl.load(output_counts + entries, inside, 0.0), tl.load(repetition + entries, inside, 1.0)
    value = tl.where(value > 0, tl.div_rn(value, factor), value * factor)
    value = value - tl.load(frequency + entries, inside, 0.0) * count
    value = value - tl.load(presence + entries, inside, 0.0) * (count > 0).to(tl.float32)
    tl.store(place, value, inside)


@triton.jit
def _mask_kernel(
    mask: tl.tensor,  # [rows, ceil(vocab / 32)] int32
    out: tl.tensor,
    mask_stride: tl.tensor,
    mask_word_stride: tl.tensor,
    vocab_size: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = ids < vocab_size
    word = tl.load(mask + row * mask_stride + (ids // 32) * mask_word_stride, inside, 0)
    place = out + row * vocab_size + ids
    tl.store(place, tl.full([TILE], float("-inf"), tl.float32), inside & (((word >> (ids % 32)) & 1) == 0))
