"""The two services: the production engines on a virtual device, whose steps take time, fail, stall and crash."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

from simulation.checks import require
from simulation.network import Stream
from simulation.tables import MAX_LEN, Table, TableRunner

from outrider.draft_service.admission import ModelMethod, make_methods
from outrider.draft_service.engine import DraftEngine
from outrider.engine.kv_cache_manager import BlockPool, KVCacheManager
from outrider.planner.simulate import Clock, Device
from outrider.proposers.device_draw import MOST_PASSES
from outrider.proposers.draft_model import DraftModelProposer
from outrider.proposers.draft_rows import DraftedToken, DraftRows
from outrider.rpc.servicer import Deliver, Detach
from outrider.target_service.engine import TargetEngine
from outrider.target_service.sequence import TargetLimits

RETRY_S = 0.05  # as the device thread's


class EngineHost:
    """What both services share: an inbox, and turns of commands and one step, as a device thread takes them."""

    def __init__(
        self, clock: Clock, dice: random.Random, table: Table, num_blocks: int, step_s: float, max_rows: int = 24
    ) -> None:
        self.clock, self.dice, self.table, self.num_blocks, self.step_s = clock, dice, table, num_blocks, step_s
        self.max_rows = max_rows
        self.seconds: Callable[[int], float] | None = None  # of a step by its rows; else it is `step_s` at most
        self._rows_before = 0
        self.notes: Counter[str] = Counter()
        self.up = True
        self.streams: dict[int, Stream] = {}
        self._outbox: dict[Stream, list[Any]] = {}
        self._device = Device(clock, self._step)
        self._running: set[tuple[int, int]] = set()  # sequences that held blocks after the last turn
        self.runner: TableRunner
        self.engine: Any
        self._boot()

    def monotonic(self) -> float:
        """As the engine's clock: within a step that has run its forward, that is over."""
        rows = self.runner.num_rows - self._rows_before
        return self.clock.now + (self.seconds(rows) if self.seconds is not None and rows else 0.0)

    def attach(self, stream: Stream) -> None:
        """A stream begins."""
        self.streams[stream.number] = stream

    def detach(self, stream: Stream) -> None:
        """A stream ended: what it opened is released."""
        if self.streams.pop(stream.number, None) is not None:
            self._device.put(lambda: self.engine.handle(Detach(stream.number)))

    def deliver(self, stream: Stream, messages: Sequence[Any]) -> None:
        """Messages arrive."""
        if stream.number in self.streams:
            self._device.put(lambda: self._handle(stream, messages))

    def crash(self, down_s: float) -> None:
        """Everything held is gone; another process starts later."""
        self.up = False
        self._device.reset()
        self.streams.clear()
        self.clock.call_later(down_s, self._boot)

    def stall(self, duration: float) -> None:
        """The device does nothing for a while."""
        if self.up:
            self._device.stall(duration)

    def check_blocks(self) -> None:
        """Raises Violation where block references and tables differ."""
        try:
            lines = [*self.sequences, *(branch for held in self.sequences for branch in getattr(held, "branches", ()))]
            self.pool.check_integrity([line.sequence.block_table for line in lines])
        except ValueError as error:
            require(False, f"blocks: {error}")

    def check_empty(self) -> None:
        """Raises Violation where something is left after everything has ended."""
        require(not self.sequences, f"{type(self).__name__} still holds {len(self.sequences)} sequences")
        self.check_blocks()
        require(self.pool.num_free == self.num_blocks, f"{type(self).__name__} still holds blocks")

    @property
    def pool(self) -> BlockPool:
        """The engine's blocks."""
        raise NotImplementedError

    @property
    def sequences(self) -> Sequence[Any]:
        """What the engine holds."""
        raise NotImplementedError

    def _new_engine(self) -> Any:
        raise NotImplementedError

    def _handle(self, stream: Stream, messages: Sequence[Any]) -> None:
        self.engine.handle(Deliver(stream.number, messages, lambda event: self._send(stream, event)))

    def _boot(self) -> None:
        self._running.clear()
        self._rows_before = 0
        self.runner = TableRunner(self.table, self.num_blocks)
        self.engine = self._new_engine()
        self.up = True

    def _step(self) -> tuple[float, float | None]:
        """One step; answers leave when it is over."""
        forwards, self._rows_before = self.runner.num_forwards, self.runner.num_rows
        try:
            wait = self.engine.step(self.clock.now)
        except Exception as error:
            self.engine.on_error(error)
            wait = RETRY_S
        took = self._took() if self.runner.num_forwards > forwards else 0.0
        self._rows_before = self.runner.num_rows
        self.check_blocks()
        self._note_preempted()
        outbox, self._outbox = self._outbox, {}
        for stream, events in outbox.items():
            stream.down(events, took)
        return took, wait

    def _took(self) -> float:
        if self.seconds is not None:
            return self.seconds(self.runner.num_rows - self._rows_before)
        return self.dice.uniform(0.2, 1.0) * self.step_s

    def _note_preempted(self) -> None:
        for held in self.sequences:
            if not held.admitted and held.sequence.num_computed_tokens == 0 and held.key in self._running:
                self.notes[f"{type(self).__name__} preempted"] += 1
        self._running = {held.key for held in self.sequences if held.admitted}

    def _send(self, stream: Stream, event: Any) -> None:
        link = stream.all_links[event.sequence_id]
        link.watch.on_departure(link, event, self.engine)
        self._outbox.setdefault(stream, []).append(event)


