"""The target's engine, run by the device thread: commands in, one ragged step at a time, commits out to the sinks.

A fault costs the sequence that it is met with, never those that share its step, its stream or the engine; one of the
process is not charged to sequences."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

from outrider.engine.batch import PreparedAdapter
from outrider.engine.kv_cache_manager import BlockPool, KVCacheManager
from outrider.engine.model_runner import ModelRunner, probe
from outrider.engine.token_tree import KeptPath, TokenTree, depths_of
from outrider.engine.worker import DeviceLost, require_device
from outrider.planner.estimates import OpenWork
from outrider.proposers.drawing import Drawer
from outrider.proposers.heads.head import Head
from outrider.rpc.errors import DeadlineExceeded, Internal, OutriderError, Unavailable, unexpected
from outrider.rpc.logs import of
from outrider.rpc.messages import (
    Adapter,
    Close,
    Closed,
    Commit,
    Credit,
    DraftTokens,
    Load,
    Open,
    StepTimings,
    TargetCommand,
    TargetEvent,
    to_failure,
)
from outrider.rpc.servicer import Deliver, Detach
from outrider.target_service.adapters import AdapterTable, AdapterTurns
from outrider.target_service.device_verifier import StepVerifier, verifier_of
from outrider.target_service.goodput import BatchingDelay, Goodput
from outrider.target_service.grammars import POLL_S, Grammars, open_grammar, stuck
from outrider.target_service.local_draft import LocalDraft
from outrider.target_service.outputs import ComputedStep, VerifiedWindow, position_logprobs, report_prompt
from outrider.target_service.profile import StepProfile, ThreadSplit, measure_steps
from outrider.target_service.scheduler import ScheduledSequence, TargetScheduler
from outrider.target_service.sequence import Sink, TargetLimits, TargetSequence, admit

log = logging.getLogger(__name__)

BLOCKED_S = 0.005  # pause when sequences are due but none can have blocks


TargetEngineCommand = Deliver[TargetCommand, TargetEvent] | Detach


class TargetEngine:
    """Run by a Worker. `on_step` is told of each step before its commits, `flush` is called after each with answers."""

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
        head: Head | None = None,
        tree: TokenTree | None = None,  # what it drafts where trees are verified
        grammars: Grammars | None = None,  # without, requests for constraints are refused
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
        drawer = Drawer(limits.vocab_size, runner.model.device)
        self.local_draft = None if head is None else LocalDraft(head, runner, self.cache, drawer, tree)
        self._batching_delay, self._work = BatchingDelay(), OpenWork(limits.max_sequences, limits.max_open_tokens)
        self.grammars = grammars
        if grammars is not None and head is not None:
            grammars.head = head.name
        self.adapters = AdapterTable(self._forget_adapter)
        if runner.adapters is not None:
            self.scheduler.turns = AdapterTurns(runner.adapters.room.num_slots)
        self.threads: ThreadSplit | None = None  # where the number is not given

    def handle(self, command: TargetEngineCommand) -> None:
        """Applies one command; nothing runs on the device."""
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
        """Runs one ragged step, or says how long nothing is due. Raises DeviceLost when the process has to end."""
        self._expire(now)
        self._resume(now)
        due = min(dues := self.scheduler.dues(now), default=None)
        if due is None or due > now:
            return 0.0 if self._prepare_ahead() else self._wait(due, now)
        if hold := self._batching_delay.hold(dues, now):
            return 0.0 if self._prepare_ahead() else hold
        has_run = False
        for step in run_isolated(self.scheduler.runnable(now), self._compute, self._give_up, self._hand_over):
            has_run = True
            self._observe(step)
            self._commit_step(step)
            if self.local_draft is not None:
                self._flush()
                self._draft(self.local_draft, step)
        self._flush()
        return 0.0 if has_run else BLOCKED_S

    def on_error(self, error: Exception) -> None:
        """A bug that is no one sequence's: every sequence fails, the service goes on."""
        log.error("the engine failed", exc_info=error)
        for target in list(self.scheduler.sequences.values()):
            self._fail(target, unexpected(error, "the engine failed; see the log", "ENGINE_FAILED"))
        self._flush()

    def probe(self) -> None:
        """A sign of life. Raises DeviceLost when the process has to end."""
        probe(self._runner, self.cache.pool)

    def profile(self) -> StepProfile:
        """Measures steps by their rows, while nothing is open; from then on the scheduler knows what they take."""
        costs = measure_steps(self._runner, self.cache.pool, self.scheduler.max_rows, self.limits.max_model_len)
        if costs:
            self.scheduler.goodput = Goodput(costs)
        if self.local_draft is not None:
            self.local_draft.warm_up()
        return costs

    def add_adapter(self, info: Adapter, prepared: PreparedAdapter) -> None:
        """New sequences may have it. Raises ValueError for a name that is taken, or a model that takes none."""
        if self._runner.adapters is None:
            raise ValueError("adapter: this target has no room for any")
        self.adapters.add(info, prepared)

    def remove_adapter(self, name: str) -> int:
        """No new sequence gets it; returns how many go on with it. Raises NotFound."""
        return self.adapters.remove(name)

    @property
    def num_adapter_swaps(self) -> int:
        """Adapters that were put on the device, since the start."""
        return 0 if self._runner.adapters is None else self._runner.adapters.num_swaps

    def _forget_adapter(self, prepared: PreparedAdapter) -> None:
        if self._runner.adapters is not None:
            self._runner.adapters.forget(prepared)
        if self.scheduler.turns is not None:
            self.scheduler.turns.forget(prepared)

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
        target = self.scheduler.sequences.get((stream, message.sequence_id))
        if isinstance(message, Close):
            if target is not None:
                self._remove(target)
            sink(Closed(message.sequence_id))
            self._flush()
        elif target is not None:  # else it finished or failed before this arrived
            self._update(target, message, received)

    def _open(self, stream: int, message: Open, sink: Sink) -> None:
        parent = self.scheduler.sequences.get((stream, message.fork_of)) if message.fork_of is not None else None
        try:
            now, num_tokens = self._clock(), len(message.prompt_ids) + message.sampling.max_tokens
            inherited, key = None if parent is None else parent.adapter, (stream, message.sequence_id)
            is_lost = message.fork_of is not None and parent is None  # which `admit` says
            adapter = None if is_lost or not (message.adapter or inherited) else self.adapters.find(message, inherited)
            target = admit(message, parent, key, sink, self.limits, self._arrivals, now, adapter)
            self._work.check(num_tokens, now, message.was_promised)
            target.chains.takes_trees = self._runner.model.takes_trees and not target.rejects
            if message.sampling.structured_output is not None or message.reasoning is not None:
                open_grammar(self.grammars, target)
        except OutriderError as error:
            sink(to_failure(message.sequence_id, error))
            self._flush()
            return
        self._arrivals += 1
        self._work.add(target.key, num_tokens, now)
        if adapter is not None:
            adapter.num_sequences += 1
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
        if target.chains.has_dropped:
            dropped = target.chains.take_dropped()
            target.sink(Commit(message.sequence_id, target.committed, (), dropped=dropped, load=self.load()))
            self._flush()

    def _expire(self, now: float) -> None:
        for target in [t for t in self.scheduler.sequences.values() if t.deadline is not None and t.deadline <= now]:
            self._fail(target, DeadlineExceeded("the request's time ran out", reason="DEADLINE"))

    def _resume(self, now: float) -> None:
        """Lets sequences go on that waited for their constraint, or ends them with its error."""
        for target in [t for t in self.scheduler.sequences.values() if t.waits_for is not None]:
            if self.grammars is not None and (error := self.grammars.resume(target, now)) is not None:
                self._fail(target, error)

    def _prepare_ahead(self) -> bool:
        """Uses idle time for the random numbers of the next windows; returns whether there were any to compute."""
        for target in [target for target in self.scheduler.sequences.values() if target.wants_tokens]:
            with self._fail_on_error(target, "random numbers"):
                if self.verifier.prepare(target):
                    return True
        return False

    def _wait(self, due: float | None, now: float) -> float | None:
        deadlines = [t.deadline for t in self.scheduler.sequences.values() if t.deadline is not None]
        looks = [now + POLL_S for t in self.scheduler.sequences.values() if t.waits_for is not None][:1]
        wakes = [*deadlines, *looks, *([due] if due is not None else [])]
        return max(0.0, min(wakes) - now) if wakes else None

    def _compute(self, targets: Sequence[TargetSequence]) -> ComputedStep | None:
        """A step of these, as far as there are rows and blocks. If it raises, all are as before."""
        step = self.scheduler.plan([target for target in targets if target.waits_for is None])
        try:
            computed = compute(step, self._runner, self.verifier, self._clock, self.grammars) if step else None
            if computed is not None and len(computed.scheduled) < len(step):  # some wait for their masks
                self.scheduler.roll_back(one for one in step if one.target.waits_for is not None)
            return computed if computed is not None and computed.scheduled else None
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
        if self._on_step is not None:
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

    def _draft(self, local_draft: LocalDraft, step: ComputedStep) -> None:
        """A head that fails costs its drafts alone: what is not drafted is decoded plainly."""
        try:
            local_draft.run(step)
        except Exception:
            require_device(self._runner.model.device)
            log.exception("the head failed; the step's sequences go on without its drafts")
        ended = self._clock()
        for target in (scheduled.target for scheduled in step.scheduled):
            if target.head_chain is not None:
                target.ready_since = max(target.ready_since, ended)  # it did not wait: it was drafted for

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
        if self.scheduler.goodput is not None:
            self.scheduler.goodput.add_verified(target.acceptance, *drafted_and_accepted(verified))
        committed = commit(verified, step, self.cache, load)
        target.sink(committed)
        if committed.finish_reason is not None:
            target.finished = True
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
        target = self.scheduler.sequences.get((stream, message.sequence_id))
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
        if self.grammars is not None and target.waits_for is not None:
            self.grammars.forget(target, target.waits_for)
        self.scheduler.remove(target)
        self._work.remove(target.key, self._clock())
        if target.adapter is not None:
            self.adapters.close(target.adapter)
            target.adapter = None

    def _fail(self, target: TargetSequence, error: OutriderError) -> None:
        target.finished = True
        self._remove(target)
        target.sink(to_failure(target.open.sequence_id, error))
        self._flush()  # at once: no step may follow before the next command


