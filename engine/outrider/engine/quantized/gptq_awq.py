"""Checkpoints of GPTQ and AWQ: integers in words, [in, out] turned, with zero points. The layouts are AutoGPTQ's and
AutoAWQ's ("gemm")."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from outrider.engine.models.base import UnsupportedModel, WrongCheckpoint
from outrider.engine.quantized.numbers import BITS, WORD, Integers, unpack

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # of the outputs in a word, from its lowest bits on


class _Words:
    """What both have: qweight, qzeros and scales of each product."""

    parts: tuple[str, ...] = ("qweight", "qzeros", "scales", "g_idx")
    bits_served: tuple[int, ...] = BITS

    def __init__(self, said: Mapping[str, Any], name: str) -> None:
        bits, group = said.get("bits", said.get("w_bit")), said.get("group_size", said.get("q_group_size"))
        if type(bits) is not int or bits not in self.bits_served:
            allowed = ", ".join(map(str, self.bits_served))
            raise UnsupportedModel(f"quantization_config: bits: is {bits!r:.40} of {name}; allowed: {allowed}")
        if type(group) is not int or not (group == -1 or group > 0):
            raise UnsupportedModel(
                f"quantization_config: group_size: is {group!r:.40}; allowed: -1, or a number of inputs"
            )
        self._bits, self._group = bits, group

    def module(self, name: str) -> str | None:
        """The module of which a tensor of that name is the weight; None: of none that is quantised."""
        stem, _, part = name.rpartition(".")
        return stem if part == "qweight" else None

    def _part(self, module: str, stored: Mapping[str, Tensor], part: str, dtype: torch.dtype | None) -> Tensor:
        found = stored.get(f"{module}.{part}")
        if found is None or found.dim() != 2 or (dtype is not None and found.dtype != dtype):
            has = "is not there" if found is None else f"is {found.dtype} of shape {tuple(found.shape)}"
            raise WrongCheckpoint(f"{module}.{part}: {has}; allowed: a matrix of {dtype or 'floats'}")
        return found

    def _made(
        self, module: str, codes: Tensor, zeros: Tensor, scales: Tensor, group_of: Tensor | None = None
    ) -> Integers:  # of codes [in, out], zeros and scales [groups, out]
        group = codes.shape[0] if self._group == -1 else self._group
        middle = 1 << self._bits - 1
        turned, points = codes.t().contiguous(), zeros.t().contiguous()
        if bool((points == middle).all()):  # as where zero is in the middle of all
            around = (turned.short() - middle).to(torch.int8)
            return Integers(around, self._bits, scales.t().contiguous(), group, None, group_of).check(module)
        return Integers(turned, self._bits, scales.t().contiguous(), group, points, group_of).check(module)


class Gptq(_Words):
    """How a checkpoint of GPTQ is read. Before version 2 zero points were stored less one."""

    def __init__(self, said: Mapping[str, Any]) -> None:
        """`said` is the quantization_config. Raises UnsupportedModel for what is not served, by name."""
        super().__init__(said, "GPTQ")
        form = said.get("checkpoint_format", "gptq")
        if form not in ("gptq", "gptq_v2"):
            raise UnsupportedModel(f"quantization_config: checkpoint_format: is {form!r:.40}; allowed: gptq, gptq_v2")
        self._less = 1 if form == "gptq" else 0

    def shape(self, module: str, stored: Mapping[str, Tensor]) -> tuple[int, ...]:
        """Of the weight of a module, [out, in]. Raises WrongCheckpoint."""
        rows, outputs = self._part(module, stored, "qweight", torch.int32).shape
        return outputs, rows * WORD // self._bits

    def numbers(self, module: str, stored: Mapping[str, Tensor]) -> Integers:
        """The weight of a module. Raises WrongCheckpoint."""
        words = self._part(module, stored, "qweight", torch.int32)  # [in * bits / 32, out]
        zeros = self._part(module, stored, "qzeros", torch.int32)  # [groups, out * bits / 32]
        scales = self._part(module, stored, "scales", None)  # [groups, out]
        outputs, inputs = self.shape(module, stored)
        if zeros.shape[1] * WORD // self._bits != outputs:
            raise WrongCheckpoint(f"{module}.qzeros: has shape {tuple(zeros.shape)}, for {outputs} outputs")
        points = unpack(zeros, self._bits, outputs, 1).short() + self._less
        codes = unpack(words, self._bits, inputs, 0)
        order = stored.get(f"{module}.g_idx")
        group = inputs if self._group == -1 else self._group
        in_order = order is None or torch.equal(order.long(), torch.arange(inputs) // group)
        return self._made(module, codes, points, scales, None if in_order or order is None else order.long())


class Awq(_Words):
    """How a checkpoint of AWQ is read."""

    bits_served = (4,)

    def __init__(self, said: Mapping[str, Any]) -> None:
        """`said` is the quantization_config. Raises UnsupportedModel for what is not served, by name."""
        super().__init__(said, "AWQ")
        version = str(said.get("version", "gemm")).lower()
        if version != "gemm":
            raise UnsupportedModel(f"quantization_config: version: is {version!r:.40} of AWQ; allowed: gemm")
        self._has_zeros = bool(said.get("zero_point", True))

    def shape(self, module: str, stored: Mapping[str, Tensor]) -> tuple[int, ...]:
        """Of the weight of a module, [out, in]. Raises WrongCheckpoint."""
        inputs, words = self._part(module, stored, "qweight", torch.int32).shape
        return words * len(AWQ_ORDER), inputs

    def numbers(self, module: str, stored: Mapping[str, Tensor]) -> Integers:
        """The weight of a module. Raises WrongCheckpoint."""
        words = self._part(module, stored, "qweight", torch.int32)  # [in, out / 8]
        scales = self._part(module, stored, "scales", None)  # [groups, out]
        codes = self._in_order(words)
        if self._has_zeros:
            zeros = self._in_order(self._part(module, stored, "qzeros", torch.int32))  # [groups, out]
        else:
            zeros = torch.full_like(scales, 8, dtype=torch.uint8)
        return self._made(module, codes, zeros, scales)

    def _in_order(self, words: Tensor) -> Tensor:  # [rows, out / 8] -> [rows, out]
        rows, count = words.shape[0], words.shape[1] * len(AWQ_ORDER)
        return unpack(words, 4, count, 1).view(rows, -1, len(AWQ_ORDER))[:, :, list(AWQ_ORDER)].flatten(1)
