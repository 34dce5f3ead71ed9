"""What a verified window commits: the ids up to the token that ends the sequence, their origins, and why it ended.

Stops match one-token-at-a-time decoding: the first token that is a stop id, then EOS, then the length limit, cuts
what follows it. (Stop strings come before these; the gateway, which has the text, looks for them.)

Log probabilities as they leave the target: of committed tokens, and of the prompt while its rows are computed.

What a step was, for traces and metrics.

Step spans of the target: one span a batch step, linked to the requests in it. Nothing is installed when tracing
is off."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import Link, SpanKind, Tracer
from torch import Tensor

from outrider.engine.sampler import RowLogprobs
from outrider.rpc.messages import PositionLogprobs, PromptLogprobs, TokenLogprob
from outrider.rpc.sampling_params import FinishReason, SamplingParams, TokenOrigin
from outrider.rpc.telemetry import context_from_traceparent
from outrider.target_service.scheduler import ScheduledSequence
from outrider.target_service.verifier import Verdict, prompt_logprobs


@dataclass(frozen=True, slots=True)
class Outcome:
    """The committed part of a verdict."""

    ids: tuple[int, ...]
    origins: tuple[TokenOrigin, ...]
    finish_reason: FinishReason | None
    stop_token_id: int | None


def origins_of(num_drafted: int, num_accepted: int, has_next: bool) -> tuple[TokenOrigin, ...]:
    """Accepted tokens, then the target's own: plain without a draft, bonus after a full window, else recovered."""
    accepted = (TokenOrigin.ACCEPTED,) * num_accepted
    if not has_next:
        return accepted
    if num_drafted == 0:
        return (TokenOrigin.PLAIN,)
    return (*accepted, TokenOrigin.BONUS if num_accepted == num_drafted else TokenOrigin.RECOVERED)


def outcome_of(
    ids: Sequence[int],
    origins: Sequence[TokenOrigin],
    sampling: SamplingParams,
    eos_ids: Collection[int],
    num_output: int,
    max_tokens_left: int,
) -> Outcome:
    """Cuts `ids` at the token that completes a stop. `num_output` tokens were generated before them."""
    for index, token in enumerate(ids):
        after_minimum = num_output + index >= sampling.min_tokens
        if after_minimum and token in sampling.stop_token_ids:
            return Outcome(tuple(ids[: index + 1]), tuple(origins[: index + 1]), FinishReason.STOP, token)
        if after_minimum and token in eos_ids and not sampling.ignore_eos:
            return Outcome(tuple(ids[: index + 1]), tuple(origins[: index + 1]), FinishReason.STOP, None)
        if index + 1 >= max_tokens_left:
            return Outcome(tuple(ids[: index + 1]), tuple(origins[: index + 1]), FinishReason.LENGTH, None)
    return Outcome(tuple(ids), tuple(origins), None, None)


def position_logprobs(rows: Sequence[RowLogprobs]) -> tuple[PositionLogprobs, ...]:
    """Engine rows as wire values."""
    return tuple(tuple(map(TokenLogprob._make, zip(row.ids, row.values, row.ranks, strict=True))) for row in rows)


def report_prompt(entry: ScheduledSequence, logits: Tensor) -> None:
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


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a step was, for traces and metrics."""

    started_ns: int  # wall clock
    ended_ns: int
    num_rows: int
    num_sequences: int
    num_drafted: int
    num_accepted: int
    traceparents: tuple[str, ...]


def report_step(entries: Sequence[ScheduledSequence], verdicts: Sequence[Verdict], started_ns: int) -> StepReport:
    """Of a step that has just ended."""
    return StepReport(
        started_ns=started_ns,
        ended_ns=time.time_ns(),
        num_rows=sum(entry.num_rows for entry in entries),
        num_sequences=len(entries),
        num_drafted=sum(len(entry.window.ids) for entry in entries),
        num_accepted=sum(verdict.num_accepted for verdict in verdicts),
        traceparents=tuple(entry.target.open.traceparent for entry in entries if entry.target.open.traceparent),
    )


class StepTracer:
    """Writes a span for every step that holds a traced request."""

    def __init__(self, tracer: Tracer | None = None) -> None:
        self._tracer = tracer or trace.get_tracer("outrider.target")

    @classmethod
    def if_enabled(cls) -> StepTracer | None:
        """None unless a real provider was installed: then steps cost nothing."""
        return cls() if isinstance(trace.get_tracer_provider(), TracerProvider) else None

    def on_step(self, report: StepReport) -> None:
        """Called on the device thread after each step."""
        if not report.traceparents:
            return
        contexts = (trace.get_current_span(context_from_traceparent(header)) for header in report.traceparents)
        links = [Link(span.get_span_context()) for span in contexts]
        attributes = {
            "outrider.step.rows": report.num_rows,
            "outrider.step.sequences": report.num_sequences,
            "outrider.step.drafted": report.num_drafted,
            "outrider.step.accepted": report.num_accepted,
        }
        span = self._tracer.start_span(
            "outrider.verify_step",
            kind=SpanKind.INTERNAL,
            links=links,
            attributes=attributes,
            start_time=report.started_ns,
        )
        span.end(end_time=report.ended_ns)