def compute(
    step: Sequence[ScheduledSequence],
    runner: ModelRunner,
    verifier: StepVerifier,
    clock: Callable[[], float],
    grammars: Grammars | None = None,
) -> ComputedStep:
    """One pass over the model, and what the target says of the windows in it, without sequences whose masks are late;
    nothing is committed. Raises what model and verifier raise, or DeviceLost if the device is unusable after it."""
    started_ns, started = time.time_ns(), clock()
    masks = None
    if grammars is not None and any(scheduled.target.sampler.constrained for scheduled in step):
        masks = grammars.start([scheduled for scheduled in step if scheduled.samples], verifier.takes_masks_lazily)
    try:
        logits = runner.forward([scheduled.batch_entry() for scheduled in step])  # [rows that want them, vocab]
        for scheduled in step:
            if scheduled.target.wants_prompt_logprobs:
                report_prompt(scheduled, logits[scheduled.first_logit :][: scheduled.num_logits])
        if masks is not None:
            masks.wait(clock() - started)
        verified = verifier.verify(logits, [one for one in step if one.samples and one.target.waits_for is None], masks)
        runner.keep_paths([path for window in verified if (path := kept_path(window)) is not None])
    except Exception:
        if masks is not None:
            masks.close()  # nobody else may use a matcher meanwhile
        require_device(runner.model.device)
        raise
    if masks is not None:
        masks.close()
        step = [one for one in step if one.target.waits_for is None]
    ended = clock()
    step_us = round((ended - started) * 1e6)
    verify_us = min(runner.last_forward_us, step_us)  # known now, also where it ran behind the host's back
    num_rows, mask_us = sum(one.num_rows for one in step), 0 if masks is None else round(masks.wait_s * 1e6)
    timings = StepTimings(0, verify_us, step_us - verify_us, num_rows, len(step), mask_us=mask_us)
    return ComputedStep(step, verified, started_ns, started, ended, timings)


def kept_path(verified: VerifiedWindow) -> KeptPath | None:
    """What stays of a tree; None of a chain, which lies where it has to."""
    scheduled = verified.scheduled
    if not verified.path:
        return None
    first_row = scheduled.first_row + scheduled.committed - scheduled.start
    return KeptPath(scheduled.target.sequence.block_table, scheduled.committed, first_row, verified.path)


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
        timings=replace(step.timings, queue_us=queue_us, draft_us=draft_us, compile_us=compile_us),
        load=load,
        num_cached_ids=target.num_cached_ids,
        num_forced=scheduled.window.num_forced,
    )


def drafted_and_accepted(verified: VerifiedWindow) -> tuple[int, int]:
    """What a window says of the draft. A plain token tests a held one, too, where a token holds by being the target's
    own; to be asked before the window is committed."""
    target, window = verified.scheduled.target, verified.scheduled.window
    num_drafted = max(depths_of(window.parents)) if window.parents else len(window.ids) - window.num_forced
    if not num_drafted and not target.rejects:
        held = target.chains.window(1).ids
        return len(held), int(held == verified.ids[:1])
    return num_drafted, min(verified.num_accepted, num_drafted)


Item = TypeVar("Item")
Result = TypeVar("Result")


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
