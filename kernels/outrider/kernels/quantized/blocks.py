"""The blocks of a GGUF file as codes: nothing is rounded, and each number is what `reference.decode` makes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from outrider.kernels.quantized.form import Codes, Form, QuantizedMatrix
from outrider.kernels.quantized.reference import MXFP4_VALUES, PARTS, bits, k_scales, nibbles

BLOCK, K_BLOCK = 32, 256

ReadBytes = Callable[[int, int], Tensor]  # the rows from one to before another, [rows, bytes of a row] uint8


def quantized_blocks(kind: str, shape: tuple[int, int], read: ReadBytes) -> QuantizedMatrix | None:
    """A matrix of blocks of a kind by ggml's name; None for kinds that are plain numbers."""
    if kind not in _KINDS:
        return None
    num_bytes, form, codes_of = _KINDS[kind]

    def codes(start: int, end: int) -> Codes:
        stored = read(start, end)
        found = codes_of(stored.reshape(-1, num_bytes))
        return _by_rows(found, len(stored))

    return QuantizedMatrix(form, shape, codes)


def _by_rows(found: Codes, rows: int) -> Codes:
    """Of blocks, [blocks, ...] each -> [rows, ...] each."""

    def folded(part: Tensor | None) -> Tensor | None:
        return None if part is None else part.reshape(rows, -1)

    return Codes(
        found.codes.reshape(rows, -1), found.scales.reshape(rows, -1), folded(found.minima),
        folded(found.part_scales), folded(found.part_minima),
    )  # fmt: skip


def _half(blocks: Tensor, start: int) -> Tensor:  # [blocks, bytes] -> [blocks, 1] float16
    return blocks[:, start : start + 2].contiguous().view(torch.float16)


def _q4(blocks: Tensor) -> Codes:
    return Codes(nibbles(blocks[:, -BLOCK // 2 :]), _half(blocks, 0))


def _q4_with_minima(blocks: Tensor) -> Codes:
    return Codes(nibbles(blocks[:, -BLOCK // 2 :]), _half(blocks, 0), -_half(blocks, 2))


def _five_bits(blocks: Tensor) -> Tensor:  # [blocks, bytes] -> [blocks, 32] uint8
    start = blocks.shape[1] - BLOCK // 2
    return nibbles(blocks[:, start:]) | bits(blocks[:, start - 4 : start]) << 4


def _q5(blocks: Tensor) -> Codes:
    return Codes(_five_bits(blocks), _half(blocks, 0))


def _q5_with_minima(blocks: Tensor) -> Codes:
    return Codes(_five_bits(blocks), _half(blocks, 0), -_half(blocks, 2))


def _q8(blocks: Tensor) -> Codes:
    return Codes(blocks[:, 2:] ^ 0x80, _half(blocks, 0))  # less 128 they are the integers


def _by_parts(blocks: Tensor, codes: Tensor) -> Codes:
    scales, minima = k_scales(blocks[:, 4:16])
    return Codes(codes, _half(blocks, 0), _half(blocks, 2), scales.view(torch.int8), minima.view(torch.int8))


def _q4_k(blocks: Tensor) -> Codes:
    return _by_parts(blocks, nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, K_BLOCK))


def _q5_k(blocks: Tensor) -> Codes:
    low = nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, PARTS, 32)
    high = blocks[:, None, 16:48] >> torch.arange(PARTS, dtype=torch.uint8)[:, None] & 1  # [blocks, 8, 32]
    return _by_parts(blocks, (low | high << 4).reshape(-1, K_BLOCK))


def _q6_k(blocks: Tensor) -> Codes:
    low = nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3  # [blocks, 2, 4, 32]
    codes = (low | high << 4).reshape(-1, K_BLOCK)
    return Codes(codes, _half(blocks, 208), part_scales=blocks[:, 192:208].contiguous().view(torch.int8))


def _mxfp4(blocks: Tensor) -> Codes:
    """Powers of two are bfloat16 numbers, even those that float32 holds with fewer digits alone."""
    scales = torch.ldexp(torch.ones(len(blocks), 1), blocks[:, :1].int() - 128)
    return Codes(nibbles(blocks[:, 1:]), scales.bfloat16())


MXFP4 = Form(4, BLOCK, dtype=torch.bfloat16, table=MXFP4_VALUES)
# Bytes of a block, its form, and its codes.
_KINDS: Mapping[str, tuple[int, Form, Callable[[Tensor], Codes]]] = {
    "Q4_0": (18, Form(4, BLOCK, zero=8), _q4),
    "Q4_1": (20, Form(4, BLOCK, has_minima=True), _q4_with_minima),
    "Q5_0": (22, Form(5, BLOCK, zero=16), _q5),
    "Q5_1": (24, Form(5, BLOCK, has_minima=True), _q5_with_minima),
    "Q8_0": (34, Form(8, BLOCK, zero=128), _q8),
    "Q4_K": (144, Form(4, K_BLOCK, part=32, has_minima=True), _q4_k),
    "Q5_K": (176, Form(5, K_BLOCK, part=32, has_minima=True), _q5_k),
    "Q6_K": (210, Form(6, K_BLOCK, part=16, zero=32), _q6_k),
    "MXFP4": (17, MXFP4, _mxfp4),
}
QUANTIZED_KINDS = tuple(_KINDS)
