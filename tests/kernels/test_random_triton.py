"""Philox in Triton: the reference's integers, and its noise."""

# mypy: allow-untyped-decorators, disable-error-code="name-defined,no-untyped-def"
from __future__ import annotations

import pytest
import torch
from support.kernels import poisoned_allocations

from outrider.kernels.random import reference as philox
from outrider.kernels.random.reference import Purpose, as_int64

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
philox_triton = pytest.importorskip("outrider.kernels.random.triton")

SEEDS = [0, 0xA4093822_299F31D0, 2**64 - 1]


def counters(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Seeds, positions and completions: columns of one table, so not contiguous."""
    rows = [[as_int64(seed), 1000 * row + 2**31 - 2, row] for row, seed in enumerate(SEEDS)]
    seeds, positions, completions = torch.tensor(rows, device=device).unbind(1)
    return seeds, positions, completions


@pytest.mark.parametrize("by_row", [False, True])
def test_words_are_the_references(triton_device: torch.device, by_row: bool) -> None:
    purposes = torch.arange(len(SEEDS)) % 4 if by_row else Purpose.RECOVERED
    on_device = purposes.to(triton_device) if isinstance(purposes, torch.Tensor) else purposes
    seeds, positions, completions = counters(triton_device)
    with poisoned_allocations():
        got = philox_triton.words(seeds, positions, on_device, completions, (1 << 28) - 1)
    reference = counters(torch.device("cpu"))
    assert torch.equal(got.cpu(), philox.words(reference[0], reference[1], purposes, reference[2], (1 << 28) - 1))
    draws = torch.tensor([3, (1 << 60) - 1, 5 << 28])
    got = philox_triton.words(seeds, positions, on_device, completions, draws.to(triton_device))
    assert torch.equal(got.cpu(), philox.words(reference[0], reference[1], purposes, reference[2], draws))


def test_more_rows_than_a_program_takes(triton_device: torch.device) -> None:
    rows = torch.arange(philox_triton.ROWS_PER_PROGRAM + 3)
    got = philox_triton.words(*[rows.to(triton_device)] * 2, Purpose.ACCEPT, rows.to(triton_device), 0)
    assert torch.equal(got.cpu(), philox.words(rows, rows, Purpose.ACCEPT, rows))
    empty = rows[:0].to(triton_device)
    assert philox_triton.words(empty, empty, Purpose.ACCEPT, empty, 0).shape == (0, 4)


@pytest.mark.parametrize(("vocab_size", "groups"), [(1, 16), (16, 16), (70, 16), (4097, 512)])
@pytest.mark.parametrize("by_row", [False, True])
def test_vocabulary_words_and_noise(triton_device: torch.device, vocab_size: int, groups: int, by_row: bool) -> None:
    purposes = torch.arange(len(SEEDS)) % 4 if by_row else Purpose.BONUS
    on_device = purposes.to(triton_device) if isinstance(purposes, torch.Tensor) else purposes
    seeds, positions, completions = counters(triton_device)
    reference = counters(torch.device("cpu"))
    arguments = (reference[0], reference[1], purposes, reference[2], vocab_size)
    with poisoned_allocations():
        got = philox_triton.vocabulary_words(seeds, positions, on_device, completions, vocab_size, 5, groups)
        noise = philox_triton.exponential_noise(seeds, positions, on_device, completions, vocab_size, groups)
    assert torch.equal(got.cpu(), philox.vocabulary_words(*arguments, draw=5))
    by_seed = purposes.tolist() if isinstance(purposes, torch.Tensor) else [purposes] * len(SEEDS)
    expected = torch.stack(
        [
            philox.exponential_noise(one[:1], one[1:2], one[2:], vocab_size, purpose)[0]
            for one, purpose in zip(torch.stack(reference, 1), by_seed, strict=True)
        ]
    )
    assert torch.equal(noise.cpu(), expected)


@triton.jit
def _noise_kernel(words, out, COUNT: tl.constexpr) -> None:
    places = tl.arange(0, COUNT)
    tl.store(out + places, philox_triton.noise_of(tl.load(words + places).to(tl.uint32)))


def test_noise_of_extreme_words(triton_device: torch.device) -> None:
    words = torch.tensor([0, 1, 2, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 2, 2**32 - 1])
    out = torch.full((8,), float("nan"), device=triton_device)
    _noise_kernel[(1,)](words.to(triton_device), out, 8)
    expected = words.double().add(0.5).mul(-(2.0**-32)).log1p().neg().float()
    assert torch.equal(out.cpu(), expected) and bool(((out > 0) & (out < 23)).all())
