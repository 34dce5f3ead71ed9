"""From logits to probabilities in Triton.

Single ids are scattered into a float32 copy of the logits, one launch for each kind that any row asks for, in the fixed
order; a batch that asks for none is read where it lies. Then one program per row makes two passes: the first keeps a
running maximum and a sum relative to it, the second writes probabilities (min_p needs the kept sum between, one more).
Rows with top_k or top_p are cut in place, without a sort: see `find_cut`.

A row's result depends on that row alone: its tiles are taken in order, whatever the batch. Invalid rows come out as
zeros, so that nothing can be drawn from them.

What precedes temperature, in Triton: allowed and banned ids, bias, penalties, the structured-output mask.

One launch copies the rows to float32 (of a row with allowed ids those alone), one scatters the entries of each kind,
one applies the packed mask. The stream keeps them in order, so that a later kind sees what an earlier one left.

The cut of top_k and top_p without a sort, for the kernels that truncate a row of probabilities.

Bits of non-negative floats are ordered as the floats are, so the cut is a search for an integer: the greatest threshold
t at which the values of at least t are k in number (top_k), or hold the wanted mass (top_p). The search quarters its
range with each pass over the row, until the values left in the range fit one tile of registers (with a usual row after
four or five passes, the row in cache); these are collected, and the rest of the search reads no memory. Of the values
equal to t only the lowest ids are kept, as many as are wanted.

Masses are sums of integers, in units of 2^-61, so a sum does not depend on its order and the cut is a function of the
values alone. A probability of at least 2^-37 is a whole number of units; what smaller ones lose is less than the
rounding of a sum in float64. Rows must sum to about 1 (below 2), which probabilities do.

Draft draws in Triton: truncate, round to integer weights, draw from them, and pack them for the wire.

One program per row finds the cut (see `find_cut`), writes the positive weights in the order of their ids to the row's
slots, adds them up, and takes the first id whose sum is above floor(total x r / 2^64): integers throughout after the
rounding, which multiplies, rounds and breaks ties to even as the reference does. A second launch moves the entries
of all rows together. Both have grids of fixed shape; only the packed view's length is read on the host.

`advance` in Triton: one program for a few sequences each."""

# mypy: allow-untyped-decorators, disable-error-code="import-untyped,import-not-found"
from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from outrider.kernels.types import RowSampling, Truncation


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


CUT_TILE = 2048  # ids a pass takes at once, and how many values the search holds in registers
UNITS_PER_ONE = tl.constexpr(2305843009213693952.0)  # 2^61
UNIT = tl.constexpr(4.336808689942018e-19)  # 2^-61


@triton.jit
def load_probs(row: tl.tensor, ids: tl.tensor, vocab_size: tl.tensor) -> tl.tensor:
    """Probabilities at `ids`; what is outside the row, below 0 or NaN reads as 0."""
    prob = tl.load(row + ids, ids < vocab_size, 0.0)
    return tl.where(prob > 0, prob, 0.0)


@triton.jit
def units(prob: tl.tensor) -> tl.tensor:
    """Mass as a whole number of 2^-61, int64."""
    return (prob * UNITS_PER_ONE).to(tl.int64)


@triton.jit
def share_of(mass: tl.tensor) -> tl.tensor:
    """The float32 nearest to a number of units."""
    return mass.to(tl.float32) * UNIT


@triton.jit
def row_mass(row: tl.tensor, vocab_size: tl.tensor, TILE: tl.constexpr) -> tl.tensor:
    """The bits of the greatest value, int32, and the mass of all, int64."""
    greatest = tl.zeros([TILE], tl.int32)
    mass = tl.zeros([TILE], tl.int64)
    for start in range(0, vocab_size, TILE):
        prob = load_probs(row, start + tl.arange(0, TILE), vocab_size)
        greatest = tl.maximum(greatest, prob.to(tl.int32, bitcast=True))
        mass += units(prob)
    return tl.max(greatest, axis=0), tl.sum(mass, axis=0)


