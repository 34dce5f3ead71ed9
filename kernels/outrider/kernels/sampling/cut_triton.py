"""The cut of top_k and top_p in Triton, without a sort, by as many programs as a row has tiles.

Bits of non-negative floats are ordered as the floats are, so the cut is a search for an integer: the greatest threshold
t at which the values of at least t are k in number (top_k), or hold the wanted mass (top_p). Of the values equal to t
only the lowest ids are kept, as many as are wanted.

* **survey**, a program per tile: how many of its values lie in each of a few bins, eight an octave, and their mass.
* **gather**, a program per tile: writes the values from the highest bin that suffices to a short list, in the order of
  their ids. Where no such list is short, the row itself is searched.
* **threshold**, a program per row: `find_cut` in the list; a usual row's fits one tile of registers.
* **keep**, a program per tile: zeros and shares, in place.

Masses are sums of integers, in units of 2^-61, so a sum does not depend on its order and the cut is a function of the
values alone. A probability of at least 2^-37 is a whole number of units; what smaller ones lose is less than the
rounding of a sum in float64. Rows must sum to about 1 (below 2), which probabilities do."""

# mypy: allow-untyped-decorators, disable-error-code="import-untyped,import-not-found"
from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from outrider.kernels.types import Truncation

CUT_TILE = 2048  # values that a search takes at once, and how many it holds in registers
SURVEY_TILE = 4096  # ids of a program that surveys or gathers
BINS = tl.constexpr(256)  # the first holds what is 0, the second all that lies below the third
LOWEST = tl.constexpr(768)  # the leading twelve bits of 2^-31, where the third begins less a bin
MOST_GATHERED = 8192
NAN_BITS = tl.constexpr(0x7F800001)  # above those of every number
UNITS_PER_ONE = tl.constexpr(2305843009213693952.0)  # 2^61
UNIT = tl.constexpr(4.336808689942018e-19)  # 2^-61
MARGIN = tl.constexpr(1e-12)  # more than that of a sum of a row's bins in float64

SIZE, HELD, TOTAL, POSITIVE, PIVOT, GREATEST = (tl.constexpr(field) for field in range(6))  # of a row's summary
FIELDS = tl.constexpr(6)


class Gathered(NamedTuple):
    """The short lists of some rows, and what is known of each row."""

    values: Tensor  # [n, most gathered] float32
    ids: Tensor  # [n, most gathered] int32, ascending
    summary: Tensor  # [n, FIELDS] int64: values in the list (-1: there is none) and their mass, the row's mass and how
    # many of it are above 0, the bits that the list's reach, and the greatest of the row, NAN_BITS if it has a NaN
    scratch: Tensor  # [n, tile] int32, of the search


