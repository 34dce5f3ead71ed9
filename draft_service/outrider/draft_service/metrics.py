"""A draft's time series, for Prometheus. Most are read from the engine at the scrape; what only its messages and passes
know is counted on the device thread. Imported only where metrics are asked for."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from outrider.draft_service.engine import DraftEngine
from outrider.draft_service.observer import DraftEngineCommand, DraftObserver
from outrider.draft_service.sequence import DraftSequence, SequenceKey
from outrider.rpc.messages import Commit, DraftTokens, ModelInfo
from outrider.rpc.metrics import PARTS_S, Metrics
from outrider.rpc.servicer import Deliver, EngineThread

PASSES_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(slots=True)
class _Clock:
    """What one sequence waits for; times on the device thread's clock."""

    ready: float | None = None  # since when the device could draft for it
    waited: float = 0.0  # that the piece under way has been ready, in seconds
    resting: float | None = None  # since when all that it may be drafted is


class DraftMetrics(Metrics, DraftObserver):
    """Counts and times what an engine does; its methods that take sequences belong to the device thread."""

    def __init__(self, methods: Iterable[str]) -> None:
        super().__init__("draft", "draft")
        self._batch = self.histogram("batch_sequences", "Chains and branches in one pass", BATCHES)
        self._pass = self.histogram("pass_seconds", "Of one forward pass", PASSES_S)
        self._piece_wait = self.histogram(
            "piece_wait_seconds", "Of a piece, from when its tokens could be drafted to the passes that do", PARTS_S
        )
        self._credit_wait = self.histogram(
            "credit_wait_seconds", "Of a sequence, from its last drafted token to the credit for the next", PARTS_S
        )
        self._drafted, self._verified, self._accepted = (dict.fromkeys(methods, 0) for _ in range(3))
        self._num_passes = 0
        self._busy_s = 0.0
        self._clocks: dict[SequenceKey, _Clock] = {}

    def attach(self, engine: DraftEngine, thread: EngineThread, model: ModelInfo) -> None:
        """The series that are read from the engine, once the thread runs it."""
        started = time.monotonic()

        def drafts() -> list[DraftSequence]:
            return list(engine.sequences.values())  # at once: the device thread changes it

        def used() -> float:
            return engine.cache.pool.num_blocks - engine.cache.pool.num_free

        def states() -> dict[str, float]:
            drafting = sum(draft.wants_tokens for draft in drafts())
            return {"drafting": drafting, "resting": len(engine.sequences) - drafting}

        def stores() -> dict[str, float]:
            return {
                "kv_blocks": used(),
                "branches": sum(len(draft.branches) for draft in drafts()),
                "unsent_tokens": sum(draft.chain.num_unsent for draft in drafts()),
                "lookup_tokens": sum(len(draft.text) for draft in drafts() if draft.lookups),
            }

        def idle_s() -> float:
            return max(0.0, time.monotonic() - started - self._busy_s - thread.step_age_s())

        self.model_info(model)
        self.read_gauges("num_sequences", "Open sequences, by whether they may be drafted", "state", states)
        self.gauge(
            "kv_cache_usage_perc",
            "Blocks in use over all, 0 to 1",
            lambda: used() / max(1, engine.cache.pool.num_blocks),
        )
        self.read_gauges(
            "model_sequences",
            "Open sequences, by the model of theirs",
            "served_model",
            lambda: engine.sequences_by_model,
        )
        self.read_counter("displaced", "Sequences that gave way to another model's", lambda: engine.num_displaced)
        self.read_gauges("store_entries", "What is held, by kind", "store", stores)
        self.read_gauges("learned", "What methods keep of finished sequences, by what is counted", "kind", engine.held)
        self.read_counter("passes", "Forward passes", lambda: self._num_passes)
        self.read_counters("tokens", "Tokens sent in pieces, those of branches too", "method", lambda: self._drafted)
        self.read_counters("verified_tokens", "Drafted tokens that targets verified", "method", lambda: self._verified)
        self.read_counters("accepted_tokens", "... and accepted", "method", lambda: self._accepted)
        self.read_counter(
            "num_preemptions", "Sequences that gave up their blocks", lambda: engine.scheduler.num_preempted
        )
        self.read_counter("device_idle_seconds", "Time in which no pass ran", idle_s)

    def on_command(self, command: DraftEngineCommand, drafts: Mapping[SequenceKey, DraftSequence]) -> None:
        """Counts what was verified, and notes who waits since when."""
        if not isinstance(command, Deliver):
            return
        received = time.monotonic() if command.received is None else command.received
        for message in command.messages:
            draft = drafts.get((command.stream, message.sequence_id))
            if draft is None:
                continue
            if isinstance(message, Commit):
                self._verified[draft.verified_method] += message.num_drafted
                self._accepted[draft.verified_method] += message.num_accepted
            self._set_clock(draft, received)

    def on_start(self, drafts: Iterable[DraftSequence]) -> None:
        """Notes how long these have waited to be drafted for."""
        now = time.monotonic()
        for draft in drafts:
            clock = self._clocks.get(draft.key)
            if clock is not None and clock.ready is not None:
                clock.waited += max(0.0, now - clock.ready)
                clock.ready = None

    def on_passes(self, num_passes: int, num_lines: int, seconds: float) -> None:
        """Counts passes, and times each as its share of them."""
        self._num_passes += num_passes
        self._busy_s += seconds
        self._batch.observe(num_lines)
        self._pass.observe(seconds / num_passes)

    def on_piece(self, draft: DraftSequence, piece: DraftTokens) -> None:
        """Counts a piece, and times its wait. Branches are drafted beside their chain, and wait for nothing of their
        own."""
        self._drafted[piece.method or draft.methods[0]] += len(piece.ids)
        clock = self._clocks.get(draft.key)
        if piece.ids and clock is not None and piece.chain == draft.chain.number:
            self._piece_wait.observe(clock.waited)
            clock.waited = 0.0

    def on_step(self, drafts: Iterable[DraftSequence]) -> None:
        """Notes who waits from now on, and for what."""
        now = time.monotonic()
        for draft in drafts:
            self._set_clock(draft, now)

    def on_release(self, key: SequenceKey) -> None:
        """Forgets a sequence."""
        self._clocks.pop(key, None)

    def _set_clock(self, draft: DraftSequence, now: float) -> None:
        clock = self._clocks.setdefault(draft.key, _Clock())
        if draft.wants_tokens:
            clock.ready = now if clock.ready is None else clock.ready
            if clock.resting is not None:
                self._credit_wait.observe(max(0.0, now - clock.resting))
                clock.resting = None
            return
        clock.ready = None
        at_end = 0 < draft.limit <= len(draft.text) and not draft.finished
        if at_end and clock.resting is None:
            clock.resting = now
