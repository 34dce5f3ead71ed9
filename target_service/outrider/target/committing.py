"""Puts verdicts in the place of windows: tokens, sampling state, cache and chains, and the Commit that says so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from outrider.engine.sequence import SequenceCache
from outrider.target.outcome import Outcome, origins_of, outcome_of
from outrider.target.reports import position_logprobs
from outrider.target.verifier import Verdict
from outrider.wire.messages import Commit, Load, StepTimings


def commit(
    verdict: Verdict,
    cache: SequenceCache,
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


def _settle(verdict: Verdict, cache: SequenceCache, eos_ids: Sequence[int]) -> Outcome:
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
