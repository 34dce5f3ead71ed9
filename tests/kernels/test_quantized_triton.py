"""Products with packed weights by Triton: against the numbers in float64, and bits that depend on the row alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from support.kernels import poisoned, poisoned_allocations
from support.quantized import by_groups, matrix_of, random_blocks, small_floats
from torch import Tensor

from outrider.kernels.quantized.blocks import QUANTIZED_KINDS
from outrider.kernels.quantized.form import Codes, Form, QuantizedMatrix
from outrider.kernels.quantized.linear import packed_linear, packed_rows
from outrider.kernels.quantized.packed import can_pack, pack, unpack

triton_quantized = pytest.importorskip("outrider.kernels.quantized.triton")


def of_kind(kind: str, outputs: int, inputs: int) -> QuantizedMatrix:
    return matrix_of(kind, random_blocks(kind, outputs, inputs))


HALF = torch.float16
MATRICES: dict[str, Callable[[], QuantizedMatrix]] = {
    **{kind: partial(of_kind, kind, 70, 512) for kind in QUANTIZED_KINDS},
    "4 bits by 16, zero points": lambda: by_groups(4, 45, 144, 16, torch.bfloat16, True),
    "4 bits by 32": lambda: by_groups(4, 128, 160, 32, HALF),
    "4 bits by 128, zero points": lambda: by_groups(4, 45, 384, 128, HALF, True),
    "4 bits by row": lambda: by_groups(4, 33, 52, 52, torch.float32),
    "8 bits by row, zero points": lambda: by_groups(8, 45, 100, 100, torch.bfloat16, True),
    "8 bits by 64": lambda: by_groups(8, 1, 192, 64, HALF),
    "floats by row": lambda: small_floats(45, 100, 100),
    "floats by block": lambda: small_floats(70, 256, 128, torch.bfloat16),
    "in parts": lambda: by_groups(4, 70, 2048, 32, HALF),
}
ROW_COUNTS = (1, 2, 5, 17, 40)


def some_rows(count: int, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(width)).to(dtype)


@pytest.mark.parametrize("name", MATRICES)
def test_what_is_packed_is_the_numbers(name: str, triton_device: torch.device) -> None:
    matrix = MATRICES[name]()
    packed = pack(matrix, triton_device)
    assert can_pack(matrix) and len(packed) == len(matrix)
    assert torch.equal(unpack(packed).cpu(), matrix.decode())


@pytest.mark.parametrize("kind", QUANTIZED_KINDS)
def test_they_take_the_memory_of_their_blocks(kind: str) -> None:
    stored = random_blocks(kind, 128, 1024)
    packed = pack(matrix_of(kind, stored), torch.device("cpu"))
    assert stored.numel() <= packed.num_bytes <= 1.06 * stored.numel()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MATRICES)
def test_products_are_those_of_the_numbers(name: str, dtype: torch.dtype, triton_device: torch.device) -> None:
    """To float32's last places of all that is added, and one rounding of the output: no weight is rounded."""
    matrix = MATRICES[name]()
    outputs, inputs = matrix.shape
    packed, x = pack(matrix, triton_device), some_rows(40, inputs, dtype)
    bias = torch.randn(outputs, generator=torch.Generator().manual_seed(3)).to(dtype)
    numbers = matrix.decode().double()
    expected = x.double() @ numbers.T + bias.double()
    room = (x.double().abs() @ numbers.abs().T + bias.double().abs()) * 2e-6 + torch.finfo(dtype).eps * expected.abs()
    for count in ROW_COUNTS if dtype == torch.float32 else (5,):
        with poisoned_allocations():
            found = triton_quantized.linear(poisoned(x[:count], triton_device), packed, poisoned(bias, triton_device))
        assert found.dtype == dtype and found.shape == (count, outputs)
        assert bool(((found.cpu().double() - expected[:count]).abs() <= room[:count]).all()), count


def test_it_is_split_where_outputs_are_few() -> None:
    assert triton_quantized.parts_of(70, 2048 // 128) == 2 and triton_quantized.parts_of(70, 1024 // 128) == 1
    assert triton_quantized.parts_of(1024, 4096 // 128) == 4 and triton_quantized.parts_of(32768, 4096 // 128) == 1


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "4 bits by 16, zero points", "floats by row", "in parts"])
def test_bits_depend_on_the_row_alone(name: str, triton_device: torch.device) -> None:
    """Among any number of rows, at any place, beside any others."""
    matrix = MATRICES[name]()
    packed, x = pack(matrix, triton_device), some_rows(40, matrix.shape[1]).to(triton_device)

    def product(rows: Tensor) -> Tensor:
        found: Tensor = triton_quantized.linear(rows, packed, batch_invariant=True)
        return found

    whole = product(x)
    for start, count in ((0, 1), (39, 1), (3, 5), (16, 17), (15, 2)):
        assert torch.equal(product(x[start : start + count]), whole[start : start + count])
    x[1:] = float("nan")
    assert torch.equal(product(x)[0], whole[0])


