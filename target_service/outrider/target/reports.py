"""Log probabilities as they leave the target: of committed tokens, and of the prompt while its rows are computed."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from outrider.engine.logprobs import RowLogprobs
from outrider.target.scheduler import StepEntry
from outrider.target.verifier import prompt_logprobs
from outrider.wire.messages import PositionLogprobs, PromptLogprobs, TokenLogprob


def position_logprobs(rows: Sequence[RowLogprobs]) -> tuple[PositionLogprobs, ...]:
    """Engine rows as wire values."""
    return tuple(tuple(map(TokenLogprob._make, zip(row.ids, row.values, row.ranks, strict=True))) for row in rows)


def report_prompt(entry: StepEntry, logits: Tensor) -> None:
    """Keeps the log probabilities of an entry's prompt rows, [rows that want logits, vocab], and sends them when
    they are whole. The row of position p speaks of the prompt token at p + 1; the first token of a prompt has none.
    Rows that are computed again after a preemption are skipped."""
    target = entry.target
    kept, sampling = target.prompt_logprobs, target.open.sampling
    if not kept:
        kept.append(())
    skip = len(kept) - 1 - entry.start
    end = min(entry.start + len(logits) + 1, target.prompt_len)
    next_ids = target.sequence.tokens[len(kept) : end]
    if next_ids:
        rows = logits[skip : skip + len(next_ids)]
        count, mode = sampling.prompt_logprobs or 0, sampling.logprobs_mode.value
        kept.extend(position_logprobs(prompt_logprobs(rows, next_ids, count, mode)))
    if len(kept) == target.prompt_len:
        target.sink(PromptLogprobs(target.open.sequence_id, 0, tuple(kept)))
