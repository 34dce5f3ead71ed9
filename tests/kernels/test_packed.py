"""Products with quantised weights: values against the reference in float64, bits that depend on the row alone, and how
much memory the packed form takes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from support.quantized import BLOCKS, by_groups, matrix_of, random_blocks
from torch import Tensor

from outrider.kernels.cpu.decoder import Kind, Weight
from outrider.kernels.cpu.library import cpu_library
from outrider.kernels.cpu.linear import CpuLinear
from outrider.kernels.cpu.packed import STEP, can_pack, can_round, pack_quantized
from outrider.kernels.quantized.blocks import QUANTIZED_KINDS
from outrider.kernels.quantized.form import Codes, Form, QuantizedMatrix

pytestmark = pytest.mark.skipif(cpu_library() is None, reason="no C kernels")

WIDEST = 32512  # what the largest of 32 inputs becomes, where they become integers
OF_GROUPS = [
    (bits, span, dtype, has_zeros)
    for bits, has_zeros in ((4, False), (4, True), (8, False), (8, True))
    for span, dtype in ((32, torch.float16), (64, torch.bfloat16), (128, torch.float32), (256, torch.float32))
]


def some_quantized() -> Iterator[tuple[str, QuantizedMatrix]]:
    """Of every kind, and of every way to share scales, with outputs that fill no panel."""
    for kind in QUANTIZED_KINDS:
        block = BLOCKS[kind][0]
        for outputs, inputs in ((70, 1024), (33, block), (5, 3 * block)):
            yield kind, matrix_of(kind, random_blocks(kind, outputs, inputs))
    for bits, span, dtype, has_zeros in OF_GROUPS:
        yield f"{bits} bits by {span}", by_groups(bits, 45, 256, span, dtype, has_zeros)


@contextmanager
def on_threads(count: int) -> Iterator[None]:
    """Products are computed by so many."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("rounds", [False, True], ids=["floats", "integers"])
def test_products_are_those_of_the_numbers(rounds: bool) -> None:
    """To float32's last places of all that is added; where 32 inputs are rounded to 16 bits, to half a step of the
    largest for each of them."""
    generator = torch.Generator().manual_seed(2)
    for name, matrix in some_quantized():
        outputs, inputs = matrix.shape
        bias, x = torch.randn(outputs, generator=generator), torch.randn(13, inputs, generator=generator)
        numbers = matrix.decode().double()
        expected = x.double() @ numbers.T + bias
        room = (x.double().abs() @ numbers.abs().T + bias.abs()) * 1e-6
        product = CpuLinear(matrix, bias, rounds)
        if rounds and can_round(matrix):
            largest = x.double().abs().unflatten(1, (-1, STEP)).amax(-1).repeat_interleave(STEP, dim=1)
            room = room + largest @ numbers.abs().T * 0.5 / WIDEST
        for rows in (1, 2, 3, 12, 13):
            assert bool(((product(x[:rows]) - expected[:rows]).abs() <= room[:rows]).all()), name


def test_minima_that_are_most_of_a_number() -> None:
    """Codes near 0 whose minima are large: what is taken off is the sum of the inputs, to float32's last places."""
    codes, scales = torch.ones(32, 64, dtype=torch.uint8), torch.full((32, 2), 1e-3)
    form = Form(4, 32, torch.float32, has_minima=True)
    matrix = QuantizedMatrix(form, (32, 64), lambda start, end: Codes(codes, scales, scales * 100)[start:end])
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(CpuLinear(matrix)(x), x @ matrix.decode().T, atol=1e-6, rtol=0)


def test_inputs_become_integers_of_16_bits() -> None:
    """What one weight of 1 is multiplied with: the input, in steps of its block's largest."""
    codes, scales = torch.eye(32, 64, dtype=torch.uint8), torch.ones(32, 2)
    form = Form(4, 32, torch.float32)
    matrix = QuantizedMatrix(form, (32, 64), lambda start, end: Codes(codes, scales)[start:end])
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(3)) * torch.logspace(-3, 3, 5)[:, None]
    steps = x[:, :32].abs().amax(1, keepdim=True) / WIDEST
    expected = (x[:, :32] * (WIDEST / x[:, :32].abs().amax(1, keepdim=True))).round() * steps
    torch.testing.assert_close(CpuLinear(matrix, rounds=True)(x), expected, atol=0, rtol=1e-6)
    assert bool((CpuLinear(matrix, rounds=True)(torch.zeros(1, 64)) == 0).all())


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_stays_none(wrong: float) -> None:
    matrix = matrix_of("Q8_0", random_blocks("Q8_0", 40, 256))
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(3))
    alone = CpuLinear(matrix, rounds=True)(x)
    x[1, 70] = wrong
    found = CpuLinear(matrix, rounds=True)(x)
    assert not bool(found[1].isfinite().any()) and torch.equal(found[::2], alone[::2])


@pytest.mark.parametrize("rounds", [False, True], ids=["floats", "integers"])
def test_rows_have_the_bits_that_they_have_alone(rounds: bool) -> None:
    """Among 1 to 40 rows, on any number of threads."""
    generator = torch.Generator().manual_seed(4)
    for name, matrix in some_quantized():
        product, x = CpuLinear(matrix, rounds=rounds), torch.randn(40, matrix.shape[1], generator=generator)
        alone = torch.cat([product(row) for row in x.split(1)])
        for threads in (1, 2, 3):
            with on_threads(threads):
                for rows in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 24, 25, 40):
                    assert torch.equal(product(x[:rows]), alone[:rows]), (name, threads, rows)


@pytest.mark.parametrize("kind", QUANTIZED_KINDS)
def test_they_take_the_memory_of_their_blocks(kind: str) -> None:
    stored = random_blocks(kind, 64, 1024)
    packed = pack_quantized(matrix_of(kind, stored))
    assert packed.dtype == torch.uint8 and stored.numel() <= packed.numel() <= 1.06 * stored.numel()


def test_what_is_packed() -> None:
    groups = by_groups(4, 8, 96, 48, torch.float16)
    assert not can_pack(groups) and can_pack(by_groups(4, 8, 96, 96, torch.float16))
    x = torch.randn(2, 96, generator=torch.Generator().manual_seed(5))
    torch.testing.assert_close(CpuLinear(groups)(x), x @ groups.decode().T)  # by its numbers


@pytest.mark.parametrize("rounds", [False, True], ids=["floats", "integers"])
def test_sections_of_several_kinds(rounds: bool) -> None:
    """One below the other, of which each but the last is whole panels; else they are decoded. Beside a plain one no
    inputs are rounded."""
    generator = torch.Generator().manual_seed(6)
    for sizes in ((64, 32, 40), (64, 40, 32)):
        parts: tuple[Weight, ...] = (
            matrix_of("Q4_K", random_blocks("Q4_K", sizes[0], 256)),
            torch.randn(sizes[1], 256, generator=generator),
            matrix_of("Q6_K", random_blocks("Q6_K", sizes[2], 256)),
        )
        whole = torch.cat([part if isinstance(part, Tensor) else part.decode() for part in parts])
        bias, x = torch.randn(136, generator=generator), torch.randn(14, 256, generator=generator)
        product = CpuLinear(parts, bias, rounds)
        assert not product._matrix.rounds
        assert (product._matrix.kind == Kind.SECTIONS) is (sizes[1] == 32)
        with on_threads(3):
            torch.testing.assert_close(product(x), x @ whole.T + bias, atol=1e-4, rtol=1e-5)
            assert torch.equal(product(x)[-1:], product(x[-1:]))
