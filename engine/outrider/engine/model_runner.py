"""Runs a model over the key-value cache that it owns, and says how long a pass took: by the host's clock, or by the
device's events, which nobody waits for.

On a GPU the largest step is run once over a small cache; what a share of the device's memory leaves beside it is the
cache's. Elsewhere, and where the operator says so, it is a number of bytes or of blocks."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from outrider.engine.adapters.resident import AdapterRoom, ResidentAdapters
from outrider.engine.batch import BatchEntry, StepLimits, build_batch
from outrider.engine.cuda_graphs import CapturedSteps, GraphDevice
from outrider.engine.hidden_states import Taps, check_taps
from outrider.engine.kv_cache import KVCache, bytes_per_block
from outrider.engine.kv_cache_manager import BLOCK_SIZE, BlockPool, OutOfBlocks
from outrider.engine.models.base import CausalLM
from outrider.engine.models.census import CountsExperts
from outrider.engine.models.decoder import Decoder
from outrider.engine.staging import on_host
from outrider.engine.token_tree import KeptPath
from outrider.engine.worker import require_device

log = logging.getLogger(__name__)
DEFAULT_STEPS = StepLimits(max_rows=512, max_sequences=256, max_query_len=33)
SAMPLING_COPIES = 8  # of a step's logits, in float32: processed, sorted, summed up, and as many in captured sampling


class ForwardTimer(Protocol):
    """Times one pass after the other."""

    def start(self) -> None:
        """Begins to measure; to be called right before a pass."""

    def stop(self) -> Callable[[], int]:
        """Ends the measurement; to be called once the pass was launched. What says how many microseconds it took, once
        it has ended; 0 before."""


def timer_of(device: torch.device) -> ForwardTimer:
    """The one that tells the time of a pass on this device."""
    return CudaTimer() if device.type == "cuda" else HostTimer()


class HostTimer:
    """Measures passes that have run when they return."""

    def __init__(self) -> None:
        self._started = 0

    def start(self) -> None:
        """Begins to measure."""
        self._started = time.perf_counter_ns()

    def stop(self) -> Callable[[], int]:
        """Ends the measurement."""
        microseconds = (time.perf_counter_ns() - self._started) // 1000
        return lambda: microseconds


class CudaTimer:
    """Measures passes by events on the current stream: a pass may be launched before the one before it has ended."""

    def __init__(self) -> None:
        self._first = torch.cuda.Event(enable_timing=True)

    def start(self) -> None:
        """Records the event before a pass."""
        self._first = torch.cuda.Event(enable_timing=True)
        self._first.record()

    def stop(self) -> Callable[[], int]:
        """Records the event behind a pass that was launched; whoever has read its logits has waited for both."""
        first, last = self._first, torch.cuda.Event(enable_timing=True)
        last.record()
        return lambda: round(first.elapsed_time(last) * 1000) if last.query() else 0


class ModelRunner:
    """One model, one cache. Called from one thread."""

    def __init__(
        self,
        model: CausalLM,
        num_blocks: int,
        block_size: int = BLOCK_SIZE,
        taps: Sequence[int] = (),
        adapters: ResidentAdapters | None = None,
    ) -> None:
        self.model = model
        self.adapters = adapters
        self.taps = check_taps(taps, len(model.layers))
        self.cache = KVCache.allocate(model.layers, num_blocks, model.dtype, model.device, block_size)
        self._timer = timer_of(model.device)
        self.last_pass: Callable[[], int] = lambda: 0
        """How many microseconds the last pass took, once it has ended: on an accelerator, once its logits were read."""
        self.census = model.census if isinstance(model, CountsExperts) else None
        self.last_woken: Callable[[], int] = lambda: 0
        """How many experts the rows of the last pass went to, over all layers, at the same time; 0: it has none."""
        self._taps: Taps | None = None  # as large as the largest step so far
        self.hidden_states: Tensor | None = None  # [rows, taps, hidden] of the last pass, until the next
        self.captured: CapturedSteps | None = None

    @property
    def block_size(self) -> int:
        """How many tokens a block holds."""
        return self.cache.block_size

    def capture(self, limits: StepLimits, device: GraphDevice) -> None:
        """Captures the steps without a prompt's chunk, from then on replayed. Other models than our own decoder run
        eagerly: what theirs do on the host is not ours to know."""
        if isinstance(self.model, Decoder):
            self.captured = CapturedSteps(self.model, self.cache, limits, device, self.taps)
            self.captured.capture()

    @torch.inference_mode()
    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies whole blocks of the cache, given as (from, to)."""
        self.cache.copy_blocks(pairs)

    @torch.inference_mode()
    def keep_paths(self, paths: Sequence[KeptPath]) -> None:
        """Makes the last pass as if these paths of its trees had been chains: moves keys, values and hidden states."""
        moves = [move for path in paths for move in path.moves(self.block_size)]
        if moves:
            self.cache.copy_slots([slots for slots, _ in moves])
        if moves and self.hidden_states is not None:
            sources, targets = torch.tensor([rows for _, rows in moves], device=self.hidden_states.device).unbind(1)
            self.hidden_states[targets] = self.hidden_states[sources]

    @torch.inference_mode()
    def forward(self, entries: Sequence[BatchEntry]) -> Tensor:  # [rows that want logits, vocab] float32
        """Computes all rows of `entries`; the logits are in the entries' order, and hold until the next pass."""
        self._timer.start()
        slots = self._slots_of(entries)
        logits = None if self.captured is None or slots is not None else self.captured.run(entries)
        if logits is None:
            batch = build_batch(entries, self.cache.block_size, self.model.device, slots)
            logits = self.model.forward(batch, self.cache, taps=self._taps_for(batch.num_rows))
            self.hidden_states = None if self._taps is None else self._taps.states[: batch.num_rows]
        elif self.captured is not None:
            self.hidden_states = self.captured.hidden_states
        self._end_pass()
        return logits

    @torch.inference_mode()
    def follow(self, entries: Sequence[BatchEntry], ids: Tensor) -> Tensor:  # [rows, vocab] float32
        """As `forward`, of rows whose ids, [rows] int64, the device has and the host does not. ValueError where no
        captured pass holds them."""
        self._timer.start()
        logits = None if self.captured is None else self.captured.run(entries, ids)
        if self.captured is None or logits is None:
            raise ValueError(f"no captured pass holds {len(entries)} rows, whose ids the device alone has")
        self.hidden_states = self.captured.hidden_states
        self._end_pass()
        return logits

    def _end_pass(self) -> None:
        """What the pass took and woke is known once the device has computed it; nobody waits for it here."""
        if self.census is not None:
            read = on_host if self.captured is None else self.captured.graphs.download
            found = read(self.census.num_woken)
            self.last_woken = lambda: int(found())
        self.last_pass = self._timer.stop()

    def _slots_of(self, entries: Sequence[BatchEntry]) -> list[int] | None:
        """Where the entries' adapters lie, once they are on the device; None where no entry has one."""
        if self.adapters is None or all(entry.adapter is None for entry in entries):
            return None
        return self.adapters.slots_for([entry.adapter for entry in entries])

    def _taps_for(self, num_rows: int) -> Taps | None:
        """Memory that is kept, if any layer is tapped."""
        if self.taps and (self._taps is None or len(self._taps.states) < num_rows):
            self._taps = Taps(self.taps, num_rows, self.model.hidden_size, self.model.dtype, self.model.device)
        return self._taps


