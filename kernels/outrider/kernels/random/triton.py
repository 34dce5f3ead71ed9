"""Philox 4x32-10 in Triton: the same integers as the reference, and the same noise from them.

A program computes a tile of counters of one row. Each counter gives the words of four token ids in a row, which are put
side by side. Noise goes through float64, where 1 - (x + 1/2) 2^-32 is exact, so that rounding to float32 gives the
reference's bits but for about one word in 2^28, where the two logarithms lie on different sides of a rounding edge."""

# mypy: allow-untyped-decorators, disable-error-code="import-untyped,import-not-found"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS_PER_PROGRAM = 64
GROUPS_PER_PROGRAM = 512  # counters, of four token ids each
PURPOSE_SHIFT = tl.constexpr(28)
DRAW_MASK = tl.constexpr((1 << 28) - 1)


def words(
    seeds: Tensor,  # [n] int64
    positions: Tensor,  # [n] int64
    purposes: Tensor | int,  # [n] int64, or one for all
    completions: Tensor,  # [n] int64
    draws: Tensor | int,  # [n] int64, or one for all
) -> Tensor:  # [n, 4] int64
    """Launches the reference's `words`."""
    num_rows = len(seeds)
    out = torch.empty(num_rows, 4, dtype=torch.int64, device=seeds.device)
    if num_rows:
        columns = [column.contiguous() for column in (seeds, positions, completions)]
        row_purposes = purposes.contiguous() if isinstance(purposes, Tensor) else seeds
        purpose = 0 if isinstance(purposes, Tensor) else int(purposes)
        row_draws = draws.contiguous() if isinstance(draws, Tensor) else seeds
        draw = 0 if isinstance(draws, Tensor) else draws
        _words_kernel[(triton.cdiv(num_rows, ROWS_PER_PROGRAM),)](
            *columns, row_purposes, row_draws, out, num_rows, purpose, draw, isinstance(purposes, Tensor),
            isinstance(draws, Tensor), ROWS_PER_PROGRAM,
        )  # fmt: skip
    return out


def vocabulary_words(
    seeds: Tensor,  # [n] int64
    positions: Tensor,  # [n] int64
    purposes: Tensor | int,  # [n] int64, or one for all
    completions: Tensor,  # [n] int64
    vocab_size: int,
    draw: int,
    groups: int = GROUPS_PER_PROGRAM,
) -> Tensor:  # [n, vocab] int64
    """Launches the reference's `vocabulary_words`."""
    out = torch.empty(len(seeds), vocab_size, dtype=torch.int64, device=seeds.device)
    return _over_vocabulary(out, seeds, positions, purposes, completions, draw, groups)


def exponential_noise(
    seeds: Tensor,  # [n] int64
    positions: Tensor,  # [n] int64
    purposes: Tensor | int,  # [n] int64, or one for all
    completions: Tensor,  # [n] int64
    vocab_size: int,
    groups: int = GROUPS_PER_PROGRAM,
) -> Tensor:  # [n, vocab] float32
    """Launches the reference's `exponential_noise`."""
    out = torch.empty(len(seeds), vocab_size, dtype=torch.float32, device=seeds.device)
    return _over_vocabulary(out, seeds, positions, purposes, completions, 0, groups)


def _over_vocabulary(
    out: Tensor,  # [n, vocab]; noise if float32, else words
    seeds: Tensor,
    positions: Tensor,
    purposes: Tensor | int,
    completions: Tensor,
    draw: int,
    groups: int,
) -> Tensor:
    num_rows, vocab_size = out.shape
    if num_rows:
        columns = [column.contiguous() for column in (seeds, positions, completions)]
        row_purposes = purposes.contiguous() if isinstance(purposes, Tensor) else seeds
        purpose = 0 if isinstance(purposes, Tensor) else int(purposes)
        _vocabulary_kernel[(num_rows, triton.cdiv(vocab_size, 4 * groups))](
            *columns, row_purposes, out, vocab_size, purpose, draw, isinstance(purposes, Tensor),
            out.dtype == torch.float32, groups,
        )  # fmt: skip
    return out


