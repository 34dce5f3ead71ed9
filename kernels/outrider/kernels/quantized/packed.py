"""Quantised matrices as the Triton kernels read them: a block of inputs of all outputs, then the next, so that what a
tile of a product takes lies together. Codes keep their 4, 5, 6 or 8 bits, scales and minima their type.

A block is 128 inputs in eight turns of 16. Of 4 to 6 bits word j of an output has the lower four bits of input j of
each turn, the first turn's lowest; what is above them lies apart in the same order, eight times one or two bits. Of
8 bits there are two words, of four turns each."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.kernels.quantized.form import Codes, Form, QuantizedMatrix, decode_codes
from outrider.kernels.quantized.reference import MXFP4_VALUES

TURN, STEP, BLOCK = 16, 32, 128  # inputs, which are filled up to whole blocks
TILE_OUT = 64  # outputs are filled up to a multiple of it
UPPER = {5: torch.uint8, 6: torch.int16}  # what holds eight times the bits above the fourth
CHUNK = 1 << 22  # numbers that are laid out at a time


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A matrix [out, in] on its device. Columns are outputs; what fills them up is 0."""

    form: Form
    shape: tuple[int, int]
    codes: Tensor  # [blocks, columns, 16] int32, or [2 * blocks, columns, 16] of 8 bits
    upper: Tensor | None  # [blocks, columns, 16], uint8 of 5 bits, int16 of 6
    scales: Tensor  # [spans, columns] of the form's dtype
    minima: Tensor | None  # the same
    part_scales: Tensor | None  # [parts, columns] int8
    part_minima: Tensor | None  # the same
    zeros: Tensor | None  # [spans, columns] uint8

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def num_bytes(self) -> int:
        """All that a product reads of it."""
        parts = (getattr(self, field.name) for field in fields(self))
        return sum(part.nbytes for part in parts if isinstance(part, Tensor))


def can_pack(matrix: QuantizedMatrix) -> bool:
    """Whether the kernels take it; what they do not take is decoded."""
    form, inputs = matrix.form, matrix.shape[1]
    whole = inputs % form.span == 0 and (form.span == TURN or form.span % STEP == 0)
    parts = form.part in (0, TURN) or form.part % STEP == 0
    return (form.span == inputs or whole) and parts and form.bits in (4, 5, 6, 8) and form.table in ((), MXFP4_VALUES)


def pack(matrix: QuantizedMatrix, device: torch.device) -> PackedMatrix:
    """Lays a matrix out, on the device. Takes little memory beside the result."""
    form, (outputs, inputs) = matrix.form, matrix.shape
    step, packed = max(CHUNK // inputs, 1), None
    for start in range(0, outputs, step):
        end = min(start + step, outputs)
        some = _laid_out(form, matrix.read(start, end).on(device))
        if packed is None:
            packed = _empty(form, matrix.shape, some, device)
        for name, part in some.items():
            getattr(packed, name)[:, start:end].copy_(part.transpose(0, 1))
    if packed is None:
        raise ValueError(f"a matrix of shape {matrix.shape}; allowed: one that has outputs")
    return packed


def unpack(packed: PackedMatrix) -> Tensor:  # -> [out, in] float32
    """The numbers, by PyTorch."""
    outputs, inputs = packed.shape
    form = packed.form

    def rows(part: Tensor | None, size: int) -> Tensor | None:  # [n, columns] -> [out, inputs / size]
        return None if part is None else part.T[:outputs, : inputs // size].contiguous()

    codes = _apart(packed.codes, 8 if form.bits == 8 else 4)
    if packed.upper is not None:
        codes |= _apart(packed.upper, form.bits - 4) << 4
    codes = codes[:outputs, :inputs].contiguous()
    scales = packed.scales.T[:outputs, : inputs // form.span].contiguous()
    minima, zeros = rows(packed.minima, form.span), rows(packed.zeros, form.span)
    of_parts = rows(packed.part_scales, form.part), rows(packed.part_minima, form.part)
    return decode_codes(form, Codes(codes, scales, minima, *of_parts, zeros))


def _empty(form: Form, shape: tuple[int, int], some: dict[str, Tensor], device: torch.device) -> PackedMatrix:
    columns = _filled(shape[0], TILE_OUT)
    parts: dict[str, Tensor | None] = {field.name: None for field in fields(PackedMatrix)[2:]}
    for name, part in some.items():
        parts[name] = torch.zeros(part.shape[1], columns, *part.shape[2:], dtype=part.dtype, device=device)
    return PackedMatrix(form, shape, **parts)  # type: ignore[arg-type]


def _laid_out(form: Form, given: Codes) -> dict[str, Tensor]:  # [rows, n] or [rows, n, 16] each
    """By the names of PackedMatrix's parts."""
    width = given.codes.shape[1]
    inputs = _filled(width, BLOCK)
    codes = F.pad(given.codes, (0, inputs - width))
    lower = 8 if form.bits == 8 else 4
    found = {"codes": _together(codes & ((1 << lower) - 1), lower, torch.int32)}
    if form.bits > lower:
        found["upper"] = _together(codes >> lower, form.bits - lower, UPPER[form.bits])
    by_span = {"scales": given.scales, "minima": given.minima, "zeros": given.zeros}
    by_part = {"part_scales": given.part_scales, "part_minima": given.part_minima}
    for names, size in ((by_span, form.span), (by_part, form.part)):
        for name, part in names.items():
            if part is not None:
                count = 1 if size == width else -(-inputs // size)
                found[name] = F.pad(part, (0, count - part.shape[1]))
    return found


def _filled(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _together(codes: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """codes: [rows, inputs] uint8, of so many bits -> [rows, words of 16 turns, 16] of the type that they fill."""
    turns = codes.view(len(codes), -1, dtype.itemsize * 8 // bits, TURN)  # [rows, words, turns, 16]
    words = torch.zeros(len(codes), turns.shape[1], TURN, dtype=torch.int32, device=codes.device)
    for turn in range(turns.shape[2]):
        words |= turns[:, :, turn].int() << turn * bits
    return words.to(dtype)  # of which it keeps the last bits


def _apart(words: Tensor, bits: int) -> Tensor:
    """[blocks, columns, 16] of some type -> [columns, inputs] uint8: what `_together` put there."""
    places = torch.arange(0, words.dtype.itemsize * 8, bits, device=words.device)
    turns = words.transpose(0, 1)[:, :, None].int() >> places[:, None] & (
        (1 << bits) - 1
    )  # [columns, words, turns, 16]
    return turns.to(torch.uint8).flatten(1)
