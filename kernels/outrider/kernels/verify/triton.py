"""Rejection acceptance in Triton, for a whole ragged batch in a few launches: judge, leave, restore, draw.

* **judge**, a program per drafted token: adds up its weights, finds what makes a vector unusable, and tests
  `uniform * draft_weight < target_prob * total_weight` in float64, where both products are exact.
* **block**, a program per drafted token, where windows are judged by blocks: finds its block, with which probability
  the tokens of it up to this one hold, and tests this one's coin.
* **leave**, a program per tile of a window: counts the tokens that stay and writes the weights of the next draw: what
  the draft left of the target's law in the row where it was refused, or the law itself of the row after a whole window.
* **restore**, a program per tile of a window: the target's own law, where nothing is left of it.
* **draw**, a program per tile that adds it up, and one per row of weights that finds the tile and in it the first id
  whose sum is above the point. float64 sums depend on their order in the last bits, so an id can differ from the
  reference's where the point lies within that rounding (about 1e-16 of the total) of its edge; an id of weight 0 never
  wins.

Coupled acceptance in Triton: the exponential race over the vocabulary, and the walk along a chain or down a tree.

The race has two stages. A program finds the least noise / probability in one tile of one row, with the noise computed
from its counters on the spot (or read, if it was drawn before); a second launch takes the least of a row's tiles. Both
take the first of equal values, so that ties go to the lowest id. Division rounds to nearest, as the reference's does.

The walk is one program per window: parents precede children, so one scan in order finds the path."""

# mypy: allow-untyped-decorators, disable-error-code="import-untyped,import-not-found"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.random.triton import noise_of, row_words
from outrider.kernels.types import DraftWeights, PackedEntries, Windows

TILE = 2048
ENTRY_TILE = 128
MAX_TOTAL_WEIGHT = tl.constexpr(1 << 24)


def accept(
    target_probs: Tensor,  # [rows, vocab] float32
    windows: Windows,  # one without rows is padding
    draft_ids: Tensor,  # [drafted] int64
    draft_weights: DraftWeights | PackedEntries,
    uniforms: Tensor,  # [drafted] float64
    by_block: Tensor | None = None,  # [n] bool
    invalid: Tensor | None = None,  # [rows] bool
    tile: int = TILE,
    entry_tile: int = ENTRY_TILE,
) -> tuple[Tensor, Tensor]:  # [n] int64, [n, vocab] float64
    """Launches the reference's `accept`; of packed entries the sizes of tensors alone tell what is launched. Padding
    accepts nothing."""
    num_drafted, num_windows, vocab_size = len(draft_ids), len(windows.num_rows), target_probs.shape[1]
    entries = draft_weights if isinstance(draft_weights, PackedEntries) else draft_weights.packed(num_drafted)
    draft_ids, uniforms = draft_ids.contiguous(), uniforms.contiguous()
    device, starts = target_probs.device, entries.starts
    accepted = torch.empty(num_drafted, dtype=torch.int32, device=device)
    totals = torch.empty(num_drafted, dtype=torch.int64, device=device)
    masses, weights, reached = torch.empty(3, num_drafted, dtype=torch.float64, device=device)
    if num_drafted:
        _accept_kernel[(num_drafted,)](
            target_probs, windows.row_of_draft, draft_ids, uniforms, entries.ids, entries.weights, starts, accepted,
            totals, masses, weights, target_probs.stride(0), vocab_size, entry_tile, enable_fp_fusion=False,
        )  # fmt: skip
    if num_drafted and by_block is not None:
        _block_kernel[(num_drafted,)](
            target_probs, windows.row_of_draft, windows.window_of_draft, windows.offset_of_draft, windows.num_drafted,
            by_block, invalid, uniforms, entries.ids, entries.weights, starts, totals, masses, weights, accepted,
            reached, target_probs.stride(0), entry_tile, enable_fp_fusion=False,
        )  # fmt: skip
    num_accepted = torch.empty(num_windows, dtype=torch.int64, device=device)
    next_weights = torch.empty(num_windows, vocab_size, dtype=torch.float64, device=device)
    if num_windows:
        grid = num_windows, triton.cdiv(vocab_size, tile)
        sums = torch.empty(grid, dtype=torch.float64, device=device)
        _leave_kernel[grid](
            target_probs, windows.row_starts, windows.num_rows, windows.draft_starts, windows.num_drafted, draft_ids,
            entries.ids, entries.weights, starts, accepted, totals, reached, num_accepted, next_weights, sums,
            target_probs.stride(0), vocab_size, grid[1], by_block is not None, tile, entry_tile, num_warps=8,
            enable_fp_fusion=False,
        )  # fmt: skip
        _restore_kernel[grid](
            target_probs, windows.row_starts, windows.num_rows, windows.num_drafted, num_accepted, sums, next_weights,
            target_probs.stride(0), vocab_size, grid[1], tile, triton.next_power_of_2(grid[1]), num_warps=8,
        )  # fmt: skip
    return num_accepted, next_weights