def sampling_bytes(num_rows: int, vocab_size: int) -> int:
    """What sampling takes beside the logits of so many rows."""
    return SAMPLING_COPIES * num_rows * vocab_size * torch.float32.itemsize


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    """What a service was told of its cache, and what its steps hold."""

    steps: StepLimits = DEFAULT_STEPS
    num_blocks: int | None = None  # wins
    cache_bytes: int | None = None  # then this
    default_cache_bytes: int = 512 << 20  # on a CPU
    gpu_memory_utilization: float = 0.9  # on a GPU
    cuda_graphs: bool = True
    taps: tuple[int, ...] = ()  # layers whose hidden states passes leave
    bytes_beside_block: int = 0  # that others keep of each block of the cache
    adapters: AdapterRoom | None = None

    def beside_another(self) -> RunnerOptions:
        """The options for the second model of a process: what a device has left is the first one's."""
        return replace(self, cache_bytes=self.cache_bytes or self.default_cache_bytes)


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """The bytes of one device, by what they are for."""

    total: int
    free: int  # before the largest step
    held: int  # by this process's allocator at that time: weights
    peak: int  # by this process's allocator in the largest step, the small cache not counted
    reserve: int  # for what that step did not show: sampling, and the pool of captured graphs

    def room(self, share: float) -> int:
        """What the cache may have, so that `share` of the device is in use with it. What others hold counts, too."""
        others = self.total - self.free - self.held
        return int(self.total * share) - others - self.peak - self.reserve


def build_runner(model: CausalLM, options: RunnerOptions) -> ModelRunner:
    """A runner with its cache, and on a GPU its graphs. Raises ValueError where no block fits."""
    with torch.cuda.device(model.device) if model.device.type == "cuda" else nullcontext():
        return _built(model, options)


