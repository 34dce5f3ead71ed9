"""The target's engine, run by the device thread: commands in, one ragged step at a time, commits out to the sinks.

A fault costs the sequence that it is met with, never those that share its step, its stream or the engine; one of the
process is not charged to sequences."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

from outrider.engine.kv_cache_manager import BlockPool, KVCacheManager
from outrider.engine.model_runner import ModelRunner, probe
from outrider.engine.profile import Profile, StepProfile, measure
from outrider.engine.token_tree import TokenTree
from outrider.engine.worker import DeviceLost
from outrider.planner.estimates import OpenWork
from outrider.proposers.drawing import Drawer
from outrider.proposers.heads.loading import AnyHead
from outrider.rpc.errors import DeadlineExceeded, Internal, OutriderError, Unavailable, unexpected
from outrider.rpc.logs import of
from outrider.rpc.messages import (
    Close,
    Closed,
    Commit,
    Credit,
    DraftTokens,
    Load,
    Open,
    TargetCommand,
    TargetEvent,
    to_failure,
)
from outrider.rpc.servicer import Deliver, Detach
from outrider.rpc.words.expert_costs import ExpertCosts
from outrider.target_service.cohort import CohortHold
from outrider.target_service.device_verifier import verifier_of
from outrider.target_service.grammars import Grammars, stuck
from outrider.target_service.heads.drafter import HeadDrafter
from outrider.target_service.heads.learning import HeadLearning
from outrider.target_service.outputs import ComputedStep, VerifiedWindow, position_logprobs
from outrider.target_service.parts import Adapters, EnginePart, StepCosts, constraints_of
from outrider.target_service.scheduler import ScheduledSequence, TargetScheduler
from outrider.target_service.sequence import Sink, TargetLimits, TargetSequence, admit, with_prompt
from outrider.target_service.steps import LaunchedStep, Steps
from outrider.target_service.succession import Succession

log = logging.getLogger(__name__)

BLOCKED_S = 0.005  # pause when sequences are due but none can have blocks
BUSY_SHARE = 0.8  # of the time that a step should take, in which commands are taken: it may end sooner


TargetEngineCommand = Deliver[TargetCommand, TargetEvent] | Detach
Item = TypeVar("Item")
Result = TypeVar("Result")


class TargetEngine:
    """Run by a DeviceWorker. `on_step` is told of each step before its commits, `flush` is called after each that has
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
        on_step: Callable[[ComputedStep], None] | None = None,
        head: AnyHead | None = None,
        tree: TokenTree | None = None,  # what it drafts where trees are verified
        grammars: Grammars | None = None,  # without, requests for constraints are refused
        learning: HeadLearning | None = None,  # of the head
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits, self.learning = limits, learning
        self._runner = runner
        self._flush = flush
        self._on_step = on_step or (lambda step: None)
        self._clock = clock
        self._arrivals = 0
        dtype = str(runner.model.dtype).removeprefix("torch.")
        pool, model = BlockPool(limits.num_blocks), limits.model_digest
        self.cache = KVCacheManager(pool, limits.block_size, prefix_cache, dtype, model)
        self.scheduler = TargetScheduler(self.cache, max_rows, limits.max_window, cut_windows)
        verifier = verifier_of(runner, limits.vocab_size)
        self._cohort, self._work = CohortHold(), OpenWork(limits.max_sequences, limits.max_open_tokens)
        self.adapters = Adapters(runner.adapters, self.scheduler)
        constraints = constraints_of(grammars, verifier, None if head is None else head.name)
        self.parts: list[EnginePart] = [constraints, self.adapters, StepCosts(self.scheduler)]
        if learning is not None:
            self.parts.append(learning)
        if head is not None:
            drawer = Drawer(limits.vocab_size, runner.model.device)
            self.parts.append(HeadDrafter(head, runner, self.cache, drawer, tree, clock, learning))
        self.profiled: Profile | None = None  # once steps were measured
        self.succession: Succession | None = None  # another engine comes, and what is its own waits
        self.steps = Steps(runner, verifier, self.parts, clock)
        self._ahead: LaunchedStep | None = None  # launched, and not finished
        self._busy_until = 0.0  # with it the device is
        self._failed_ahead = False  # one that was launched so: the next one is finished at once

    @property
    def capabilities(self) -> tuple[str, ...]:
        """What its parts add to what every target can."""
        return tuple(capability for part in self.parts for capability in part.capabilities)

    def handle(self, command: TargetEngineCommand) -> None:
        """Applies one command; nothing runs on the device."""
        if self.succession is not None:
            command = self.succession.sift(command)
        if isinstance(command, Detach):
            for ended in [t for t in self.scheduler.sequences.values() if t.key[0] == command.stream]:
                self._remove(ended)
            return
        received = self._clock() if command.received is None else command.received
        for message in command.messages:
            try:
                self._apply(command.stream, message, command.sink, received)
            except Exception as error:
                self._give_up_message(command.stream, message, command.sink, error)

    def step(self, now: float) -> float | None:
        """Runs one ragged step, or says how long nothing is due. Where the device computes behind the host's back one
        call launches a step, and the next one finishes it: between them commands are taken. Raises DeviceLost when
        the process has to end."""
        self._expire(now)
        self._end_refused(now)
        if self._ahead is not None:
            if now < self._busy_until:
                return self._busy_until - now
            self._go_on(self._ahead)
            return 0.0
        due = min(self.scheduler.dues(now), default=math.inf)
        if due <= now and (hold := self._hold(now)):
            due = now + hold
        if due > now:
            return 0.0 if self._prepare_ahead() else self._wait(due, now)
        runnable, has_run = self.scheduler.runnable(now), False
        if self._runner.captured is not None and not self._failed_ahead and self._launch(runnable):
            return 0.0
        self._failed_ahead = False
        for step in run_isolated(runnable, self._compute, self._give_up, self._hand_over):
            has_run = True
            self._settle(step)
        self._flush()
        return 0.0 if has_run else BLOCKED_S

    def on_error(self, error: Exception) -> None:
        """A bug that is no one sequence's: every sequence fails, the service goes on."""
        log.error("the engine failed", exc_info=error)
        self._abandon_ahead()
        for target in list(self.scheduler.sequences.values()):
            self._fail(target, unexpected(error, "the engine failed; see the log", "ENGINE_FAILED"))
        self._flush()

    def end_all(self, error: OutriderError) -> int:
        """Every sequence fails so; how many there were."""
        self._abandon_ahead()
        ended = list(self.scheduler.sequences.values())
        for target in ended:
            self._fail(target, error)
        return len(ended)

    @property
    def cache_bytes(self) -> int:
        """Of its keys and values."""
        cache = self._runner.cache
        return sum(tensor.nbytes for tensor in (*cache.keys, *cache.values))

    def probe(self) -> None:
        """A sign of life. Raises DeviceLost when the process has to end."""
        probe(self._runner, self.cache.pool)

    def profile(self, known: Profile | None = None) -> StepProfile:
        """Measures steps by their rows, while nothing is open, unless it is known of a model of the same shape; from
        then on the scheduler knows what they take."""
        most_tokens = self.limits.max_model_len
        self.profiled = known or measure(self._runner, self.cache.pool, self.scheduler.max_rows, most_tokens)
        for part in self.parts:
            part.measured(*self.profiled)
        return self.profiled.steps

    @property
    def expert_costs(self) -> ExpertCosts | None:
        """Of a mixture, once steps were measured."""
        return None if self.profiled is None else self.profiled.experts

    def close(self) -> None:
        """Ends what its parts have beside the device thread, once that has ended."""
        for part in self.parts:
            part.close()

    def load(self) -> Load:
        """The present load; from any thread."""
        sequences = list(self.scheduler.sequences.values())  # at once: commands and steps change it
        running = sum(1 for target in sequences if target.wants_tokens)
        waiting = sum(1 for target in sequences if not target.admitted)
        return Load(running, waiting, self.cache.pool.num_free)

    def _apply(self, stream: int, message: TargetCommand, sink: Sink, received: float) -> None:
        if isinstance(message, Open):
            self._open(stream, message, sink)
            return
        target = self._sequence(stream, message.sequence_id)
        if isinstance(message, Close):
            if target is not None:
                self._remove(target)
            sink(Closed(message.sequence_id))
            self._flush()
        elif target is not None:  # else it finished or failed before this arrived
            self._update(target, message, received)

    def _sequence(self, stream: int, sequence_id: int | None) -> TargetSequence | None:
        return None if sequence_id is None else self.scheduler.sequences.get((stream, sequence_id))

    def _open(self, stream: int, message: Open, sink: Sink) -> None:
        now, num_tokens = self._clock(), len(message.prompt_ids) + message.sampling.max_tokens
        try:
            parent = self._sequence(stream, message.fork_of)
            whole = with_prompt(message, parent.open if parent else None)
            adapter = self.adapters.find(message, parent.adapter if parent else None)
            key = (stream, message.sequence_id)
            target = admit(whole, parent, key, sink, self.limits, self._arrivals, now, adapter)
            self._work.check(num_tokens, now, message.was_promised)
            target.chains.takes_trees = self._runner.model.takes_trees and not target.rejects
            for part in self.parts:
                part.opened(target)
        except OutriderError as error:
            sink(to_failure(message.sequence_id, error))
            self._flush()
            return
        self._arrivals += 1
        self._work.add(target.key, num_tokens, now)
        self.scheduler.add(target)

    def _update(self, target: TargetSequence, message: DraftTokens | Credit, received: float) -> None:
        if isinstance(message, Credit):
            wanted_tokens = target.wants_tokens
            target.grant(message)
            if not wanted_tokens:
                target.ready_since = max(target.ready_since, received)
            return
        was_waiting = target.chains.live() is None
        target.chains.add(replace(message, weights=()) if self.limits.untrusted_draft else message)
        target.patience_spent = target.patience_spent and target.num_own_tokens == 0
        if was_waiting:
            target.ready_since = max(target.ready_since, received)
            if target.chains.live() is not None and received > target.last_commit:
                target.lag.add(received - target.last_commit)
        if target.chains.has_dropped:
            committed, dropped = target.chains.committed, target.chains.take_dropped()
            target.sink(Commit(message.sequence_id, committed, (), dropped=dropped, load=self.load()))
            self._flush()

    def _expire(self, now: float) -> None:
        for target in [target for target in self.scheduler.sequences.values() if target.deadline <= now]:
            self._fail(target, DeadlineExceeded("the request's time ran out", reason="DEADLINE"))

    def _end_refused(self, now: float) -> None:
        for part in self.parts:
            for target, error in part.refusals(self.scheduler.sequences.values(), now):
                self._fail(target, error)

    def _prepare_ahead(self) -> bool:
        """Uses idle time for the random numbers of the next windows; returns whether there were any to compute."""
        for target in [target for target in self.scheduler.sequences.values() if target.wants_tokens]:
            with self._fail_on_error(target, "random numbers"):
                if self.steps.verifier.prepare(target):
                    return True
        return False

    def _wait(self, due: float, now: float) -> float | None:
        """How long nothing is to be done; None: until a command comes."""
        sequences = self.scheduler.sequences.values()
        looks = [part.next_look(sequences, now) for part in self.parts]
        wake = min(due, *looks, *(target.deadline for target in sequences))
        return max(0.0, wake - now) if wake < math.inf else None

    def _hold(self, now: float) -> float:
        """How long those that may run wait for others, so that all are in one step."""
        goodput = self.scheduler.goodput
        return 0.0 if goodput is None else self._cohort.hold(*self.scheduler.cohort(now), goodput.time, now)

    def _launched(self, targets: Sequence[TargetSequence]) -> LaunchedStep | None:
        """A step of these, as far as there are rows and blocks. If it raises, all are as before."""
        step = self.scheduler.plan([target for target in targets if not target.is_waiting])
        if not step:
            return None
        try:
            launched = self.steps.launch(step)
        except Exception:
            self.scheduler.roll_back(step)
            raise
        self.scheduler.roll_back(one for one in step if one.target.is_waiting)
        return launched

    def _compute(self, targets: Sequence[TargetSequence]) -> ComputedStep | None:
        """A step of these that is finished at once. If it raises, all are as before."""
        if (launched := self._launched(targets)) is None:
            return None
        try:
            computed = self._finish(launched)
        except Exception:
            self.scheduler.roll_back(launched.step.scheduled)
            raise
        return computed if computed.scheduled else None

    def _finish(self, launched: LaunchedStep) -> ComputedStep:
        computed = self.steps.finish(launched)
        waiting = [one for one in launched.step.scheduled if one.target.is_waiting and one.stands]  # for late masks
        self.scheduler.roll_back(waiting)
        return computed

    def _launch(self, targets: Sequence[TargetSequence]) -> bool:
        """Launches a step of these; whether there is one to finish. If it fails, it is run once more, which finds whose
        fault that is."""
        try:
            self._ahead = self._launched(targets)
        except DeviceLost:
            raise
        except Exception:
            log.exception("a step of %d sequences could not be launched; they run again", len(targets))
        if self._ahead is not None:
            self._busy_until = self._ahead.step.started + self._busy_s(self._ahead.step.scheduled)
        return self._ahead is not None

    def _busy_s(self, step: Sequence[ScheduledSequence]) -> float:
        """For how long commands are waited for while the device computes. What may be followed is, at once."""
        goodput = self.scheduler.goodput
        if goodput is None or all(one.follows_plainly for one in step):
            return 0.0
        num_rows, context = sum(one.num_rows for one in step), sum(one.committed for one in step)
        step_us = goodput.time.at(num_rows, context, len(step))
        return BUSY_SHARE * 1e-6 * step_us

    def _launch_ahead(self, launched: LaunchedStep) -> LaunchedStep | None:
        """The step after one that was not read yet; None where it can't be told before. What raises here will where it
        is launched in its turn."""
        scheduled, steps = launched.step.scheduled, self._runner.captured
        may_follow = launched.verify.next_ids is not None and all(part.lets_follow for part in self.parts)
        if not may_follow or steps is None or not steps.holds([1] * len(scheduled)):
            return None
        try:
            following = self.scheduler.follow(scheduled, self._clock())
            return self.steps.follow(launched, following) if following else None
        except DeviceLost:
            raise
        except Exception:
            log.exception("a step of %d sequences could not be launched ahead", len(scheduled))
            return None

    def _go_on(self, launched: LaunchedStep) -> None:
        """Finishes the step that was launched, with the next one behind it if that can be told. If it fails, its
        sequences are as they were before it, and run again."""
        self._ahead = None
        try:
            self._ahead = self._launch_ahead(launched)
            step = self._finish(launched)
        except DeviceLost:
            raise
        except Exception:
            log.exception("a step of %d sequences failed; they run again", len(launched.step.scheduled))
            self._abandon_ahead()
            self.scheduler.roll_back(one for one in launched.step.scheduled if one.stands)
            self._failed_ahead = True
            return
        if step.scheduled:
            self._settle(step)

    def _abandon_ahead(self) -> None:
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            self.steps.abandon(ahead)

    def _settle(self, step: ComputedStep) -> None:
        """Learns from a step that was computed, commits what it gave, and answers."""
        self._learn(step)
        self._commit_step(step)
        self._flush()
        for part in self.parts:
            part.committed(step)

    def _learn(self, step: ComputedStep) -> None:
        """Learns what steps take, before what this one gave is committed."""
        self._cohort.stepped()
        for part in self.parts:
            part.finished(step)

    def _commit_step(self, step: ComputedStep) -> None:
        """Commits every window, and what was computed of prompts."""
        self._on_step(step)
        load = self.load()  # once a step: it looks at every sequence
        for verified in step.verified:
            with self._fail_on_error(verified.scheduled.target, "a commit"):
                self._commit(verified, step, load)
        for scheduled in step.scheduled:
            if not scheduled.samples:
                with self._fail_on_error(scheduled.target, "a prompt's chunk"):
                    scheduled.target.sequence.num_computed_tokens = scheduled.end
                    self.cache.publish(scheduled.target.sequence, scheduled.committed)

    def _commit(self, verified: VerifiedWindow, step: ComputedStep, load: Load) -> None:
        target = verified.scheduled.target
        if verified.invalid:
            if (error := stuck(target, verified.scheduled.window)) is not None:
                self._fail(target, error)
                return
            message = "the target's logits hold NaN or infinity, or no token is allowed"
            self.cache.forget(target.sequence, target.num_cached_ids)  # nobody shall find what it computed
            self._fail(target, Internal(message, reason="INVALID_LOGITS"))
            return
        for part in self.parts:
            part.committing(verified)
        committed = commit(verified, step, self.cache, load)
        target.sink(committed)
        if committed.finish_reason is not None:
            self._remove(target)

    @contextmanager
    def _fail_on_error(self, target: TargetSequence, what: str) -> Iterator[None]:
        """What raises in here costs this sequence, and no other."""
        try:
            yield
        except Exception as error:
            log.exception("%s of sequence %d failed", what, target.open.sequence_id, extra=of(target.open))
            self._fail(target, unexpected(error, f"{what} failed in the engine; see the log", "COMMIT_FAILED"))

    def _give_up_message(self, stream: int, message: TargetCommand, sink: Sink, error: Exception) -> None:
        """To be called where a message raised: it costs its own sequence."""
        log.exception("a %s of sequence %d failed", type(message).__name__, message.sequence_id)
        target = self._sequence(stream, message.sequence_id)
        failed = unexpected(error, "a message failed in the engine; see the log", "COMMAND_FAILED")
        if target is not None:
            self._fail(target, failed)
        else:
            sink(to_failure(message.sequence_id, failed))
            self._flush()

    def _give_up(self, target: TargetSequence, error: Exception) -> None:
        """A step of this sequence alone failed."""
        log.error("sequence %d ends: its step fails", target.open.sequence_id, exc_info=error, extra=of(target.open))
        self._fail(target, unexpected(error, "the sequence's step failed; see the log", "STEP_FAILED"))

    def _hand_over(self, target: TargetSequence, error: Exception) -> None:
        """No sequence's step runs here: the gateway opens it elsewhere."""
        log.error("sequence %d ends: no step runs here", target.open.sequence_id, exc_info=error, extra=of(target.open))
        self._fail(target, Unavailable("no step runs on this target; see the log", reason="NO_STEP_RUNS"))

    def _remove(self, target: TargetSequence) -> None:
        target.finished = True
        self.scheduler.remove(target)
        self._work.remove(target.key, self._clock())
        for part in self.parts:
            part.released(target)

    def _fail(self, target: TargetSequence, error: OutriderError) -> None:
        self._remove(target)
        target.sink(to_failure(target.open.sequence_id, error))
        self._flush()  # at once: no step may follow before the next command


