"""The target's engine, run by the device thread: commands in, one ragged step at a time, commits out to the sinks.

A fault costs the sequence that it is met with, never those that share its step, its stream or the engine."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import grpc

from outrider.engine.kv_cache_manager import BlockPool, KVCacheManager
from outrider.engine.model_runner import ModelRunner, probe
from outrider.rpc.messages import (
    Close,
    Closed,
    Commit,
    Credit,
    DraftTokens,
    Failure,
    Load,
    Open,
    TargetCommand,
    TargetEvent,
)
from outrider.rpc.servicer import Deliver, Detach
from outrider.target_service.device_verifier import verifier_of
from outrider.target_service.goodput import Goodput
from outrider.target_service.outputs import ComputedStep, VerifiedWindow
from outrider.target_service.profile import StepProfile, ThreadSplit, measure_steps
from outrider.target_service.scheduler import BatchingDelay, TargetScheduler
from outrider.target_service.sequence import Refused, Sink, TargetLimits, TargetSequence, admit
from outrider.target_service.step import commit, compute, drafted_and_accepted, run_isolated

log = logging.getLogger(__name__)

BLOCKED_S = 0.005  # pause when sequences are due but none can have blocks


TargetEngineCommand = Deliver[TargetCommand, TargetEvent] | Detach


class TargetEngine:
    """Run by a Worker. `on_step` is told of every step, `flush` is called once after each with answers."""

    def __init__(
        self,
        runner: ModelRunner,
        limits: TargetLimits,
        *,
        prefix_cache: bool = True,
        max_rows: int = 512,
        cut_windows: bool = True,
        flush: Callable[[], None] = lambda: None,
        on_step: Callable[[ComputedStep], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits
        self._runner = runner
        self._flush = flush
        self._on_step = on_step
        self._clock = clock
        self._arrivals = 0
        self._step_ended = 0.0
        dtype = str(runner.model.dtype).removeprefix("torch.")
        self.cache = KVCacheManager(BlockPool(limits.num_blocks), limits.block_size, prefix_cache, cache_dtype=dtype)
        self.scheduler = TargetScheduler(self.cache, max_rows, limits.max_window, cut_windows)
        self.verifier = verifier_of(runner, limits.vocab_size)
        self._batching_delay = BatchingDelay()
        self.threads: ThreadSplit | None = None  # where the number is not given

    def handle(self, command: TargetEngineCommand) -> None:
        """Applies one command; nothing runs on the device."""
        if isinstance(command, Detach):
            for ended in [t for t in self.scheduler.sequences.values() if t.key[0] == command.stream]:
                self.scheduler.remove(ended)
            return
        received = self._clock() if command.received is None else command.received
        for message in command.messages:
            try:
                self._apply(command.stream, message, command.sink, received)
            except Exception:
                self._give_up_message(command.stream, message, command.sink)

    def step(self, now: float) -> float | None:
        """Runs one ragged step, or says how long nothing is due. Raises DeviceLost when the process has to end."""
        self._expire(now)
        due = self.scheduler.next_due(now)
        if due is None or due > now:
            return 0.0 if self._prepare_ahead() else self._wait(due, now)
        if hold := self._batching_delay.hold(self.scheduler.sequences.values(), now):
            return 0.0 if self._prepare_ahead() else hold
        has_run = False
        for step in run_isolated(self.scheduler.runnable(now), self._compute, self._give_up, self._hand_over):
            has_run = True
            self._observe(step)
            self._commit_step(step)
        self._flush()
        return 0.0 if has_run else BLOCKED_S

    def on_error(self, error: Exception) -> None:
        """A bug that is no one sequence's: every sequence fails, the service goes on."""
        log.error("the engine failed", exc_info=error)
        for target in list(self.scheduler.sequences.values()):
            self._fail(target, grpc.StatusCode.INTERNAL, "the engine failed; see the log", "ENGINE_FAILED")
        self._flush()

    def probe(self) -> None:
        """A sign of life. Raises DeviceLost when the process has to end."""
        probe(self._runner, self.cache.pool)

    def profile(self) -> StepProfile:
        """Measures steps by their rows, while nothing is open; from then on the scheduler knows what they take."""
        costs = measure_steps(self._runner, self.cache.pool, self.scheduler.max_rows, self.limits.max_model_len)
        if costs:
            self.scheduler.goodput = Goodput(costs)
        return costs

    def load(self) -> Load:
        """The present load; from any thread."""
        sequences = list(self.scheduler.sequences.values())  # at once: commands and steps change it
        running = sum(1 for target in sequences if target.has_credit)
        waiting = sum(1 for target in sequences if not target.admitted)
        return Load(running, waiting, self.cache.pool.num_free)

    def _apply(self, stream: int, message: TargetCommand, sink: Sink, received: float) -> None:
        if isinstance(message, Open):
            self._open(stream, message, sink)
            return
        target = self.scheduler.sequences.get((stream, message.sequence_id))
        if isinstance(message, Close):
            if target is not None:
                self.scheduler.remove(target)
            sink(Closed(message.sequence_id))
            self._flush()
        elif target is not None:  # else it finished or failed before this arrived
            self._update(target, message, received)

    def _open(self, stream: int, message: Open, sink: Sink) -> None:
        parent = self.scheduler.sequences.get((stream, message.fork_of)) if message.fork_of is not None else None
        try:
            if len(self.scheduler.sequences) >= self.limits.max_sequences:
                raise Refused.busy(message.sequence_id, self.limits.max_sequences)
            target = admit(
                message, parent, (stream, message.sequence_id), sink, self.limits, self._arrivals, self._clock()
            )
        except Refused as refused:
            sink(refused.failure)
            self._flush()
            return
        self._arrivals += 1
        self.scheduler.add(target)

    def _update(self, target: TargetSequence, message: DraftTokens | Credit, received: float) -> None:
        if isinstance(message, Credit):
            had_credit = target.has_credit
            target.grant(message)
            if not had_credit:
                target.ready_since = max(target.ready_since, received)
            return
        was_waiting = target.chains.live() is None
        target.chains.add(replace(message, weights=()) if self.limits.untrusted_draft else message)
        target.patience_spent = target.patience_spent and target.num_own_tokens == 0
        if was_waiting:
            target.ready_since = max(target.ready_since, received)
        if target.chains.has_dropped:
            dropped = target.chains.take_dropped()
            target.sink(Commit(message.sequence_id, target.committed, (), dropped=dropped, load=self.load()))
            self._flush()

    def _expire(self, now: float) -> None:
        for target in [t for t in self.scheduler.sequences.values() if t.deadline is not None and t.deadline <= now]:
            self._fail(target, grpc.StatusCode.DEADLINE_EXCEEDED, "the request's time ran out", "DEADLINE")
            self._flush()

    def _prepare_ahead(self) -> bool:
        """Uses idle time for the random numbers of the next windows; returns whether there were any to compute."""
        for target in [target for target in self.scheduler.sequences.values() if target.has_credit]:
            with self._fail_on_error(target, "random numbers"):
                if self.verifier.prepare(target):
                    return True
        return False

    def _wait(self, due: float | None, now: float) -> float | None:
        deadlines = [t.deadline for t in self.scheduler.sequences.values() if t.deadline is not None]
        wakes = [*deadlines, *([due] if due is not None else [])]
        return max(0.0, min(wakes) - now) if wakes else None

    def _compute(self, targets: Sequence[TargetSequence]) -> ComputedStep | None:
        """A step of these, as far as there are rows and blocks. If it raises, all are as before."""
        step = self.scheduler.plan(targets)
        try:
            return compute(step, self._runner, self.verifier, self._clock) if step else None
        except Exception:
            self.scheduler.roll_back(step)
            raise

    def _observe(self, step: ComputedStep) -> None:
        """Learns what steps take."""
        self._batching_delay.add_step(step.seconds, chunked=any(not one.samples for one in step.scheduled))
        only_windows = all(one.num_rows == one.num_verify_rows for one in step.scheduled)
        if self.scheduler.goodput is not None and only_windows:
            pause_s = step.started - self._step_ended
            self.scheduler.goodput.add_step(step.timings.num_rows, step.seconds * 1e6, pause_s * 1e6)
        if self.threads is not None and any(one.window.ids for one in step.scheduled):
            self.threads.add_step(step.timings.num_rows, step.seconds)
        self._step_ended = step.ended

    def _commit_step(self, step: ComputedStep) -> None:
        """Commits every window, and what was computed of prompts."""
        load = self.load()  # once a step: it looks at every sequence
        for verified in step.verified:
            with self._fail_on_error(verified.scheduled.target, "a commit"):
                self._commit(verified, step, load)
        for scheduled in step.scheduled:
            if not scheduled.samples:
                with self._fail_on_error(scheduled.target, "a prompt's chunk"):
                    scheduled.target.sequence.num_computed_tokens = scheduled.end
                    self.cache.publish(scheduled.target.sequence, scheduled.committed)
        if self._on_step is not None:
            self._on_step(step)

    def _commit(self, verified: VerifiedWindow, step: ComputedStep, load: Load) -> None:
        target = verified.scheduled.target
        if verified.invalid:
            message = "the target's logits hold NaN or infinity, or no token is allowed"
            self.cache.forget(target.sequence, target.num_cached_ids)  # nobody shall find what it computed
            self._fail(target, grpc.StatusCode.INTERNAL, message, "INVALID_LOGITS")
            return
        if self.scheduler.goodput is not None:
            self.scheduler.goodput.add_verified(target.acceptance, *drafted_and_accepted(verified))
        committed = commit(verified, step, self.cache, load)
        target.sink(committed)
        if committed.finish_reason is not None:
            target.finished = True
            self.scheduler.remove(target)

    @contextmanager
    def _fail_on_error(self, target: TargetSequence, what: str) -> Iterator[None]:
        """What raises in here costs this sequence, and no other."""
        try:
            yield
        except Exception:
            log.exception("%s of sequence %d failed", what, target.open.sequence_id)
            self._fail(target, grpc.StatusCode.INTERNAL, f"{what} failed in the engine; see the log", "COMMIT_FAILED")

    def _give_up_message(self, stream: int, message: TargetCommand, sink: Sink) -> None:
        """To be called where a message raised: it costs its own sequence."""
        log.exception("a %s of sequence %d failed", type(message).__name__, message.sequence_id)
        target = self.scheduler.sequences.get((stream, message.sequence_id))
        reason, text = "COMMAND_FAILED", "a message failed in the engine; see the log"
        if target is not None:
            self._fail(target, grpc.StatusCode.INTERNAL, text, reason)
        else:
            sink(Failure(message.sequence_id, grpc.StatusCode.INTERNAL.value[0], text, reason))
        self._flush()

    def _give_up(self, target: TargetSequence, error: Exception) -> None:
        """A step of this sequence alone failed."""
        log.error("sequence %d ends: its step fails", target.open.sequence_id, exc_info=error)
        self._fail(target, grpc.StatusCode.INTERNAL, "the sequence's step failed; see the log", "STEP_FAILED")

    def _hand_over(self, target: TargetSequence, error: Exception) -> None:
        """No sequence's step runs here: the gateway opens it elsewhere."""
        log.error("sequence %d ends: no step runs here", target.open.sequence_id, exc_info=error)
        self._fail(target, grpc.StatusCode.UNAVAILABLE, "no step runs on this target; see the log", "NO_STEP_RUNS")

    def _fail(self, target: TargetSequence, code: grpc.StatusCode, message: str, reason: str) -> None:
        target.finished = True
        self.scheduler.remove(target)
        target.sink(Failure(target.open.sequence_id, code.value[0], message, reason))
