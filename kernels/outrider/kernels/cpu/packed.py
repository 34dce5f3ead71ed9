"""Quantised matrices as the C kernels read them (`packed.h`): panels of 32 outputs, in them spans of inputs that share
a scale, in them steps of 32 inputs. Their codes stay packed."""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import Structure, c_int8, c_int64

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.kernels.cpu.memory import in_huge_pages
from outrider.kernels.quantized.form import Codes, Form, QuantizedMatrix

PANEL = 32  # outputs whose weights lie together
STEP = 32  # inputs of a step
PART = 16  # inputs that are added up before they are scaled
BY_TABLE = 3  # the kernels' word for codes of 4 bits that a table explains
CHUNK = 1 << 18  # numbers that are laid out at a time
_NUMBERS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


class Packing(Structure):
    """How codes lie."""

    _fields_ = (
        *((name, c_int64) for name in ("codes", "span", "numbers", "has_minima", "parts", "has_zeros", "zero")),
        ("table", c_int8 * 16),
    )


def packing_of(form: Form) -> Packing:
    """The form in the kernels' words."""
    parts, zero = STEP // form.part if form.part else 0, form.zero
    table: tuple[int, ...] = ()
    if form.table:
        zero = -min(form.table)
        table = tuple(number + zero for number in form.table)
    return Packing(
        BY_TABLE if table else form.bits, form.span, _NUMBERS[form.dtype], form.has_minima, parts, form.has_zeros, zero,
        (c_int8 * 16)(*table),
    )  # fmt: skip


def can_pack(matrix: QuantizedMatrix) -> bool:
    """Whether the kernels take it; what they do not take is decoded."""
    form, inputs = matrix.form, matrix.shape[1]
    fits = inputs % form.span == 0 and form.span % STEP == 0
    parts = form.part in (0, STEP) or (form.part == PART and not form.has_minima)
    tabled = form.bits == 4 and not form.has_zeros and not form.zero
    return fits and parts and form.bits in (4, 5, 6, 8) and (tabled or not form.table) and not form.floats


def can_round(matrix: QuantizedMatrix) -> bool:
    """Whether rows of integers of 16 bits can be multiplied with it: of what is packed all that has no scales of 16
    inputs, but codes of 6 bits."""
    return can_pack(matrix) and (matrix.form.part != PART or matrix.form.bits == 6)


def pack_quantized(matrix: QuantizedMatrix) -> Tensor:
    """[ceil(out / 32), bytes of a panel] uint8, filled up with zeros. Takes little memory beside the result."""
    outputs, inputs = matrix.shape
    width = _panels(matrix.form, matrix.read(0, 1)).shape[1]
    packed = in_huge_pages((-(-outputs // PANEL), width), torch.uint8)
    step = max(CHUNK // inputs // PANEL, 1) * PANEL
    for start in range(0, outputs, step):
        panels = _panels(matrix.form, matrix.read(start, min(start + step, outputs)))
        packed[start // PANEL :][: len(panels)] = panels
    return packed


def _panels(form: Form, given: Codes) -> Tensor:  # [panels, bytes]
    codes = _by_panel(given.codes, STEP)  # [panels, steps, 32 inputs, 32 outputs]
    panels, steps = codes.shape[:2]
    of_steps = [*_part_numbers(form, given, (panels, steps)), _bytes(_words(form.bits, codes))]
    spans = steps * STEP // form.span
    of_span = [_bytes(_by_panel(part, 1)) for part in _span_numbers(given)]  # [panels, spans, bytes] each
    steps_bytes = torch.cat(of_steps, dim=2).view(panels, spans, -1)
    return torch.cat([*of_span, steps_bytes], dim=2).flatten(1)


def _span_numbers(given: Codes) -> Iterator[Tensor]:  # [rows, spans] each
    yield given.scales
    if given.minima is not None:
        yield given.minima
    if given.zeros is not None:
        yield from (given.zeros ^ 0x80, torch.zeros_like(given.zeros))


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


def _words(bits: int, codes: Tensor) -> Tensor:
    """codes: [panels, steps, 32 inputs, 32 outputs] uint8 -> [panels, steps, bits, 32 outputs] int32."""
    quads = codes.unflatten(2, (-1, 4))  # [panels, steps, 8 quads, 4 inputs, 32]
    if bits == 8:
        return _by_bytes(quads)
    lower, upper = (quads & 15).unflatten(2, (-1, 2)).unbind(3)  # [panels, steps, 4, 4 inputs, 32]
    words = [_by_bytes(lower | upper << 4)]
    if bits > 4:
        rest, width = quads >> 4, bits - 4
        of_words = rest.unflatten(2, (width, -1))  # [panels, steps, words, quads of a word, 4 inputs, 32]
        shifts = torch.arange(of_words.shape[3], dtype=torch.uint8)[:, None, None] * width
        words.append(_by_bytes((of_words << shifts).sum(3, dtype=torch.uint8)))
    return torch.cat(words, dim=2)


def _by_bytes(numbers: Tensor) -> Tensor:
    """[..., 4, 32] uint8 -> [..., 32] int32, the first one lowest."""
    whole = numbers.int()
    return whole[..., 0, :] | whole[..., 1, :] << 8 | whole[..., 2, :] << 16 | whole[..., 3, :] << 24
