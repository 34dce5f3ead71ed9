"""The gateway's spans: one for a request, one for each round, and in a round what its time went to. Without an
installed tracer provider, or for a request that is not sampled, nothing is built."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, Tracer

from outrider.gateway.request import Prepared
from outrider.planner.policy import Round
from outrider.rpc import telemetry as names
from outrider.rpc.server_calls import as_outrider_error, end_attributes
from outrider.rpc.telemetry import context_from_traceparent, inject_traceparent
from outrider.rpc.words.answer import GenerationDelta
from outrider.rpc.words.request import GenerationRequest, ServerCall
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
        """One more."""
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
        """All of them as one."""
        attributes = {names.ROUNDS_COUNT: self.num_rounds, names.REQUEST_COMPLETION: completion, **self.sums}
        return TimedSpan(names.SPAN_ROUNDS, self.started, self.ended, attributes)


class RequestTrace:
    """The root span of one request. `recording` is false where nothing is to be built. A client's trace is gone on with
    only where clients are trusted; elsewhere a new trace, which this process's sampler decides on, has a link to it."""

    def __init__(
        self,
        tracer: Tracer,
        prepared: Prepared,
        model_name: str,
        trust_traceparent: bool = False,
        max_rounds: int = MAX_TRACED_ROUNDS,
    ) -> None:
        request, sampling = prepared.request, prepared.sampling
        self._tracer = tracer
        self._clock_offset = time.time() - time.monotonic()
        self._started = time.monotonic()
        self._call = request.call
        self._max_rounds = max_rounds
        self._num_rounds: Counter[int] = Counter()  # by completion
        self._summed: dict[int, RoundSums] = {}
        self._num_chunks = self._num_output = self._num_reasoning = self._compile_us = 0
        self._finish_reasons: list[str] = []
        self.span = _server_span(tracer, request, model_name, trust_traceparent)
        self._context = trace.set_span_in_context(self.span)
        self.traceparent = inject_traceparent(self._context)
        self.recording = self.span.is_recording()
        if self.recording:
            self.span.set_attributes(
                {
                    **_attributes_of(request, model_name),
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
            )
            if sampling.structured_output is not None:
                self.span.set_attribute(names.REQUEST_CONSTRAINT, sampling.structured_output.kind)

    def add_round(self, closed: Round, completion: int) -> None:
        """One round with its parts; after `max_rounds` of a completion, its share of a sum."""
        if not self.recording:
            return
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

    def add_delta(self, delta: GenerationDelta) -> None:
        """What the client got."""
        if not self.recording:
            return
        if delta.token_ids and not self._num_chunks:
            seconds = time.monotonic() - self._started
            self.span.set_attribute(names.GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK, seconds)
        self._num_chunks += bool(delta.token_ids)
        self._num_output += len(delta.token_ids)
        self._num_reasoning += delta.num_reasoning
        if delta.finish_reason is not None:
            self._finish_reasons.append(delta.finish_reason.name.lower())
        if delta.usage is not None:
            self.span.set_attribute(names.GEN_AI_USAGE_CACHED_TOKENS, delta.usage.cached_tokens)

    def end(self, error: BaseException | None = None) -> None:
        """Ends the root span. By the conventions, what the caller did is no error of a server's span: neither that it
        went away, nor that its request had to be refused."""
        if self.recording:
            for completion, summed in self._summed.items():
                self._start(summed.span(completion), self._context).end(self._ns(summed.ended))
            self.span.set_attribute(names.GEN_AI_USAGE_OUTPUT_TOKENS, self._num_output)
            if self._num_reasoning:
                self.span.set_attribute(names.GEN_AI_USAGE_REASONING_TOKENS, self._num_reasoning)
            if self._compile_us:
                self.span.set_attribute(names.REQUEST_COMPILE_US, self._compile_us)
            self.span.set_attribute(names.GEN_AI_RESPONSE_FINISH_REASONS, tuple(self._finish_reasons))
            _tell_end(self.span, self._call, error, self._num_chunks > 0)
        self.span.end()

    def _start(self, timed: TimedSpan, context: Context) -> Span:
        return self._tracer.start_span(
            timed.name, context=context, attributes=timed.attributes, start_time=self._ns(timed.start)
        )

    def _ns(self, monotonic: float) -> int:
        return round((monotonic + self._clock_offset) * 1e9)


def trace_refusal(
    tracer: Tracer,
    request: GenerationRequest,
    model_name: str,
    trust_traceparent: bool,
    error: BaseException,
    waited_s: float,
) -> str:
    """The span of a request that ended before it ran, `waited_s` after it came; returns its traceparent."""
    start = time.time_ns() - round(waited_s * 1e9)
    span = _server_span(tracer, request, model_name, trust_traceparent, start)
    if span.is_recording():
        span.set_attributes(_attributes_of(request, model_name))
        _tell_end(span, request.call, error, False)
    span.end()
    return inject_traceparent(trace.set_span_in_context(span))


def _server_span(
    tracer: Tracer, request: GenerationRequest, model_name: str, trust_traceparent: bool, start_ns: int | None = None
) -> Span:
    """A request's root, which goes on with the client's trace, or has a link to it."""
    client = context_from_traceparent(request.traceparent)
    context = trace.get_current_span(client).get_span_context()
    return tracer.start_span(
        f"{_operation(request)} {model_name}",
        context=client if trust_traceparent else Context(),
        kind=SpanKind.SERVER,
        links=[Link(context)] if context.is_valid and not trust_traceparent else [],
        start_time=start_ns,
    )


def _operation(request: GenerationRequest) -> str:
    return names.OPERATION_TEXT_COMPLETION if request.messages is None else names.OPERATION_CHAT


def _attributes_of(request: GenerationRequest, model_name: str) -> dict[str, str]:
    """What is known of a request as it comes."""
    return {
        names.GEN_AI_OPERATION_NAME: _operation(request),
        names.GEN_AI_PROVIDER_NAME: names.PROVIDER,
        names.GEN_AI_REQUEST_MODEL: model_name,
        **({names.REQUEST_ID: request.request_id} if request.request_id else {}),
        **({names.REQUEST_ADAPTER: request.adapter} if request.adapter else {}),
        **(request.call.attributes if request.call is not None else {}),
    }


def _tell_end(span: Span, call: ServerCall | None, error: BaseException | None, answered: bool) -> None:
    ended = end_attributes(call, as_outrider_error(error), answered)
    span.set_attributes(ended)
    if names.ERROR_TYPE in ended:
        span.set_status(Status(StatusCode.ERROR))
