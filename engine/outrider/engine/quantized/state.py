"""A quantised checkpoint's tensors by their names in one that is not: a weight is decoded when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from outrider.engine.models.base import UnsupportedModel, WrongCheckpoint
from outrider.engine.quantized.compressed_tensors import CompressedTensors
from outrider.engine.quantized.gptq_awq import Awq, Gptq
from outrider.engine.quantized.numbers import Integers, SmallFloats
from outrider.kernels.quantized.form import QuantizedMatrix

KEYS = ("quantization_config", "compression_config")  # of config.json


class StoredAs(Protocol):
    """How a kind of checkpoint is read."""

    @property
    def parts(self) -> tuple[str, ...]:
        """Beside a module's other tensors."""

    def module(self, name: str) -> str | None:
        """The module of which a tensor of that name is the weight; None: of none that is quantised."""

    def shape(self, module: str, stored: Mapping[str, Tensor]) -> tuple[int, ...]:
        """Of the weight of a module, [out, in]. Raises WrongCheckpoint."""

    def numbers(self, module: str, stored: Mapping[str, Tensor]) -> Integers | SmallFloats:
        """The weight of a module. Raises WrongCheckpoint."""


LAYOUTS: Mapping[str, Callable[[Mapping[str, Any]], StoredAs]] = {
    "compressed-tensors": CompressedTensors,
    "gptq": Gptq,
    "awq": Awq,
}
TOGETHER = "mxfp4"


def said_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What a config.json says of how its weights are kept; None: as they are."""
    parts = (config, config.get("text_config"))
    found = (part.get(key) for part in parts if isinstance(part, Mapping) for key in KEYS)
    return next((said for said in found if said is not None), None)


def rounds_activations(said: Mapping[str, Any]) -> bool:
    """Whether what products read is to be rounded, too, which our engine does not."""
    groups = said.get("config_groups")
    schemes = groups.values() if isinstance(groups, Mapping) else ()
    return any(isinstance(scheme, Mapping) and bool(scheme.get("input_activations")) for scheme in schemes)


def layout_of(said: Mapping[str, Any]) -> StoredAs | None:
    """None where the quantised weights are those of experts alone, a layer's in one tensor (models/fused_experts.py).
    Raises UnsupportedModel for what is not served, by name."""
    method = said.get("quant_method") if isinstance(said, Mapping) else None
    if method == TOGETHER:
        return None
    if not isinstance(method, str) or method not in LAYOUTS:
        allowed = ", ".join([*LAYOUTS, TOGETHER])
        raise UnsupportedModel(f"quantization_config: quant_method: is {method!r:.60}; allowed: {allowed}")
    return LAYOUTS[method](said)


class QuantizedTensors(Mapping[str, Tensor]):
    """A LazyState over the tensors as they are stored."""

    def __init__(self, layout: StoredAs, stored: Mapping[str, Tensor]) -> None:
        self._layout, self._stored = layout, stored
        modules = {layout.module(name) for name in stored} - {None}
        self._weights = {f"{module}.weight": str(module) for module in modules}
        beside = {f"{module}.{part}" for module in self._weights.values() for part in layout.parts}
        self._names = sorted({name for name in stored if name not in beside} | self._weights.keys())

    def __getitem__(self, name: str) -> Tensor:
        module = self._weights.get(name)
        return self._stored[name] if module is None else self.numbers(module).decode()

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def packed(self, name: str) -> QuantizedMatrix | None:
        """A weight as it is stored; None for what the kernels would decode."""
        module = self._weights.get(name)
        return None if module is None else self.numbers(module).matrix

    def numbers(self, module: str) -> Integers | SmallFloats:
        """What stands for the weight of a module. Raises WrongCheckpoint."""
        with _named(module):
            return self._layout.numbers(module, self._stored)

    @cached_property
    def meta(self) -> Mapping[str, Tensor]:
        """The shape and type of each, without its numbers."""
        return {name: self._without_numbers(name) for name in self._names}

    def _without_numbers(self, name: str) -> Tensor:
        module = self._weights.get(name)
        if module is None:
            return torch.empty_like(self._stored[name], device="meta")
        with _named(module):
            return torch.empty(self._layout.shape(module, self._stored), device="meta")


@contextmanager
def _named(module: str) -> Iterator[None]:
    """What is missing of a module is a WrongCheckpoint."""
    try:
        yield
    except KeyError as error:
        raise WrongCheckpoint(f"{module}: is quantised, and {error.args[0]} is not there") from error