def commit(verified: VerifiedWindow, step: ComputedStep, cache: KVCacheManager, load: Load) -> Commit:
    """Puts what was verified in the place of the window: tokens, cache, sampling state and chains. The sequence ends
    where the Commit says why."""
    scheduled, target = verified.scheduled, verified.scheduled.target
    queue_us = max(0, round((step.started - target.ready_since) * 1e6))
    draft_us, sequence = scheduled.draft_us, target.sequence
    compile_us, target.compile_us = target.compile_us, 0
    sequence.tokens[scheduled.committed :] = verified.ids
    sequence.num_computed_tokens = scheduled.end
    cache.truncate(sequence, len(sequence))
    cache.publish(sequence, len(sequence))
    target.sampler.append(verified.ids)
    target.chains.advance()
    if scheduled.window.ids:
        target.head_chain = None
    target.last_commit = target.ready_since = step.ended
    if scheduled.committed == target.prompt_len + len(target.open.output_ids):
        target.patience_spent = False  # the first token waited for no draft; from here on patience counts
    return Commit(
        sequence_id=target.open.sequence_id,
        position=scheduled.committed,
        ids=verified.ids,
        origins=verified.origins,
        chain=scheduled.window.chain,
        num_drafted=len(scheduled.window.ids) - scheduled.window.num_forced,
        num_accepted=min(verified.num_accepted, len(scheduled.window.ids) - scheduled.window.num_forced),
        logprobs=position_logprobs(verified.logprobs),
        finish_reason=verified.finish_reason,
        stop_token_id=verified.stop_token_id,
        dropped=target.chains.take_dropped(),
        timings=step.timings.of_one(queue_us, draft_us, compile_us),
        load=load,
        num_cached_ids=target.num_cached_ids,
        num_forced=scheduled.window.num_forced,
    )