@triton.jit
def find_cut(
    row: tl.tensor,  # of float32 probabilities
    scratch: tl.tensor,  # [TILE] int32
    vocab_size: tl.tensor,
    top_k: tl.tensor,  # int64, at least 1
    top_p: tl.tensor,  # float64; 1: off
    OF_WHOLE_ROW: tl.constexpr,  # top_p is a share of the row's mass, else of what top_k leaves
    TILE: tl.constexpr,
) -> tl.tensor:
    """Returns the threshold's bits, int32, how many values equal to it are kept, int64, and the kept mass, int64."""
    greatest, total = row_mass(row, vocab_size, TILE)
    top = greatest + 1
    limit = tl.minimum(top_k, vocab_size)
    threshold, num_from, num_above, above = tl.zeros_like(top), tl.zeros_like(limit) + vocab_size, limit * 0, total * 0
    if limit < vocab_size:
        threshold, num_from, num_above, above = _search(
            row, scratch, vocab_size, threshold, num_from, top, limit, False, TILE
        )
        ties = limit - num_above
        mass = above + ties * units(threshold.to(tl.float32, bitcast=True))
    else:
        ties = limit
        mass = total
    if top_p < 1.0:
        base = total if OF_WHOLE_ROW else mass
        wanted = tl.maximum(tl.ceil(base.to(tl.float64) * top_p).to(tl.int64), 1)
        if wanted <= mass:  # else the limit holds
            threshold, num_from, num_above, above = _search(
                row, scratch, vocab_size, threshold, num_from, top, wanted, True, TILE
            )
            unit = units(threshold.to(tl.float32, bitcast=True))
            ties = (wanted - above + unit - 1) // tl.maximum(unit, 1)
            mass = above + ties * unit
    return threshold, ties, mass


@triton.jit
def kept_of_tile(
    prob: tl.tensor,  # [TILE] float32
    threshold: tl.tensor,  # int32
    ties: tl.tensor,  # int64
    num_ties: tl.tensor,  # int64: values equal to the threshold in earlier tiles
) -> tl.tensor:
    """Which values of a tile are kept, [TILE] int1, and the number of ties up to its end."""
    bits = prob.to(tl.int32, bitcast=True)
    equal = bits == threshold
    rank = num_ties + tl.cumsum(equal.to(tl.int64), axis=0)  # from 1
    return (prob > 0) & ((bits > threshold) | (equal & (rank <= ties))), num_ties + tl.sum(equal.to(tl.int64), axis=0)


