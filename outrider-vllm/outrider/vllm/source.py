"""Where drafts come from, as the scheduler sees it: from a service that drives it over a link, or from draft services
that it asks by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from outrider.rpc.messages import Load, StepTimings, TargetEvent
from outrider.vllm.rows import DraftedRow

LINK = "OUTRIDER_LINK"  # environment of the engine's process: where the service that drives it listens
DRAFT = "OUTRIDER_DRAFT"  # or: where draft services listen, separated by commas


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one step computed."""

    started_ns: int  # wall clock
    seconds: float
    timings: StepTimings  # of the step; the queue's time is not known
    events: Sequence[TargetEvent]  # what it committed of rows, by their sequence ids
    load: Load
    num_preempted: int = 0  # times so far that a request gave up its blocks
    waits: Sequence[float] = ()  # seconds that requests in their first step had waited for it


class DraftSource(Protocol):
    """All methods belong to the engine's thread, and none of them may block but `wait`."""

    is_reader: bool  # it hands on what steps commit of its rows, so that vLLM's own client hears of their ends alone
    longest_wait_s: float  # of a step that has nothing to do; vLLM's loop, to which requests come, stands meanwhile

    def output_len(self, request: Any) -> int:
        """How many of a request's prompt ids were generated before it came."""

    def opened(self, request: Any) -> DraftedRow | None:
        """The row of a vLLM request that was added; None where nobody drafts for it."""

    def closed(self, row: DraftedRow) -> None:
        """It ended, or was aborted."""

    def take(self, rows: Mapping[int, DraftedRow]) -> bool:
        """Gives what has come to the rows that it is for, by their sequence ids. Returns whether something came of
        which vLLM's own loop hears, too: a request begins, or is to end."""

    def wait(self, timeout_s: float) -> None:
        """Returns when something has come, or after so long."""

    def stepping(self, started: float) -> None:
        """A step begins."""

    def committed(self, report: StepReport) -> None:
        """A step has ended."""

    def close(self) -> None:
        """The engine ends."""
