"""Normalisation, gate and linear products: their values, and their bits in batch-invariant mode.

Rotary embedding against complex rotation.

The norm and gate kernels against the CPU path in float64, and their bits.

The Triton product: its values, and bits that depend on the row alone."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from support.kernels import poisoned, poisoned_allocations
from torch import Tensor

from outrider.kernels.cpu.library import cpu_features
from outrider.kernels.layers import triton as layers_triton
from outrider.kernels.layers.reference import (
    Linear,
    add_rms_norm,
    apply_rotary,
    gated_gelu,
    gated_silu,
    rms_norm,
    rotary_table,
)

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


def test_rotation_equals_complex_multiplication() -> None:
    inv_freq = 1.0 / 100.0 ** (torch.arange(0, 8, 2) / 8)
    cos, sin = rotary_table(inv_freq, 1.5, 20, torch.float32)
    x, positions = torch.randn(6, 3, 8), torch.tensor([0, 1, 7, 7, 19, 3])
    turned = apply_rotary(x, cos[positions][:, None], sin[positions][:, None])
    pairs = torch.complex(x[..., :4], x[..., 4:])  # element i turns with element i + 4
    angles = positions[:, None, None] * inv_freq
    expected = pairs * torch.polar(torch.full_like(angles, 1.5), angles)
    torch.testing.assert_close(turned, torch.cat([expected.real, expected.imag], -1), atol=1e-5, rtol=1e-5)


NORM_DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(actual.cpu().double(), expected.double(), atol=4 * eps, rtol=4 * eps)


@pytest.mark.parametrize("dtype", NORM_DTYPES)
@pytest.mark.parametrize(
    ("heads", "per_head", "dim"), [(1, False, 100), (3, False, 64), (5, True, 72), (1, False, 4100)]
)
def test_rms_norm(heads: int, per_head: bool, dim: int, dtype: torch.dtype, triton_device: torch.device) -> None:
    """Of a view between NaN."""
    whole = torch.full((7, heads + 2, dim), torch.nan).to(dtype)
    x = torch.randn(7, heads, dim).to(dtype) * 3
    weight = torch.randn(*([heads] if per_head else []), dim).to(dtype)
    whole[:, 1 : 1 + heads] = x
    out = layers_triton.rms_norm(whole.to(triton_device)[:, 1 : 1 + heads], weight.to(triton_device), 1e-5)
    close(out, rms_norm(x.double(), weight.double(), 1e-5), dtype)
    assert out.shape == x.shape and out.is_contiguous()


def test_rms_norm_with_a_weight_in_float32(triton_device: torch.device) -> None:
    x, weight = torch.randn(7, 3, 72).bfloat16(), 1 + torch.randn(3, 72)
    out = layers_triton.rms_norm(x.to(triton_device), weight.to(triton_device), 1e-5)
    assert out.dtype == torch.bfloat16
    close(out, rms_norm(x.double(), weight.double(), 1e-5), torch.bfloat16)


@pytest.mark.parametrize("dtype", NORM_DTYPES)
@pytest.mark.parametrize("dim", [36, 100, 4100])
def test_add_rms_norm(dim: int, dtype: torch.dtype, triton_device: torch.device) -> None:
    x, residual, weight = (torch.randn(*shape).to(dtype) for shape in ((6, dim), (6, dim), (dim,)))
    x[5] = torch.nan  # padding
    out, total = layers_triton.add_rms_norm(
        x.to(triton_device), residual.to(triton_device), weight.to(triton_device), 1e-5
    )
    close(total[:5], (residual.double() + x.double())[:5], dtype)
    expected, _ = add_rms_norm(total[:5].cpu().double(), torch.zeros(5, dim).double(), weight.double(), 1e-5)
    close(out[:5], expected, dtype)
    assert bool(out[5].isnan().all())


@pytest.mark.parametrize("dtype", NORM_DTYPES)
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_add_rms_norm_on_the_cpu_is_a_sum_and_a_norm(batch_invariant: bool, dtype: torch.dtype) -> None:
    x, residual, weight = (torch.randn(*shape).to(dtype) for shape in ((6, 40), (6, 40), (40,)))
    out, total = add_rms_norm(x, residual, weight, 1e-5, batch_invariant=batch_invariant)
    assert torch.equal(total, residual + x)
    assert torch.equal(out, rms_norm(residual + x, weight, 1e-5, batch_invariant=batch_invariant))


GATES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "silu": (lambda x: layers_triton.gated(x, "silu"), gated_silu),
    "gelu_tanh": (lambda x: layers_triton.gated(x, "gelu_tanh"), gated_gelu),
    "gelu": (lambda x: layers_triton.gated(x, "gelu"), lambda x: gated_gelu(x, approximate=False)),
}


@pytest.mark.parametrize("dtype", NORM_DTYPES)
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("width", [45, 1025])
def test_gates(width: int, gate: str, dtype: torch.dtype, triton_device: torch.device) -> None:
    kernel, reference = GATES[gate]
    whole = torch.full((7, 2 * width + 3), torch.nan).to(dtype)
    gate_up = (torch.randn(7, 2 * width) * 8).to(dtype)
    gate_up[0, :5] = torch.tensor([-6e4, 6e4, 0.0, -90.0, 90.0]).to(dtype)
    gate_up[0, width : width + 5] = 0.5
    whole[:, : 2 * width] = gate_up
    expected = reference(gate_up.double())
    actual = kernel(whole.to(triton_device)[:, : 2 * width]).cpu().double()
    eps, wide_eps = torch.finfo(dtype).eps, torch.finfo(torch.float32).eps
    # 1 + tanh and 1 + erf of a negative gate of about -6 cancel: times half the gate, and an `up` of up to 40
    torch.testing.assert_close(actual, expected, atol=128 * wide_eps, rtol=4 * eps)


def test_bits_depend_on_nothing_but_the_row(triton_device: torch.device) -> None:
    x, weight = torch.randn(19, 300).to(triton_device), torch.randn(300).to(triton_device)
    functions: list[Callable[[Tensor], Tensor]] = [lambda rows: layers_triton.rms_norm(rows, weight, 1e-6)]
    functions += [kernel for kernel, _ in GATES.values()]
    for function in functions:
        whole = function(x)
        for start, count in ((0, 1), (18, 1), (3, 5), (7, 12)):
            assert torch.equal(function(x[start : start + count].clone()), whole[start : start + count])


linear_triton = pytest.importorskip("outrider.kernels.layers.triton")

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(1, 1), (16, 33), (100, 52), (257, 64)]  # in, out


def operands(wide: int, out: int, num_rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(wide)
    x, weight = torch.randn(num_rows, wide, generator=generator), torch.randn(out, wide, generator=generator)
    return x.to(dtype), (weight / wide**0.5).to(dtype), torch.randn(out, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("wide", "out"), SHAPES)
def test_values(triton_device: torch.device, wide: int, out: int, dtype: torch.dtype) -> None:
    x, weight, bias = operands(wide, out, linear_triton.TILE_ROWS + 3, dtype)
    for count in (0, 1, 5, len(x)):
        for offset in (None, bias):
            expected = F.linear(x[:count].double(), weight.double(), None if offset is None else offset.double())
            with poisoned_allocations():
                got = linear_triton.linear(
                    poisoned(x[:count], triton_device),
                    poisoned(weight, triton_device),
                    None if offset is None else poisoned(offset, triton_device),
                )
            assert got.dtype == dtype
            rounding = torch.finfo(dtype).eps  # one rounding of the output; sums are in float32, their order any
            torch.testing.assert_close(got.cpu().double(), expected, rtol=rounding, atol=5e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_depend_on_the_row_alone(triton_device: torch.device, dtype: torch.dtype) -> None:
    """Any number of rows, at any place of a tile, among any neighbours."""
    x, weight, bias = (part.to(triton_device) for part in operands(300, 40, linear_triton.TILE_ROWS + 9, dtype))
    whole = linear_triton.linear(x, weight, bias)
    for start, count in ((0, 1), (0, 2), (3, 5), (60, 9), (linear_triton.TILE_ROWS, 1), (7, 64)):
        part = linear_triton.linear(x[start : start + count], weight, bias)
        assert torch.equal(part, whole[start : start + count])
    x[1:] = float("nan")
    assert torch.equal(linear_triton.linear(x, weight, bias)[0], whole[0])


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="no such kernels")
@pytest.mark.parametrize(("core", "needs"), [("Haswell", "avx2"), ("Zen", "avx2"), ("SkylakeX", "avx512f")])
def test_bits_do_not_depend_on_the_kernels_of_numpy(core: str, needs: str) -> None:
    """The interpreter multiplies by OpenBLAS, which has others for each processor."""
    if needs not in cpu_features():
        pytest.skip(f"this processor has no {needs}")
    command = [sys.executable, "-m", "pytest", "-q", __file__, "-k", test_bits_depend_on_the_row_alone.__name__]
    done = subprocess.run(command, env=os.environ | {"OPENBLAS_CORETYPE": core}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_an_order_of_its_own_would_show(triton_device: torch.device) -> None:
    """The inverse test: the same sums with K taken in another order differ in some bit."""
    x, weight, _ = (part.to(triton_device) for part in operands(300, 40, 8, torch.float32))
    turned = linear_triton.linear(x.flip(1).contiguous(), weight.flip(1).contiguous())
    assert not torch.equal(turned, linear_triton.linear(x, weight))


def test_a_transposed_view_of_the_weight(triton_device: torch.device) -> None:
    x, weight, _ = operands(100, 52, 3, torch.float32)
    expected = linear_triton.linear(x.to(triton_device), weight.to(triton_device))
    transposed = weight.t().contiguous().to(triton_device).t()
    assert torch.equal(linear_triton.linear(x.to(triton_device), transposed), expected)
