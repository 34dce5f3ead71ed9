"""The key-value cache's tensors: per layer one tensor of keys and one of values, in blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.engine.kv_cache_manager import BLOCK_SIZE


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one attention layer stores per token."""

    num_kv_heads: int
    head_dim: int
    value_dim: int | None = None  # where values are of another size than keys


@dataclass(frozen=True, slots=True)
class KVCache:
    """Keys and values of every layer, addressed by slot: block * block_size + offset."""

    keys: tuple[Tensor, ...]  # per layer [num_blocks, block_size, num_kv_heads, head_dim]
    values: tuple[Tensor, ...]  # per layer [num_blocks, block_size, num_kv_heads, value_dim]
    block_size: int = BLOCK_SIZE

    @staticmethod
    def allocate(
        layers: tuple[LayerShape, ...],
        num_blocks: int,
        dtype: torch.dtype,
        device: torch.device | str,
        block_size: int = BLOCK_SIZE,
    ) -> KVCache:
        """Zeroed tensors: a slot that was never written must not hold NaN, which would pass through a masked
        product."""

        def tensor(heads: int, dim: int) -> Tensor:
            return torch.zeros(num_blocks, block_size, heads, dim, dtype=dtype, device=device)

        return KVCache(
            keys=tuple(tensor(layer.num_kv_heads, layer.head_dim) for layer in layers),
            values=tuple(tensor(layer.num_kv_heads, layer.value_dim or layer.head_dim) for layer in layers),
            block_size=block_size,
        )

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies whole blocks in every layer, given as (from, to)."""
        if not pairs:
            return
        sources, targets = torch.tensor(pairs, device=self.keys[0].device).unbind(1)  # [pairs] each
        for tensor in (*self.keys, *self.values):
            tensor[targets] = tensor[sources]

    def copy_slots(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies single tokens in every layer, given as (from, to); all are read before any is written."""
        sources, targets = torch.tensor(pairs, device=self.keys[0].device).unbind(1)  # [pairs] each
        for tensor in (*self.keys, *self.values):
            flat = tensor.view(-1, *tensor.shape[2:])  # [slots, heads, dim]
            flat[targets] = flat[sources]

    @property
    def num_blocks(self) -> int:
        """How many blocks every layer has."""
        return self.keys[0].shape[0]


def bytes_per_block(layers: tuple[LayerShape, ...], dtype: torch.dtype, block_size: int = BLOCK_SIZE) -> int:
    """Memory of one block over all layers, in bytes."""
    per_token = sum(layer.num_kv_heads * (layer.head_dim + (layer.value_dim or layer.head_dim)) for layer in layers)
    return per_token * block_size * dtype.itemsize
