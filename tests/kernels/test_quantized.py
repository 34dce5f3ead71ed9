"""Quantised matrices in one form, whatever they are stored as: the numbers are those of the reference."""

from __future__ import annotations

import pytest
import torch
from support.quantized import BLOCKS, matrix_of, random_blocks

from outrider.kernels.quantized.blocks import QUANTIZED_KINDS, quantized_blocks
from outrider.kernels.quantized.form import Codes, Form, QuantizedMatrix, stacked
from outrider.kernels.quantized.reference import decode


@pytest.mark.parametrize("kind", QUANTIZED_KINDS)
def test_codes_are_the_numbers_of_the_reference(kind: str) -> None:
    stored = random_blocks(kind, 70, 512)
    matrix, expected = matrix_of(kind, stored), decode(kind, stored)
    assert matrix.shape == (70, 512) == tuple(expected.shape)
    assert torch.equal(matrix.decode(), expected)
    assert torch.equal(matrix.rows(30, 64).decode(), expected[30:64])
    order = torch.arange(70).view(7, 5, 2).transpose(1, 2).flatten()
    assert torch.equal(matrix.reordered(order).decode(), expected[order])
    assert torch.equal(matrix.reordered(order).rows(3, 9).decode(), expected[order[3:9]])


@pytest.mark.parametrize("kind", QUANTIZED_KINDS)
def test_every_byte_counts(kind: str) -> None:
    """A row of which one byte is another decodes to other numbers."""
    block, num_bytes = BLOCKS[kind]
    stored = random_blocks(kind, 1, block)
    changed = stored.repeat(num_bytes, 1)
    for at in range(num_bytes):
        changed[at, at] ^= 0x11
    found = matrix_of(kind, changed).decode()
    assert torch.equal(found, decode(kind, changed))
    assert all(
        not torch.equal(row, other) for row, other in zip(found, decode(kind, stored).expand_as(found), strict=True)
    )


def test_matrices_of_one_form_become_one() -> None:
    """Which is read across their bounds, with all that a form has."""
    parts = [matrix_of("Q4_K", random_blocks("Q4_K", rows, 256, rows)) for rows in (3, 5, 1)]
    whole, numbers = stacked(parts), torch.cat([part.decode() for part in parts])
    assert whole.shape == (9, 256) and whole.form == parts[0].form and torch.equal(whole.decode(), numbers)
    assert torch.equal(whole.rows(2, 9).decode(), numbers[2:]) and torch.equal(whole.rows(4, 5).decode(), numbers[4:5])


def test_plain_numbers_are_none() -> None:
    assert quantized_blocks("F16", (4, 64), lambda start, end: torch.zeros(end - start, 128, dtype=torch.uint8)) is None


def test_zeros_of_spans() -> None:
    form = Form(4, 64, dtype=torch.float32, has_zeros=True)
    codes = torch.arange(16, dtype=torch.uint8).repeat(3, 8)  # [3, 128]
    scales, zeros = torch.rand(3, 2), torch.tensor([[0, 15], [7, 8], [1, 2]], dtype=torch.uint8)
    matrix = QuantizedMatrix(form, (3, 128), lambda first, last: Codes(codes, scales, zeros=zeros)[first:last])
    expected = (codes.float().view(3, 2, 64) - zeros[..., None]) * scales[..., None]
    assert torch.equal(matrix.decode(), expected.view(3, 128))
