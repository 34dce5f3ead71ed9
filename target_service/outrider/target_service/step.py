"""One pass over the model, and what the target says of the windows in it. Nothing is committed here.

Puts verdicts in the place of windows: tokens, sampling state, cache and chains, and the Commit that says so.

Keeps the fault of one sequence from the others that share its step, and one of the process from being charged to
sequences."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from torch import Tensor

from outrider.engine.kv_cache_manager import KVCacheManager
from outrider.engine.model_runner import ModelRunner
from outrider.engine.worker import DeviceLost, require_device
from outrider.rpc.messages import Commit, Load, StepTimings
from outrider.target_service.device_verifier import StepVerifier
from outrider.target_service.outputs import Outcome, origins_of, outcome_of, position_logprobs, report_prompt
from outrider.target_service.scheduler import ScheduledSequence
from outrider.target_service.verifier import Verdict, VerifyRows


@dataclass(frozen=True, slots=True)
class ComputedStep:
    """Entries that shared a pass, with the verdicts on their windows."""

    entries: Sequence[ScheduledSequence]
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

    def compute(self, entries: Sequence[ScheduledSequence]) -> ComputedStep:
        """Raises what the model or the verifier raises, or DeviceLost if the device is unusable after it."""
        started_ns, started = time.time_ns(), self._clock()
        try:
            logits = self._runner.forward([entry.batch_entry() for entry in entries])
            verdicts = self.verifier.verify(logits, _verify_rows(entries, logits))
        except Exception:
            require_device(self._runner.model.device)
            raise
        return ComputedStep(entries, verdicts, started_ns, started, self._clock(), self._runner.last_forward_us)


def _verify_rows(entries: Sequence[ScheduledSequence], logits: Tensor) -> list[VerifyRows]:
    """Reads prompt log probabilities off their rows; the last rows of each entry judge its window."""
    verify_rows, end = [], 0
    for entry in entries:
        start, end = end, end + entry.num_logits
        if entry.target.wants_prompt_logprobs:
            report_prompt(entry, logits[start:end])
        if entry.samples:
            verify_rows.append(VerifyRows(entry, range(end - entry.num_verify_rows, end)))
    return verify_rows


def commit(
    verdict: Verdict,
    cache: KVCacheManager,
    eos_ids: Sequence[int],
    timings: StepTimings,
    load: Load,
    started: float,
    now: float,
) -> Commit:
    """Commits what a verdict leaves; `started` is when its step did. The sequence ends where the Commit says why."""
    entry, target = verdict.entry, verdict.entry.target
    queue_us = max(0, round((started - target.ready_since) * 1e6))
    outcome = _settle(verdict, cache, eos_ids)
    target.last_commit = target.ready_since = now
    if entry.committed == target.prompt_len + len(target.open.output_ids):
        target.patience_spent = False  # the first token waited for no draft; from here on patience counts
    return Commit(
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
        timings=replace(timings, queue_us=queue_us),
        load=load,
        num_cached_ids=target.num_cached_ids,
    )


def drafted_and_accepted(verdict: Verdict) -> tuple[int, int]:
    """What a verdict says of the draft. A plain token tests a held one, too, where a token holds by being the target's
    own; to be asked before the verdict is committed."""
    target, num_drafted, num_accepted = verdict.entry.target, len(verdict.entry.window.ids), verdict.num_accepted
    if not num_drafted and not target.rejects:
        held = target.chains.window(1).ids
        return len(held), int(held == verdict.ids[:1])
    return num_drafted, num_accepted


def _settle(verdict: Verdict, cache: KVCacheManager, eos_ids: Sequence[int]) -> Outcome:
    entry, target = verdict.entry, verdict.entry.target
    origins = origins_of(len(entry.window.ids), verdict.num_accepted, len(verdict.ids) > verdict.num_accepted)
    outcome = outcome_of(
        verdict.ids,
        origins,
        target.open.sampling,
        eos_ids,
        entry.committed - target.prompt_len,
        target.tokens_left_at(entry.committed),
    )
    sequence = target.sequence
    sequence.tokens[entry.committed :] = outcome.ids
    sequence.num_computed_tokens = entry.start + entry.num_rows
    cache.truncate(sequence, len(sequence))
    cache.publish(sequence, len(sequence))
    target.sampler.append(outcome.ids)
    target.chains.advance()
    return outcome


log = logging.getLogger(__name__)

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
