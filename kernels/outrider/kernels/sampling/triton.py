"""Sampling in Triton.

What precedes temperature: allowed and banned ids, bias, penalties, the structured-output mask. One launch copies the
rows to float32 (of a row with allowed ids those alone), one scatters the entries of each kind that any row asks for, in
the fixed order, and one applies the packed mask. The stream keeps them in order, so that a later kind sees what an
earlier one left. A batch that asks for none is read where it lies.

From logits to probabilities: a program per tile of a row finds the tile's maximum and a sum relative to it; a second
one puts those of the row together and writes the tile's probabilities (min_p needs the kept sum between, one launch
more). Rows with top_k or top_p are cut in place, see cut_triton.py. A row's result depends on that row alone: its tiles
are the same, and are added up in the same way, whatever the batch. Invalid rows come out as zeros, so that nothing can
be drawn from them.

Draft draws: truncate, round to integer weights, draw from them, and pack them for the wire. One program per row finds
the cut, writes the positive weights in the order of their ids to the row's slots, adds them up, and takes the first id
whose sum is above floor(total x r / 2^64): integers throughout after the rounding, which multiplies, rounds and breaks
ties to even as the reference does. A second launch moves the entries of all rows together. Both have grids of fixed
shape; only the packed view's length is read on the host.

`advance`: one program for a few sequences each."""

# mypy: allow-untyped-decorators, disable-error-code="import-untyped,import-not-found"
from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.sampling.cut_triton import (
    CUT_TILE,
    FIELDS,
    GREATEST,
    NAN_BITS,
    SIZE,
    find_cut,
    gather,
    kept_of_tile,
    load_probs,
    truncate,
)

if TYPE_CHECKING:
    from outrider.kernels.types import RowSampling


ADJUST_TILE = 2048
ENTRIES = 128  # that a program of a scatter takes
BAN, BIAS = (tl.constexpr(kind) for kind in range(2))


def adjust_logits(logits: Tensor, sampling: RowSampling, tile: int = ADJUST_TILE) -> Tensor:  # [rows, vocab]
    """Launches the reference's `adjust_logits`: float32, but the argument itself where nothing applies."""
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


TILE = 4096


def logits_to_probs(
    raw: Tensor,  # [rows, vocab]
    sampling: RowSampling,
    tile: int = TILE,
    cut_tile: int = CUT_TILE,
) -> tuple[Tensor, Tensor]:
    """Launches the reference's `logits_to_probs`: [rows, vocab] float32 and [rows] bool."""
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
    columns = temperature, probs if sampling.min_p is None else sampling.min_p
    flags = sampling.temperature is not None, sampling.min_p is not None, sampling.greedy_rows is not None
    tile = _tile_for(vocab_size, tile)
    scan = _scan(raw, adjusted, temperature, tile, has_temperature=flags[0])
    kept = torch.empty_like(scan.totals) if flags[1] else scan.totals
    shape = adjusted.stride(0), vocab_size, scan.num_tiles
    grid, tiles = (num_rows, scan.num_tiles), triton.next_power_of_2(scan.num_tiles)
    # No fused products: a sum's lanes would round each its own way, and equal logits have unequal probabilities.
    if flags[1]:
        _kept_kernel[grid](
            adjusted, *columns, *scan, kept, *shape, flags[0], tile, tiles, num_warps=8, enable_fp_fusion=False
        )
    _probs_kernel[grid](
        adjusted, *columns, greedy, *scan, kept, probs, invalid, *shape, *flags, tile, tiles, num_warps=8,
        enable_fp_fusion=False,
    )  # fmt: skip
    if sampling.truncation is not None:
        truncate(probs, sampling.truncation, None if sampling.greedy_rows is None else greedy, cut_tile)
    return probs, invalid


def greedy_choice(
    raw: Tensor,  # [rows, vocab]
    sampling: RowSampling,
    tile: int = TILE,
) -> tuple[Tensor, Tensor]:
    """Launches the reference's `greedy_choice`: [rows] int64 and [rows] bool."""
    adjusted = adjust_logits(raw, sampling)
    num_rows, vocab_size = raw.shape
    ids = torch.empty(num_rows, dtype=torch.int64, device=raw.device)
    invalid = torch.empty(num_rows, dtype=torch.bool, device=raw.device)
    if num_rows:
        scan = _scan(raw, adjusted, None, _tile_for(vocab_size, tile), has_temperature=False)
        _best_kernel[(num_rows,)](
            scan.highest, scan.best, scan.bad, ids, invalid, scan.num_tiles, triton.next_power_of_2(scan.num_tiles),
            num_warps=1,
        )  # fmt: skip
    return ids, invalid


