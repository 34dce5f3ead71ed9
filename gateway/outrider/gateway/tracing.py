"""The gateway's spans: one for a request, one for each round, and in a round what its time went to. Without an
installed tracer provider, or for a request that is not sampled, nothing is built."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import INVALID_SPAN, Link, Span, SpanKind, Status, StatusCode, Tracer

from outrider.gateway.prepare import Prepared
from outrider.gateway.request_record import RequestObserver, RequestRecord
from outrider.planner.policy import Round
from outrider.rpc import telemetry as names
from outrider.rpc.server_calls import as_outrider_error, end_attributes
from outrider.rpc.telemetry import context_from_traceparent, inject_traceparent
from outrider.rpc.words.answer import GenerationDelta
from outrider.rpc.words.request import GenerationRequest
from outrider.rpc.words.sampling_params import TokenOrigin

Attribute = str | int | float | bool | tuple[str, ...]
MAX_TRACED_ROUNDS = 256  # of a completion: a round has up to six spans


@dataclass(frozen=True, slots=True)
class TimedSpan:
    """A span that is over; seconds on the monotonic clock."""

    name: str
    start: float
    end: float
    attributes: Mapping[str, Attribute] = field(default_factory=dict)


def spans_for(closed: Round) -> tuple[TimedSpan, ...]:
    """The round's span, then its parts in the order in which they end. Parts are durations without a clock of their
    own: they are laid from the end backwards, and cut at the round's start where they overlapped the one before."""
    commit, timings = closed.commit, closed.commit.timings
    attributes: dict[str, Attribute] = {
        names.ROUND_INDEX: closed.index,
        names.ROUND_K: closed.num_draft_tokens,
        names.ROUND_POSITION: commit.position,
        names.ROUND_DRAFTED: commit.num_drafted,
        names.ROUND_ACCEPTED: commit.num_accepted,
        names.ROUND_EMITTED: len(commit.ids),
        names.ROUND_BONUS: TokenOrigin.BONUS in commit.origins,
        names.ROUND_OVERHEAD_US: closed.overhead_us,
        names.BATCH_ROWS: timings.num_rows,
        names.BATCH_SEQUENCES: timings.num_sequences,
    }
    if closed.mode:
        attributes[names.ROUND_POLICY] = closed.mode
    if closed.drafted_by:
        attributes[names.ROUND_METHODS] = tuple(share.method for share in closed.drafted_by)
    attributes |= constraint_numbers(closed)
    attributes |= {f"{names.CONTROLLER}.{name}": value for name, value in closed.inputs.items()}
    if commit.chain is not None:
        attributes[names.ROUND_CHAIN] = commit.chain
    parts = (
        (names.SPAN_SAMPLE, timings.sample_us),
        (names.SPAN_VERIFY, timings.verify_us),
        (names.SPAN_QUEUE, timings.queue_us),
        (names.SPAN_WIRE, closed.wire_us),
        (names.SPAN_DRAFT, closed.draft_us),
    )
    end, laid = closed.ended, []
    for name, duration_us in parts:
        if duration_us > 0 and end > closed.started:
            start = max(closed.started, end - duration_us * 1e-6)
            laid.append(TimedSpan(name, start, end))
            end = start
    return (TimedSpan(names.SPAN_ROUND, closed.started, closed.ended, attributes), *reversed(laid))


def constraint_numbers(closed: Round) -> dict[str, int]:
    """What a constraint did in a round; nothing of one without."""
    commit = closed.commit
    found = {
        names.ROUND_FORCED: commit.num_forced,
        names.ROUND_FORCED_ACCEPTED: commit.num_accepted_forced,
        names.ROUND_MASK_US: commit.timings.mask_us,
    }
    return {name: number for name, number in found.items() if number}


