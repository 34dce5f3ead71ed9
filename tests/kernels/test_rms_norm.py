"""Normalisation, gate and linear products: their values, and their bits in batch-invariant mode."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.kernels.layers.reference import Linear, gated_gelu, gated_silu, rms_norm

ROW_COUNTS = (1, 2, 5, 17)
LINEAR_SHAPES = [(100, 52), (128, 384), (256, 4096), (1024, 1024)]


def same_bits(function: Callable[[Tensor], Tensor], rows: Tensor) -> bool:
    """Whether a row has the same bits in every number of rows and at every place of a tile."""
    whole = function(rows)
    return all(
        torch.equal(function(rows[start : start + count]), whole[start : start + count])
        for count in ROW_COUNTS
        for start in range(0, 9)
    )


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("per_head", [False, True])
def test_rms_norm_is_x_over_its_root_mean_square(batch_invariant: bool, per_head: bool) -> None:
    x = torch.randn(11, 3, 100) * 3
    weight = torch.randn(3, 100) if per_head else torch.randn(100)
    expected = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    out = rms_norm(x, weight, 1e-5, batch_invariant=batch_invariant)
    torch.testing.assert_close(out, expected.float(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("per_head", [False, True])
def test_a_weight_in_float32_multiplies_before_the_one_rounding(per_head: bool, batch_invariant: bool) -> None:
    """As Gemma's norms do; a weight of the rows' own type multiplies what has been rounded."""
    x = torch.randn(11, 3, 128).bfloat16() * 3
    weight = 1 + torch.randn(3, 128) if per_head else 1 + torch.randn(128)
    expected = (x.float() * (x.float().square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight).bfloat16()
    out = rms_norm(x, weight, 1e-5, batch_invariant=batch_invariant)
    assert out.dtype == torch.bfloat16 and (out != expected).float().mean() < 0.001
    assert (rms_norm(x, weight.bfloat16(), 1e-5, batch_invariant=batch_invariant) != expected).float().mean() > 0.1


@pytest.mark.parametrize("dim", [36, 128, 4100])
def test_rms_norm_bits_do_not_depend_on_the_batch(dim: int) -> None:
    weight = torch.randn(dim)
    assert same_bits(lambda rows: rms_norm(rows, weight, 1e-6, batch_invariant=True), torch.randn(40, dim))


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_gated_silu(batch_invariant: bool) -> None:
    gate_up = torch.randn(7, 90) * 20
    gate_up[0, :4] = torch.tensor([-1e4, 1e4, 0.0, -90.0])
    expected = F.silu(gate_up[:, :45]) * gate_up[:, 45:]
    torch.testing.assert_close(gated_silu(gate_up, batch_invariant=batch_invariant), expected)


def test_gated_silu_bits_do_not_depend_on_the_batch() -> None:
    assert same_bits(lambda rows: gated_silu(rows, batch_invariant=True), torch.randn(40, 4098))


@pytest.mark.parametrize("approximate", [False, True])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_gated_gelu(batch_invariant: bool, approximate: bool) -> None:
    gate_up = torch.randn(7, 90) * 5
    gate_up[0, :4] = torch.tensor([-1e4, 1e4, 0.0, -90.0])
    expected = F.gelu(gate_up[:, :45], approximate="tanh" if approximate else "none") * gate_up[:, 45:]
    out = gated_gelu(gate_up, approximate=approximate, batch_invariant=batch_invariant)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("approximate", [False, True])
def test_gated_gelu_bits_do_not_depend_on_the_batch(approximate: bool) -> None:
    assert same_bits(
        lambda rows: gated_gelu(rows, approximate=approximate, batch_invariant=True), torch.randn(40, 4098)
    )


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("shape", LINEAR_SHAPES)
def test_linear(shape: tuple[int, int], batch_invariant: bool, bias: bool) -> None:
    wide, out = shape
    weight, offset, x = torch.randn(out, wide) / wide**0.5, torch.randn(out), torch.randn(40, wide)
    linear = Linear(weight, offset if bias else None, batch_invariant=batch_invariant)
    for count in (1, 3, 8, 40):
        expected = F.linear(x[:count], weight, offset if bias else None)
        torch.testing.assert_close(linear(x[:count]), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", LINEAR_SHAPES)
def test_linear_bits_do_not_depend_on_the_batch(shape: tuple[int, int]) -> None:
    wide, out = shape
    linear = Linear(torch.randn(out, wide), batch_invariant=True)
    assert same_bits(linear, torch.randn(40, wide))


def test_ordinary_products_do_depend_on_the_batch() -> None:
    """The inverse test: without the mode some size fails the contract, so that the test above can fail."""
    products = [Linear(torch.randn(out, wide)) for wide, out in LINEAR_SHAPES]
    assert not all(
        same_bits(product, torch.randn(40, shape[0])) for product, shape in zip(products, LINEAR_SHAPES, strict=True)
    )
