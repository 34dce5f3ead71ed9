"""What quantised matrices have in common, however they are stored: codes of few bits, and what these stand for. A
number is scale * (code - zero) - minimum.

A matrix of this kind is read a few rows at a time, so that whoever lays it out holds little beside the result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

CHUNK = 1 << 20  # numbers that are decoded at a time


@dataclass(frozen=True, slots=True)
class Form:
    """How the numbers of a matrix are made. `span` inputs of an output share a scale; where they have parts, each part
    has an integer scale besides, by which the span's is multiplied, and so has each part its minimum."""

    bits: int  # of a code: 4, 5, 6 or 8
    span: int
    dtype: torch.dtype = torch.float16  # of a span's scale and minimum: float16, bfloat16 or float32
    part: int = 0  # inputs: 16 or 32; 0: none
    has_minima: bool = False
    zero: int = 0  # the code that stands for 0
    has_zeros: bool = False  # each span its own, in its place
    table: tuple[int, ...] = ()  # what the sixteen codes of 4 bits stand for, if not for themselves
    floats: bool = False  # codes of 8 bits are floats (e4m3)


@dataclass(frozen=True, slots=True)
class Codes:
    """Some rows of a matrix."""

    codes: Tensor  # [rows, in] uint8
    scales: Tensor  # [rows, in / span] of the form's dtype
    minima: Tensor | None = None  # the same
    part_scales: Tensor | None = None  # [rows, in / part] int8
    part_minima: Tensor | None = None  # the same
    zeros: Tensor | None = None  # [rows, in / span] uint8

    def __getitem__(self, chosen: Tensor | slice) -> Codes:
        """Of these rows."""

        return self._each(lambda part: part[chosen])

    def on(self, device: torch.device) -> Codes:
        """The same there."""
        return self._each(lambda part: part.to(device))

    def _each(self, change: Callable[[Tensor], Tensor]) -> Codes:
        def part(numbers: Tensor | None) -> Tensor | None:
            return None if numbers is None else change(numbers)

        return Codes(
            change(self.codes), change(self.scales), part(self.minima), part(self.part_scales), part(self.part_minima),
            part(self.zeros),
        )  # fmt: skip


def _joined(parts: Sequence[Codes]) -> Codes:
    """Of the same form, one below the other."""

    def part(all_of: Sequence[Tensor | None]) -> Tensor | None:
        found = [one for one in all_of if one is not None]
        return torch.cat(found) if found else None

    return Codes(
        torch.cat([one.codes for one in parts]), torch.cat([one.scales for one in parts]),
        part([one.minima for one in parts]), part([one.part_scales for one in parts]),
        part([one.part_minima for one in parts]), part([one.zeros for one in parts]),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """A matrix [out, in] as it is stored."""

    form: Form
    shape: tuple[int, int]
    read: Callable[[int, int], Codes]  # the rows from one to before another

    def __len__(self) -> int:
        return self.shape[0]

    def rows(self, start: int, end: int) -> QuantizedMatrix:
        """Those from `start` to before `end`."""
        return QuantizedMatrix(
            self.form, (end - start, self.shape[1]), lambda first, last: self.read(start + first, start + last)
        )

    def reordered(self, order: Tensor) -> QuantizedMatrix:  # [out] int64
        """Row i is this one's row order[i], which is not far from i."""

        def read(start: int, end: int) -> Codes:
            wanted = order[start:end]
            first, last = int(wanted.min()), int(wanted.max())
            return self.read(first, last + 1)[wanted - first]

        return QuantizedMatrix(self.form, (len(order), self.shape[1]), read)

    def decode(self) -> Tensor:  # [out, in] float32
        """The numbers."""
        numbers = torch.empty(self.shape)
        step = max(CHUNK // self.shape[1], 1)
        for start in range(0, len(self), step):
            end = min(start + step, len(self))
            numbers[start:end] = decode_codes(self.form, self.read(start, end))
        return numbers


def stacked(matrices: Sequence[QuantizedMatrix]) -> QuantizedMatrix:
    """Matrices of one form, and of rows of one length, one below the other."""
    bounds = [*accumulate(map(len, matrices), initial=0)]

    def read(start: int, end: int) -> Codes:
        cut = ((max(start - bound, 0), min(end - bound, len(m)), m) for bound, m in zip(bounds, matrices, strict=False))
        return _joined([matrix.read(first, last) for first, last, matrix in cut if first < last])

    return QuantizedMatrix(matrices[0].form, (bounds[-1], matrices[0].shape[1]), read)


def decode_codes(form: Form, given: Codes) -> Tensor:
    """The numbers of these rows, [rows, in] float32."""
    rows, width = given.codes.shape
    if form.table:
        numbers = torch.tensor(form.table, dtype=torch.float32, device=given.codes.device)[given.codes.long()]
    elif form.floats:
        numbers = given.codes.view(torch.float8_e4m3fn).float()
    else:
        numbers = given.codes.float() - form.zero
    if given.zeros is not None:
        numbers = (numbers.view(rows, -1, form.span) - given.zeros[..., None].float()).view(rows, width)
    numbers = numbers.view(rows, -1, form.part or form.span)
    numbers = _by_part(form, given.scales, given.part_scales)[..., None] * numbers
    if given.minima is not None:
        numbers = numbers - _by_part(form, given.minima, given.part_minima)[..., None]
    return numbers.view(rows, width)


def _by_part(form: Form, of_spans: Tensor, of_parts: Tensor | None) -> Tensor:
    """[rows, spans] and [rows, parts], or none -> [rows, parts or spans] float32."""
    if of_parts is None:
        return of_spans.float()
    return of_spans.float().repeat_interleave(form.span // form.part, dim=1) * of_parts.float()