class TargetHost(EngineHost):
    """The target service."""

    @property
    def pool(self) -> BlockPool:
        """The engine's blocks."""
        return cast(BlockPool, self.engine.cache.pool)

    @property
    def sequences(self) -> Sequence[Any]:
        """What the engine holds."""
        return list(self.engine.scheduler.sequences.values())

    def _new_engine(self) -> TargetEngine:
        limits = TargetLimits(self.table.vocab_size, MAX_LEN, (0,), self.num_blocks, max_window=8)
        return TargetEngine(self.runner, limits, max_rows=self.max_rows, clock=self.monotonic)  # type: ignore[arg-type]

    def _handle(self, stream: Stream, messages: Sequence[Any]) -> None:
        for message in messages:
            link = stream.all_links[message.sequence_id]
            link.watch.on_delivery(link, message)
        super()._handle(stream, messages)


class SeveralAtOnce(DraftModelProposer):
    """As with captured passes on a device: several tokens between two looks at what has arrived."""

    def tokens_at_once(self, rows: Sequence[DraftRows], wanted: Sequence[int]) -> list[int]:
        """As many as are wanted, if no prompt is among them."""
        return [max(1, min(*wanted, MOST_PASSES)) if all(row.draws for row in rows) else 1] * len(rows)

    def run(self, rows: Sequence[DraftRows], counts: Sequence[int]) -> list[list[DraftedToken]]:
        """Pass after pass."""
        drafted = self.step(rows)
        for _ in range(counts[0] - 1):
            for tokens, more in zip(drafted, self.step([replace(row, num_rows=1) for row in rows]), strict=True):
                tokens += more
        return drafted


class DraftHost(EngineHost):
    """The draft service, drafting with a model."""

    proposer_type = DraftModelProposer

    @property
    def pool(self) -> BlockPool:
        """The engine's blocks."""
        return self._cache.pool

    @property
    def sequences(self) -> Sequence[Any]:
        """What the engine holds."""
        return list(self.engine.sequences.values())

    def _new_engine(self) -> DraftEngine:
        self._cache = KVCacheManager(BlockPool(self.num_blocks))
        proposer = self.proposer_type(self.runner)  # type: ignore[arg-type]
        return DraftEngine(make_methods([ModelMethod(proposer, self._cache, (0,))]), max_rows=self.max_rows)


class DeviceDraftHost(DraftHost):
    """The same on a device that takes several passes at once."""

    proposer_type = SeveralAtOnce
