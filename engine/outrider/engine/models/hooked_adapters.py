"""Adapters of transformers' models: their products are plain modules, to whose results a hook adds what the rows'
adapters give. Passes without adapters have no hooks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from outrider.engine.models.base import LowRank
from outrider.engine.models.low_rank import slot_rank
from outrider.kernels.lora.reference import add_low_rank
from outrider.kernels.types import LowRankWeights

EXPERTS = ".experts."  # compute some of the rows, in an order of their own


def hooked_linears(model: nn.Module, head: nn.Module | None) -> dict[str, nn.Linear]:
    """The products of all rows by their names, but for the language-model head."""
    return {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear and module is not head and EXPERTS not in name
    }


class HookedAdapters:
    """An AdapterBank: slots of one size."""

    def __init__(self, linears: Mapping[str, nn.Linear]) -> None:
        self._linears = linears
        self._weights: dict[str, LowRankWeights] = {}
        self._held: list[frozenset[str]] = []  # of each slot, the modules that it changes

    @property
    def linears(self) -> Mapping[str, tuple[int, int]]:
        """The outputs and inputs of each product, by the modules' names."""
        return {name: (module.out_features, module.in_features) for name, module in self._linears.items()}

    def make_room(self, num_slots: int, max_rank: int) -> None:
        """Makes room for all slots, where the modules' weights are."""
        rank = slot_rank(max_rank)
        self._weights = {
            name: LowRankWeights(
                module.weight.new_zeros(num_slots, 1, rank, module.in_features),
                module.weight.new_zeros(num_slots, module.out_features, rank),
                torch.zeros(num_slots, 1, device=module.weight.device),
                (0, module.out_features),
            )
            for name, module in self._linears.items()
        }
        self._held = [frozenset()] * num_slots

    def prepare(self, modules: Mapping[str, LowRank]) -> dict[str, LowRank]:
        """Brings an adapter into the type of the weights, on the host."""
        dtypes = {name: self._weights[name].down.dtype for name in modules}
        return {
            name: LowRank(one.down.to(dtypes[name]), one.up.to(dtypes[name]), one.scaling)
            for name, one in modules.items()
        }

    def put(self, slot: int, prepared: Mapping[str, LowRank] | None) -> None:
        """Fills a slot; what the adapter leaves alone becomes 0."""
        parts = prepared or {}
        for name in self._held[slot] - parts.keys():
            self._weights[name].scaling[slot] = 0
        for name, one in parts.items():
            weights, rank = self._weights[name], len(one.down)
            weights.down[slot].zero_()[0, :rank] = one.down
            weights.up[slot].zero_()[:, :rank] = one.up
            weights.scaling[slot] = one.scaling
        self._held[slot] = frozenset(parts)

    @contextmanager
    def hooked(self, slots: Tensor) -> Iterator[None]:  # [rows] int32
        """A pass within adds what its rows' adapters give."""
        with ExitStack() as hooks:
            for name in frozenset().union(*self._held):
                hook = partial(_add, self._weights[name], slots)
                hooks.callback(self._linears[name].register_forward_hook(hook).remove)
            yield


def _add(weights: LowRankWeights, slots: Tensor, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
    x = inputs[0].flatten(0, -2)  # [rows, in]
    if len(x) != len(slots):
        raise ValueError(f"{type(module).__name__} computes {len(x)} rows of {len(slots)}; its adapter needs all")
    add_low_rank(output.flatten(0, -2), x, weights, slots)
