"""Counter-based randomness: Philox 4x32-10.

Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011; the library Random123. A random word is a pure
function of (seed, completion, position, purpose, draw, token id). Nothing is consumed, so retries, batching and
speculation do not shift what a request draws, and words may be computed ahead of the logits they meet.

    key      (seed's low word, seed's high word)
    counter  (token_id >> 2, position, purpose << 28 | draw, completion); token_id & 3 picks one of the four words

Where no token id is in it, what a draw index has above its 28 bits stands in the place of the id."""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import c_int64, c_void_p
from enum import IntEnum
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.kernels import dispatch
from outrider.kernels.cpu.library import cpu_library

Array = TypeVar(
    "Array", Tensor, NDArray[np.int64]
)  # numpy's calls are the cheaper ones on a CPU; the arithmetic is the same

NUM_ROUNDS = 10
WORD_MASK = 0xFFFFFFFF
# A product of two 32-bit words overflows int64, so we multiply by (multiplier - 2^32), which keeps the low word and
# makes the high word too small by exactly the other factor.
WRAPPED_MULTIPLIER_0 = 0xD2511F53 - (1 << 32)
WRAPPED_MULTIPLIER_1 = 0xCD9E8D57 - (1 << 32)
KEY_STEP_0 = 0x9E3779B9
KEY_STEP_1 = 0xBB67AE85
PURPOSE_SHIFT = 28
COUNTERS_PER_BLOCK = 8192  # what stays in a processor's second-level cache


class Purpose(IntEnum):
    """What a draw decides. Two purposes share no counter."""

    DRAFT = 0
    ACCEPT = 1
    RECOVERED = 2
    BONUS = 3


def as_int64(seed: int) -> int:
    """The signed value of an unsigned 64-bit seed's bits, which is how tensors hold it."""
    seed &= (1 << 64) - 1
    return seed - (1 << 64) if seed >> 63 else seed


