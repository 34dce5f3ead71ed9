"""Runs a model over the key-value cache that it owns."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.engine.batch import BatchEntry, build_batch
from outrider.engine.blocks import BLOCK_SIZE
from outrider.engine.kv_cache import KVCache, bytes_per_block
from outrider.engine.models.base import CausalLM


def blocks_for_memory(model: CausalLM, memory: int, block_size: int = BLOCK_SIZE) -> int:
    """How many blocks `memory` bytes hold over all layers of `model`. Raises ValueError for less than one sequence of a
    block."""
    blocks = memory // bytes_per_block(model.layers, model.dtype, block_size)
    if blocks < 1:
        raise ValueError(f"{memory} bytes hold no block of {block_size} tokens of this model")
    return blocks


class ModelRunner:
    """One model, one cache. Called from one thread."""

    def __init__(self, model: CausalLM, num_blocks: int, block_size: int = BLOCK_SIZE) -> None:
        self.model = model
        self.cache = KVCache.allocate(model.layers, num_blocks, model.dtype, model.device, block_size)
        self.last_forward_us = 0

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self.cache.block_size

    @torch.inference_mode()
    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies whole blocks of the cache, given as (from, to)."""
        self.cache.copy_blocks(pairs)

    @torch.inference_mode()
    def forward(self, entries: Sequence[BatchEntry]) -> Tensor:  # [rows that want logits, vocab] float32
        """Computes all rows of `entries`; the logits are in the entries' order. On an accelerator `last_forward_us` is
        the time to launch, until the caller reads the logits."""
        started = time.perf_counter_ns()
        batch = build_batch(entries, self.cache.block_size, self.model.device)
        logits = self.model.forward(batch, self.cache)
        self.last_forward_us = (time.perf_counter_ns() - started) // 1000
        return logits
