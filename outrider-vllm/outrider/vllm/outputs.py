"""What vLLM says of a step, in the words of the protocol."""

from __future__ import annotations

from typing import Any

from outrider.rpc.messages import Commit, Load, PromptLogprobs, StepTimings
from outrider.rpc.words.answer import PositionLogprobs, TokenLogprob
from outrider.rpc.words.sampling_params import FinishReason, TokenOrigin
from outrider.vllm.rows import DraftedRow

# By the names of vLLM's own.
FINISH_REASONS = {
    "STOP": FinishReason.STOP,
    "LENGTH": FinishReason.LENGTH,
    "ABORT": FinishReason.ABORT,
    "ERROR": FinishReason.ERROR,
    "REPETITION": FinishReason.STOP,
}


def commit_of(
    row: DraftedRow, output: Any, num_drafted: int, num_accepted: int, timings: StepTimings, load: Load
) -> Commit:
    """What a step committed of a row, whose tokens include it."""
    ids = tuple(output.new_token_ids)
    reason = None if output.finish_reason is None else FINISH_REASONS[output.finish_reason.name]
    stop = output.stop_reason if reason is FinishReason.STOP and isinstance(output.stop_reason, int) else None
    if output.prefill_stats is not None:
        row.num_cached_ids = output.prefill_stats.num_cached_tokens
    return Commit(
        sequence_id=row.sequence_id,
        position=row.committed - len(ids),
        ids=ids,
        origins=origins_of(len(ids), num_drafted, num_accepted),
        chain=row.window.chain if num_drafted else None,
        num_drafted=num_drafted,
        num_accepted=num_accepted,
        logprobs=position_logprobs(output.new_logprobs),
        finish_reason=reason,
        stop_token_id=stop,
        dropped=row.chains.take_dropped(),
        timings=timings,
        load=load,
        num_cached_ids=row.num_cached_ids,
    )


def origins_of(num_ids: int, num_drafted: int, num_accepted: int) -> tuple[TokenOrigin, ...]:
    """The accepted tokens, then the target's own; cut where a stop cut the ids."""
    own = TokenOrigin.BONUS if num_accepted == num_drafted else TokenOrigin.RECOVERED
    return ((TokenOrigin.ACCEPTED,) * num_accepted + (own if num_drafted else TokenOrigin.PLAIN,))[:num_ids]


def position_logprobs(rows: Any) -> tuple[PositionLogprobs, ...]:
    """vLLM's LogprobsLists: of each position the chosen token first, whose rank it says, then the most probable ones. A
    chosen one that is among them is not repeated."""
    if rows is None:
        return ()
    return tuple(
        _position(ids.tolist(), values.tolist(), int(rank))
        for ids, values, rank in zip(rows.logprob_token_ids, rows.logprobs, rows.sampled_token_ranks, strict=True)
    )


def _position(ids: list[int], values: list[float], rank: int) -> PositionLogprobs:
    others = [
        TokenLogprob(token, value, place)
        for place, (token, value) in enumerate(zip(ids[1:], values[1:], strict=True), start=1)
        if token != ids[0]
    ]
    return (TokenLogprob(ids[0], values[0], rank), *others)


def prompt_logprobs_of(row: DraftedRow, output: Any) -> PromptLogprobs:
    """Of the whole prompt, whose first token has none."""
    return PromptLogprobs(row.sequence_id, 0, ((), *position_logprobs(output.new_prompt_logprobs_tensors.tolists())))