def run_isolated(
    items: Sequence[Item],
    run: Callable[[Sequence[Item]], Result | None],  # None where it had no room for any
    give_up: Callable[[Item, Exception], None],
    hand_over: Callable[[Item, Exception], None],
) -> Iterator[Result]:
    """Runs all items at once. Where that raises, it runs halves of them, down to the ones that fail alone: these are
    given up. Where two have failed alone and nothing has run, it is no item's fault: nothing more is tried, and all
    are handed over. DeviceLost goes to the caller: nothing can run any more."""
    waiting = [items] if items else []
    alone: list[tuple[Item, Exception]] = []
    has_run = False
    while waiting and (has_run or len(alone) < 2):
        # After the first one that failed alone, the largest parts show whether anything runs.
        part = waiting.pop(0 if alone and not has_run else -1)
        try:
            result = run(part)
        except DeviceLost:
            raise
        except Exception as error:
            if len(part) == 1:
                alone.append((part[0], error))
            else:
                log.exception("a step of %d sequences failed; they run again in halves", len(part))
                middle = len(part) // 2
                waiting += [part[middle:], part[:middle]]
        else:
            if result is not None:
                has_run = True
                yield result
    if has_run or len(alone) < 2:
        for item, cause in alone:
            give_up(item, cause)
    else:
        for item in items:
            hand_over(item, alone[-1][1])
