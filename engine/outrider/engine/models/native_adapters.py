"""Adapters of the decoder by our C kernels: laid out once, each brings its memory, and a slot points to it."""

from __future__ import annotations

from collections.abc import Mapping
from ctypes import Structure

from torch import Tensor

from outrider.engine.models.base import LowRank
from outrider.engine.models.decoder_config import DecoderConfig
from outrider.engine.models.low_rank import by_layer, decoder_linears, projection_sizes
from outrider.kernels.cpu.low_rank import CpuAdapter, CpuAdapters


class NativeAdapters:
    """The AdapterBank of the C decoder, which follows pointers."""

    def __init__(self, config: DecoderConfig) -> None:
        self._config = config
        self._sizes = {_projection(name): size for name, size in projection_sizes(config).items()}
        self._slots = CpuAdapters(0, self._sizes)

    @property
    def linears(self) -> Mapping[str, tuple[int, int]]:
        """The outputs and inputs of each product, by the checkpoint's names."""
        return decoder_linears(self._config)

    def make_room(self, num_slots: int, max_rank: int) -> None:
        """Makes room for the pointers of all slots."""
        self._slots = CpuAdapters(num_slots, self._sizes)

    def prepare(self, modules: Mapping[str, LowRank]) -> CpuAdapter:
        """Brings an adapter into float32."""
        layers = [
            {_projection(name): (one.down, one.up, one.scaling) for name, one in layer.items()}
            for layer in by_layer(self._config, modules)
        ]
        return CpuAdapter(layers, {name: outputs for name, (outputs, _) in self._sizes.items()})

    def put(self, slot: int, prepared: CpuAdapter | None) -> None:
        """Lets a slot point to an adapter."""
        self._slots.put(slot, prepared)

    def step(self, slots: Tensor) -> Structure:  # [rows] int32
        """What the pass is told, while `slots` lives."""
        return self._slots.step(slots)


def _projection(name: str) -> str:
    return name.rpartition(".")[2]
