"""One pass over the model, and what the target says of the windows in it. Nothing is committed here."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from outrider.engine.device_thread import require_device
from outrider.engine.runner import ModelRunner
from outrider.target.reports import report_prompt
from outrider.target.scheduler import StepEntry
from outrider.target.verifier import Judged, Verdict
from outrider.target.verifiers import StepVerifier
from outrider.wire.messages import StepTimings


@dataclass(frozen=True, slots=True)
class ComputedStep:
    """Entries that shared a pass, with the verdicts on their windows."""

    entries: Sequence[StepEntry]
    verdicts: Sequence[Verdict]  # in no fixed order
    started_ns: int  # wall clock
    started: float  # on the engine's clock
    ended: float
    verify_us: int  # of the pass itself

    @property
    def num_rows(self) -> int:
        """Rows of all entries."""
        return sum(entry.num_rows for entry in self.entries)

    @property
    def seconds(self) -> float:
        """From its start to the verdicts."""
        return self.ended - self.started

    def timings(self) -> StepTimings:
        """What every commit of it says; the queue's time is each sequence's own."""
        step_us = round(self.seconds * 1e6)
        verify_us = min(self.verify_us, step_us)  # known now, also where it ran behind the host's back
        return StepTimings(
            verify_us=verify_us,
            sample_us=step_us - verify_us,
            num_rows=self.num_rows,
            num_sequences=len(self.entries),
        )


class StepComputer:
    """Computes and judges. Called from one thread."""

    def __init__(self, runner: ModelRunner, verifier: StepVerifier, clock: Callable[[], float]) -> None:
        self._runner = runner
        self.verifier = verifier
        self._clock = clock

    def compute(self, entries: Sequence[StepEntry]) -> ComputedStep:
        """Raises what the model or the verifier raises, or DeviceLost if the device is unusable after it."""
        started_ns, started = time.time_ns(), self._clock()
        try:
            logits = self._runner.forward([entry.batch_entry() for entry in entries])
            verdicts = self.verifier.verify(logits, _judged(entries, logits))
        except Exception:
            require_device(self._runner.model.device)
            raise
        return ComputedStep(entries, verdicts, started_ns, started, self._clock(), self._runner.last_forward_us)


def _judged(entries: Sequence[StepEntry], logits: Tensor) -> list[Judged]:
    """Reads prompt log probabilities off their rows; the last rows of each entry judge its window."""
    judged, end = [], 0
    for entry in entries:
        start, end = end, end + entry.num_logits
        if entry.target.wants_prompt_logprobs:
            report_prompt(entry, logits[start:end])
        if entry.samples:
            judged.append(Judged(entry, range(end - entry.num_judging, end)))
    return judged
