"""What stands for a matrix in a quantised checkpoint, whoever wrote it, and the numbers that it stands for."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.engine.models.base import WrongCheckpoint
from outrider.kernels.quantized.form import Codes, Form, QuantizedMatrix

BITS = (4, 8)  # of integers
MOST_ZERO = 255  # of a zero point that stays as it is
HALVES = (torch.float16, torch.bfloat16)
WORD = 32  # bits of the integers in which others are packed


@dataclass(frozen=True, slots=True)
class Integers:
    """Numbers are (code - zero) * scale, by groups of inputs."""

    codes: Tensor  # [out, in] int8, or uint8
    bits: int
    scales: Tensor  # [out, groups] of any floating type
    group: int  # inputs that share a scale, where they lie together
    zeros: Tensor | None = None  # [out, groups] of the codes' type; None: 0
    group_of: Tensor | None = None  # [in] int64: the group of each input, where those of one do not lie together

    def decode(self) -> Tensor:  # [out, in] float32
        """The numbers. A scale and a code are exact in float32, their product is rounded once."""
        groups = self._groups()
        numbers = self.codes.float()
        if self.zeros is not None:
            numbers -= self.zeros.float()[:, groups]
        return numbers.mul_(self.scales.float()[:, groups])

    @property
    def matrix(self) -> QuantizedMatrix | None:
        """As the kernels keep it; None for what they have no form for: it is decoded."""
        form = self.form
        return None if form is None else QuantizedMatrix(form, (self.codes.shape[0], self.codes.shape[1]), self.read)

    @property
    def form(self) -> Form | None:
        """The kernels', if they have one for them."""
        beyond = self.zeros is not None and int(self.zeros.short().max()) + self._middle > MOST_ZERO
        if self.group_of is not None or self.codes.shape[1] % self.group or beyond:
            return None
        dtype = self.scales.dtype if self.scales.dtype in HALVES else torch.float32
        has_zeros = self.zeros is not None
        return Form(self.bits, self.group, dtype, zero=0 if has_zeros else self._middle, has_zeros=has_zeros)

    def read(self, start: int, end: int) -> Codes:
        """The rows from one to before another, in that form."""
        scales, zeros = self.scales[start:end], None if self.zeros is None else self._from_0(self.zeros[start:end])
        return Codes(
            self._from_0(self.codes[start:end]), scales if scales.dtype in HALVES else scales.float(), zeros=zeros
        )

    @property
    def _middle(self) -> int:
        """What is added to codes, which the kernels' are not below 0."""
        return 1 << self.bits - 1 if self.codes.dtype == torch.int8 else 0

    def _from_0(self, codes: Tensor) -> Tensor:
        return (codes.short() + self._middle).to(torch.uint8)

    def check(self, name: str) -> Integers:
        """Itself. Raises WrongCheckpoint where its parts do not fit one another."""
        (outputs, inputs), groups = self.codes.shape, self.scales.shape[-1]
        wanted = (outputs, -(-inputs // self.group))
        if self.scales.shape != wanted or (self.zeros is not None and self.zeros.shape != wanted):
            zeros = "" if self.zeros is None else f", zero points {tuple(self.zeros.shape)}"
            given = f"has shape {(outputs, inputs)} in groups of {self.group}, and scales {tuple(self.scales.shape)}"
            raise WrongCheckpoint(f"{name}: {given}{zeros}; allowed: {wanted}")
        if self.group_of is not None and not _are_groups(self.group_of, inputs, groups):
            raise WrongCheckpoint(f"{name}: its inputs' groups are not {inputs} numbers from 0 to {groups - 1}")
        return self

    def _groups(self) -> Tensor:  # [in] int64
        if self.group_of is not None:
            return self.group_of
        return torch.arange(self.codes.shape[1]) // self.group


def _are_groups(group_of: Tensor, inputs: int, groups: int) -> bool:
    return group_of.shape == (inputs,) and bool(((group_of >= 0) & (group_of < groups)).all())


@dataclass(frozen=True, slots=True)
class SmallFloats:
    """Numbers are floats of 8 bits times a scale of the matrix, of each output, or of each block."""

    floats: Tensor  # [out, in] float8
    scales: Tensor  # [], [1], [out, 1], or [blocks of outputs, blocks of inputs]
    block: tuple[int, int] | None = None  # outputs and inputs of a block

    @property
    def matrix(self) -> QuantizedMatrix | None:
        """As the kernels keep it; None for what they have no form for: it is decoded."""
        outputs, inputs = self.floats.shape
        rows, span = (outputs, inputs) if self.block is None else self.block
        if self.floats.dtype != torch.float8_e4m3fn or inputs % span:
            return None
        scales = self.scales if self.scales.dtype in HALVES else self.scales.float()
        by_rows = scales if self.block is not None else scales.reshape(-1, 1)
        shared = rows if len(by_rows) < outputs else 1  # outputs of a scale

        def read(start: int, end: int) -> Codes:
            return Codes(self.floats[start:end].view(torch.uint8), by_rows[torch.arange(start, end) // shared])

        return QuantizedMatrix(Form(8, span, scales.dtype, floats=True), (outputs, inputs), read)

    def decode(self) -> Tensor:  # [out, in] float32
        """The numbers."""
        scales = self.scales.float()
        if self.block is not None:
            outputs, inputs = self.floats.shape
            scales = scales.repeat_interleave(self.block[0], 0)[:outputs]
            scales = scales.repeat_interleave(self.block[1], 1)[:, :inputs]
        return self.floats.float().mul_(scales)

    def check(self, name: str) -> SmallFloats:
        """Itself. Raises WrongCheckpoint where its parts do not fit one another."""
        shape, given = self.floats.shape, tuple(self.scales.shape)
        if self.block is not None:
            fits = given == tuple(-(-size // part) for size, part in zip(shape, self.block, strict=True))
        else:
            fits = given in ((), (1,), (1, 1), (shape[0], 1))
        if not fits:
            raise WrongCheckpoint(f"{name}: has shape {tuple(shape)}, and scales {given}, which do not fit")
        return self


def unpack(words: Tensor, bits: int, count: int, dim: int) -> Tensor:
    """words: int32, each of which holds 32 / bits numbers along `dim`, the first in the lowest bits -> uint8 with
    `count` of them along it."""
    shifts = torch.arange(0, WORD, bits, dtype=torch.int32)
    spread = (words.unsqueeze(dim + 1) >> shifts.view(-1, *[1] * (words.dim() - dim - 1))) & ((1 << bits) - 1)
    return spread.flatten(dim, dim + 1).narrow(dim, 0, count).to(torch.uint8)
