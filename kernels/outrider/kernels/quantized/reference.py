"""What the blocks of a GGUF file mean, kind by kind, in PyTorch. The layouts are ggml's (`ggml-common.h`), the numbers
those of its `dequantize_row_*`.

A row is whole blocks, each of which has its scale, and in some kinds a minimum, as float16. K kinds have blocks of 256
in parts of 32 or 16, whose own scales are integers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

NIBBLE = 0xF
MXFP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice what four bits stand for
PARTS = 8  # of a block of Q4_K and Q5_K


def decode(kind: str, rows: Tensor) -> Tensor:
    """rows: [rows, bytes] uint8, whole blocks of a kind by ggml's name -> [rows, numbers] float32."""
    split, numbers = _DECODERS[kind]
    blocks = rows.reshape(-1, split)  # [blocks, bytes]
    return numbers(blocks).reshape(len(rows), -1)


def _half(blocks: Tensor, start: int) -> Tensor:  # [blocks, bytes] -> [blocks, 1] float32
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def nibbles(packed: Tensor) -> Tensor:  # [..., n] -> [..., 2 n]
    """Fours of bits: all low ones, then all high ones."""
    return torch.cat([packed & NIBBLE, packed >> 4], dim=-1)


def bits(packed: Tensor) -> Tensor:  # [blocks, bytes] -> [blocks, 8 bytes]
    """Single bits, of each byte the lowest first."""
    return (packed[..., None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(-2)


def _q4_0(blocks: Tensor) -> Tensor:
    return (nibbles(blocks[:, 2:]).float() - 8) * _half(blocks, 0)


def _q4_1(blocks: Tensor) -> Tensor:
    return nibbles(blocks[:, 4:]).float() * _half(blocks, 0) + _half(blocks, 2)


def _q5(blocks: Tensor, start: int) -> Tensor:
    """Integers from 0 to 31, behind their fifth bits."""
    return (nibbles(blocks[:, start + 4 :]) | bits(blocks[:, start : start + 4]) << 4).float()


def _q5_0(blocks: Tensor) -> Tensor:
    return (_q5(blocks, 2) - 16) * _half(blocks, 0)


def _q5_1(blocks: Tensor) -> Tensor:
    return _q5(blocks, 4) * _half(blocks, 0) + _half(blocks, 2)


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].view(torch.int8).float() * _half(blocks, 0)


def k_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """packed: [blocks, 12] -> the scales and minima of the parts, [blocks, 8] uint8 each, of six bits."""
    low, middle, high = packed.split(4, dim=-1)
    scales = torch.cat([low & 63, (high & NIBBLE) | (low >> 6 << 4)], dim=-1)
    minima = torch.cat([middle & 63, (high >> 4) | (middle >> 6 << 4)], dim=-1)
    return scales, minima


def _by_parts(blocks: Tensor, numbers: Tensor) -> Tensor:
    """numbers: [blocks, 8, 32] integers of a K kind whose blocks begin with two halves and packed scales."""
    scales, minima = k_scales(blocks[:, 4:16])
    scales, minima = _half(blocks, 0) * scales.float(), _half(blocks, 2) * minima.float()  # [blocks, 8] each
    return (scales[..., None] * numbers.float() - minima[..., None]).flatten(1)


def _q4_k(blocks: Tensor) -> Tensor:
    return _by_parts(blocks, nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, PARTS, 32))


def _q5_k(blocks: Tensor) -> Tensor:
    low = nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, PARTS, 32)
    high = blocks[:, None, 16:48] >> torch.arange(PARTS, dtype=torch.uint8)[:, None] & 1  # [blocks, 8, 32]
    return _by_parts(blocks, low | high << 4)


def _q6_k(blocks: Tensor) -> Tensor:
    low = nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3  # [blocks, 2, 4, 32]
    numbers = (low | high << 4).float() - 32
    scales = blocks[:, 192:208].view(torch.int8).float() * _half(blocks, 208)  # [blocks, 16]
    return (numbers.reshape(-1, 16, 16) * scales[..., None]).flatten(1)


def _mxfp4(blocks: Tensor) -> Tensor:
    values = torch.tensor(MXFP4_VALUES, dtype=torch.float32)[nibbles(blocks[:, 1:]).long()]
    return torch.ldexp(values, blocks[:, :1].int() - 128)


def _plain(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda blocks: blocks.view(dtype).float()


_DECODERS: Mapping[str, tuple[int, Callable[[Tensor], Tensor]]] = {  # bytes of a block, and what they stand for
    "F32": (4, _plain(torch.float32)),
    "F16": (2, _plain(torch.float16)),
    "BF16": (2, _plain(torch.bfloat16)),
    "Q4_0": (18, _q4_0),
    "Q4_1": (20, _q4_1),
    "Q5_0": (22, _q5_0),
    "Q5_1": (24, _q5_1),
    "Q8_0": (34, _q8_0),
    "Q4_K": (144, _q4_k),
    "Q5_K": (176, _q5_k),
    "Q6_K": (210, _q6_k),
    "MXFP4": (17, _mxfp4),
}
