"""Who watches an engine's steps: what counts them and what traces them, where somebody asks for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from outrider.rpc.telemetry import StepTracer
from outrider.target_service.observed import ObservedStep, observed
from outrider.target_service.outputs import ComputedStep
from outrider.target_service.settings import TargetSettings

if TYPE_CHECKING:
    from outrider.target_service.metrics import TargetMetrics


def new_metrics(settings: TargetSettings) -> TargetMetrics | None:
    """What counts, where somebody asks for it; nothing of metrics is imported elsewhere."""
    if not settings.metrics:
        return None
    from outrider.target_service.metrics import TargetMetrics

    return TargetMetrics()


def step_watcher(metrics: TargetMetrics | None) -> Callable[[ObservedStep], None] | None:
    """Traces steps if tracing is on, and counts them; None where nobody does either."""
    tracer = StepTracer.if_enabled("outrider.target")
    watchers: list[Callable[[ObservedStep], None]] = []
    watchers += [partial(trace_step, tracer)] if tracer is not None else []
    watchers += [metrics.add_step] if metrics is not None else []
    return partial(_tell_all, watchers) if watchers else None


def own_step_watcher(metrics: TargetMetrics | None) -> Callable[[ComputedStep], None] | None:
    """Traces and counts our engine's steps; None where nobody asks for it."""
    watch = step_watcher(metrics)
    return (lambda step: watch(observed(step))) if watch else None


def _tell_all(watchers: Sequence[Callable[[ObservedStep], None]], step: ObservedStep) -> None:
    for watch in watchers:
        watch(step)


def trace_step(tracer: StepTracer, step: ObservedStep) -> None:
    """A span of a step that has just ended."""
    tracer.record(
        "outrider.verify_step",
        step.traceparents,
        step.started_ns,
        lambda: {
            "outrider.step.rows": step.timings.num_rows,
            "outrider.step.sequences": step.timings.num_sequences,
            "outrider.step.drafted": step.num_drafted,
            "outrider.step.accepted": step.num_accepted,
            "outrider.step.draft_us": step.draft_us,
            "outrider.step.forced": step.num_forced,
            "outrider.step.mask_us": step.timings.mask_us,
        },
    )
