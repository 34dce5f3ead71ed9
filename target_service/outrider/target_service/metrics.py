"""A target's time series, for Prometheus, whichever engine runs it. Most are read from the engine at the scrape; what
only a step knows is counted on the device thread, once a step. Imported only where metrics are asked for."""

from __future__ import annotations

import time
from collections.abc import Callable

from outrider.rpc.messages import ModelInfo
from outrider.rpc.metrics import PARTS_S, EngineState, Metrics, VllmCollector, exemplar_of
from outrider.rpc.servicer import EngineThread
from outrider.target_service.observed import EngineStats, ObservedStep

MAX_ROWS_LABEL = 4096  # steps of more rows share the last label
STEPS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)

COMPILES_S = (0.0001, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class TargetMetrics(Metrics):
    """`add_step` belongs to the device thread."""

    def __init__(self) -> None:
        super().__init__("target", "target")
        steps = self.histogram("step_seconds", "Of one step, by the power of two that holds its rows", STEPS_S, "rows")
        self._steps = {rows: steps.labels(str(rows)) for rows in _row_labels()}
        self._compiled = self.histogram(
            "constraint_compile_seconds",
            "Of constraints that sequences go on with",
            COMPILES_S,
        )
        self._queue = self.histogram("queue_seconds", "From when a sequence could run to its step", PARTS_S)
        self._num_prompt_rows = self._num_verify_rows = 0
        self._busy_s = 0.0

    def attach(
        self, stats: Callable[[], EngineStats], thread: EngineThread, model: ModelInfo, vllm_names: bool = False
    ) -> None:
        """The series that are read from the engine, once the thread runs it."""
        started = time.monotonic()

        def idle_s() -> float:
            busy_s = self._busy_s + stats().head_seconds
            return max(0.0, time.monotonic() - started - busy_s - thread.step_age_s())

        def state() -> EngineState:
            now = stats()
            blocks = now.cache_usage, now.block_size, now.num_blocks
            return EngineState(model.name, now.load.running, now.load.waiting, *blocks)

        self.model_info(model)
        self.gauge("num_requests_running", "Sequences that a step may take", lambda: stats().load.running)
        self.gauge("num_requests_waiting", "Sequences that wait for blocks", lambda: stats().load.waiting)
        self.gauge("num_requests_open", "Sequences that are open", lambda: stats().num_open)
        self.gauge("kv_cache_usage_perc", "Blocks in use over all, 0 to 1", lambda: stats().cache_usage)
        self.gauge("cache_blocks", "Blocks of the key-value cache", lambda: stats().num_blocks)
        self.gauge("cache_block_size_tokens", "Tokens of a block", lambda: stats().block_size)
        self.read_counter("prefix_cache_queries", "Tokens looked up in the prefix cache", lambda: stats().num_looked_up)
        self.read_counter("prefix_cache_hits", "Tokens found in the prefix cache", lambda: stats().num_found)
        self.read_counter("num_preemptions", "Sequences that gave up their blocks", lambda: stats().num_preempted)
        self.read_counters(
            "step_rows",
            "Rows computed, of prompts and to verify windows or decode plain tokens",
            "kind",
            lambda: {"prompt": self._num_prompt_rows, "verify": self._num_verify_rows},
        )
        self.read_counter(
            "rows_cut", "Drafted tokens put off, as a row would not have paid", lambda: stats().num_rows_cut
        )
        self.read_counter("device_idle_seconds", "Time in which no step and no head ran", idle_s)
        self.read_counter("head_steps", "Steps that the head beside the model was behind", lambda: stats().head_steps)
        self.read_counter("head_seconds", "Time that the head took", lambda: stats().head_seconds)
        self.read_counter("head_draft_tokens", "Tokens that it drafted", lambda: stats().head_drafted)
        self.read_counter(
            "constraints_refused",
            "Constraints that do not compile, or not in time",
            lambda: stats().num_refused_constraints,
        )
        self.read_counter("mask_seconds", "Time that masks took on their threads", lambda: stats().mask_seconds)
        self.read_counter("mask_wait_seconds", "Time that constraints held steps up", lambda: stats().mask_wait_seconds)
        self.read_counter("masks_late", "Windows put off, whose masks were not there", lambda: stats().num_late_masks)
        self.gauge("adapters_loaded", "Adapters that requests may name", lambda: stats().num_adapters)
        self.read_gauges(
            "adapter_sequences", "Open sequences of adapters that have any", "adapter",
            lambda: stats().adapter_sequences,
        )  # fmt: skip
        self.read_gauges(
            "learned", "What is kept of finished sequences, and was learned of them", "kind",
            lambda: {"lesson_bytes": stats().lesson_bytes, "adapters": stats().num_learned},
        )  # fmt: skip
        self.read_counter("adapter_swaps", "Adapters put on the device", lambda: stats().num_adapter_swaps)
        if vllm_names:
            self.registry.register(VllmCollector(state))

    def add_compiled(self, seconds: float) -> None:
        """A constraint was compiled, or found."""
        self._compiled.observe(seconds)

    def add_step(self, step: ObservedStep) -> None:
        """What a step computed, before it is committed."""
        num_rows, num_verify_rows = step.timings.num_rows, step.num_verify_rows
        exemplar = next(filter(None, map(exemplar_of, step.traceparents)), None)
        for wait_s in step.waits:
            self._queue.observe(wait_s)
        self._num_verify_rows += num_verify_rows
        self._num_prompt_rows += num_rows - num_verify_rows
        self._busy_s += step.seconds
        label = min(1 << (num_rows - 1).bit_length(), MAX_ROWS_LABEL)
        self._steps[label].observe(step.seconds, exemplar)


def _row_labels() -> list[int]:
    return [1 << power for power in range(MAX_ROWS_LABEL.bit_length())]
