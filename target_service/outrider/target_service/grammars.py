"""Constraints beside the device thread: compiled by threads of their own, which make their masks, too, while a pass
runs or where judging asks for one (`lazy_masks`).

A sequence whose constraint is being compiled waits without blocks. One whose masks are not there when the pass is, and
a little later, leaves the step to the others: its window is not judged, and it comes back once they are there."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from outrider.engine.grammar.compiler import CompiledGrammar, GrammarCompiler, Matcher
from outrider.engine.grammar.lark import GrammarError
from outrider.engine.grammar.masks import ALL_BITS, num_words
from outrider.engine.grammar.queue import GrammarQueue, GrammarQueueFull
from outrider.engine.grammar.source import GrammarSpec
from outrider.engine.grammar.trial import TrialFailed
from outrider.engine.sampler import SamplingRows, is_stuck
from outrider.engine.token_tree import path_to
from outrider.rpc.errors import Internal, InvalidArgument, OutriderError, ResourceExhausted, Unavailable, Violation
from outrider.rpc.logs import of
from outrider.rpc.messages import Open
from outrider.target_service.draft_buffer import Window
from outrider.target_service.scheduler import ScheduledSequence
from outrider.target_service.sequence import SequenceKey, TargetSequence

log = logging.getLogger(__name__)

FIELD = "sampling.structured_output"
PATIENCE_S = 0.05  # after a pass for the masks of its windows, or as long as the pass took
GIVE_UP_S = 1.0  # of a processor's time for one sequence's masks
POLL_S = 0.002  # between two looks at what is not there yet


class Grammars:
    """What the engine has for constraints. All but `masks_of`'s work belongs to the device thread."""

    def __init__(
        self,
        compiler: GrammarCompiler,
        compile_pool: Executor | None = None,
        mask_pool: Executor | None = None,
        patience_s: float = PATIENCE_S,
        pin_memory: bool = False,
    ) -> None:
        self.compiler = compiler
        self._queue = GrammarQueue(lambda: compiler, pool=compile_pool)
        self._mask_pool = mask_pool or ThreadPoolExecutor(min(8, os.cpu_count() or 1), "grammar-masks")
        self._patience_s = patience_s
        self._pin_memory = pin_memory
        self.head: str | None = None  # the method that drafts beside the model
        self._late: dict[SequenceKey, WorkClock] = {}  # of masks that are
        self._buffer = torch.empty(0, num_words(compiler.vocab_size), dtype=torch.int32)
        self.on_compiled: Callable[[float], None] = lambda seconds: None  # told of each that a sequence goes on with
        self.num_compiled = self.num_refused = self.num_late = 0
        self.mask_seconds = self.wait_seconds = 0.0

    def open(self, target: TargetSequence) -> None:
        """Starts to compile what a new sequence asks for, if anything. Raises ResourceExhausted where too many wait."""
        spec = spec_of(target)
        if spec is not None:
            try:
                target.waits_for = self._queue.submit(spec, partial(self._match, target.open))
            except GrammarQueueFull as full:
                raise ResourceExhausted(str(full), reason="BUSY", retry_after_ms=full.wait_ms) from full

    def resume(self, target: TargetSequence, now: float) -> OutriderError | None:
        """Lets a waiting sequence go on once what it waits for is there; why it cannot, if so."""
        waits_for = target.waits_for
        if waits_for is None:
            return None
        if not waits_for.done():
            late = self._late.get(target.key)
            return too_slow() if late is not None and late.seconds() > GIVE_UP_S else None
        target.waits_for, target.ready_since = None, now
        self._late.pop(target.key, None)
        try:
            found = waits_for.result()
        except OutriderError as error:
            self.num_refused += 1
            return error
        except GrammarError as error:
            self.num_refused += target.sampler.constraint is None  # else it is of masks
            return refused(str(error))
        except TrialFailed as error:
            return untried(error)
        except Exception:
            log.exception("the constraint of sequence %d failed", target.open.sequence_id, extra=of(target.open))
            return Internal("the constraint failed in the engine; see the log", reason="GRAMMAR_FAILED")
        if isinstance(found, tuple):
            matcher, seconds = found
            self.num_compiled += 1
            self.on_compiled(seconds)
            target.compile_us = round(seconds * 1e6)
            target.sampler.constrain(matcher, target.eos_ids if target.open.sampling.ignore_eos else ())
        return None

    def forget(self, target: TargetSequence) -> None:
        """A sequence ended while it waited for its constraint."""
        if target.waits_for is not None:
            target.waits_for.cancel()
        self._late.pop(target.key, None)

    def start(
        self, windows: Sequence[ScheduledSequence], is_lazy: Callable[[TargetSequence], bool] = lambda target: False
    ) -> StepMasks | None:
        """Has the masks of these windows made, but for sequences whose masks are made where they are asked for; None
        where no window has a constraint."""
        if not any(window.target.sampler.constrained for window in windows):
            return None
        started = time.perf_counter()
        step = StepMasks(self)
        ahead = {w.target.key for w in windows if w.target.sampler.constrained and not is_lazy(w.target)}
        if ahead:
            step.start(windows, ahead, self._rows(sum(window.num_verify_rows for window in windows)))
        step.wait_s = time.perf_counter() - started
        return step

    def submit(self, plans: Sequence[SamplingRows], out: Tensor, clock: WorkClock) -> Future[float]:
        """Has the masks of one sequence's rows written, [rows, words] int32, on another thread."""
        return self._mask_pool.submit(write_masks, plans, out, clock)

    def new_masks(self, count: int) -> Tensor:  # [count, words] int32
        """Masks of so many rows, not written yet."""
        return torch.empty(count, self._buffer.shape[1], dtype=torch.int32)

    def patience(self, pass_s: float) -> float:
        """Seconds for masks after a pass of so many."""
        return max(self._patience_s, pass_s)

    def count(self, mask_s: float, wait_s: float, late: Mapping[SequenceKey, WorkClock]) -> None:
        """Counts a step's masks."""
        self.mask_seconds, self.wait_seconds = self.mask_seconds + mask_s, self.wait_seconds + wait_s
        if late:
            self.num_late += len(late)
            self._late |= late
            self._buffer = self._buffer[:0]  # threads still write to it

    def close(self) -> None:
        """Ends the threads."""
        self._queue.close()
        self._mask_pool.shutdown(wait=False, cancel_futures=True)

    def _rows(self, count: int) -> Tensor:
        if len(self._buffer) < count:
            shape = max(count, 2 * len(self._buffer)), self._buffer.shape[1]
            self._buffer = torch.empty(shape, dtype=torch.int32, pin_memory=self._pin_memory)
        return self._buffer[:count]

    def _match(self, request: Open, compiled: CompiledGrammar, seconds: float) -> tuple[Matcher, float]:
        started = time.perf_counter() - seconds
        try:
            matcher = compiled.matcher(request.output_ids)
            matcher.forced(1)  # finds out here whether that is slow
            if request.method == self.head:  # which drafts by it on the device's thread
                matcher.try_mask()
            return matcher, time.perf_counter() - started
        except GrammarError as error:
            problem = f"does not fit {FIELD}: {error}; allowed: what it generated"
            raise InvalidArgument.of([Violation("open.output_ids", problem)]) from error