def test_an_order_of_its_own_would_show(triton_device: torch.device) -> None:
    """The inverse test: the same sums with the inputs taken in another order differ in some bit."""
    codes = torch.randint(256, (40, 256), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    form, scales, x = Form(8, 256, torch.float32, zero=128), torch.full((40, 1), 0.01), some_rows(3, 256)

    def product(at: Tensor) -> Tensor:
        turned = Codes(codes[:, at], scales)
        packed = pack(QuantizedMatrix(form, (40, 256), lambda start, end: turned[start:end]), triton_device)
        found: Tensor = triton_quantized.linear(x[:, at].contiguous().to(triton_device), packed)
        return found

    in_order = torch.arange(256)
    assert not torch.equal(product(in_order.flip(0)), product(in_order))


def test_results_go_between_others(triton_device: torch.device) -> None:
    """Into columns of a wider result."""
    matrix = by_groups(4, 70, 2048, 32, HALF)
    packed, x = pack(matrix, triton_device), some_rows(5, 2048).to(triton_device)
    for one in (packed, pack(matrix.rows(0, 70), triton_device)):
        wide = torch.full((5, 90), 7.0, device=triton_device)
        triton_quantized.linear(x, one, out=wide[:, 10:80])
        assert torch.equal(wide[:, 10:80], triton_quantized.linear(x, packed))
        assert bool((wide[:, :10] == 7).all() and (wide[:, 80:] == 7).all())


def test_every_float_of_8_bits(triton_device: torch.device) -> None:
    """All 256 bytes, NaN included, as rows and by a product with one."""
    codes = torch.arange(256, dtype=torch.uint8)[None]
    whole = Codes(codes, torch.ones(1, 1))
    matrix = QuantizedMatrix(Form(8, 256, torch.float32, floats=True), (1, 256), lambda start, end: whole[start:end])
    expected = codes.view(torch.float8_e4m3fn).float()
    packed = pack(matrix, triton_device)
    found = triton_quantized.rows(packed, torch.zeros(1, dtype=torch.int64, device=triton_device), torch.float32).cpu()
    torch.testing.assert_close(found, expected, atol=0, rtol=0, equal_nan=True)
    each = [at for at in range(256) if at not in (127, 255)]
    columns = QuantizedMatrix(
        Form(8, 1, torch.float32, floats=True),
        (256, 1),
        lambda start, end: Codes(codes.T, torch.ones(256, 1))[start:end],
    )
    products = triton_quantized.linear(torch.ones(1, 1, device=triton_device), pack(columns, triton_device)).cpu()
    assert torch.equal(products[0, each], expected[0, each]) and bool(products[0, [127, 255]].isnan().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MATRICES)
def test_rows_are_the_numbers(name: str, dtype: torch.dtype, triton_device: torch.device) -> None:
    matrix = MATRICES[name]()
    ids = torch.tensor([0, len(matrix) - 1, len(matrix) // 2, 0])
    for kind in (torch.int32, torch.int64):
        found = triton_quantized.rows(pack(matrix, triton_device), ids.to(kind).to(triton_device), dtype)
        exact = matrix.decode()[ids]
        torch.testing.assert_close(found.cpu(), exact.to(dtype), atol=1e-7, rtol=torch.finfo(dtype).eps)


@pytest.mark.parametrize("name", ["Q5_K", "4 bits by row"])
def test_both_forms(name: str, form: torch.device) -> None:
    """PyTorch's and Triton's, by the functions that a model calls."""
    matrix = MATRICES[name]()
    packed, x = pack(matrix, form), some_rows(9, matrix.shape[1]).to(form)
    expected = x.cpu().double() @ matrix.decode().double().T
    for batch_invariant in (False, True):
        out = torch.empty(9, len(matrix), device=form)
        found = packed_linear(x, packed, out=out, batch_invariant=batch_invariant)
        assert found is out
        torch.testing.assert_close(found.cpu().double(), expected, atol=1e-4, rtol=1e-5)
    ids = torch.tensor([3, 0, 32], device=form)
    torch.testing.assert_close(packed_rows(packed, ids, torch.float32).cpu(), matrix.decode()[ids.cpu()])


def test_what_is_not_packed() -> None:
    assert not can_pack(by_groups(4, 8, 96, 48, HALF)) and not can_pack(by_groups(4, 8, 96, 24, HALF))
    assert not can_pack(by_groups(3, 8, 96, 32, HALF)) and can_pack(by_groups(4, 8, 96, 96, HALF))
    with pytest.raises(ValueError, match="one that has outputs"):
        pack(by_groups(4, 0, 96, 96, HALF), torch.device("cpu"))
