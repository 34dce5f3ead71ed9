"""One product by the C kernels is PyTorch's, and a row's bits do not depend on the others."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from outrider.kernels.cpu.library import cpu_library
from outrider.kernels.cpu.linear import CpuLinear, can_multiply

pytestmark = pytest.mark.skipif(cpu_library() is None, reason="no C kernels")


@pytest.mark.parametrize(("outputs", "inputs"), [(97, 64), (32, 16), (200, 80), (31, 640)])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("threads", [1, 2])
def test_products(outputs: int, inputs: int, stored: torch.dtype, has_bias: bool, threads: int) -> None:
    generator = torch.Generator().manual_seed(outputs + inputs)
    weight = torch.randn(outputs, inputs, generator=generator).to(stored).float()
    bias = torch.randn(outputs, generator=generator) if has_bias else None
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        product = CpuLinear(weight, bias)
        for rows in (1, 3, 4, 13, 40):
            x = torch.randn(rows, inputs + 16, generator=generator)[:, 16:]
            found = product(x)
            torch.testing.assert_close(found, F.linear(x, weight, bias), atol=1e-4, rtol=1e-4)
            assert torch.equal(found[-1:], product(x[-1:]))
        assert product(torch.empty(0, inputs)).shape == (0, outputs)
    finally:
        torch.set_num_threads(before)


def test_what_it_does_not_take() -> None:
    assert can_multiply(torch.zeros(5, 32)) and not can_multiply(torch.zeros(5, 33))
    assert not can_multiply(torch.zeros(5, 32, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="rows of 48 numbers; allowed: 32"):
        CpuLinear(torch.zeros(5, 32))(torch.zeros(2, 48))