def philox_rounds(
    counter: tuple[Array, Array, Array, Array], key: tuple[Array, Array]
) -> tuple[Array, Array, Array, Array]:
    """Ten rounds over int64 arrays that hold 32-bit words; all six broadcast against one another."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(NUM_ROUNDS):
        product_0 = c0 * WRAPPED_MULTIPLIER_0
        product_1 = c2 * WRAPPED_MULTIPLIER_1
        high_0 = (product_0 >> 32) + c0
        high_1 = (product_1 >> 32) + c2
        c0, c1, c2, c3 = high_1 ^ (c1 ^ k0), product_1 & WORD_MASK, high_0 ^ (c3 ^ k1), product_0 & WORD_MASK
        k0 = (k0 + KEY_STEP_0) & WORD_MASK
        k1 = (k1 + KEY_STEP_1) & WORD_MASK
    return c0, c1, c2, c3


def words(
    seeds: Tensor,  # [n] int64, the bits of the 64-bit seeds
    positions: Tensor,  # [n] int64, absolute position of the token that is decided
    purpose: Purpose | Tensor,  # one for all, or [n] int64
    completions: Tensor,  # [n] int64
    draws: Tensor | int = 0,  # one for all, or [n] int64, each below 2^60: tells apart decisions of one position
) -> Tensor:  # [n, 4] int64, each below 2^32
    """Four words per position, for decisions that take a number rather than noise over a vocabulary."""
    if isinstance(draws, int):
        _check_draw(draws, 2 * PURPOSE_SHIFT + 4)
    if dispatch.runs_triton(seeds):
        from outrider.kernels.random import triton as philox_triton

        return philox_triton.words(seeds, positions, purpose, completions, draws)
    draws = draws if isinstance(draws, Tensor) else torch.full_like(seeds, draws)
    low = draws & ((1 << PURPOSE_SHIFT) - 1)
    groups = (draws >> PURPOSE_SHIFT)[:, None]  # [n, 1]
    return _grouped_words(groups, seeds, positions, purpose, completions, low)[:, 0]


def vocabulary_words(
    seeds: Tensor,  # [n] int64
    positions: Tensor,  # [n] int64
    purpose: Purpose | Tensor,  # one for all, or [n] int64
    completions: Tensor,  # [n] int64
    vocab_size: int,
    draw: int = 0,
) -> Tensor:  # [n, vocab] int64, each below 2^32
    """One word per token id and position."""
    _check_draw(draw, PURPOSE_SHIFT)
    if dispatch.runs_triton(seeds):
        from outrider.kernels.random import triton as philox_triton

        return philox_triton.vocabulary_words(seeds, positions, purpose, completions, vocab_size, draw)
    groups = torch.arange(-(-vocab_size // 4), device=seeds.device)[None]  # [1, groups]
    return _grouped_words(groups, seeds, positions, purpose, completions, draw).flatten(1)[:, :vocab_size]


def exponential_noise(
    seeds: Tensor,  # [n] int64
    positions: Tensor,  # [n] int64
    completions: Tensor,  # [n] int64
    vocab_size: int,
    purpose: Purpose = Purpose.BONUS,
) -> Tensor:  # [n, vocab] float32, finite and above 0
    """Standard exponential noise for each token id: -log1p(-(x + 1/2) 2^-32) of the id's whole 32-bit word x.

    float64 holds 1 - (x + 1/2) 2^-32 exactly, so that one expression is right for every x; a float32 implementation
    needs -log((~x + 1/2) 2^-32) from x = 2^31 on, where the argument would round to 1. The C kernel's logarithm is its
    own: it and PyTorch's differ in about one word of 2^28, where they lie on different sides of a rounding edge.
    """
    if dispatch.runs_triton(seeds):
        from outrider.kernels.random import triton as philox_triton

        return philox_triton.exponential_noise(seeds, positions, purpose, completions, vocab_size)
    num_rows = len(seeds)
    noise = torch.empty(num_rows, vocab_size, dtype=torch.float32, device=seeds.device)
    library = cpu_library() if seeds.device.type == "cpu" else None
    if library is not None:
        columns = [column.contiguous() for column in (seeds, positions, completions)]  # [n] each
        library.exponential_noise(
            *(c_void_p(column.data_ptr()) for column in columns), c_int64(int(purpose)), c_int64(num_rows),
            c_int64(vocab_size), c_void_p(noise.data_ptr()),
        )  # fmt: skip
        return noise
    for start, groups in _group_blocks(vocab_size, num_rows, seeds.device):
        block = _grouped_words(groups, seeds, positions, purpose, completions, 0).flatten(1).double()
        block = block.add_(0.5).mul_(-(2.0**-32)).log1p_().neg_()  # [n, 4 * groups in the block] float64
        noise[:, start : start + block.shape[1]] = block[:, : vocab_size - start]
    return noise


def _group_blocks(vocab_size: int, num_rows: int, device: torch.device) -> Iterator[tuple[int, Tensor]]:
    """Cuts the vocabulary into blocks: the first token id, and the counters [1, groups] of four ids each."""
    num_groups = -(-vocab_size // 4)
    step = max(COUNTERS_PER_BLOCK // max(num_rows, 1), 1024) if device.type == "cpu" else num_groups
    for start in range(0, num_groups, step):
        yield 4 * start, torch.arange(start, min(start + step, num_groups), device=device)[None]


def _grouped_words(
    groups: Tensor,  # [n or 1, groups] int64: token id >> 2
    seeds: Tensor,  # [n] int64
    positions: Tensor,  # [n] int64
    purpose: Purpose | Tensor,
    completions: Tensor,  # [n] int64
    draw: Tensor | int,  # one for all, or [n] int64
) -> Tensor:  # [n, groups, 4] int64
    purposes = purpose if isinstance(purpose, Tensor) else torch.full_like(seeds, int(purpose))
    columns = torch.stack((positions, (purposes << PURPOSE_SHIFT) + draw, completions, seeds, seeds >> 32))
    columns = (columns & WORD_MASK).unsqueeze(-1)  # [5, n, 1]
    if groups.device.type == "cpu":
        return torch.from_numpy(_interleave_numpy(_run(groups.numpy(), columns.numpy())))
    return torch.stack(_run(groups, columns), dim=-1)


def _check_draw(draw: int, num_bits: int) -> None:
    if not 0 <= draw < 1 << num_bits:
        raise ValueError(f"draw index {draw} does not fit into the counter's {num_bits} bits")


def _run(groups: Array, columns: Array) -> tuple[Array, Array, Array, Array]:
    position, purpose, completion, key_low, key_high = columns
    return philox_rounds((groups, position, purpose, completion), (key_low, key_high))


def _interleave_numpy(lanes: tuple[NDArray[np.int64], ...]) -> NDArray[Any]:
    return np.stack(lanes, axis=-1)