class StepMasks:
    """The masks of a step's windows, while threads write them."""

    def __init__(self, owner: Grammars) -> None:
        self._owner = owner
        self._patience_s = owner.patience(0.0)
        self._masks: Tensor | None = None  # [rows that judge windows, words] int32
        self._parts: dict[SequenceKey, Tensor] = {}  # of each window's rows
        self._jobs: dict[SequenceKey, MaskJob] = {}
        self._started: frozenset[SequenceKey] = frozenset()  # those that were not left for later
        self._late: dict[SequenceKey, WorkClock] = {}
        self.mask_s = self.wait_s = 0.0  # of the threads that make them; that the device thread spent on it

    def start(self, windows: Sequence[ScheduledSequence], wanted: Iterable[SequenceKey], masks: Tensor) -> None:
        """Has those of the wanted sequences written, and all bits of the others' set, [rows that judge, words]."""
        self._masks, self._started = masks, frozenset(wanted)
        for window, rows in zip(windows, torch.split(masks, [w.num_verify_rows for w in windows]), strict=True):
            self._parts[window.target.key] = rows
            if window.target.key in self._started:
                self._submit(window, window.sampling_rows, rows)
            else:
                rows.fill_(ALL_BITS)

    def wait(self, pass_s: float) -> None:
        """Waits until what was started is there, after a pass of so many seconds; sequences whose masks are late, or
        failed, have to wait, too."""
        patience_s = self._patience_s = self._owner.patience(pass_s)
        self._collect(list(self._jobs))
        self._patience_s = patience_s  # again, for all that are made from here on

    def rows_of(self, windows: Sequence[ScheduledSequence]) -> Tensor | None:  # [rows that judge them, words] int32
        """The masks of windows that do not wait; None where none of theirs was started."""
        keys = [window.target.key for window in windows]
        if self._started.isdisjoint(keys):
            return None
        return self._masks if len(keys) == len(self._parts) else torch.cat([self._parts[key] for key in keys])

    def lacks(self, window: ScheduledSequence) -> bool:
        """Whether a window has a constraint, and its masks were left for later."""
        return window.target.sampler.constrained and window.target.key not in self._started

    def make(self, wanted: Sequence[tuple[ScheduledSequence, SamplingRows]]) -> dict[SequenceKey, Tensor]:
        """Masks that are wanted now, of some rows of each window, [rows, words] int32; without those that are late, or
        failed: their sequences wait."""
        started = time.perf_counter()
        with torch.inference_mode(False):  # the threads that write them are not in it
            made = {window.target.key: self._owner.new_masks(plan.num_rows) for window, plan in wanted}
        for window, plan in wanted:
            self._submit(window, [plan], made[window.target.key])
        self.wait_s += time.perf_counter() - started
        self._collect(list(made))
        return {key: masks for key, masks in made.items() if key not in self._late}

    def close(self) -> None:
        """Counts them, once per step; what still runs is late."""
        self._patience_s = 0.0
        self._collect(list(self._jobs))
        self._owner.count(self.mask_s, self.wait_s, self._late)

    def wait_for_all(self) -> None:
        """Returns once they are there, in whatever state; for measuring."""
        wait([job.future for job in self._jobs.values()])

    def _submit(self, window: ScheduledSequence, plans: Sequence[SamplingRows], out: Tensor) -> None:
        clock = WorkClock()
        self._jobs[window.target.key] = MaskJob(window, clock, self._owner.submit(plans, out, clock))

    def _collect(self, keys: Sequence[SequenceKey]) -> None:
        """Waits for the jobs of these sequences."""
        started = time.perf_counter()
        until = started + self._patience_s
        for key in keys:
            job = self._jobs.pop(key)
            try:
                self.mask_s += job.future.result(max(0.0, until - time.perf_counter()))
            except Exception:  # what failed is told to its own sequence, once that looks for it
                job.window.target.waits_for = job.future
                self._late[key] = job.clock
        waited_s = time.perf_counter() - started
        self.wait_s, self._patience_s = self.wait_s + waited_s, max(0.0, self._patience_s - waited_s)


