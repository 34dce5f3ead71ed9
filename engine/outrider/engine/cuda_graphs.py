"""Steps captured once and replayed: what a small step costs is then its kernels, not their launches.

A captured step reads everything that changes (ids, slots, tables, lengths) from one buffer on the device, which one
copy from pinned memory fills before the replay. Its grids depend on its bucket alone; rows and sequences that pad a
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
    bucket_of,
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

    def upload(self, target: Tensor, source: Tensor) -> None:
        """Copies numbers of the host, both [numbers] int32, behind what was launched; the host may change them once
        this returns."""

    def download(self, source: Tensor) -> Callable[[], Tensor]:
        """What gives a copy on the host of what the device has computed of `source` by then; it waits for that."""

    def capture(self, step: Callable[[], object]) -> Callable[[], object]:
        """What runs `step` again, on the same memory."""

    def reserved_bytes(self) -> int:
        """Memory of the device in this process's hands."""


class CapturedPasses:
    """The graphs of passes over one cache, some for each bucket, and the one buffer of numbers that all of them read.
    Called from one thread at a time."""

    def __init__(
        self,
        buckets: Sequence[Bucket],  # the largest first: smaller ones find its memory
        max_model_len: int,
        block_size: int,
        graphs: GraphDevice,
        device: torch.device,
    ) -> None:
        self.buckets, self.max_model_len, self.block_size, self.graphs = buckets, max_model_len, block_size, graphs
        self._table_width = -(-max_model_len // block_size)
        size = max(buffer_size(bucket, self._table_width) for bucket in buckets)
        self._host = torch.zeros(size, dtype=torch.int32)
        self._numbers = torch.zeros(size, dtype=torch.int32, device=device)
        self._buffers: dict[Bucket, StepBuffer] = {}
        self._replays: dict[Bucket, tuple[Callable[[], object], ...]] = {}

    @torch.inference_mode()
    def capture_bucket(self, bucket: Bucket, *passes: Callable[[StaticBatch], object]) -> None:
        """Captures passes that run one at a time. What they store goes nowhere."""
        self._buffers[bucket] = buffer = StepBuffer(bucket, self._table_width, self._host, self._numbers)
        self.prepare(bucket, [])
        self._replays[bucket] = tuple(self.graphs.capture(partial(run, buffer.batch)) for run in passes)

    def has(self, bucket: Bucket | None) -> bool:
        """Whether the bucket was captured."""
        return bucket in self._replays

    def batch_of(self, bucket: Bucket) -> StaticBatch:
        """What the passes of a bucket read, on the device."""
        return self._buffers[bucket].batch

    def prepare(self, bucket: Bucket, entries: Sequence[BatchEntry]) -> PackedRows:
        """Takes a step's numbers to the device, behind what was launched, and runs nothing."""
        rows, buffer = PackedRows.of(entries, self.block_size), self._buffers[bucket]
        used = buffer.write(rows, [entry.block_table for entry in entries])
        self.graphs.upload(self._numbers[:used], self._host[:used])
        return rows

    def replay(self, bucket: Bucket, number: int = 0) -> None:
        """Runs one of a bucket's passes over what the device holds of it."""
        self._replays[bucket][number]()


class CapturedSteps(CapturedPasses):
    """The graphs of one model and one cache. `logits` holds those of the last step, from its start on."""

    def __init__(
        self, model: Decoder, cache: KVCache, limits: StepLimits, device: GraphDevice, taps: Sequence[int] = ()
    ) -> None:
        super().__init__(all_buckets(limits), model.max_model_len, cache.block_size, device, model.device)
        self.limits = limits
        self._model = model
        self._cache = cache
        most_rows = self.buckets[0].rows
        self.logits = torch.zeros(most_rows, model.vocab_size, dtype=torch.float32, device=model.device)
        self._taps = Taps(taps, most_rows, model.hidden_size, model.dtype, model.device) if taps else None
        self.hidden_states: Tensor | None = None  # [rows, taps, hidden] of the last step that ran, until the next

    def capture(self) -> None:
        """Captures every bucket. Stores nothing in the cache."""
        before = self.graphs.reserved_bytes()
        for bucket in self.buckets:
            out = self.logits[: bucket.rows]
            self.capture_bucket(bucket, partial(self._model.forward, cache=self._cache, out=out, taps=self._taps))
        taken = (self.graphs.reserved_bytes() - before) >> 20
        log.info("captured %d graphs of up to %d rows in %d MiB", len(self.buckets), self.buckets[0].rows, taken)

    @torch.inference_mode()
    def run(
        self,
        entries: Sequence[BatchEntry],
        fed: Tensor | None = None,  # [rows] int64 on the device: the rows' ids, where the host does not know them yet
    ) -> Tensor | None:  # [rows that want logits, vocab] float32
        """One step, or None if no graph holds it. The logits hold until the next step."""
        bucket = bucket_of(self.limits, entries)
        if bucket is None or not self.has(bucket):
            return None
        rows = self.prepare(bucket, entries)
        if fed is not None:
            self.batch_of(bucket).token_ids[: len(fed)].copy_(fed.clamp(min=0))  # -1: of a row that failed
        self.replay(bucket)
        self.hidden_states = None if self._taps is None else self._taps.states[: len(rows.token_ids)]
        return self.logits[: len(rows.logit_rows)]

    def holds(self, lengths: Sequence[int]) -> bool:
        """Whether a step of sequences of so many rows was captured."""
        return self.has(choose_bucket(self.limits, sum(lengths), len(lengths), max(lengths)))

    def plain_bucket(self, num_sequences: int) -> Bucket | None:
        """The bucket of a step of one row for each of so many sequences; None if it is too large."""
        return choose_bucket(self.limits, num_sequences, num_sequences, 1)


class CudaGraphs:
    """The GraphDevice of one model on a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def upload(self, target: Tensor, source: Tensor) -> None:
        """On the current stream, from pinned memory, which the allocator gives to nobody before it was read."""
        pinned = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        pinned.copy_(source)
        target.copy_(pinned, non_blocking=True)

    def download(self, source: Tensor) -> Callable[[], Tensor]:
        """On the current stream, into pinned memory, of which the allocator keeps some at hand."""
        found = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        found.copy_(source, non_blocking=True)
        ended = torch.cuda.Event()
        ended.record()

        def read() -> Tensor:
            ended.synchronize()
            return found

        return read

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
