"""What a step was, for traces and metrics."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.target.scheduler import StepEntry
from outrider.target.verifier import Verdict


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a step was, for traces and metrics."""

    started_ns: int  # wall clock
    ended_ns: int
    num_rows: int
    num_sequences: int
    num_drafted: int
    num_accepted: int
    traceparents: tuple[str, ...]


def report_step(entries: Sequence[StepEntry], verdicts: Sequence[Verdict], started_ns: int) -> StepReport:
    """Of a step that has just ended."""
    return StepReport(
        started_ns=started_ns,
        ended_ns=time.time_ns(),
        num_rows=sum(entry.num_rows for entry in entries),
        num_sequences=len(entries),
        num_drafted=sum(len(entry.window.ids) for entry in entries),
        num_accepted=sum(verdict.num_accepted for verdict in verdicts),
        traceparents=tuple(entry.target.open.traceparent for entry in entries if entry.target.open.traceparent),
    )
