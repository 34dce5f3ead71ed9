"""The norm and gate kernels against the CPU path in float64, and their bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from outrider.kernels.layers import triton as layers_triton
from outrider.kernels.layers.reference import add_rms_norm, gated_gelu, gated_silu, rms_norm

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(actual.cpu().double(), expected.double(), atol=4 * eps, rtol=4 * eps)


@pytest.mark.parametrize("dtype", DTYPES)
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


@pytest.mark.parametrize("dtype", DTYPES)
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


@pytest.mark.parametrize("dtype", DTYPES)
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


@pytest.mark.parametrize("dtype", DTYPES)
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
