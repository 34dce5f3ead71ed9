"""Coupled acceptance in Triton: the exponential race over the vocabulary, and the walk along a chain or down a tree.

The race has two stages. A program finds the least noise / probability in one tile of one row, with the noise computed
from its counters on the spot (or read, if it was drawn before); a second launch takes the least of a row's tiles. Both
take the first of equal values, so that ties go to the lowest id. Division rounds to nearest, as the reference's does.

The walk is one program per window: parents precede children, so one scan in order finds the path.
"""

# mypy: allow-untyped-decorators, disable-error-code="import-untyped,import-not-found"

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.philox_triton import noise_of, row_words

if TYPE_CHECKING:
    from outrider.kernels.rejection import Windows

GROUPS_PER_PROGRAM = 256  # counters, of four token ids each


def coupled_choice(
    probs: Tensor,  # [rows, vocab] float32
    noise: Tensor,  # [rows, vocab] float32
    groups: int = GROUPS_PER_PROGRAM,
) -> Tensor:  # [rows] int64
    """Launches `coupled.coupled_choice`."""
    return _choose(probs, noise, probs, probs, probs, 0, True, groups)


def coupled_draw(
    probs: Tensor,  # [rows, vocab] float32
    seeds: Tensor,  # [rows] int64
    positions: Tensor,  # [rows] int64
    completions: Tensor,  # [rows] int64
    purpose: int,
    groups: int = GROUPS_PER_PROGRAM,
) -> Tensor:  # [rows] int64
    """Launches `coupled.coupled_draw`: no noise is ever stored."""
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
    """Launches `coupled.coupled_accept`, or with parents `coupled.coupled_accept_tree`. Returns the numbers accepted
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