@dataclass(slots=True)
class RoundSums:
    """The rounds of a completion that have no spans of their own."""

    started: float  # seconds on the monotonic clock
    ended: float = 0.0
    num_rounds: int = 0
    sums: Counter[str] = field(default_factory=Counter)

    def add(self, closed: Round) -> None:
        commit, timings = closed.commit, closed.commit.timings
        self.ended = closed.ended
        self.num_rounds += 1
        self.sums.update(
            {
                names.ROUND_DRAFTED: commit.num_drafted,
                names.ROUND_ACCEPTED: commit.num_accepted,
                names.ROUND_EMITTED: len(commit.ids),
                names.ROUNDS_DRAFT_US: closed.draft_us,
                names.ROUNDS_WIRE_US: closed.wire_us,
                names.ROUNDS_QUEUE_US: timings.queue_us,
                names.ROUNDS_VERIFY_US: timings.verify_us,
                names.ROUNDS_SAMPLE_US: timings.sample_us,
                **constraint_numbers(closed),
            }
        )

    def span(self, completion: int) -> TimedSpan:
        attributes = {names.ROUNDS_COUNT: self.num_rounds, names.REQUEST_COMPLETION: completion, **self.sums}
        return TimedSpan(names.SPAN_ROUNDS, self.started, self.ended, attributes)


class RequestTrace(RequestObserver):
    """The root span of one request, from when it may run. `recording` is false where nothing is to be built. A client's
    trace is gone on with only where clients are trusted; elsewhere a new trace, which this process's sampler decides
    on, has a link to it."""

    def __init__(
        self,
        tracer: Tracer,
        model_name: str,
        trust_traceparent: bool = False,
        max_rounds: int = MAX_TRACED_ROUNDS,
    ) -> None:
        self._tracer, self._model_name, self._trusts = tracer, model_name, trust_traceparent
        self._max_rounds = max_rounds
        self._clock_offset = time.time() - time.monotonic()
        self._num_rounds: Counter[int] = Counter()  # by completion
        self._summed: dict[int, RoundSums] = {}
        self._compile_us = 0
        self._span: Span = INVALID_SPAN
        self._context = Context()
        self.recording = False

    def began(self, record: RequestRecord) -> None:
        """Starts the span: the record gets its traceparent."""
        self._start_root(record, record.started)
        if self.recording and record.prepared is not None:
            self._span.set_attributes(_attributes_of_prepared(record.prepared, self._model_name))

    def add(self, record: RequestRecord, delta: GenerationDelta) -> None:
        """Spans of a round, if the delta has one."""
        if self.recording and delta.round is not None:
            self._add_round(delta.round, delta.index)

    def ended(self, record: RequestRecord, error: BaseException | None) -> None:
        """Ends the root span, which begins with the request's arrival where it never ran. By the conventions, what the
        caller did is no error of a server's span: neither that it went away, nor that its request had to be refused."""
        if record.prepared is None:
            self._start_root(record, record.arrived)
        if self.recording:
            for completion, summed in self._summed.items():
                self._start(summed.span(completion), self._context).end(self._ns(summed.ended))
            if record.prepared is not None:
                self._span.set_attributes(self._results_of(record))
            self._set_end(record, error)
        self._span.end()

    def _start_root(self, record: RequestRecord, at: float) -> None:
        """Goes on with the client's trace, or has a link to it."""
        request, name = record.request, self._model_name
        client = context_from_traceparent(request.traceparent)
        context = trace.get_current_span(client).get_span_context()
        self._span = self._tracer.start_span(
            f"{operation_of(request)} {name}",
            context=client if self._trusts else Context(),
            kind=SpanKind.SERVER,
            links=[Link(context)] if context.is_valid and not self._trusts else [],
            start_time=self._ns(at),
        )
        self._context = trace.set_span_in_context(self._span)
        self.recording = self._span.is_recording()
        record.traceparent = inject_traceparent(self._context)
        if self.recording:
            self._span.set_attributes(_attributes_of(request, name))

    def _results_of(self, record: RequestRecord) -> dict[str, Attribute]:
        results: dict[str, Attribute] = {
            names.GEN_AI_USAGE_OUTPUT_TOKENS: record.num_tokens,
            names.GEN_AI_RESPONSE_FINISH_REASONS: tuple(record.finish_reasons),
        }
        if record.first_token:
            results[names.GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK] = record.first_token - record.started
        if record.num_cached is not None:
            results[names.GEN_AI_USAGE_CACHED_TOKENS] = record.num_cached
        if record.num_reasoning:
            results[names.GEN_AI_USAGE_REASONING_TOKENS] = record.num_reasoning
        if self._compile_us:
            results[names.REQUEST_COMPILE_US] = self._compile_us
        return results

    def _set_end(self, record: RequestRecord, error: BaseException | None) -> None:
        ended = end_attributes(record.request.call, as_outrider_error(error), record.num_tokens > 0)
        self._span.set_attributes(ended)
        if names.ERROR_TYPE in ended:
            self._span.set_status(Status(StatusCode.ERROR))

    def _add_round(self, closed: Round, completion: int) -> None:
        """A round with its parts; after `max_rounds` of a completion, its share of a sum."""
        self._compile_us += closed.commit.timings.compile_us
        self._num_rounds[completion] += 1
        if self._num_rounds[completion] > self._max_rounds:
            self._summed.setdefault(completion, RoundSums(closed.started)).add(closed)
            return
        whole, *parts = spans_for(closed)
        span = self._start(whole, self._context)
        span.set_attribute(names.REQUEST_COMPLETION, completion)
        inner = trace.set_span_in_context(span)
        for part in parts:
            self._start(part, inner).end(self._ns(part.end))
        span.end(self._ns(whole.end))

    def _start(self, timed: TimedSpan, context: Context) -> Span:
        return self._tracer.start_span(
            timed.name, context=context, attributes=timed.attributes, start_time=self._ns(timed.start)
        )

    def _ns(self, monotonic: float) -> int:
        return round((monotonic + self._clock_offset) * 1e9)


