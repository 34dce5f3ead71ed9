"""A step in two halves: it is launched, and later its verdicts are read. Where the device computes behind the host's
back, the engine takes commands between them. And a step of plain tokens is launched before what it follows has been
read: each row's id goes from one to the other on the device, and while it runs the host commits, answers and packs the
next one. So a token past an end is computed, too, and nobody ever hears of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from outrider.engine.model_runner import ModelRunner
from outrider.engine.staging import index_on
from outrider.engine.token_tree import KeptPath
from outrider.engine.worker import require_device
from outrider.rpc.messages import StepTimings
from outrider.target_service.device_verifier import StepVerifier
from outrider.target_service.outputs import ComputedStep, LaunchedVerify, VerifiedWindow, report_prompt
from outrider.target_service.parts import EnginePart, StepUnderWay
from outrider.target_service.scheduler import ScheduledSequence


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step whose verdicts were not read yet."""

    step: StepUnderWay
    verify: LaunchedVerify
    pass_us: Callable[[], int]  # of the model's pass, once it has ended
    num_woken: Callable[[], int]  # experts, at that time


class Steps:
    """Launches and finishes the steps of one engine."""

    def __init__(
        self, runner: ModelRunner, verifier: StepVerifier, parts: Sequence[EnginePart], clock: Callable[[], float]
    ) -> None:
        self.verifier = verifier
        self._runner, self._parts, self._clock = runner, parts, clock
        self._ended = 0.0  # when the last one had been read

    def launch(self, scheduled: Sequence[ScheduledSequence], fed: Tensor | None = None) -> LaunchedStep:
        """One pass over the model, and what judges its windows, without sequences whose masks are late; nothing is
        committed. `fed` are the rows' ids, [rows] int64, where the device alone has them. Raises what model and
        verifier raise, or DeviceLost if the device is unusable after it."""
        step = StepUnderWay(scheduled, time.time_ns(), self._clock())
        try:
            for part in self._parts:
                part.launching(step)
            entries = [one.batch_entry() for one in scheduled]
            # [rows that want logits, vocab]
            logits = self._runner.forward(entries) if fed is None else self._runner.follow(entries, fed)
            pass_us, num_woken = self._runner.last_pass, self._runner.last_woken
            for one in scheduled:
                if one.target.wants_prompt_logprobs:
                    report_prompt(one, logits[one.first_logit :][: one.num_logits])
            pass_s = self._clock() - step.started
            for part in self._parts:
                part.judging(step, pass_s)
            going_on = [one for one in scheduled if not one.target.is_waiting]
            verify = self.verifier.launch(logits, [one for one in going_on if one.samples], step.masks)
            step.scheduled = [one for one in going_on if not one.target.is_waiting]
        except Exception:
            self._end(step)
            require_device(self._runner.model.device)
            raise
        return LaunchedStep(step, verify, pass_us, num_woken)

    def follow(self, launched: LaunchedStep, following: Mapping[int, ScheduledSequence]) -> LaunchedStep:
        """A step of plain tokens behind one that was not read, by the places that its sequences have in that one."""
        next_ids = launched.verify.next_ids  # [n]
        if next_ids is not None and len(following) < len(next_ids):
            next_ids = next_ids[index_on(list(following), next_ids.device)]  # [those that go on]
        return self.launch(list(following.values()), next_ids)

    def finish(self, launched: LaunchedStep) -> ComputedStep:
        """What a step gave to the sequences that stand as they were planned, once the device has computed it. Raises as
        `launch` does."""
        step = launched.step
        try:
            verified = [window for window in launched.verify.read() if window.scheduled.stands]
            self._runner.keep_paths([path for window in verified if (path := kept_path(window)) is not None])
        except Exception:
            require_device(self._runner.model.device)
            raise
        finally:
            self._end(step)
        started, self._ended = max(step.started, self._ended), self._clock()  # before, the device had another one
        stayed = [one for one in step.scheduled if one.stands and not one.target.is_waiting]
        step_us = round((self._ended - started) * 1e6)
        verify_us = min(launched.pass_us(), step_us)
        num_rows = sum(one.num_rows for one in stayed)
        counts = {"mask_us": step.mask_us, "num_woken": launched.num_woken()}
        timings = StepTimings(0, verify_us, step_us - verify_us, num_rows, len(stayed), **counts)
        started_ns = step.started_ns + round((started - step.started) * 1e9)
        return ComputedStep(stayed, verified, started_ns, started, self._ended, timings)

    def abandon(self, launched: LaunchedStep) -> None:
        """Nobody will read what the device computes of it."""
        self._end(launched.step)

    def _end(self, step: StepUnderWay) -> None:
        for part in self._parts:
            part.ended(step)


def kept_path(verified: VerifiedWindow) -> KeptPath | None:
    """What stays of a tree; None of a chain, which lies where it has to."""
    scheduled = verified.scheduled
    if not verified.path:
        return None
    first_row = scheduled.first_row + scheduled.committed - scheduled.start
    return KeptPath(scheduled.target.sequence.block_table, scheduled.committed, first_row, verified.path)
