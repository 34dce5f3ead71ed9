"""Runs a model over the key-value cache that it owns."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.engine.batch import BatchEntry, build_batch
from outrider.engine.blocks import BLOCK_SIZE
from outrider.engine.buckets import StepLimits
from outrider.engine.forward_timer import timer_of
from outrider.engine.graphs import CapturedSteps, GraphDevice
from outrider.engine.kv_cache import KVCache
from outrider.engine.models.base import CausalLM
from outrider.engine.models.decoder import Decoder


class ModelRunner:
    """One model, one cache. Called from one thread."""

    def __init__(self, model: CausalLM, num_blocks: int, block_size: int = BLOCK_SIZE) -> None:
        self.model = model
        self.cache = KVCache.allocate(model.layers, num_blocks, model.dtype, model.device, block_size)
        self._timer = timer_of(model.device)
        self.captured: CapturedSteps | None = None

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self.cache.block_size

    @property
    def last_forward_us(self) -> int:
        """How long the last pass took, once it has ended: on an accelerator, once its logits were read."""
        return self._timer.microseconds()

    def capture(self, limits: StepLimits, device: GraphDevice) -> None:
        """Captures the steps without a prompt's chunk, from then on replayed. Other models than our own decoder run
        eagerly: what theirs do on the host is not ours to know."""
        if isinstance(self.model, Decoder):
            self.captured = CapturedSteps(self.model, self.cache, limits, device)
            self.captured.capture()

    @torch.inference_mode()
    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies whole blocks of the cache, given as (from, to)."""
        self.cache.copy_blocks(pairs)

    @torch.inference_mode()
    def forward(self, entries: Sequence[BatchEntry]) -> Tensor:  # [rows that want logits, vocab] float32
        """Computes all rows of `entries`; the logits are in the entries' order, and hold until the next pass."""
        self._timer.start()
        logits = None if self.captured is None else self.captured.run(entries)
        if logits is None:
            logits = self.model.forward(build_batch(entries, self.cache.block_size, self.model.device), self.cache)
        self._timer.stop()
        return logits