def truncate(
    probs: Tensor,  # [rows, vocab] float32; changed in place
    cut: Truncation,
    greedy: Tensor | None = None,  # [rows] bool: rows left alone
    tile: int = CUT_TILE,
) -> None:
    """Launches top_k and top_p. A row that has either comes out as what is kept over its sum, also where that is all of
    it; one that has neither (top_k 0 and top_p 1), and a greedy one, keeps its bits, normalised or not."""
    num_cut, vocab_size = len(cut.rows), probs.shape[1]
    if not num_cut:
        return
    rows, top_k, top_p = cut.rows.contiguous(), cut.top_k.contiguous(), cut.top_p.contiguous()
    gathered = gather(probs, top_k, top_p, tile=tile, rows=rows, greedy=greedy)
    bounds = torch.empty(num_cut, 2, dtype=torch.int32, device=probs.device)
    masses = torch.empty(num_cut, dtype=torch.int64, device=probs.device)
    left_alone, has_greedy = probs if greedy is None else greedy, greedy is not None
    _threshold_kernel[(num_cut,)](
        probs, rows, top_k, top_p, left_alone, *gathered, bounds, masses, probs.stride(0), vocab_size,
        gathered.values.shape[1], has_greedy, tile, num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    _keep_kernel[(num_cut, triton.cdiv(vocab_size, SURVEY_TILE))](
        probs, rows, top_k, top_p, left_alone, bounds, masses, probs.stride(0), vocab_size, has_greedy, SURVEY_TILE,
        num_warps=8,
    )  # fmt: skip


def gather(
    probs: Tensor,  # [rows, vocab] float32
    top_k: Tensor,  # [n] int64, or one for all; 0: off
    top_p: Tensor,  # the same in float64; 1: off
    *,
    tile: int,
    rows: Tensor | None = None,  # [n] int64; None: all
    greedy: Tensor | None = None,  # [rows] bool: rows left alone
    of_whole_row: bool = False,  # top_p is a share of the row's mass, else of what top_k leaves
) -> Gathered:
    """Lists that hold what the cut keeps, and more. Nothing is written for rows that have no cut."""
    num_cut, vocab_size = len(probs) if rows is None else len(rows), probs.shape[1]
    surveyed = min(SURVEY_TILE, 4 * tile)  # a test's tiles are small
    num_tiles, device = triton.cdiv(vocab_size, surveyed), probs.device
    most = min(MOST_GATHERED, 4 * tile)
    tile_bins = torch.empty(num_cut, num_tiles, BINS.value, dtype=torch.int32, device=device)
    row_bins = torch.zeros(num_cut, BINS.value, dtype=torch.int32, device=device)
    gathered = Gathered(
        torch.empty(num_cut, most, dtype=torch.float32, device=device),
        torch.empty(num_cut, most, dtype=torch.int32, device=device),
        torch.zeros(num_cut, FIELDS.value, dtype=torch.int64, device=device),
        torch.empty(num_cut, tile, dtype=torch.int32, device=device),
    )
    limit_stride = int(len(top_k) == num_cut)
    skips = probs if greedy is None else greedy
    choices = rows is not None, greedy is not None
    given = probs, top_k if rows is None else rows, top_k, top_p, skips, tile_bins, row_bins
    _survey_kernel[(num_cut, num_tiles)](
        *given, gathered.summary, probs.stride(0), limit_stride, vocab_size, num_tiles, *choices, surveyed,
        num_warps=8,
    )  # fmt: skip
    _gather_kernel[(num_cut, num_tiles)](
        *given, *gathered[:3], probs.stride(0), limit_stride, vocab_size, num_tiles, most, of_whole_row, *choices,
        surveyed, triton.next_power_of_2(num_tiles), num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    return gathered


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
def _first_bits(place: tl.tensor) -> tl.tensor:
    """The least bits of a bin, int32."""
    return tl.where(place > 1, (LOWEST + place - 1) << 20, place)


@triton.jit
def _has_cut(
    top_k: tl.tensor, top_p: tl.tensor, greedy: tl.tensor, row: tl.tensor, HAS_GREEDY: tl.constexpr
) -> tl.tensor:
    found = (top_k > 0) | (top_p < 1)
    if HAS_GREEDY:
        found = found & (tl.load(greedy + row) == 0)
    return found


@triton.jit
def _limit(top_k: tl.tensor, positive: tl.tensor) -> tl.tensor:
    """How many values top_k leaves; zeros are never kept."""
    return tl.where(top_k > 0, tl.minimum(top_k, positive), positive)


@triton.jit
def _wanted_mass(base: tl.tensor, top_p: tl.tensor) -> tl.tensor:
    return tl.maximum(tl.ceil(base.to(tl.float64) * top_p).to(tl.int64), 1)


@triton.jit
def _survey_kernel(
    probs: tl.tensor,
    rows: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    greedy: tl.tensor,
    tile_bins: tl.tensor,  # [n, tiles, BINS]
    row_bins: tl.tensor,  # [n, BINS], from 0 on
    summary: tl.tensor,  # [n, FIELDS], from 0 on
    stride: tl.tensor,
    limit_stride: tl.tensor,
    vocab_size: tl.tensor,
    num_tiles: tl.tensor,
    HAS_ROWS: tl.constexpr,
    HAS_GREEDY: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    index, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row_index = tl.load(rows + index) if HAS_ROWS else index
    top_k, top_p = tl.load(top_ks + index * limit_stride), tl.load(top_ps + index * limit_stride)
    if _has_cut(top_k, top_p, greedy, row_index, HAS_GREEDY):
        ids = tile * TILE + tl.arange(0, TILE)
        value = tl.load(probs + row_index * stride + ids, ids < vocab_size, 0.0)
        prob = tl.where(value > 0, value, 0.0)
        bits = prob.to(tl.int32, bitcast=True)
        place = tl.where(bits > 0, tl.minimum(tl.maximum((bits >> 20) - LOWEST, 0) + 1, BINS - 1), 0)
        count, bins = tl.histogram(place, BINS), tl.arange(0, BINS)
        tl.store(tile_bins + (index * num_tiles + tile) * BINS + bins, count)
        tl.atomic_add(row_bins + index * BINS + bins, count, mask=(count > 0) & (bins > 0))
        highest = tl.max(tl.where(value != value, NAN_BITS, bits), axis=0)
        tl.atomic_add(summary + index * FIELDS + TOTAL, tl.sum(units(prob), axis=0))
        tl.atomic_max(summary + index * FIELDS + GREATEST, highest.to(tl.int64))


@triton.jit
def _gather_kernel(
    probs: tl.tensor,
    rows: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    greedy: tl.tensor,
    tile_bins: tl.tensor,  # [n, tiles, BINS]
    row_bins: tl.tensor,  # [n, BINS]
    values: tl.tensor,  # [n, most]
    value_ids: tl.tensor,  # [n, most]
    summary: tl.tensor,  # [n, FIELDS]
    stride: tl.tensor,
    limit_stride: tl.tensor,
    vocab_size: tl.tensor,
    num_tiles: tl.tensor,
    most: tl.tensor,
    OF_WHOLE_ROW: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    HAS_GREEDY: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,  # a power of two, at least the row's
) -> None:
    index, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row_index = tl.load(rows + index) if HAS_ROWS else index
    top_k, top_p = tl.load(top_ks + index * limit_stride), tl.load(top_ps + index * limit_stride)
    if _has_cut(top_k, top_p, greedy, row_index, HAS_GREEDY):
        bins, of_row = tl.arange(0, BINS), summary + index * FIELDS
        count, total = tl.load(row_bins + index * BINS + bins), tl.load(of_row + TOTAL)
        reaching = tl.cumsum(count, axis=0, reverse=True)  # of this bin and those above
        positive = tl.max(reaching, axis=0).to(tl.int64)
        limit = _limit(top_k, positive)
        by_mass = top_p < 1
        if OF_WHOLE_ROW == 0:
            by_mass = by_mass & (limit == positive)  # else what top_k leaves must be there to be added up
        # What the bins below hold is at most their numbers times where the next bin begins.
        most_each = _first_bits(bins + 1).to(tl.float32, bitcast=True).to(tl.float64)
        below = count.to(tl.float64) * tl.where(bins > 0, most_each, 0.0)
        below = tl.cumsum(below, axis=0) - below
        spare = (total - _wanted_mass(total, top_p)).to(tl.float64) * UNIT - MARGIN
        enough = (reaching >= limit) | (below <= tl.where(by_mass, spare, -1.0))
        chosen = tl.max(tl.where(enough & (reaching <= most) & (bins > 0), bins, 0), axis=0)
        pivot = _first_bits(chosen)  # 0: no list is short
        if tile == 0:
            size = tl.sum(tl.where(bins == chosen, reaching, 0), axis=0)
            tl.store(of_row + SIZE, tl.where(chosen > 0, size, -1).to(tl.int64))
            tl.store(of_row + POSITIVE, positive)
            tl.store(of_row + PIVOT, pivot.to(tl.int64))
            if chosen == 0:
                tl.store(of_row + HELD, total)
        if chosen > 0:
            tiles = tl.arange(0, TILES)
            earlier = (tiles < tile)[:, None] & (bins >= chosen)[None, :]
            places = (index * num_tiles + tiles[:, None]) * BINS + bins[None, :]
            before = tl.sum(tl.sum(tl.load(tile_bins + places, earlier, 0), axis=1), axis=0)
            ids = tile * TILE + tl.arange(0, TILE)
            prob = load_probs(probs + row_index * stride, ids, vocab_size)
            found = prob.to(tl.int32, bitcast=True) >= pivot
            place = index * most + before + tl.cumsum(found.to(tl.int32), axis=0) - 1
            tl.store(values + place, prob, found)
            tl.store(value_ids + place, ids, found)
            tl.atomic_add(of_row + HELD, tl.sum(tl.where(found, units(prob), 0), axis=0))


@triton.jit
def find_cut(
    row: tl.tensor,  # of float32 probabilities: a list or, where there is none, the whole row
    size: tl.tensor,  # int64: of that
    summary: tl.tensor,  # [FIELDS] int64
    scratch: tl.tensor,  # [TILE] int32
    top_k: tl.tensor,  # int64; 0: off
    top_p: tl.tensor,  # float64; 1: off
    OF_WHOLE_ROW: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """Returns the threshold's bits, int32, how many values equal to it are kept, int64, and the kept mass, int64."""
    mass, total = tl.load(summary + HELD), tl.load(summary + TOTAL)
    top = tl.load(summary + GREATEST).to(tl.int32) + 1
    threshold = tl.load(summary + PIVOT).to(tl.int32)
    positive = tl.load(summary + POSITIVE)
    limit, base = _limit(top_k, positive), total
    num_from, num_above, above = size, size * 0, total * 0
    ties = tl.minimum(limit, size)
    if limit < tl.minimum(size, positive):
        threshold, num_from, num_above, above = _search(
            row, scratch, size, threshold, num_from, top, limit, False, TILE
        )
        ties = limit - num_above
        mass = above + ties * units(threshold.to(tl.float32, bitcast=True))
    if top_p < 1.0:
        if OF_WHOLE_ROW == 0:
            base = tl.where(limit < positive, mass, total)
        wanted = _wanted_mass(base, top_p)
        if wanted <= mass:  # else the limit holds
            threshold, num_from, num_above, above = _search(
                row, scratch, size, threshold, num_from, top, wanted, True, TILE
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


@triton.jit
def _threshold_kernel(
    probs: tl.tensor,
    rows: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    greedy: tl.tensor,
    values: tl.tensor,  # [n, most]
    value_ids: tl.tensor,  # [n, most]
    summary: tl.tensor,  # [n, FIELDS]
    scratch: tl.tensor,  # [n, TILE]
    bounds: tl.tensor,  # [n, 2] int32: the threshold's bits, and the last id that is kept of those equal to it
    masses: tl.tensor,  # [n] int64: what is kept
    stride: tl.tensor,
    vocab_size: tl.tensor,
    most: tl.tensor,
    HAS_GREEDY: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    index = tl.program_id(0).to(tl.int64)
    row_index = tl.load(rows + index)
    top_k, top_p = tl.load(top_ks + index), tl.load(top_ps + index)
    if _has_cut(top_k, top_p, greedy, row_index, HAS_GREEDY):
        of_row = summary + index * FIELDS
        size = tl.load(of_row + SIZE)
        is_listed = size >= 0
        row = tl.where(is_listed, values + index * most, probs + row_index * stride)
        size = tl.where(is_listed, size, vocab_size)
        threshold, ties, mass = find_cut(row, size, of_row, scratch + index * TILE, top_k, top_p, False, TILE)
        last, num_ties = tl.full([], -1, tl.int32), ties * 0
        for start in range(0, size, TILE):
            places = (start + tl.arange(0, TILE)).to(tl.int32)
            prob = load_probs(row, places, size)
            kept, num_ties = kept_of_tile(prob, threshold, ties, num_ties)
            equal = kept & (prob.to(tl.int32, bitcast=True) == threshold)
            ids = tl.load(value_ids + index * most + places, equal & is_listed, 0)
            last = tl.maximum(last, tl.max(tl.where(equal, tl.where(is_listed, ids, places), -1), axis=0))
        tl.store(bounds + 2 * index, threshold)
        tl.store(bounds + 2 * index + 1, last)
        tl.store(masses + index, mass)


@triton.jit
def _keep_kernel(
    probs: tl.tensor,
    rows: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    greedy: tl.tensor,
    bounds: tl.tensor,
    masses: tl.tensor,
    stride: tl.tensor,
    vocab_size: tl.tensor,
    HAS_GREEDY: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    index = tl.program_id(0).to(tl.int64)
    row_index = tl.load(rows + index)
    if _has_cut(tl.load(top_ks + index), tl.load(top_ps + index), greedy, row_index, HAS_GREEDY):
        threshold, last = tl.load(bounds + 2 * index), tl.load(bounds + 2 * index + 1)
        share = tl.load(masses + index).to(tl.float32) * UNIT
        ids = tl.program_id(1) * TILE + tl.arange(0, TILE)
        place = probs + row_index * stride
        prob = load_probs(place, ids, vocab_size)
        bits = prob.to(tl.int32, bitcast=True)
        kept = (prob > 0) & ((bits > threshold) | ((bits == threshold) & (ids <= last)))
        tl.store(place + ids, tl.where(kept, tl.div_rn(prob, share), 0.0), ids < vocab_size)
