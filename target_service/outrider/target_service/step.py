"""A step: computed, verified and committed, so that the fault of one sequence costs no other, and one of the process is
not charged to sequences."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from outrider.engine.kv_cache_manager import KVCacheManager
from outrider.engine.model_runner import ModelRunner
from outrider.engine.worker import DeviceLost, require_device
from outrider.rpc.messages import Commit, Load, StepTimings
from outrider.target_service.device_verifier import StepVerifier
from outrider.target_service.outputs import ComputedStep, VerifiedWindow, position_logprobs, report_prompt
from outrider.target_service.scheduler import ScheduledSequence

log = logging.getLogger(__name__)


def compute(
    step: Sequence[ScheduledSequence], runner: ModelRunner, verifier: StepVerifier, clock: Callable[[], float]
) -> ComputedStep:
    """One pass over the model, and what the target says of the windows in it; nothing is committed. Raises what the
    model or the verifier raises, or DeviceLost if the device is unusable after it."""
    started_ns, started = time.time_ns(), clock()
    try:
        logits = runner.forward([scheduled.batch_entry() for scheduled in step])  # [rows that want them, vocab]
        for scheduled in step:
            if scheduled.target.wants_prompt_logprobs:
                report_prompt(scheduled, logits[scheduled.first_logit :][: scheduled.num_logits])
        verified = verifier.verify(logits, [scheduled for scheduled in step if scheduled.samples])
    except Exception:
        require_device(runner.model.device)
        raise
    ended = clock()
    step_us = round((ended - started) * 1e6)
    verify_us = min(runner.last_forward_us, step_us)  # known now, also where it ran behind the host's back
    num_rows = sum(scheduled.num_rows for scheduled in step)
    timings = StepTimings(
        verify_us=verify_us, sample_us=step_us - verify_us, num_rows=num_rows, num_sequences=len(step)
    )
    return ComputedStep(step, verified, started_ns, started, ended, timings)


def commit(verified: VerifiedWindow, step: ComputedStep, cache: KVCacheManager, load: Load) -> Commit:
    """Puts what was verified in the place of the window: tokens, cache, sampling state and chains. The sequence ends
    where the Commit says why."""
    scheduled, target = verified.scheduled, verified.scheduled.target
    queue_us = max(0, round((step.started - target.ready_since) * 1e6))
    sequence = target.sequence
    sequence.tokens[scheduled.committed :] = verified.ids
    sequence.num_computed_tokens = scheduled.end
    cache.truncate(sequence, len(sequence))
    cache.publish(sequence, len(sequence))
    target.sampler.append(verified.ids)
    target.chains.advance()
    target.last_commit = target.ready_since = step.ended
    if scheduled.committed == target.prompt_len + len(target.open.output_ids):
        target.patience_spent = False  # the first token waited for no draft; from here on patience counts
    return Commit(
        sequence_id=target.open.sequence_id,
        position=scheduled.committed,
        ids=verified.ids,
        origins=verified.origins,
        chain=scheduled.window.chain,
        num_drafted=len(scheduled.window.ids),
        num_accepted=verified.num_accepted,
        logprobs=position_logprobs(verified.logprobs),
        finish_reason=verified.finish_reason,
        stop_token_id=verified.stop_token_id,
        dropped=target.chains.take_dropped(),
        timings=replace(step.timings, queue_us=queue_us),
        load=load,
        num_cached_ids=target.num_cached_ids,
    )


def drafted_and_accepted(verified: VerifiedWindow) -> tuple[int, int]:
    """What a window says of the draft. A plain token tests a held one, too, where a token holds by being the target's
    own; to be asked before the window is committed."""
    target, num_drafted = verified.scheduled.target, len(verified.scheduled.window.ids)
    if not num_drafted and not target.rejects:
        held = target.chains.window(1).ids
        return len(held), int(held == verified.ids[:1])
    return num_drafted, verified.num_accepted


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
