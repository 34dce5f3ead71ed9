"""Steps captured once and replayed: what a small step costs is then its kernels, not their launches.

A captured step reads everything that changes (ids, slots, tables, lengths) from one buffer on the device, which one
copy from one pinned buffer fills before the replay. Its grids depend on its bucket alone; rows and sequences that pad a
bucket store nothing and are attended to by nothing. Graphs run one at a time, so all share one pool of memory.

CUDA's side of captured steps: the graphs, their pool, and the copies between the host and the device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from outrider.engine.batch import (
    BatchEntry,
    Bucket,
    PackedRows,
    StaticBatch,
    StepBuffer,
    StepLimits,
    all_buckets,
    buffer_size,
    choose_bucket,
)
from outrider.engine.hidden_states import Taps
from outrider.engine.kv_cache import KVCache
from outrider.engine.models.decoder import Decoder

log = logging.getLogger(__name__)
WARM_UP = 2  # runs before a capture: they compile kernels, and give the library of products its workspace


class GraphDevice(Protocol):
    """What captures, and how a step's numbers get there; CUDA's is in cuda_graphs.py."""

    def host_buffer(self, size: int) -> Tensor:
        """[size] int32 on the host, that `upload` may read later on."""

    def upload(self, target: Tensor, source: Tensor) -> None:
        """Copies a part of the host buffer, both [numbers] int32; it may go on after this returns."""

    def wait_for_upload(self) -> None:
        """Returns once the host buffer may be written again."""

    def download(self, source: Tensor) -> Tensor:
        """A copy on the host of what the device has computed by then; it waits for the device."""

    def capture(self, step: Callable[[], object]) -> Callable[[], object]:
        """What runs `step` again, on the same memory."""

    def reserved_bytes(self) -> int:
        """Memory of the device in this process's hands."""


class CapturedSteps:
    """The graphs of one model and one cache. Called from one thread at a time. `logits` holds those of the last step,
    from its start on."""

    def __init__(
        self, model: Decoder, cache: KVCache, limits: StepLimits, device: GraphDevice, taps: Sequence[int] = ()
    ) -> None:
        self._model = model
        self._cache = cache
        self._limits = limits
        self.graphs = device
        self.buckets = all_buckets(limits)
        self._table_width = -(-model.max_model_len // cache.block_size)
        size = max(buffer_size(bucket, self._table_width) for bucket in self.buckets)
        self._host = device.host_buffer(size)
        self._numbers = torch.zeros(size, dtype=torch.int32, device=model.device)
        most_rows = self.buckets[0].rows
        self.logits = torch.zeros(most_rows, model.vocab_size, dtype=torch.float32, device=model.device)
        self._taps = Taps(taps, most_rows, model.hidden_size, model.dtype, model.device) if taps else None
        self.hidden_states: Tensor | None = None  # [rows, taps, hidden] of the last step that ran, until the next
        self._replays: dict[Bucket, tuple[StepBuffer, Callable[[], object]]] = {}

    @torch.inference_mode()
    def capture(self) -> None:
        """Captures every bucket, the largest first. Stores nothing in the cache."""
        before = self.graphs.reserved_bytes()
        for bucket in self.buckets:
            buffer = StepBuffer(bucket, self._table_width, self._host, self._numbers)
            self._fill(buffer, PackedRows.of([], self._cache.block_size), [])
            out = self.logits[: bucket.rows]
            step = partial(self._model.forward, buffer.batch, self._cache, out=out, taps=self._taps)
            self._replays[bucket] = buffer, self.graphs.capture(step)
        taken = (self.graphs.reserved_bytes() - before) >> 20
        log.info("captured %d graphs of up to %d rows in %d MiB", len(self.buckets), self.buckets[0].rows, taken)

    @torch.inference_mode()
    def run(self, entries: Sequence[BatchEntry]) -> Tensor | None:  # [rows that want logits, vocab] float32
        """One step, or None if no graph holds it. The logits hold until the next step."""
        lengths = [len(entry.token_ids) for entry in entries]
        trees = any(entry.parents for entry in entries)
        bucket = choose_bucket(self._limits, sum(lengths), len(entries), max(lengths), trees)
        if bucket is None or bucket not in self._replays:
            return None
        buffer, replay = self._replays[bucket]
        rows = PackedRows.of(entries, self._cache.block_size)
        self._fill(buffer, rows, entries)
        replay()
        self.hidden_states = None if self._taps is None else self._taps.states[: len(rows.token_ids)]
        return self.logits[: len(rows.logit_rows)]

    def holds(self, lengths: Sequence[int]) -> bool:
        """Whether a step of sequences of so many rows was captured."""
        return choose_bucket(self._limits, sum(lengths), len(lengths), max(lengths)) in self._replays

    def plain_bucket(self, num_sequences: int) -> Bucket | None:
        """The bucket of a step of one row for each of so many sequences; None if it is too large."""
        return choose_bucket(self._limits, num_sequences, num_sequences, 1)

    def batch_of(self, bucket: Bucket) -> StaticBatch:
        """What the passes of a bucket read, on the device."""
        return self._replays[bucket][0].batch

    @torch.inference_mode()
    def prepare(self, bucket: Bucket, entries: Sequence[BatchEntry]) -> None:
        """Takes a step's numbers to the device, behind what was launched, and runs nothing."""
        self._fill(self._replays[bucket][0], PackedRows.of(entries, self._cache.block_size), entries)

    def replay(self, bucket: Bucket) -> None:
        """Runs a bucket's pass over what the device holds of it."""
        self._replays[bucket][1]()

    @property
    def block_size(self) -> int:
        """How many tokens a block holds."""
        return self._cache.block_size

    def _fill(self, buffer: StepBuffer, rows: PackedRows, entries: Sequence[BatchEntry]) -> None:
        self.graphs.wait_for_upload()
        used = buffer.write(rows, [entry.block_table for entry in entries])
        self.graphs.upload(self._numbers[:used], self._host[:used])


class CudaGraphs:
    """The GraphDevice of one model on a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._uploaded = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._downloaded = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def host_buffer(self, size: int) -> Tensor:
        """Pinned: the copy goes on while the host prepares the replay."""
        return torch.zeros(size, dtype=torch.int32, pin_memory=True)

    def upload(self, target: Tensor, source: Tensor) -> None:
        """On the current stream, before the replay."""
        target.copy_(source, non_blocking=True)
        self._uploaded.record()

    def wait_for_upload(self) -> None:
        """A step whose logits were read has waited already."""
        self._uploaded.synchronize()

    def download(self, source: Tensor) -> Tensor:
        """Into pinned memory, of which the allocator keeps some at hand."""
        found = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        found.copy_(source, non_blocking=True)
        self._downloaded.record()
        self._downloaded.synchronize()
        return found

    def capture(self, step: Callable[[], object]) -> Callable[[], object]:
        """Other threads may use the device meanwhile: only this one's calls are held to the rules of a capture."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UP):
                step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
            step()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return graph.replay

    def reserved_bytes(self) -> int:
        """The bytes of the caching allocator, the graphs' pool included; what it only keeps at hand is given back
        first, as by a capture."""
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(self._device)
