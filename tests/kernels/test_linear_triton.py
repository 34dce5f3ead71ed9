"""The Triton product: its values, and bits that depend on the row alone."""

import os
import platform
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from poisoned import poisoned, poisoned_allocations
from torch import Tensor

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
            rounding = torch.finfo(dtype).eps  # one rounding of the output; sums are in float32
            torch.testing.assert_close(got.cpu().double(), expected, rtol=rounding, atol=2e-6)


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
@pytest.mark.parametrize("core", ["Haswell", "Zen", "SkylakeX"])
def test_bits_do_not_depend_on_the_kernels_of_numpy(core: str) -> None:
    """The interpreter multiplies by OpenBLAS, which has others for each processor."""
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