@triton.jit
def _search(
    row: tl.tensor,
    scratch: tl.tensor,
    vocab_size: tl.tensor,
    low: tl.tensor,  # int32: a threshold known to suffice
    num_low: tl.tensor,  # int64: how many values reach it
    high: tl.tensor,  # int32: a threshold that none reaches
    wanted: tl.tensor,  # int64
    BY_MASS: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """The greatest threshold whose values suffice; how many reach it, how many exceed it, and their mass."""
    num_high, mass_high = num_low * 0, wanted * 0
    places = tl.arange(0, TILE)
    while (high - low > 1) & (num_low - num_high > TILE):
        b = low + (high - low) // 2
        a = low + (b - low) // 2
        c = b + (high - b) // 2
        num_a, num_b, num_c = tl.zeros([TILE], tl.int32), tl.zeros([TILE], tl.int32), tl.zeros([TILE], tl.int32)
        mass_a, mass_b, mass_c = tl.zeros([TILE], tl.int64), tl.zeros([TILE], tl.int64), tl.zeros([TILE], tl.int64)
        for start in range(0, vocab_size, TILE):
            bits, mass = _bits_and_mass(row, start + places, vocab_size)
            num_a, mass_a = num_a + (bits >= a).to(tl.int32), mass_a + tl.where(bits >= a, mass, 0)
            num_b, mass_b = num_b + (bits >= b).to(tl.int32), mass_b + tl.where(bits >= b, mass, 0)
            num_c, mass_c = num_c + (bits >= c).to(tl.int32), mass_c + tl.where(bits >= c, mass, 0)
        low, num_low, high, num_high, mass_high = _narrow(
            low, num_low, high, num_high, mass_high, b, num_b, mass_b, wanted, BY_MASS
        )
        low, num_low, high, num_high, mass_high = _narrow(
            low, num_low, high, num_high, mass_high, a, num_a, mass_a, wanted, BY_MASS
        )
        low, num_low, high, num_high, mass_high = _narrow(
            low, num_low, high, num_high, mass_high, c, num_c, mass_c, wanted, BY_MASS
        )
    if high - low > 1:  # the values in the range fit one tile
        num_past, mass_past = num_high, mass_high
        bits = _collect(row, scratch, vocab_size, low, high, TILE)
        mass = units(tl.maximum(bits, 0).to(tl.float32, bitcast=True))
        while high - low > 1:
            middle = low + (high - low) // 2
            reached = bits >= middle
            first = (places == 0).to(tl.int64)
            low, num_low, high, num_high, mass_high = _narrow(
                low, num_low, high, num_high, mass_high, middle,
                reached.to(tl.int64) + first * num_past, tl.where(reached, mass, 0) + first * mass_past,
                wanted, BY_MASS,
            )  # fmt: skip
    return low, num_low, num_high, mass_high


@triton.jit
def _narrow(
    low: tl.tensor,
    num_low: tl.tensor,
    high: tl.tensor,
    num_high: tl.tensor,
    mass_high: tl.tensor,
    pivot: tl.tensor,  # int32, in the range or not
    nums: tl.tensor,  # [TILE]: their sum is how many values reach the pivot
    masses: tl.tensor,  # [TILE] int64: their sum is the mass of these
    wanted: tl.tensor,
    BY_MASS: tl.constexpr,
) -> tl.tensor:
    """The range after a look at one pivot."""
    num, mass = tl.sum(nums, axis=0).to(tl.int64), tl.sum(masses, axis=0)
    enough = (mass if BY_MASS else num) >= wanted
    up, down = enough & (pivot > low), (enough == 0) & (pivot < high)
    num_low, num_high = tl.where(up, num, num_low), tl.where(down, num, num_high)
    return tl.where(up, pivot, low), num_low, tl.where(down, pivot, high), num_high, tl.where(down, mass, mass_high)


@triton.jit
def _bits_and_mass(row: tl.tensor, ids: tl.tensor, vocab_size: tl.tensor) -> tl.tensor:
    """Bits, int32, and mass, int64, of a tile; both 0 outside of the row, where no pivot above the range's low lies."""
    prob = load_probs(row, ids, vocab_size)
    return prob.to(tl.int32, bitcast=True), units(prob)


@triton.jit
def _collect(
    row: tl.tensor, scratch: tl.tensor, vocab_size: tl.tensor, low: tl.tensor, high: tl.tensor, TILE: tl.constexpr
) -> tl.tensor:
    """The bits of the row's values between `low` and `high`, [TILE] int32, the rest -1; they are fewer than TILE."""
    places = tl.arange(0, TILE)
    num_found = tl.zeros_like(low)
    tl.debug_barrier()  # an earlier search may still be reading
    for start in range(0, vocab_size, TILE):
        bits, _ = _bits_and_mass(row, start + places, vocab_size)
        found = ((bits > low) & (bits < high)).to(tl.int32)
        tl.store(scratch + num_found + tl.cumsum(found, axis=0) - 1, bits, found != 0)
        num_found += tl.sum(found, axis=0)
    tl.debug_barrier()
    return tl.load(scratch + places, places < num_found, -1)


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
    """Launches the reference's `greedy_choice`: [rows] int64 and [rows] bool."""
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


SEQUENCES = 64  # of a program


def advance(
    positions: Tensor, slots: Tensor, context_lens: Tensor, block_tables: Tensor, passes: Tensor, block_size: int
) -> None:
    """Launches the reference's `advance`."""
    num_sequences = len(positions)
    _advance_kernel[(triton.cdiv(num_sequences, SEQUENCES),)](
        positions, slots, context_lens, block_tables, passes, num_sequences, block_tables.stride(0), block_size,
        SEQUENCES,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_sequences"])
def _advance_kernel(
    positions: tl.tensor,
    slots: tl.tensor,
    context_lens: tl.tensor,
    block_tables: tl.tensor,
    passes: tl.tensor,
    num_sequences: tl.tensor,
    table_stride: tl.tensor,
    block_size: tl.constexpr,
    SEQUENCES: tl.constexpr,
) -> None:
    index = tl.program_id(0) * SEQUENCES + tl.arange(0, SEQUENCES)
    inside = index < num_sequences
    length = tl.load(context_lens + index, inside, 0)
    moves = ((length > 0) & (tl.load(passes) > 0)).to(tl.int32)
    position = tl.load(positions + index, inside, 0) + moves
    place = block_tables + index.to(tl.int64) * table_stride + position // block_size
    slot = tl.load(place, inside & (length > 0), 0) * block_size + position % block_size
    tl.store(positions + index, position, inside)
    tl.store(context_lens + index, length + moves, inside)
    tl.store(slots + index, tl.where(length > 0, slot, -1), inside)
