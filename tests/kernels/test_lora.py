"""Low-rank products of adapters: y += scaling * B (A x) of each row's own adapter, in PyTorch and Triton."""

from __future__ import annotations

import pytest
import torch
from support.kernels import poisoned_allocations
from torch import Tensor

from outrider.kernels.lora.reference import add_low_rank
from outrider.kernels.types import LowRankWeights

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = {"one": (40, (0, 33)), "two": (100, (0, 70, 140)), "three": (530, (0, 66, 82, 98)), "tiny": (1, (0, 1, 2, 3))}
SLOTS = [0, 0, 2, -1, 1, 2, -1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 2, -1, -1]


def weights_of(
    width: int, bounds: tuple[int, ...], dtype: torch.dtype, device: torch.device, rank: int = 16
) -> LowRankWeights:
    """Of three slots, whose ranks are 5, 16 and 1; slot 1 leaves the first slice alone."""
    generator, slices = torch.Generator().manual_seed(width), len(bounds) - 1
    down = torch.randn(3, slices, rank, width, generator=generator) / width**0.5
    up = torch.randn(3, bounds[-1], rank, generator=generator) / rank**0.5
    for slot, own in enumerate((5, 16, 1)):
        down[slot, :, own:], up[slot, :, own:] = 0, 0
    scaling = torch.rand(3, slices, generator=generator) + 0.5
    scaling[1, 0] = 0
    return LowRankWeights(down.to(device, dtype), up.to(device, dtype), scaling.to(device), bounds)


def operands(width: int, out: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    x, y = torch.randn(len(SLOTS), width, generator=generator), torch.randn(len(SLOTS), out, generator=generator)
    return x.to(device, dtype), y.to(device, dtype), torch.tensor(SLOTS, dtype=torch.int32, device=device)


def expected(y: Tensor, x: Tensor, weights: LowRankWeights) -> Tensor:  # [rows, out] float64
    """Row by row, in float64."""
    result = y.double()
    for row, slot in enumerate(SLOTS):
        for index, (start, end) in enumerate(zip(weights.bounds[:-1], weights.bounds[1:], strict=True)):
            if slot >= 0:
                inner = weights.down[slot, index].double() @ x[row].double() * weights.scaling[slot, index].double()
                result[row, start:end] += weights.up[slot, start:end].double() @ inner
    return result


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_values(form: torch.device, shape: str, dtype: torch.dtype) -> None:
    width, bounds = SHAPES[shape]
    weights = weights_of(width, bounds, dtype, form)
    x, y, slots = operands(width, bounds[-1], dtype, form)
    wanted, before = expected(y, x, weights), y.clone()
    with poisoned_allocations():
        add_low_rank(y, x, weights, slots)
    rounding = torch.finfo(dtype).eps  # one rounding of the sum; all else is in float32
    torch.testing.assert_close(y.double(), wanted, rtol=rounding, atol=4e-6)
    alone = [row for row, slot in enumerate(SLOTS) if slot < 0]
    assert torch.equal(y[alone], before[alone]), "rows of no adapter stay as they are"
    assert not torch.equal(y, before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_depend_on_the_row_alone(form: torch.device, dtype: torch.dtype) -> None:
    """Any number of rows, at any place of a tile, among any neighbours with any adapters."""
    width, bounds = SHAPES["three"]
    weights = weights_of(width, bounds, dtype, form)
    x, y, slots = operands(width, bounds[-1], dtype, form)
    whole = y.clone()
    add_low_rank(whole, x, weights, slots, batch_invariant=True)
    for rows in ([4], [5, 4, 0], list(range(3, 20))):
        part = y[rows].clone()
        add_low_rank(part, x[rows].contiguous(), weights, slots[rows], batch_invariant=True)
        assert torch.equal(part, whole[rows]), rows
    x[1:] = float("nan")
    first = y.clone()
    add_low_rank(first, x, weights, slots, batch_invariant=True)
    assert torch.equal(first[0], whole[0])


def test_an_order_of_its_own_would_show(form: torch.device) -> None:
    """The inverse test: the same sums with the inputs taken in another order differ in some bit."""
    width, bounds = SHAPES["three"]
    weights = weights_of(width, bounds, torch.float32, form)
    x, y, slots = operands(width, bounds[-1], torch.float32, form)
    turned, straight = y.clone(), y.clone()
    flipped = LowRankWeights(weights.down.flip(3).contiguous(), weights.up, weights.scaling, bounds)
    add_low_rank(straight, x, weights, slots, batch_invariant=True)
    add_low_rank(turned, x.flip(1).contiguous(), flipped, slots, batch_invariant=True)
    assert not torch.equal(turned, straight)


def test_rows_of_a_larger_tensor(form: torch.device) -> None:
    width, bounds = SHAPES["two"]
    weights = weights_of(width, bounds, torch.float32, form)
    x, y, slots = operands(width, bounds[-1], torch.float32, form)
    wanted = y.clone()
    add_low_rank(wanted, x, weights, slots)
    strided = torch.cat([x, x], 1)[:, :width]
    add_low_rank(y, strided, weights, slots)
    torch.testing.assert_close(y, wanted)
    add_low_rank(y[:0], x[:0], weights, slots[:0])


def test_only_rows_without_adapters(form: torch.device) -> None:
    width, bounds = SHAPES["two"]
    weights = weights_of(width, bounds, torch.float32, form)
    x, y, slots = operands(width, bounds[-1], torch.float32, form)
    before = y.clone()
    add_low_rank(y, x, weights, torch.full_like(slots, -1))
    assert torch.equal(y, before)