def blocks_for_memory(model: CausalLM, memory: int, block_size: int = BLOCK_SIZE, beside: int = 0) -> int:
    """How many blocks `memory` bytes hold over all layers of `model`, with `beside` bytes more of each. Raises
    ValueError for less than one sequence of a block."""
    blocks = memory // (bytes_per_block(model.layers, model.dtype, block_size) + beside)
    if blocks < 1:
        raise ValueError(f"{memory} bytes hold no block of {block_size} tokens of this model")
    return blocks


def blocks_for_share(model: CausalLM, use: MemoryUse, options: RunnerOptions) -> int:
    """How many blocks the share of a GPU leaves room for, and no more than all sequences fill. Raises ValueError if it
    is none."""
    share, most = options.gpu_memory_utilization, options.steps.max_sequences * _table_width(model)
    blocks = use.room(share) // (bytes_per_block(model.layers, model.dtype) + options.bytes_beside_block)
    if blocks < 1:
        raise ValueError(
            f"gpu_memory_utilization={share} leaves no memory for the key-value cache: of {use.total >> 20} MiB "
            f"{(use.total - use.free - use.held) >> 20} are others', {use.peak >> 20} the model's with its largest "
            f"step, and {use.reserve >> 20} kept for sampling and graphs; raise it, free the device, or give cache_mb"
        )
    return min(blocks, most)


def largest_step(model: CausalLM, limits: StepLimits) -> list[BatchEntry]:
    """A step of as many rows as one may hold, in windows, all of which want logits; the tables are of the longest
    context, as far as memory goes. Sequence i has the blocks from i * blocks per window on."""
    entries: list[BatchEntry] = []
    length = min(max(limits.max_query_len, -(-limits.max_rows // limits.max_sequences)), model.max_model_len)
    per_window = -(-length // BLOCK_SIZE)
    width = _table_width(model)
    for index in range(min(limits.max_sequences, -(-limits.max_rows // length))):
        rows = min(length, limits.max_rows - index * length)
        table = [index * per_window + block for block in range(per_window)]
        entries.append(BatchEntry([0] * rows, 0, table + [0] * (width - per_window), rows))
    return entries


def _built(model: CausalLM, options: RunnerOptions) -> ModelRunner:
    adapters = None if options.adapters is None else ResidentAdapters(model, options.adapters)  # before the cache
    runner = ModelRunner(model, options.num_blocks or _num_blocks(model, options), taps=options.taps, adapters=adapters)
    cache = runner.cache
    size = sum(tensor.nbytes for tensor in (*cache.keys, *cache.values))
    log.info("key-value cache: %d blocks of %d tokens, %d MiB", cache.num_blocks, cache.block_size, size >> 20)
    if options.cuda_graphs and model.device.type == "cuda":
        from outrider.engine.cuda_graphs import CudaGraphs

        runner.capture(options.steps, CudaGraphs(model.device))
    return runner


def _num_blocks(model: CausalLM, options: RunnerOptions) -> int:
    if options.cache_bytes is None and model.device.type == "cuda":
        return blocks_for_share(model, _measured(model, options), options)
    memory = options.cache_bytes or options.default_cache_bytes
    return blocks_for_memory(model, memory, beside=options.bytes_beside_block)


def _measured(model: CausalLM, options: RunnerOptions) -> MemoryUse:
    """Runs the largest step."""
    device, entries = model.device, largest_step(model, options.steps)
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    held = torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    num_blocks = max(max(entry.block_table) for entry in entries) + 1
    runner = ModelRunner(model, num_blocks, taps=options.taps)
    runner.forward(entries)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_reserved(device) - num_blocks * bytes_per_block(model.layers, model.dtype)
    del runner
    torch.cuda.empty_cache()
    num_logits = sum(entry.num_logits for entry in entries)
    logits = num_logits * model.vocab_size * torch.float32.itemsize
    graphs = peak - held + logits if options.cuda_graphs else 0  # a pool of their own, and the logits that they fill
    return MemoryUse(total, free, held, peak, sampling_bytes(num_logits, model.vocab_size) + graphs)


def _table_width(model: CausalLM) -> int:
    """Blocks of the longest sequence."""
    return -(-model.max_model_len // BLOCK_SIZE)


def probe(runner: ModelRunner, pool: BlockPool) -> None:
    """One forward of one row, in a block of its own: sequences may be open. Where they hold every block, their steps
    are the sign. Raises what the model raises, or DeviceLost if the device is unusable after it."""
    try:
        block = pool.allocate(1)
    except OutOfBlocks:
        return
    try:
        runner.forward([BatchEntry([0], 0, block, 1)])
    except Exception:
        require_device(runner.model.device)
        raise
    finally:
        pool.release(block)
