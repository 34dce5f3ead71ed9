"""Adapters as the decoder's C pass takes them (`low_rank.h`): of each layer and projection its factors, in float32."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import Structure, c_float, c_int64, c_void_p

import torch
from torch import Tensor

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")  # low_rank.h's order
MOST_RANK = 64
SLICES = 3  # of one product

Factors = tuple[Tensor, Tensor, float]  # [rank, in], [out, rank], scaling


class _LowRank(Structure):
    _fields_ = (("down", c_void_p), ("up", c_void_p), ("rank", c_int64), ("outputs", c_int64), ("scaling", c_float))


class _LayerAdapter(Structure):
    _fields_ = (("of", _LowRank * len(PROJECTIONS)),)


class _Adapters(Structure):
    _fields_ = tuple((name, c_void_p) for name in ("adapters", "slots", "inputs", "inner", "outputs"))


class CpuAdapter:
    """One adapter, laid out."""

    def __init__(
        self,
        layers: Sequence[Mapping[str, Factors]],  # by the names of PROJECTIONS, where a layer's is changed
        outputs: Mapping[str, int],  # of every projection
    ) -> None:
        """Raises ValueError for a rank that the kernels do not take."""
        self._kept: list[Tensor] = []  # what the pointers below point to
        made = [
            _LayerAdapter((_LowRank * len(PROJECTIONS))(*(self._factors(layer, name, outputs) for name in PROJECTIONS)))
            for layer in layers
        ]
        self.layers = (_LayerAdapter * len(made))(*made)

    def _factors(self, layer: Mapping[str, Factors], name: str, outputs: Mapping[str, int]) -> _LowRank:
        if name not in layer:
            return _LowRank(None, None, 0, outputs[name], 0.0)
        down, up, scaling = layer[name]
        if len(down) > MOST_RANK:
            raise ValueError(f"rank: is {len(down)}; allowed: at most {MOST_RANK}")
        pointers = self._pointer(down), self._pointer(up.t())
        return _LowRank(*pointers, len(down), outputs[name], scaling)

    def _pointer(self, tensor: Tensor) -> int:
        self._kept.append(tensor.float().contiguous())
        return self._kept[-1].data_ptr()


class CpuAdapters:
    """The slots of one decoder. One thread at a time may call it: it keeps its scratch memory."""

    def __init__(self, num_slots: int, sizes: Mapping[str, tuple[int, int]]) -> None:
        """`sizes` are the outputs and inputs of every projection."""
        self._widest = max(inputs for _, inputs in sizes.values())
        self._outputs = (c_int64 * len(PROJECTIONS))(*(sizes[name][0] for name in PROJECTIONS))
        self._held: list[CpuAdapter | None] = [None] * num_slots
        self._table = (c_void_p * num_slots)()
        self._inputs = self._inner = torch.empty(0)

    def put(self, slot: int, adapter: CpuAdapter | None) -> None:
        """Rows of this slot have this adapter."""
        self._held[slot] = adapter
        self._table[slot] = None if adapter is None else ctypes.addressof(adapter.layers)

    def step(self, slots: Tensor) -> Structure:  # [rows] int32
        """What a pass is told, while `slots` lives. Raises IndexError for a slot without an adapter."""
        if missing := [slot for slot in set(slots.tolist()) if slot >= 0 and self._held[slot] is None]:
            raise IndexError(f"slot {missing[0]} has no adapter")
        if self._inputs.numel() < len(slots) * self._widest:
            self._inputs = torch.zeros(len(slots) * self._widest)
            self._inner = torch.zeros(len(slots) * SLICES * MOST_RANK)
        pointers = (tensor.data_ptr() for tensor in (slots, self._inputs, self._inner))
        return _Adapters(ctypes.addressof(self._table), *pointers, ctypes.addressof(self._outputs))
