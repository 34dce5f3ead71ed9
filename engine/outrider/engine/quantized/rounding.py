"""Matrices rounded to the nearest of few integers, and stored as compressed-tensors stores them ("pack-quantized")."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from outrider.engine.models.base import UnsupportedModel
from outrider.engine.quantized.numbers import WORD, Integers
from outrider.kernels.quantized.form import Codes, QuantizedMatrix

Rounding = Literal["int8", "int4"]
GROUP = 32  # inputs that share a scale, where nothing else is said
IN_4_BITS = ("proj", ".experts.")  # in the names of what is rounded so, where 4 bits are asked for
BITS_OF: dict[Rounding, int] = {"int8": 8, "int4": 4}


def round_to_nearest(weight: Tensor, rounding: Rounding, group: int | None) -> Integers:
    """weight: [out, in] of any floating type -> integers around 0 with a bfloat16 scale for each `group` inputs, or for
    each output. The greatest of a group lies half a step beyond the last integer, which halves the step's error for all
    others at that one's cost. Raises UnsupportedModel where a row is not whole groups."""
    bits, (outputs, inputs) = BITS_OF[rounding], weight.shape
    size = inputs if group is None else group
    if inputs % size:
        raise UnsupportedModel(f"group: is {size}, and a matrix has rows of {inputs}; allowed: a divisor of it")
    grouped, most = weight.float().view(outputs, -1, size), 2 ** (bits - 1)
    scales = (grouped.abs().amax(-1) / (most - 0.5)).bfloat16()
    steps = torch.where(scales == 0, 1.0, scales.float())  # a group of zeros
    codes = (grouped / steps[..., None]).round_().clamp_(-most, most - 1).to(torch.int8)
    return Integers(codes.view(outputs, inputs), bits, scales, size)


def stored_parts(integers: Integers) -> dict[str, Tensor]:
    """The tensors of a module, by their last names."""
    offset = (integers.codes.int() + (1 << integers.bits - 1)).to(torch.int32)
    return {
        "weight_packed": _words(offset, integers.bits),
        "weight_scale": integers.scales,
        "weight_shape": torch.tensor(integers.codes.shape),
    }


def quantization_config(rounding: Rounding, group: int | None, ignored: list[str]) -> dict[str, Any]:
    """What a config.json says of them; `ignored` are products that stay as they are."""
    strategy: dict[str, Any] = {"strategy": "channel"} if group is None else {"strategy": "group", "group_size": group}
    weights = {"num_bits": BITS_OF[rounding], "type": "int", "symmetric": True, "dynamic": False, **strategy}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
        "ignore": ignored,
    }


class RoundedTensors(Mapping[str, Tensor]):
    """A model's tensors (a LazyState) with its matrices rounded when they are asked for. What is looked up, and by
    which a token is chosen, has 8 bits: there a rounding costs most."""

    def __init__(self, state: Mapping[str, Tensor], meta: Mapping[str, Tensor], group: int = GROUP) -> None:
        self._state, self.meta, self._group = state, meta, group

    def __getitem__(self, name: str) -> Tensor:
        weight = self._state[name]
        return weight if self.meta[name].dim() != 2 else self._rounded(name, weight).decode()

    def __iter__(self) -> Iterator[str]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)

    def packed(self, name: str) -> QuantizedMatrix | None:
        """A matrix in few bits, of which a few rows are rounded at a time."""
        if self.meta[name].dim() != 2:
            return None
        weight = self._state[name]
        form = self._rounded(name, weight[:1]).form

        def read(start: int, end: int) -> Codes:
            return self._rounded(name, weight[start:end]).read(0, end - start)

        return None if form is None else QuantizedMatrix(form, (weight.shape[0], weight.shape[1]), read)

    def _rounded(self, name: str, weight: Tensor) -> Integers:
        group = self._group if weight.shape[1] % self._group == 0 else None
        return round_to_nearest(weight, "int4" if any(part in name for part in IN_4_BITS) else "int8", group)


def _words(codes: Tensor, bits: int) -> Tensor:
    """codes: [rows, columns] int32, none below 0 -> [rows, words] int32, the first column in the lowest bits."""
    per_word = WORD // bits
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % per_word))
    shifts = torch.arange(0, WORD, bits, dtype=torch.int32)
    return (padded.view(len(codes), -1, per_word) << shifts).sum(-1, dtype=torch.int32)
