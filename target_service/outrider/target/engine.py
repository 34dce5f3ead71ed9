"""The target's engine, run by the device thread: commands in, one ragged step at a time, commits out to the sinks."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import grpc
from torch import Tensor

from outrider.engine.batch import BatchEntry
from outrider.engine.blocks import BlockPool, OutOfBlocks
from outrider.engine.runner import ModelRunner
from outrider.engine.sequence import SequenceCache
from outrider.target.admission import Refused, TargetLimits, admit
from outrider.target.gathering import Gathering
from outrider.target.goodput import Goodput
from outrider.target.outcome import Outcome, origins_of, outcome_of
from outrider.target.profile import StepCosts, measure_steps
from outrider.target.reports import position_logprobs, report_prompt
from outrider.target.scheduler import Scheduler, StepEntry
from outrider.target.state import Sink, TargetSequence
from outrider.target.step_report import StepReport, report_step
from outrider.target.verifier import Judged, Verdict
from outrider.target.verifiers import verifier_of
from outrider.wire.messages import (
    Close,
    Closed,
    Commit,
    Credit,
    Failure,
    Load,
    Open,
    Piece,
    StepTimings,
    TargetCommand,
)

log = logging.getLogger(__name__)

BLOCKED_S = 0.005  # pause when sequences are due but none can have blocks


@dataclass(frozen=True, slots=True)
class StreamCommand:
    """A message of one stream, and where its answers go."""

    stream: int
    message: TargetCommand
    sink: Sink
    received: float | None = None  # on the engine's clock; a command waits while a step runs


@dataclass(frozen=True, slots=True)
class StreamEnded:
    """Everything that the stream opened is released."""

    stream: int


EngineCommand = StreamCommand | StreamEnded


class TargetEngine:
    """The worker of the device thread. `on_step` is told of every step, `flush` is called once after each with
    answers."""

    def __init__(
        self,
        runner: ModelRunner,
        limits: TargetLimits,
        *,
        prefix_cache: bool = True,
        max_rows: int = 512,
        cut_windows: bool = True,
        flush: Callable[[], None] = lambda: None,
        on_step: Callable[[StepReport], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits
        self._runner = runner
        self._flush = flush
        self._on_step = on_step
        self._clock = clock
        self._cut_windows = cut_windows
        self._arrivals = 0
        self._step_ended = 0.0
        self._verifier = verifier_of(runner, limits.vocab_size)
        dtype = str(runner.model.dtype).removeprefix("torch.")
        self.cache = SequenceCache(BlockPool(limits.num_blocks), limits.block_size, prefix_cache, cache_dtype=dtype)
        self.scheduler = Scheduler(self.cache, max_rows, limits.max_window)
        self._gathering = Gathering()

    def handle(self, command: EngineCommand) -> None:
        """Applies one command; nothing runs on the device."""
        if isinstance(command, StreamEnded):
            for ended in [t for t in self.scheduler.sequences.values() if t.key[0] == command.stream]:
                self.scheduler.remove(ended)
            return
        message, sink = command.message, command.sink
        if isinstance(message, Open):
            self._open(command.stream, message, sink)
            return
        target = self.scheduler.sequences.get((command.stream, message.sequence_id))
        if isinstance(message, Close):
            if target is not None:
                self.scheduler.remove(target)
            sink(Closed(message.sequence_id))
            self._flush()
        elif target is not None:  # else it finished or failed before this arrived
            self._update(target, message, self._clock() if command.received is None else command.received)

    def step(self, now: float) -> float | None:
        """Runs one ragged step, or says how long nothing is due."""
        self._expire(now)
        due = self.scheduler.next_due(now)
        if due is None or due > now:
            return 0.0 if self._prepare_ahead() else self._wait(due, now)
        if hold := self._gathering.hold(self.scheduler.sequences.values(), now):
            return 0.0 if self._prepare_ahead() else hold
        entries = self.scheduler.plan(now)
        if not entries:
            return BLOCKED_S
        try:
            self._run(entries, now)
        except Exception:
            log.exception("a step of %d sequences failed", len(entries))
            for entry in entries:
                self._fail(entry.target, grpc.StatusCode.INTERNAL, "the step failed; see the log", "STEP_FAILED")
        self._flush()
        return 0.0

    def on_error(self, error: Exception) -> None:
        """A bug outside of a step: every sequence fails, the service goes on."""
        log.error("the engine failed", exc_info=error)
        for target in list(self.scheduler.sequences.values()):
            self._fail(target, grpc.StatusCode.INTERNAL, "the engine failed; see the log", "ENGINE_FAILED")
        self._flush()

    def probe(self) -> None:
        """One forward of one row, as a sign of life, in a block of its own: sequences may be open by now. Where they
        hold every block, their steps are the sign."""
        try:
            block = self.cache.pool.allocate(1)
        except OutOfBlocks:
            return
        try:
            self._runner.forward([BatchEntry([0], 0, block, 1)])
        finally:
            self.cache.pool.release(block)

    def profile(self) -> StepCosts:
        """Measures steps by their rows, while nothing is open; from then on windows are cut by it, if they may be."""
        costs = measure_steps(self._runner, self.cache.pool, self.scheduler.max_rows, self.limits.max_model_len)
        if costs and self._cut_windows:
            self.scheduler.goodput = Goodput(costs)
        return costs

    def load(self) -> Load:
        """The present load."""
        sequences = self.scheduler.sequences.values()
        running = sum(1 for target in sequences if target.has_credit)
        waiting = sum(1 for target in sequences if not target.admitted)
        return Load(running, waiting, self.cache.pool.num_free)

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

    def _update(self, target: TargetSequence, message: Piece | Credit, received: float) -> None:
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
        waiting = [target for target in self.scheduler.sequences.values() if target.has_credit]
        return any(self._verifier.prepare(target) for target in waiting)

    def _wait(self, due: float | None, now: float) -> float | None:
        deadlines = [t.deadline for t in self.scheduler.sequences.values() if t.deadline is not None]
        wakes = [*deadlines, *([due] if due is not None else [])]
        return max(0.0, min(wakes) - now) if wakes else None

    def _run(self, entries: Sequence[StepEntry], now: float) -> None:
        """Compute, judge, commit."""
        started_ns, started = time.time_ns(), self._clock()
        logits = self._runner.forward([entry.batch_entry() for entry in entries])
        verdicts = self._verifier.verify(logits, self._judged(entries, logits))
        sampled = self._clock()
        self._gathering.ran(sampled - started, chunked=any(not entry.samples for entry in entries))
        if self.scheduler.goodput is not None and all(entry.num_rows == entry.num_judging for entry in entries):
            num_rows, pause_s = sum(entry.num_rows for entry in entries), started - self._step_ended
            self.scheduler.goodput.ran(num_rows, (sampled - started) * 1e6, pause_s * 1e6)
        self._step_ended = sampled
        step_us = round((sampled - started) * 1e6)
        verify_us = min(self._runner.last_forward_us, step_us)  # known now, also where it ran behind the host's back
        timings = StepTimings(
            verify_us=verify_us,
            sample_us=step_us - verify_us,
            num_rows=sum(entry.num_rows for entry in entries),
            num_sequences=len(entries),
        )
        load = self.load()  # once a step: it looks at every sequence
        for verdict in verdicts:
            queue_us = max(0, round((started - verdict.entry.target.ready_since) * 1e6))
            self._commit(verdict, replace(timings, queue_us=queue_us), load, sampled)
        for entry in entries:
            if not entry.samples:
                entry.target.sequence.num_computed_tokens = entry.start + entry.num_rows
                self.cache.publish(entry.target.sequence, entry.committed)
        if self._on_step is not None:
            self._on_step(report_step(entries, verdicts, started_ns))

    def _judged(self, entries: Sequence[StepEntry], logits: Tensor) -> list[Judged]:
        """Reads prompt log probabilities off their rows; the last rows of each entry judge its window."""
        judged, end = [], 0
        for entry in entries:
            start, end = end, end + entry.num_logits
            if entry.target.wants_prompt_logprobs:
                report_prompt(entry, logits[start:end])
            if entry.samples:
                judged.append(Judged(entry, range(end - entry.num_judging, end)))
        return judged

    def _commit(self, verdict: Verdict, timings: StepTimings, load: Load, now: float) -> None:
        entry, target = verdict.entry, verdict.entry.target
        if verdict.invalid:
            message = "the target's logits hold NaN or infinity, or no token is allowed"
            self._fail(target, grpc.StatusCode.INTERNAL, message, "INVALID_LOGITS")
            return
        self._learn(verdict)
        outcome = self._settle(verdict)
        target.last_commit = target.ready_since = now
        if entry.committed == target.prompt_len + len(target.open.output_ids):
            target.patience_spent = False  # the first token waited for no draft; from here on patience counts
        target.sink(
            Commit(
                sequence_id=target.open.sequence_id,
                position=entry.committed,
                ids=outcome.ids,
                origins=outcome.origins,
                chain=entry.window.chain,
                num_drafted=len(entry.window.ids),
                num_accepted=verdict.num_accepted,
                logprobs=position_logprobs(verdict.logprobs[: len(outcome.ids)]),
                finish_reason=outcome.finish_reason,
                stop_token_id=outcome.stop_token_id,
                dropped=target.chains.take_dropped(),
                timings=timings,
                load=load,
                num_cached_ids=target.num_cached_ids,
            )
        )
        if outcome.finish_reason is not None:
            target.finished = True
            self.scheduler.remove(target)

    def _learn(self, verdict: Verdict) -> None:
        """Counts what held. A plain token tests a held one, too, where a token holds by being the target's own."""
        target, num_drafted, num_accepted = verdict.entry.target, len(verdict.entry.window.ids), verdict.num_accepted
        if self.scheduler.goodput is None:
            return
        if not num_drafted and not target.rejects:
            held = target.chains.window(1).ids
            num_drafted, num_accepted = len(held), int(held == verdict.ids[:1])
        self.scheduler.goodput.judged(target.acceptance, num_drafted, num_accepted)

    def _settle(self, verdict: Verdict) -> Outcome:
        """Puts the outcome in the place of the window: tokens, sampling state, cache, chains."""
        entry, target = verdict.entry, verdict.entry.target
        origins = origins_of(len(entry.window.ids), verdict.num_accepted, len(verdict.ids) > verdict.num_accepted)
        num_output = entry.committed - target.prompt_len
        outcome = outcome_of(
            verdict.ids,
            origins,
            target.open.sampling,
            self.limits.eos_ids,
            num_output,
            target.tokens_left_at(entry.committed),
        )
        sequence = target.sequence
        sequence.tokens[entry.committed :] = outcome.ids
        sequence.num_computed_tokens = entry.start + entry.num_rows
        self.cache.truncate(sequence, len(sequence))
        self.cache.publish(sequence, len(sequence))
        target.sampler.append(outcome.ids)
        target.chains.advance()
        return outcome

    def _fail(self, target: TargetSequence, code: grpc.StatusCode, message: str, reason: str) -> None:
        target.finished = True
        self.scheduler.remove(target)
        target.sink(Failure(target.open.sequence_id, code.value[0], message, reason))
