"""Quantised matrices as the C kernels read them (`packed.h`): panels of 32 outputs, in them spans of inputs that share a
scale, in them steps of 32 inputs. Their codes stay packed."""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import Structure, c_int8, c_int64, c_void_p, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.kernels.cpu.memory import in_huge_pages
from outrider.kernels.quantized.form import Codes, Form, QuantizedMatrix

PANEL = 32  # outputs whose weights lie together
STEP = 32  # inputs of a step
CHUNK = 1 << 20  # numbers that are laid out at a time
_NUMBERS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


class Packing(Structure):
    """How codes lie."""

    _fields_ = (
        *((name, c_int64) for name in ("bits", "span", "numbers", "has_minima", "parts", "has_zeros", "zero")),
        ("table", c_void_p),
    )


def packing_of(form: Form) -> tuple[Packing, object]:
    """The form in the kernels' words, and what its pointer points to."""
    table = (c_int8 * 16)(*form.table) if form.table else None
    parts = STEP // form.part if form.part else 0
    packing = Packing(
        form.bits, form.span, _NUMBERS[form.dtype], form.has_minima, parts, form.has_zeros, form.zero,
        cast(table, c_void_p) if table is not None else None,
    )  # fmt: skip
    return packing, table


def can_pack(matrix: QuantizedMatrix) -> bool:
    """Whether the kernels take it; what they do not take is decoded."""
    form, inputs = matrix.form, matrix.shape[1]
    fits = inputs % form.span == 0 and form.span % STEP == 0 and form.part in (0, STEP // 2, STEP)
    shifted = form.zero != 0 or form.has_zeros
    known = form.bits in (4, 5, 6) if shifted else form.bits in (4, 5, 6, 8)
    by_table = form.bits == 4 and not shifted or not form.table
    return fits and known and by_table and not (form.has_minima and form.part == STEP // 2)


def pack_quantized(matrix: QuantizedMatrix) -> Tensor:
    """[ceil(out / 32), bytes of a panel] uint8, filled up with zeros. Takes little memory beside the result."""
    outputs, inputs = matrix.shape
    packed: Tensor | None = None
    step = max(CHUNK // inputs // PANEL, 1) * PANEL
    for start in range(0, outputs, step):
        panels = _panels(matrix.form, matrix.read(start, min(start + step, outputs)))
        if packed is None:
            packed = in_huge_pages((-(-outputs // PANEL), panels.shape[1]), torch.uint8)
        packed[start // PANEL :][: len(panels)] = panels
    assert packed is not None
    return packed


def _panels(form: Form, given: Codes) -> Tensor:  # [panels, bytes]
    codes = _by_panel(given.codes, STEP)  # [panels, steps, 32 inputs, 32 outputs]
    panels, steps = codes.shape[:2]
    of_steps = [*_part_numbers(form, given, (panels, steps)), _packed_codes(form.bits, codes.flatten(2))]
    spans = steps * STEP // form.span
    of_span = [_bytes(_by_panel(part, 1)) for part in _span_numbers(given)]  # [panels, spans, bytes] each
    steps_bytes = torch.cat(of_steps, dim=2).view(panels, spans, -1)
    return torch.cat([*of_span, steps_bytes], dim=2).flatten(1)


def _span_numbers(given: Codes) -> Iterator[Tensor]:  # [rows, spans] each
    yield given.scales
    if given.minima is not None:
        yield given.minima
    if given.zeros is not None:
        yield from (given.zeros, given.zeros)


def _part_numbers(form: Form, given: Codes, shape: tuple[int, int]) -> Iterator[Tensor]:  # [panels, steps, bytes] each
    for part in (given.part_scales, given.part_minima):
        if part is not None:
            yield _bytes(_by_panel(part, STEP // form.part)).view(*shape, -1)


def _by_panel(rows: Tensor, together: int) -> Tensor:
    """[rows, n] -> [panels, n / together, together, 32], filled up with zeros."""
    filled = F.pad(rows, (0, 0, 0, -len(rows) % PANEL))
    return filled.view(-1, PANEL, rows.shape[1] // together, together).permute(0, 2, 3, 1)


def _bytes(numbers: Tensor) -> Tensor:  # [panels, n, together, 32] -> [panels, n, bytes] uint8
    return numbers.contiguous().view(torch.uint8).flatten(2)


def _packed_codes(bits: int, codes: Tensor) -> Tensor:  # [panels, steps, 1024] -> [panels, steps, 128 bits] uint8
    if bits == 8:
        return codes.contiguous().view(torch.uint8)
    low, high = (codes & 15).chunk(2, dim=2)
    nibbles = low | high << 4
    if bits == 4:
        return nibbles
    width = bits - 4
    upper = (codes >> 4).unflatten(2, (8 // width, -1))  # [panels, steps, places in a byte, bytes]
    above = torch.zeros_like(upper[:, :, 0])
    for place in range(8 // width):
        above |= upper[:, :, place] << place * width
    return torch.cat([nibbles, above], dim=2)
