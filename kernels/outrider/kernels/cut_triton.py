"""The cut of top_k and top_p without a sort, for the kernels that truncate a row of probabilities.

Bits of non-negative floats are ordered as the floats are, so the cut is a search for an integer: the greatest threshold
t at which the values of at least t are k in number (top_k), or hold the wanted mass (top_p). The search quarters its
range with each pass over the row, until the values left in the range fit one tile of registers (with a usual row after
four or five passes, the row in cache); these are collected, and the rest of the search reads no memory. Of the values
equal to t only the lowest ids are kept, as many as are wanted.

Masses are sums of integers, in units of 2^-61, so a sum does not depend on its order and the cut is a function of the
values alone. A probability of at least 2^-37 is a whole number of units; what smaller ones lose is less than the
rounding of a sum in float64. Rows must sum to about 1 (below 2), which probabilities do.
"""

# mypy: allow-untyped-decorators, disable-error-code="import-untyped,import-not-found"

from __future__ import annotations

import triton
import triton.language as tl

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