def draw(
    weights: Tensor,  # [n, vocab] float64
    words: Tensor,  # [n, 4] int64
    tile: int = TILE,
) -> Tensor:  # [n] int64
    """Launches the reference's `draw`."""
    num_rows, vocab_size = weights.shape
    ids = torch.empty(num_rows, dtype=torch.int64, device=weights.device)
    if num_rows:
        grid = num_rows, triton.cdiv(vocab_size, tile)
        sums = torch.empty(grid, dtype=torch.float64, device=weights.device)
        _sum_kernel[grid](weights, sums, weights.stride(0), vocab_size, grid[1], tile, num_warps=8)
        _draw_kernel[(num_rows,)](
            weights, words, sums, ids, weights.stride(0), words.stride(0), vocab_size, grid[1], tile,
            triton.next_power_of_2(grid[1]), num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip
    return ids


@triton.jit
def _accept_kernel(
    probs: tl.tensor,
    row_of_draft: tl.tensor,
    draft_ids: tl.tensor,
    uniforms: tl.tensor,
    entry_ids: tl.tensor,
    entry_weights: tl.tensor,
    starts: tl.tensor,
    accepted: tl.tensor,
    totals: tl.tensor,  # 0: one-hot
    masses: tl.tensor,  # of the target's law at the drafted ids, times the totals
    drafted_weights: tl.tensor,
    stride: tl.tensor,
    vocab_size: tl.tensor,
    ENTRY_TILE: tl.constexpr,
) -> None:
    draft = tl.program_id(0)
    first, end = tl.load(starts + draft), tl.load(starts + draft + 1)
    token = tl.load(draft_ids + draft)
    total, drafted = tl.zeros([ENTRY_TILE], tl.int64), tl.zeros([ENTRY_TILE], tl.int64)
    bad, unordered = tl.zeros([ENTRY_TILE], tl.int32), tl.zeros([ENTRY_TILE], tl.int32)
    for start in range(first, end, ENTRY_TILE):
        places = start + tl.arange(0, ENTRY_TILE)
        inside = places < end
        ids, weights = tl.load(entry_ids + places, inside, 0), tl.load(entry_weights + places, inside, 0)
        bad |= (inside & ((ids < 0) | (ids >= vocab_size) | (weights <= 0))).to(tl.int32)
        weights = tl.minimum(tl.maximum(weights, 0), MAX_TOTAL_WEIGHT)  # so that no sum overflows
        total += weights
        drafted += tl.where(inside & (ids == token), weights, 0)
        previous = tl.load(entry_ids + places - 1, inside & (places > first), -1)
        unordered |= (inside & (ids <= previous)).to(tl.int32)
    num_bad = tl.max(bad, axis=0)
    if (tl.max(unordered, axis=0) != 0) & (num_bad == 0):  # our own drafts send their ids in order
        num_bad = _has_duplicate(entry_ids, first, end, ENTRY_TILE)
    total_weight, drafted_weight = tl.sum(total, axis=0), tl.sum(drafted, axis=0)
    usable = (num_bad == 0) & (drafted_weight > 0) & (total_weight < MAX_TOTAL_WEIGHT)
    tl.store(totals + draft, tl.where(usable, total_weight, 0))
    known = (token >= 0) & (token < vocab_size)
    prob = tl.load(probs + tl.load(row_of_draft + draft) * stride + token, known, 0.0).to(tl.float64)
    weight = tl.where(usable, drafted_weight, 1).to(tl.float64)
    mass = prob * tl.where(usable, total_weight, 1).to(tl.float64)
    tl.store(accepted + draft, (tl.load(uniforms + draft) * weight < mass).to(tl.int32))
    tl.store(masses + draft, mass)
    tl.store(drafted_weights + draft, weight)


@triton.jit
def _has_duplicate(entry_ids: tl.tensor, first: tl.tensor, end: tl.tensor, ENTRY_TILE: tl.constexpr) -> tl.tensor:
    """1 if two entries name the same id, int32; every pair is compared: the wire bounds their number."""
    found = tl.zeros([ENTRY_TILE, ENTRY_TILE], tl.int32)
    for start in range(first, end, ENTRY_TILE):
        places = start + tl.arange(0, ENTRY_TILE)
        ids = tl.load(entry_ids + places, places < end, -1)
        for other_start in range(first, start + 1, ENTRY_TILE):
            others = other_start + tl.arange(0, ENTRY_TILE)
            other_ids = tl.load(entry_ids + others, others < end, -2)
            pairs = (ids[:, None] == other_ids[None, :]) & (others[None, :] < places[:, None])
            found |= pairs.to(tl.int32)
    return tl.max(tl.max(found, axis=1), axis=0)


HOLDS, ENDS = tl.constexpr(1), tl.constexpr(2)  # of a drafted token under blocks: its coin, and whether its block ends


@triton.jit
def _block_kernel(
    probs: tl.tensor,
    row_of_draft: tl.tensor,
    window_of_draft: tl.tensor,
    offset_of_draft: tl.tensor,
    draft_counts: tl.tensor,
    by_block: tl.tensor,
    invalid: tl.tensor | None,  # rows: a token that such a one judges is a block of its own
    uniforms: tl.tensor,
    entry_ids: tl.tensor,
    entry_weights: tl.tensor,
    starts: tl.tensor,
    totals: tl.tensor,
    masses: tl.tensor,
    drafted_weights: tl.tensor,
    accepted: tl.tensor,  # HOLDS and ENDS
    reached: tl.tensor,  # with which probability the tokens of its block before each hold
    stride: tl.tensor,
    ENTRY_TILE: tl.constexpr,
) -> None:
    draft = tl.program_id(0)
    window, offset = tl.load(window_of_draft + draft), tl.load(offset_of_draft + draft)
    has_blocks, last = tl.load(by_block + window), tl.load(draft_counts + window) - 1
    before, after = tl.full([], 1.0, tl.float64), tl.full([], 1.0, tl.float64)
    ends = offset == last
    index = tl.zeros_like(offset)
    while index <= offset:
        at = draft - offset + index
        ends = (index >= last) | (has_blocks == 0) | (tl.load(totals + at) == 0)
        ends = ends | (tl.load(totals + at + 1, index < last, 0) == 0)
        if invalid is not None:
            ends = ends | (tl.load(invalid + tl.load(row_of_draft + at)) != 0)
            ends = ends | (tl.load(invalid + tl.load(row_of_draft + at + 1, index < last, 0), index < last, 0) != 0)
        before = after
        after = before * (tl.load(masses + at) / tl.load(drafted_weights + at))
        after = tl.where(ends | (after > 1), 1.0, after)  # NaN stays
        index += 1
    holds = tl.load(uniforms + draft) * tl.load(drafted_weights + draft) < before * tl.load(masses + draft)
    if not ends:
        following = draft + 1
        total = tl.load(totals + following).to(tl.float64)
        row = probs + tl.load(row_of_draft + following) * stride
        shares = tl.zeros([ENTRY_TILE], tl.float64)
        end = tl.load(starts + following + 1)
        for start in range(tl.load(starts + following), end, ENTRY_TILE):
            places = start + tl.arange(0, ENTRY_TILE)
            inside = places < end
            prob = tl.load(row + tl.load(entry_ids + places, inside, 0), inside, 0.0).to(tl.float64)
            weight = tl.load(entry_weights + places, inside, 0).to(tl.float64)
            mass = prob * (after * total)
            shares += tl.where(mass < weight, mass, weight)
        surplus = after - tl.sum(shares, axis=0) / total
        surplus = tl.where(surplus < 0, 0.0, surplus)
        holds = (after >= 1) | (tl.load(uniforms + draft) * (surplus + 1 - after) < surplus)
    tl.store(reached + draft, before)
    tl.store(accepted + draft, tl.where(holds, HOLDS, 0) + tl.where(ends, ENDS, 0))


@triton.jit
def _leave_kernel(
    probs: tl.tensor,
    row_starts: tl.tensor,
    row_counts: tl.tensor,
    draft_starts: tl.tensor,
    draft_counts: tl.tensor,
    draft_ids: tl.tensor,
    entry_ids: tl.tensor,
    entry_weights: tl.tensor,
    starts: tl.tensor,
    accepted: tl.tensor,
    totals: tl.tensor,
    reached: tl.tensor,
    num_accepted: tl.tensor,
    next_weights: tl.tensor,
    sums: tl.tensor,  # [n, tiles]: of what is left of each tile
    stride: tl.tensor,
    vocab_size: tl.tensor,
    num_tiles: tl.tensor,
    BY_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    ENTRY_TILE: tl.constexpr,
) -> None:
    window, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_rows, num_drafted = tl.load(row_counts + window), tl.load(draft_counts + window)
    first_draft = tl.load(draft_starts + window)
    count = tl.zeros_like(num_drafted)
    index = tl.zeros_like(num_drafted)
    if BY_BLOCK:
        goes_on = num_drafted > 0
        while index < num_drafted:
            said = tl.load(accepted + first_draft + index)
            count = tl.where(goes_on & ((said & HOLDS) != 0), index + 1, count)
            goes_on = goes_on & (said != ENDS)  # a block that does not hold whole
            index += 1
    else:
        while index < num_drafted:
            count += tl.where(count == index, tl.load(accepted + first_draft + index), 0)  # the leading run alone
            index += 1
    if tile == 0:
        tl.store(num_accepted + window, count)
    is_refused = count < num_drafted
    refused = first_draft + count
    total = tl.load(totals + refused, is_refused, 0)
    removed = tl.load(draft_ids + refused, is_refused & (total == 0), -1)  # a one-hot draft's id is left no weight
    has_next = count < num_rows
    row = probs + (tl.load(row_starts + window) + tl.minimum(count, num_rows - 1)) * stride
    out = next_weights + window * vocab_size
    scale = tl.where(has_next, tl.maximum(total, 1), 0)  # 0: no weight anywhere, whatever the row holds
    share = tl.load(reached + refused, is_refused, 1.0) if BY_BLOCK else tl.full([], 1.0, tl.float64)
    ids = tile * TILE + tl.arange(0, TILE)
    inside = (ids < vocab_size) & (scale > 0) & (ids != removed)
    weight = tl.load(row + ids, inside, 0.0).to(tl.float64) * (scale.to(tl.float64) * share)
    tl.store(out + ids, weight, ids < vocab_size)
    if total > 0:
        tl.debug_barrier()  # what follows reads what other threads wrote
        for start in range(tl.load(starts + refused), tl.load(starts + refused + 1), ENTRY_TILE):
            places = start + tl.arange(0, ENTRY_TILE)
            given = places < tl.load(starts + refused + 1)
            token = tl.load(entry_ids + places, given, -1)
            given = given & (token >= tile * TILE) & (token < (tile + 1) * TILE)
            left = tl.load(out + token, given, 0.0) - tl.load(entry_weights + places, given, 0).to(tl.float64)
            tl.store(out + token, tl.where(left < 0, 0.0, left), given)
        tl.debug_barrier()
        weight = tl.load(out + ids, ids < vocab_size, 0.0)
    tl.store(sums + window * num_tiles + tile, tl.sum(weight, axis=0))


@triton.jit
def _restore_kernel(
    probs: tl.tensor,
    row_starts: tl.tensor,
    row_counts: tl.tensor,
    draft_counts: tl.tensor,
    num_accepted: tl.tensor,
    sums: tl.tensor,  # [n, tiles]
    next_weights: tl.tensor,
    stride: tl.tensor,
    vocab_size: tl.tensor,
    num_tiles: tl.tensor,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
) -> None:
    window, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    count, tiles = tl.load(num_accepted + window), tl.arange(0, TILES)
    left = tl.sum(tl.load(sums + window * num_tiles + tiles, tiles < num_tiles, 0.0), axis=0)
    if (count < tl.load(draft_counts + window)) & (left == 0):  # nothing is left: the target's own law holds
        row = tl.load(row_starts + window) + tl.minimum(count, tl.load(row_counts + window) - 1)
        ids = tile * TILE + tl.arange(0, TILE)
        prob = tl.load(probs + row * stride + ids, ids < vocab_size, 0.0)
        tl.store(next_weights + window * vocab_size + ids, prob.to(tl.float64), ids < vocab_size)


@triton.jit
def _sum_kernel(
    weights: tl.tensor,
    sums: tl.tensor,  # [n, tiles]
    stride: tl.tensor,
    vocab_size: tl.tensor,
    num_tiles: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    index, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = tile * TILE + tl.arange(0, TILE)
    weight = tl.load(weights + index * stride + ids, ids < vocab_size, 0.0)
    tl.store(sums + index * num_tiles + tile, tl.sum(weight, axis=0))


@triton.jit
def _draw_kernel(
    weights: tl.tensor,
    words: tl.tensor,
    sums: tl.tensor,  # [n, tiles]
    drawn: tl.tensor,
    stride: tl.tensor,
    words_stride: tl.tensor,
    vocab_size: tl.tensor,
    num_tiles: tl.tensor,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
) -> None:
    index, tiles = tl.program_id(0).to(tl.int64), tl.arange(0, TILES)
    of_tiles = tl.load(sums + index * num_tiles + tiles, tiles < num_tiles, 0.0)
    reached = tl.cumsum(of_tiles, axis=0)
    high, low = tl.load(words + index * words_stride), tl.load(words + index * words_stride + 1)
    fraction = ((high << 21) | (low >> 11)).to(tl.float64) * 1.1102230246251565e-16
    total = tl.sum(tl.where(tiles == TILES - 1, reached, 0.0), axis=0)  # NaN if a weight is
    point = fraction * total
    last = tl.max(tl.where(of_tiles > 0, tiles, -1), axis=0)  # where sums round below the point
    tile = tl.minimum(tl.min(tl.where((of_tiles > 0) & (reached > point), tiles, TILES), axis=0), last)
    found = tl.full([], -1, tl.int32)
    if total > 0:
        passed = tl.sum(tl.where(tiles == tile - 1, reached, 0.0), axis=0)
        ids = tile * TILE + tl.arange(0, TILE)
        weight = tl.load(weights + index * stride + ids, ids < vocab_size, 0.0)
        above = (weight > 0) & (passed + tl.cumsum(weight, axis=0) > point)
        first = tl.min(tl.where(above, ids, vocab_size), axis=0)
        found = tl.minimum(first, tl.max(tl.where(weight > 0, ids, -1), axis=0))
    tl.store(drawn + index, found.to(tl.int64))


GROUPS_PER_PROGRAM = 256  # counters, of four token ids each


def coupled_choice(
    probs: Tensor,  # [rows, vocab] float32
    noise: Tensor,  # [rows, vocab] float32
    groups: int = GROUPS_PER_PROGRAM,
) -> Tensor:  # [rows] int64
    """Launches the reference's `coupled_choice`."""
    return _choose(probs, noise, probs, probs, probs, 0, True, groups)


def coupled_draw(
    probs: Tensor,  # [rows, vocab] float32
    seeds: Tensor,  # [rows] int64
    positions: Tensor,  # [rows] int64
    completions: Tensor,  # [rows] int64
    purpose: int,
    groups: int = GROUPS_PER_PROGRAM,
) -> Tensor:  # [rows] int64
    """Launches the reference's `coupled_draw`: no noise is ever stored."""
    columns = (seeds.contiguous(), positions.contiguous(), completions.contiguous())
    return _choose(probs, probs, *columns, int(purpose), False, groups)


def _choose(
    probs: Tensor,
    noise: Tensor,
    seeds: Tensor,
    positions: Tensor,
    completions: Tensor,
    purpose: int,
    has_noise: bool,
    groups: int,
) -> Tensor:
    num_rows, vocab_size = probs.shape
    choices = torch.empty(num_rows, dtype=torch.int64, device=probs.device)
    if num_rows == 0:
        return choices
    num_tiles = triton.cdiv(vocab_size, 4 * groups)
    least = torch.empty(num_rows, num_tiles, dtype=torch.float32, device=probs.device)
    ids = torch.empty(num_rows, num_tiles, dtype=torch.int32, device=probs.device)
    _race_kernel[(num_rows, num_tiles)](
        probs, noise, seeds, positions, completions, least, ids, probs.stride(0), noise.stride(0), vocab_size,
        purpose, has_noise, groups,
    )  # fmt: skip
    _settle_kernel[(num_rows,)](least, ids, choices, num_tiles, triton.next_power_of_2(num_tiles))
    return choices


def coupled_accept(
    choices: Tensor,  # [rows] int64
    windows: Windows,
    draft_ids: Tensor,  # [drafted] int64
    parents: Tensor | None = None,  # [drafted] int64; None: chains
) -> tuple[Tensor, Tensor, Tensor]:
    """Launches the reference's `coupled_accept`, or with parents `coupled_accept_tree`. Returns the numbers accepted
    [n] and the next ids [n], both int64, and which drafted tokens are on the path, [drafted] bool."""
    num_accepted = torch.empty_like(windows.num_drafted)
    next_ids = torch.empty_like(windows.num_drafted)
    on_path = torch.zeros(len(draft_ids), dtype=torch.bool, device=choices.device)
    if len(num_accepted):
        _walk_kernel[(len(num_accepted),)](
            choices.contiguous(), windows.row_starts, windows.num_rows, windows.draft_starts, windows.num_drafted,
            draft_ids.contiguous(), draft_ids if parents is None else parents.contiguous(), num_accepted, next_ids,
            on_path, parents is not None,
        )  # fmt: skip
    return num_accepted, next_ids, on_path


@triton.jit(do_not_specialize=["purpose"])
def _race_kernel(
    probs: tl.tensor,
    noise: tl.tensor,
    seeds: tl.tensor,
    positions: tl.tensor,
    completions: tl.tensor,
    least: tl.tensor,  # [rows, tiles]
    least_ids: tl.tensor,  # [rows, tiles]
    probs_stride: tl.tensor,
    noise_stride: tl.tensor,
    vocab_size: tl.tensor,
    purpose: tl.tensor,
    HAS_NOISE: tl.constexpr,
    GROUPS: tl.constexpr,
) -> None:
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = tile * 4 * GROUPS + tl.arange(0, 4 * GROUPS)
    inside = ids < vocab_size
    prob = tl.load(probs + row * probs_stride + ids, inside, 0.0)
    if HAS_NOISE:
        race = tl.load(noise + row * noise_stride + ids, inside, 1.0)
    else:
        seed, position, completion = tl.load(seeds + row), tl.load(positions + row), tl.load(completions + row)
        row_purpose = tl.zeros_like(seed) + purpose
        race = noise_of(row_words(seed, position, row_purpose, completion, tile * GROUPS, 0, GROUPS))
    ratio = tl.div_rn(race, tl.where(prob > 0, prob, 1.0))
    ratio = tl.where(prob > 0, ratio, float("inf"))
    ratio = tl.where(prob == prob, ratio, float("-inf"))  # a NaN wins, and is no token
    out = row * tl.num_programs(1) + tile
    tl.store(least + out, tl.min(ratio, axis=0))
    tl.store(least_ids + out, tile * 4 * GROUPS + tl.argmin(ratio, axis=0, tie_break_left=True))


@triton.jit
def _settle_kernel(
    least: tl.tensor,  # [rows, tiles]
    least_ids: tl.tensor,  # [rows, tiles]
    choices: tl.tensor,  # [rows]
    num_tiles: tl.tensor,
    TILES: tl.constexpr,  # num_tiles, rounded up to a power of two
) -> None:
    row = tl.program_id(0).to(tl.int64)
    tiles = tl.arange(0, TILES)
    ratio = tl.load(least + row * num_tiles + tiles, tiles < num_tiles, float("inf"))
    best = tl.min(ratio, axis=0)
    winner = tl.load(least_ids + row * num_tiles + tl.argmin(ratio, axis=0, tie_break_left=True)).to(tl.int64)
    is_token = (best < float("inf")) & (best > float("-inf"))
    tl.store(choices + row, tl.where(is_token, winner, -1))


@triton.jit
def _walk_kernel(
    choices: tl.tensor,
    row_starts: tl.tensor,
    num_rows: tl.tensor,
    draft_starts: tl.tensor,
    num_drafted: tl.tensor,
    draft_ids: tl.tensor,
    parents: tl.tensor,
    num_accepted: tl.tensor,
    next_ids: tl.tensor,
    on_path: tl.tensor,
    IS_TREE: tl.constexpr,
) -> None:
    window = tl.program_id(0)
    first_row, rows = tl.load(row_starts + window), tl.load(num_rows + window)
    first_draft, drafted = tl.load(draft_starts + window), tl.load(num_drafted + window)
    node = tl.zeros_like(drafted)  # the last accepted one, plus one; 0 is the root
    accepted = tl.zeros_like(drafted)
    choice = tl.load(choices + first_row)
    index = tl.zeros_like(drafted)
    while index < drafted:
        parent = tl.load(parents + first_draft + index) if IS_TREE else index
        if (parent == node) & (node < rows) & (tl.load(draft_ids + first_draft + index) == choice):
            node = index + 1
            accepted += 1
            tl.store(on_path + first_draft + index, True)
            choice = tl.load(choices + first_row + tl.minimum(node, rows - 1))
        index += 1
    tl.store(num_accepted + window, accepted)
    tl.store(next_ids + window, tl.where(node < rows, choice, -1))
