"""What metrics and traces see of an engine, ours or vLLM's: its steps, and its state at one moment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from outrider.rpc.messages import Load, StepTimings

if TYPE_CHECKING:
    from outrider.target_service.engine import TargetEngine
    from outrider.target_service.outputs import ComputedStep
    from outrider.target_service.scheduler import ScheduledSequence


@dataclass(frozen=True, slots=True)
class ObservedStep:
    """What one step did, for whoever counts or traces it."""

    started_ns: int  # by the wall clock
    seconds: float  # from its start to what was verified
    timings: StepTimings  # with its rows and sequences
    num_verify_rows: int  # that judge windows or give the next token; the others belong to prompts
    num_drafted: int
    num_accepted: int
    traceparents: Sequence[str]  # of the sequences in it
    draft_us: int = 0  # what a head beside the model took for the windows
    num_forced: int = 0  # tokens that constraints forced; drafted and accepted ones do not count them
    waits: Sequence[float] = ()  # for how many seconds sequences could have run before, where that is known


@dataclass(frozen=True, slots=True)
class EngineStats:
    """State and running totals. What an engine does not have stays 0."""

    load: Load
    num_open: int  # sequences
    num_blocks: int
    block_size: int  # tokens
    num_free: int  # blocks
    num_looked_up: int = 0  # tokens, in the prefix cache
    num_found: int = 0
    num_preempted: int = 0
    num_rows_cut: int = 0
    head_steps: int = 0
    head_seconds: float = 0.0
    head_drafted: int = 0
    num_refused_constraints: int = 0
    num_late_masks: int = 0
    mask_seconds: float = 0.0  # on threads of their own
    mask_wait_seconds: float = 0.0  # on the device's
    num_adapters: int = 0  # that sequences may name
    adapter_sequences: Mapping[str, int] = field(default_factory=dict)  # open ones, by adapters that any has
    num_adapter_swaps: int = 0  # adapters put on the device
    lesson_bytes: int = 0  # of texts that wait for who learns of them
    num_learned: int = 0  # learned weights that are in use

    @property
    def cache_usage(self) -> float:
        """Blocks in use over all, 0 to 1."""
        return 1 - self.num_free / self.num_blocks


def observed(step: ComputedStep) -> ObservedStep:
    """A step of our engine."""
    took = [scheduled.target for scheduled in step.scheduled if scheduled.samples]
    return ObservedStep(
        step.started_ns,
        step.seconds,
        step.timings,
        num_verify_rows=sum(scheduled.num_verify_rows for scheduled in step.scheduled),
        num_drafted=sum(_num_drafted(scheduled) for scheduled in step.scheduled),
        num_accepted=sum(min(window.num_accepted, _num_drafted(window.scheduled)) for window in step.verified),
        traceparents=[scheduled.target.open.traceparent for scheduled in step.scheduled],
        draft_us=max(scheduled.draft_us for scheduled in step.scheduled),
        num_forced=sum(scheduled.window.num_forced for scheduled in step.scheduled),
        waits=[max(0.0, step.started - target.ready_since) for target in took],
    )


def _num_drafted(scheduled: ScheduledSequence) -> int:
    return len(scheduled.window.ids) - scheduled.window.num_forced


def stats_of(engine: TargetEngine) -> EngineStats:
    """The state of our engine; from any thread."""
    pool, scheduler = engine.cache.pool, engine.scheduler
    of_parts: dict[str, Any] = {name: value for part in engine.parts for name, value in part.stats().items()}
    return EngineStats(
        engine.load(),
        num_open=len(scheduler.sequences),
        num_blocks=pool.num_blocks,
        block_size=engine.cache.block_size,
        num_free=pool.num_free,
        num_looked_up=scheduler.num_looked_up,
        num_found=scheduler.num_found,
        num_preempted=scheduler.num_preempted,
        num_rows_cut=scheduler.num_rows_cut,
        **of_parts,
    )