@triton.jit
def philox(c0: tl.tensor, c1: tl.tensor, c2: tl.tensor, c3: tl.tensor, k0: tl.tensor, k1: tl.tensor) -> tl.tensor:
    """Ten rounds over uint32; all six broadcast against one another."""
    for _ in tl.static_range(10):
        high_0, low_0 = tl.umulhi(c0, 0xD2511F53), c0 * 0xD2511F53
        high_1, low_1 = tl.umulhi(c2, 0xCD9E8D57), c2 * 0xCD9E8D57
        c0, c1, c2, c3 = high_1 ^ c1 ^ k0, low_1, high_0 ^ c3 ^ k1, low_0
        k0 = k0 + 0x9E3779B9
        k1 = k1 + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def row_words(
    seed: tl.tensor,  # int64, as position and completion
    position: tl.tensor,
    purpose: tl.tensor,
    completion: tl.tensor,
    first_group: tl.tensor,
    draw: tl.tensor,
    GROUPS: tl.constexpr,
) -> tl.tensor:  # [4 * GROUPS] uint32, in the order of the token ids
    """The words of the token ids from 4 * first_group on, for one row."""
    groups = (first_group + tl.arange(0, GROUPS)).to(tl.uint32)
    nought = tl.zeros([GROUPS], tl.uint32)
    purpose_and_draw = ((purpose << PURPOSE_SHIFT) + draw).to(tl.uint32)
    w0, w1, w2, w3 = philox(
        groups,
        nought + position.to(tl.uint32),
        nought + purpose_and_draw,
        nought + completion.to(tl.uint32),
        nought + seed.to(tl.uint32),
        nought + (seed >> 32).to(tl.uint32),
    )
    return tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))


@triton.jit
def noise_of(word: tl.tensor) -> tl.tensor:
    """Standard exponential noise of whole words, float32; finite and above 0."""
    survival = 1.0 - (word.to(tl.float64) + 0.5) * 2.3283064365386963e-10  # exact: 33 bits
    return (-tl.log(survival)).to(tl.float32)


@triton.jit(do_not_specialize=["num_rows", "purpose", "draw"])
def _words_kernel(
    seeds: tl.tensor,
    positions: tl.tensor,
    completions: tl.tensor,
    purposes: tl.tensor,
    draws: tl.tensor,
    out: tl.tensor,  # [n, 4]
    num_rows: tl.tensor,
    purpose: tl.tensor,
    draw: tl.tensor,
    PURPOSE_BY_ROW: tl.constexpr,
    DRAW_BY_ROW: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < num_rows
    seed = tl.load(seeds + rows, inside, 0)
    position = tl.load(positions + rows, inside, 0)
    completion = tl.load(completions + rows, inside, 0)
    row_purpose = tl.load(purposes + rows, inside, 0) if PURPOSE_BY_ROW else tl.zeros([ROWS], tl.int64) + purpose
    row_draw = tl.load(draws + rows, inside, 0) if DRAW_BY_ROW else tl.zeros([ROWS], tl.int64) + draw
    w0, w1, w2, w3 = philox(
        (row_draw >> PURPOSE_SHIFT).to(tl.uint32),
        position.to(tl.uint32),
        ((row_purpose << PURPOSE_SHIFT) + (row_draw & DRAW_MASK)).to(tl.uint32),
        completion.to(tl.uint32),
        seed.to(tl.uint32),
        (seed >> 32).to(tl.uint32),
    )
    tl.store(out + 4 * rows, w0.to(tl.int64), inside)
    tl.store(out + 4 * rows + 1, w1.to(tl.int64), inside)
    tl.store(out + 4 * rows + 2, w2.to(tl.int64), inside)
    tl.store(out + 4 * rows + 3, w3.to(tl.int64), inside)


@triton.jit(do_not_specialize=["purpose", "draw"])
def _vocabulary_kernel(
    seeds: tl.tensor,
    positions: tl.tensor,
    completions: tl.tensor,
    purposes: tl.tensor,
    out: tl.tensor,  # [n, vocab]
    vocab_size: tl.tensor,
    purpose: tl.tensor,
    draw: tl.tensor,
    BY_ROW: tl.constexpr,
    NOISE: tl.constexpr,
    GROUPS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    first_group = tl.program_id(1) * GROUPS
    seed, position, completion = tl.load(seeds + row), tl.load(positions + row), tl.load(completions + row)
    row_purpose = tl.load(purposes + row) if BY_ROW else tl.zeros_like(seed) + purpose
    word = row_words(seed, position, row_purpose, completion, first_group, draw, GROUPS)
    ids = 4 * first_group + tl.arange(0, 4 * GROUPS)
    value = noise_of(word) if NOISE else word.to(tl.int64)
    tl.store(out + row * vocab_size + ids, value, ids < vocab_size)