class Scan(NamedTuple):
    """What is known of each tile of each row, [rows, tiles] each."""

    highest: Tensor  # float32: the highest logit
    best: Tensor  # int32: its lowest id
    totals: Tensor  # float32: the sum of exp((logit - highest) / temperature)
    bad: Tensor  # int32: 1 where a logit is NaN or infinite above

    @property
    def num_tiles(self) -> int:
        """Of a row."""
        return self.highest.shape[1]


def _scan(raw: Tensor, adjusted: Tensor, temperature: Tensor | None, tile: int, *, has_temperature: bool) -> Scan:
    """One pass over all rows; without temperatures the sums are not made."""
    num_rows, vocab_size = raw.shape
    grid, device = (num_rows, triton.cdiv(vocab_size, tile)), raw.device
    highest, totals = torch.empty(2, *grid, dtype=torch.float32, device=device).unbind(0)
    best, bad = torch.empty(2, *grid, dtype=torch.int32, device=device).unbind(0)
    found = Scan(highest, best, totals, bad)
    _scan_kernel[grid](
        raw, adjusted, raw if temperature is None else temperature, *found, raw.stride(0), adjusted.stride(0),
        vocab_size, grid[1], adjusted is not raw, temperature is not None, has_temperature, tile, num_warps=8,
    )  # fmt: skip
    return found


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
def _scan_kernel(
    raw: tl.tensor,
    adjusted: tl.tensor,
    temperatures: tl.tensor,
    highest: tl.tensor,
    best: tl.tensor,
    totals: tl.tensor,
    bad: tl.tensor,
    raw_stride: tl.tensor,
    adjusted_stride: tl.tensor,
    vocab_size: tl.tensor,
    num_tiles: tl.tensor,
    HAS_RAW: tl.constexpr,
    HAS_TOTAL: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    index, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = index * num_tiles + tile
    ids = tile * TILE + tl.arange(0, TILE)
    logits = _load_logits(adjusted + index * adjusted_stride, ids, vocab_size)
    wrong = _is_bad(logits)
    if HAS_RAW:  # a mask may hide what is wrong with a row
        wrong |= _is_bad(_load_logits(raw + index * raw_stride, ids, vocab_size))
    tl.store(bad + place, tl.max(wrong, axis=0))
    logits = tl.where(_is_bad(logits) != 0, float("-inf"), logits)
    peak = tl.max(logits, axis=0)
    tl.store(highest + place, peak)
    tl.store(best + place, tile * TILE + tl.argmax(logits, axis=0, tie_break_left=True))
    if HAS_TOTAL:
        temperature = tl.load(temperatures + index) if HAS_TEMPERATURE else tl.full([], 1.0, tl.float32)
        base = tl.where(peak == float("-inf"), 0.0, peak)
        tl.store(totals + place, tl.sum(tl.exp(tl.div_rn(logits - base, temperature)), axis=0))


@triton.jit
def _best_of_tiles(
    highest: tl.tensor, best: tl.tensor, bad: tl.tensor, index: tl.tensor, num_tiles: tl.tensor, TILES: tl.constexpr
) -> tl.tensor:
    """Of a row: the tiles' highest logits, [TILES], the highest of all, its lowest id, and whether the row is
    invalid."""
    tiles = tl.arange(0, TILES)
    places, inside = index * num_tiles + tiles, tiles < num_tiles
    peaks = tl.load(highest + places, inside, float("-inf"))
    peak = tl.max(peaks, axis=0)
    ids = tl.load(best + places, inside, 0)
    first = tl.min(tl.where(peaks == peak, tiles, TILES - 1), axis=0)
    wrong = tl.max(tl.load(bad + places, inside, 0), axis=0) != 0
    return peaks, peak, tl.sum(tl.where(tiles == first, ids, 0), axis=0), wrong | (peak == float("-inf"))


@triton.jit
def _total_of_tiles(
    peaks: tl.tensor,
    peak: tl.tensor,
    totals: tl.tensor,
    temperature: tl.tensor,
    index: tl.tensor,
    num_tiles: tl.tensor,
    TILES: tl.constexpr,
) -> tl.tensor:
    """The sum of exp((logit - peak) / temperature) over a row."""
    tiles = tl.arange(0, TILES)
    of_tiles = tl.load(totals + index * num_tiles + tiles, tiles < num_tiles, 0.0)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    return tl.sum(of_tiles * tl.exp(tl.div_rn(peaks - base, temperature)), axis=0)


@triton.jit
def _best_kernel(
    highest: tl.tensor,
    best: tl.tensor,
    bad: tl.tensor,
    best_ids: tl.tensor,
    invalid: tl.tensor,
    num_tiles: tl.tensor,
    TILES: tl.constexpr,
) -> None:
    index = tl.program_id(0).to(tl.int64)
    _, _, found, wrong = _best_of_tiles(highest, best, bad, index, num_tiles, TILES)
    tl.store(best_ids + index, found.to(tl.int64))
    tl.store(invalid + index, wrong)


@triton.jit
def _kept_kernel(
    adjusted: tl.tensor,
    temperatures: tl.tensor,
    min_ps: tl.tensor,
    highest: tl.tensor,
    best: tl.tensor,
    totals: tl.tensor,
    bad: tl.tensor,
    kept: tl.tensor,  # [rows, tiles]: what min_p leaves of a tile
    stride: tl.tensor,
    vocab_size: tl.tensor,
    num_tiles: tl.tensor,
    HAS_TEMPERATURE: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
) -> None:
    index, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    min_p = tl.load(min_ps + index)
    if min_p > 0:
        temperature = tl.load(temperatures + index) if HAS_TEMPERATURE else tl.full([], 1.0, tl.float32)
        peaks, peak, _, _ = _best_of_tiles(highest, best, bad, index, num_tiles, TILES)
        total = _total_of_tiles(peaks, peak, totals, temperature, index, num_tiles, TILES)
        logits = _load_logits(adjusted + index * stride, tile * TILE + tl.arange(0, TILE), vocab_size)
        prob = tl.div_rn(tl.exp(tl.div_rn(logits - peak, temperature)), total)
        least = min_p * tl.div_rn(1.0, total)
        tl.store(kept + index * num_tiles + tile, tl.sum(tl.where(prob >= least, prob, 0.0), axis=0))


@triton.jit
def _probs_kernel(
    adjusted: tl.tensor,
    temperatures: tl.tensor,
    min_ps: tl.tensor,
    greedy: tl.tensor,
    highest: tl.tensor,
    best: tl.tensor,
    totals: tl.tensor,
    bad: tl.tensor,
    kept: tl.tensor,
    probs: tl.tensor,
    invalid: tl.tensor,
    stride: tl.tensor,
    vocab_size: tl.tensor,
    num_tiles: tl.tensor,
    HAS_TEMPERATURE: tl.constexpr,
    HAS_MIN_P: tl.constexpr,
    HAS_GREEDY: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
) -> None:
    index, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperatures + index) if HAS_TEMPERATURE else tl.full([], 1.0, tl.float32)
    peaks, peak, first, wrong = _best_of_tiles(highest, best, bad, index, num_tiles, TILES)
    total = _total_of_tiles(peaks, peak, totals, temperature, index, num_tiles, TILES)
    if tile == 0:
        tl.store(invalid + index, wrong)
    ids = tile * TILE + tl.arange(0, TILE)
    logits = _load_logits(adjusted + index * stride, ids, vocab_size)
    prob = tl.div_rn(tl.exp(tl.div_rn(logits - peak, temperature)), total)
    if HAS_MIN_P:
        min_p = tl.load(min_ps + index)
        if min_p > 0:  # a row that has it off is left as it is, whatever the others have
            tiles = tl.arange(0, TILES)
            left = tl.sum(tl.load(kept + index * num_tiles + tiles, tiles < num_tiles, 0.0), axis=0)
            prob = tl.where(prob >= min_p * tl.div_rn(1.0, total), tl.div_rn(prob, left), 0.0)
    if HAS_GREEDY:
        prob = tl.where(tl.load(greedy + index) != 0, (ids == first).to(tl.float32), prob)
    tl.store(probs + index * vocab_size + ids, tl.where(wrong, 0.0, prob), ids < vocab_size)