def operation_of(request: GenerationRequest) -> str:
    """What the conventions call what is asked for."""
    return names.OPERATION_TEXT_COMPLETION if request.messages is None else names.OPERATION_CHAT


def _attributes_of(request: GenerationRequest, model_name: str) -> dict[str, str]:
    """What is known of a request as it comes."""
    return {
        names.GEN_AI_OPERATION_NAME: operation_of(request),
        names.GEN_AI_PROVIDER_NAME: names.PROVIDER,
        names.GEN_AI_REQUEST_MODEL: model_name,
        **({names.REQUEST_ID: request.request_id} if request.request_id else {}),
        **({names.REQUEST_ADAPTER: request.adapter} if request.adapter else {}),
        **(request.call.attributes if request.call is not None else {}),
    }


def _attributes_of_prepared(prepared: Prepared, model_name: str) -> dict[str, Attribute]:
    sampling = prepared.sampling
    attributes: dict[str, Attribute] = {
        names.GEN_AI_REQUEST_MAX_TOKENS: sampling.max_tokens,
        names.GEN_AI_REQUEST_TEMPERATURE: sampling.temperature,
        names.GEN_AI_REQUEST_TOP_P: sampling.top_p,
        names.GEN_AI_REQUEST_TOP_K: sampling.top_k,
        names.GEN_AI_REQUEST_STREAM: True,
        names.GEN_AI_RESPONSE_MODEL: model_name,
        names.GEN_AI_USAGE_INPUT_TOKENS: len(prepared.prompt_ids),
        names.REQUEST_ID: prepared.request_id,  # made here where the client gave none
        names.REQUEST_ACCEPTANCE: prepared.acceptance.name.lower(),
        names.REQUEST_METHOD: ",".join(prepared.methods),
    }
    if sampling.structured_output is not None:
        attributes[names.REQUEST_CONSTRAINT] = sampling.structured_output.kind
    return attributes
