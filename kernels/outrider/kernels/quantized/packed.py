"""Quantised matrices as the Triton kernels read them: by inputs, so that what lies together is of neighbouring outputs,
which a tile of a product takes together. Codes keep their 4, 5, 6 or 8 bits, scales and minima their type.

Steps of 32 inputs are halves of 16. Below 8 bits byte j of a step has the lower four bits of inputs j and 16 + j; what
is above them lies apart, 4 bytes a step of 5 bits and 8 of 6."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.kernels.quantized.form import Codes, Form, QuantizedMatrix, decode_codes
from outrider.kernels.quantized.reference import MXFP4_VALUES, NIBBLE

STEP, HALF = 32, 16  # inputs
BLOCK_IN = 128  # inputs are filled up to a multiple of it
TILE_OUT = 64  # outputs, too
CHUNK = 1 << 22  # numbers that are laid out at a time


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A matrix [out, in] on its device. Columns are outputs; what fills them up is 0."""

    form: Form
    shape: tuple[int, int]
    codes: Tensor  # [inputs / 2, columns] uint8, or [inputs, columns] of 8 bits
    upper: Tensor | None  # [inputs * bits above the fourth / 8, columns] uint8, of 5 and 6 bits
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
    whole = inputs % form.span == 0 and (form.span == HALF or form.span % STEP == 0)
    parts = form.part in (0, HALF) or form.part % STEP == 0
    return (form.span == inputs or whole) and parts and form.bits in (4, 5, 6, 8) and form.table in ((), MXFP4_VALUES)


def pack(matrix: QuantizedMatrix, device: torch.device) -> PackedMatrix:
    """Takes little memory beside the result."""
    form, (outputs, inputs) = matrix.form, matrix.shape
    step, packed = max(CHUNK // inputs, 1), None
    for start in range(0, outputs, step):
        end = min(start + step, outputs)
        some = _laid_out(form, matrix.read(start, end))
        if packed is None:
            packed = _empty(form, matrix.shape, some, device)
        for name, part in some.items():
            getattr(packed, name)[:, start:end].copy_(part.T)
    if packed is None:
        raise ValueError(f"a matrix of shape {matrix.shape}; allowed: one that has outputs")
    return packed


def unpack(packed: PackedMatrix) -> Tensor:  # -> [out, in] float32
    """The numbers, by PyTorch."""
    outputs, inputs = packed.shape
    form = packed.form

    def rows(part: Tensor | None, size: int) -> Tensor | None:  # [n, columns] -> [out, inputs / size]
        return None if part is None else part.T[:outputs, : inputs // size].contiguous()

    lower, upper = packed.codes.T[:outputs], None if packed.upper is None else packed.upper.T[:outputs]
    codes = _codes_of(form.bits, lower, upper)[:, :inputs].contiguous()
    scales = packed.scales.T[:outputs, : inputs // form.span].contiguous()
    minima, zeros = rows(packed.minima, form.span), rows(packed.zeros, form.span)
    of_parts = rows(packed.part_scales, form.part), rows(packed.part_minima, form.part)
    return decode_codes(form, Codes(codes, scales, minima, *of_parts, zeros))


def _empty(form: Form, shape: tuple[int, int], some: dict[str, Tensor], device: torch.device) -> PackedMatrix:
    columns = _filled(shape[0], TILE_OUT)
    parts: dict[str, Tensor | None] = {field.name: None for field in fields(PackedMatrix)[2:]}
    for name, part in some.items():
        parts[name] = torch.zeros(part.shape[1], columns, dtype=part.dtype, device=device)
    return PackedMatrix(form, shape, **parts)  # type: ignore[arg-type]


def _laid_out(form: Form, given: Codes) -> dict[str, Tensor]:  # [rows, n] each
    """By the names of PackedMatrix's parts."""
    width = given.codes.shape[1]
    inputs = _filled(width, BLOCK_IN)
    codes = F.pad(given.codes, (0, inputs - width))
    found = {"codes": _lower(codes) if form.bits < 8 else codes}
    if form.bits in (5, 6):
        found["upper"] = _upper(codes, form.bits - 4)
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


def _lower(codes: Tensor) -> Tensor:  # [rows, inputs] uint8 -> [rows, inputs / 2] uint8
    halves = (codes & NIBBLE).unflatten(1, (-1, 2, HALF))  # [rows, steps, 2, 16]
    return (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1)


def _upper(codes: Tensor, bits: int) -> Tensor:
    """codes: [rows, inputs] uint8 -> [rows, inputs * bits / 8] uint8: byte j of a step has the upper bits of the inputs
    that are j more than a multiple of its bytes, the first half's in its lower four."""
    size = STEP * bits // 8  # bytes of a step
    places = (codes >> 4).unflatten(1, (-1, 2, HALF // size, size))  # [rows, steps, 2, places, size]
    return (places << _shifts(bits, codes.device)).sum((2, 3), dtype=torch.uint8).flatten(1)


def _shifts(bits: int, device: torch.device) -> Tensor:  # [2, places, 1] uint8
    per_half = torch.arange(0, 4, bits, dtype=torch.uint8, device=device)
    return torch.stack([per_half, per_half + 4])[..., None]


def _codes_of(bits: int, lower: Tensor, upper: Tensor | None) -> Tensor:
    """[outputs, bytes] uint8 each -> [outputs, inputs] uint8."""
    if bits == 8:
        return lower
    bytes_of = lower.unflatten(1, (-1, 1, HALF))
    codes = torch.cat([bytes_of & NIBBLE, bytes_of >> 4], dim=2).flatten(1)
    if upper is None:
        return codes
    size = STEP * (bits - 4) // 8
    spread = upper.unflatten(1, (-1, 1, 1, size)) >> _shifts(bits - 4, upper.device) & ((1 << bits - 4) - 1)
    return codes | spread.flatten(1) << 4