@dataclass(frozen=True, slots=True)
class MaskJob:
    """The masks of one window, on another thread."""

    window: ScheduledSequence
    clock: WorkClock
    future: Future[float]


class WorkClock:
    """The processor time of a job on another thread: neither what runs before it nor what else the machine does is held
    against it."""

    def __init__(self) -> None:
        self._started: tuple[int, float] | None = None  # the thread's clock, and what it said

    def start(self) -> None:
        """The job begins, on this thread."""
        if hasattr(time, "pthread_getcpuclockid"):
            self._started = time.pthread_getcpuclockid(threading.get_ident()), time.thread_time()
        else:
            self._started = time.CLOCK_MONOTONIC, time.monotonic()

    def seconds(self) -> float:
        """What the job has taken so far, while it runs."""
        return 0.0 if self._started is None else time.clock_gettime(self._started[0]) - self._started[1]


def write_masks(plans: Sequence[SamplingRows], out: Tensor, clock: WorkClock) -> float:  # out: [rows, words] int32
    """The masks of some rows; returns the seconds that it took. Raises GrammarError."""
    clock.start()
    started, first = time.perf_counter(), 0
    for plan in plans:
        constraint = plan.sampler.constraint
        if constraint is not None:
            constraint.write_masks(
                plan.sampler.num_output, plan.drafted, plan.first, out[first : first + plan.num_rows]
            )
        first += plan.num_rows
    return time.perf_counter() - started


def spec_of(target: TargetSequence) -> GrammarSpec | None:
    """What a sequence is constrained by."""
    return GrammarSpec.of(target.open.sampling.structured_output, target.open.reasoning)


def refused(problem: str) -> InvalidArgument:
    """A constraint that is not served."""
    return InvalidArgument.of([Violation(FIELD, problem)])


def untried(error: TrialFailed) -> Unavailable:
    """A constraint of which this machine could not find out; another may."""
    return Unavailable(f"{error}; ask again", reason="CONSTRAINT_NOT_TRIED", retry_after_ms=1000)


def too_slow() -> InvalidArgument:
    """A constraint of which single masks take too long."""
    return refused(f"takes longer than {GIVE_UP_S:g} s to find the next tokens; allowed: a simpler one")


def stuck(target: TargetSequence, window: Window) -> InvalidArgument | None:
    """Why nothing could be drawn, where the request itself leaves no token; None: that is not why."""
    paths = (
        [window.ids[: length + 1] for length in range(len(window.ids))]
        if not window.parents
        else [[window.ids[node] for node in path_to(window.parents, node)] for node in range(len(window.parents))]
    )
    if not target.sampler.constrained or not any(is_stuck(target.sampler, path) for path in [(), *paths]):
        return None
    problem = (
        f"leaves no token behind output token {target.num_output}, or what was drafted after it, together with "
        "allowed_token_ids and bad_words; allowed: parameters that agree"
    )
    return refused(problem)


def grammars_of(tokenizer: bytes | None, vocab_size: int, eos_ids: Sequence[int], **options: Any) -> Grammars | None:
    """None without a tokenizer that serves grammars."""
    if tokenizer is None:
        return None
    try:
        return Grammars(GrammarCompiler(tokenizer, vocab_size, eos_ids), **options)
    except GrammarError:
        return None