ROUNDING = tl.constexpr(12582912.0)  # 1.5 x 2^23: adding and taking it off again rounds to even
PACK_ROWS = 128


def draft_sample(
    draft_probs: Tensor,  # [rows, vocab] float32
    words: Tensor,  # [rows, 4] int64
    mass: float,
    max_entries: int,
    tile: int = CUT_TILE,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launches the reference's `draft_sample`: token ids [rows], entry ids, their weights, starts [rows + 1]. Entries
    are in buffers of rows x max_entries, valid up to the last of the starts, so that nothing is read on the host."""
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
        limit = torch.full((1,), max_entries, device=device)
        share = torch.full((1,), mass, dtype=torch.float64, device=device)  # as an argument it would be float32
        gathered = gather(draft_probs, limit, share, tile=tile, of_whole_row=True)
        _sample_kernel[(num_rows,)](
            draft_probs, words, token_ids, counts, row_ids, row_weights, *gathered, draft_probs.stride(0),
            words.stride(0), vocab_size, slots, limit, share, gathered.values.shape[1], tile,
            triton.next_power_of_2(slots), num_warps=8, enable_fp_fusion=False,
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
    values: tl.tensor,  # [rows, most]
    value_ids: tl.tensor,  # [rows, most]
    summary: tl.tensor,  # [rows, FIELDS]
    scratch: tl.tensor,  # [rows, TILE]
    stride: tl.tensor,
    words_stride: tl.tensor,
    vocab_size: tl.tensor,
    slots: tl.tensor,
    limits: tl.tensor,  # [1] int64
    shares: tl.tensor,  # [1] float64
    most: tl.tensor,
    TILE: tl.constexpr,
    SLOTS: tl.constexpr,
) -> None:
    index = tl.program_id(0).to(tl.int64)
    of_row = summary + index * FIELDS
    size, highest = tl.load(of_row + SIZE), tl.load(of_row + GREATEST).to(tl.int32)
    is_listed, spoilt = size >= 0, (highest == 0) | (highest == NAN_BITS)
    row = tl.where(is_listed, values + index * most, probs + index * stride)
    size = tl.where(is_listed, size, vocab_size)
    top_k, top_p = tl.load(limits), tl.load(shares)
    threshold, ties, _ = find_cut(row, size, of_row, scratch + index * TILE, top_k, top_p, True, TILE)
    scale = tl.div_rn(32767.0, tl.where(spoilt, 1.0, highest.to(tl.float32, bitcast=True)))
    count, num_ties = tl.zeros_like(index), tl.zeros_like(index)
    for start in range(0, size, TILE):
        places = start + tl.arange(0, TILE)
        prob = load_probs(row, places, size)
        kept, num_ties = kept_of_tile(prob, threshold, ties, num_ties)
        weight = ((tl.where(kept, prob, 0.0) * scale + ROUNDING) - ROUNDING).to(tl.int32)
        sent = (weight > 0) & (spoilt == 0)
        slot = index * slots + count + tl.cumsum(sent.to(tl.int64), axis=0) - 1
        ids = tl.load(value_ids + index * most + places, sent & is_listed, 0)
        tl.store(row_ids + slot, tl.where(is_listed, ids, places.to(tl.int32)), sent)
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


SEQUENCES = 64  # of a program


def advance(
    positions: Tensor, slots: Tensor, context_lens: Tensor, block_tables: Tensor, ends: Tensor, block_size: int
) -> None:
    """Launches the reference's `advance`."""
    num_sequences = len(positions)
    _advance_kernel[(triton.cdiv(num_sequences, SEQUENCES),)](
        positions, slots, context_lens, block_tables, ends, num_sequences, block_tables.stride(0), block_size,
        SEQUENCES,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_sequences"])
def _advance_kernel(
    positions: tl.tensor,
    slots: tl.tensor,
    context_lens: tl.tensor,
    block_tables: tl.tensor,
    ends: tl.tensor,
    num_sequences: tl.tensor,
    table_stride: tl.tensor,
    block_size: tl.constexpr,
    SEQUENCES: tl.constexpr,
) -> None:
    index = tl.program_id(0) * SEQUENCES + tl.arange(0, SEQUENCES)
    inside = index < num_sequences
    length, end = tl.load(context_lens + index, inside, 0), tl.load(ends + index, inside, 0)
    moves = (length > 0).to(tl.int32)
    position = tl.minimum(tl.load(positions + index, inside, 0) + moves, end)
    has_place = inside & (position < end)
    place = block_tables + index.to(tl.int64) * table_stride + position // block_size
    slot = tl.load(place, has_place, 0) * block_size + position % block_size
    tl.store(positions + index, position, inside)
    tl.store(context_lens + index, tl.minimum(length + moves, end), inside)
    tl.store(slots + index, tl.where(has_place, slot, -1), inside)
