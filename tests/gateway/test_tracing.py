"""One span a request, one a round, and in it what its time went to."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, ParentBased
from opentelemetry.trace import SpanKind, StatusCode
from support.collector import collecting
from support.fakes import EOS, ToyDraft, ToyTarget, scripted
from support.gateways import over_grpc, thinking_tokenizer
from support.models import train_byte_level

from outrider.client import Client
from outrider.gateway.engine import EngineConfig, GenerationEngine
from outrider.gateway.http.errors import http_status
from outrider.gateway.servicer import CALL, GenerationServicer
from outrider.gateway.text.tokenizer import Tokenizer
from outrider.gateway.tracing import spans_for
from outrider.planner.policy import MethodShare, Round
from outrider.rpc import telemetry as names
from outrider.rpc.errors import OutriderError
from outrider.rpc.messages import Commit, Failure, StepTimings
from outrider.rpc.telemetry import setup_tracing
from outrider.rpc.words.request import GenerationRequest, ServerCall
from outrider.rpc.words.sampling_params import SamplingParams, TokenOrigin
from outrider.rpc.words.structured import StructuredOutput

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
REQUEST = GenerationRequest(
    token_ids=(11, 12, 13),
    sampling=SamplingParams(temperature=0.0, max_tokens=20),
    n=2,
    request_id="r1",
    traceparent=f"00-{TRACE}-{SPAN}-01",
)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Iterator[Tokenizer]:
    train_byte_level().save(str(tmp_path / "tokenizer.json"))
    yield Tokenizer.load(tmp_path)


def closed(draft_us: int = 100, total_s: float = 0.001, timings: StepTimings | None = None) -> Round:
    commit = Commit(
        0, 7, (1, 2, 3), (TokenOrigin.ACCEPTED, TokenOrigin.ACCEPTED, TokenOrigin.BONUS), 4, 2, 2,
        timings=timings or StepTimings(50, 300, 20, 3, 1),
    )  # fmt: skip
    return Round(5, commit, 4, 10.0, 10.0 + total_s, draft_us)


def test_a_rounds_parts_fill_it() -> None:
    whole, *parts = spans_for(closed())
    assert whole.name == names.SPAN_ROUND and (whole.start, whole.end) == (10.0, 10.001)
    assert [part.name for part in parts] == [
        names.SPAN_DRAFT, names.SPAN_WIRE, names.SPAN_QUEUE, names.SPAN_VERIFY, names.SPAN_SAMPLE,
    ]  # fmt: skip
    assert [round((part.end - part.start) * 1e6) for part in parts] == [100, 530, 50, 300, 20]
    assert parts[0].start == pytest.approx(10.0) and parts[-1].end == 10.001
    assert all(left.end == right.start for left, right in itertools.pairwise(parts))
    attributes = whole.attributes
    assert attributes[names.ROUND_DRAFTED] == attributes[names.ROUND_ACCEPTED] == 2
    assert attributes[names.ROUND_EMITTED] == 3 and attributes[names.ROUND_BONUS] is True
    assert attributes[names.ROUND_CHAIN] == attributes[names.ROUND_K] == 4


def test_a_round_names_the_methods_that_drafted_it() -> None:
    by = (MethodShare("suffix", 1, 1), MethodShare("draft_model", 2, 0))
    (whole, *_) = spans_for(replace(closed(), drafted_by=by))
    assert whole.attributes[names.ROUND_METHODS] == ("suffix", "draft_model")
    assert names.ROUND_METHODS not in spans_for(closed())[0].attributes


def test_parts_that_overlap_the_round_before_are_cut() -> None:
    whole, *parts = spans_for(closed(draft_us=900, total_s=0.0005))
    assert [part.name for part in parts] == [
        names.SPAN_DRAFT, names.SPAN_QUEUE, names.SPAN_VERIFY, names.SPAN_SAMPLE,
    ]  # fmt: skip
    assert parts[0].start == whole.start == 10.0


def test_parts_that_took_no_time_are_left_out() -> None:
    assert len(spans_for(closed(0, 0.0003, StepTimings(0, 300, 0)))) == 2


async def traced(
    tokenizer: Tokenizer, provider: TracerProvider, target: ToyTarget, trust: bool = True
) -> tuple[ReadableSpan, ...]:
    exporter = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    config = EngineConfig(trust_traceparent=trust)
    engine = GenerationEngine(tokenizer, target, ToyDraft(wrong_every=4), config, provider.get_tracer("test"))
    try:
        async for _ in engine.generate(REQUEST):
            pass
    except OutriderError:
        pass
    provider.shutdown()
    return exporter.get_finished_spans()


async def test_spans_of_a_request(tokenizer: Tokenizer) -> None:
    target = ToyTarget(num_cached=2)
    spans = await traced(tokenizer, TracerProvider(shutdown_on_exit=False), target)
    by_id = {span.context.span_id: span for span in spans if span.context is not None}
    root = spans[-1]
    rounds = [span for span in spans if span.name == names.SPAN_ROUND]
    assert root.name == "text_completion toy" and root.context is not None and root.parent is not None
    assert f"{root.context.trace_id:032x}" == TRACE and f"{root.parent.span_id:016x}" == SPAN
    assert root.attributes is not None
    assert root.attributes[names.GEN_AI_USAGE_INPUT_TOKENS] == 3
    assert root.attributes[names.GEN_AI_USAGE_OUTPUT_TOKENS] == 40
    assert root.attributes[names.GEN_AI_USAGE_CACHED_TOKENS] == 2
    assert root.attributes[names.GEN_AI_RESPONSE_FINISH_REASONS] == ("length", "length")
    assert root.attributes[names.REQUEST_ID] == "r1"
    assert all(span.parent is not None and span.parent.span_id == root.context.span_id for span in rounds)
    assert {span.attributes[names.REQUEST_COMPLETION] for span in rounds if span.attributes} == {0, 1}
    emitted = sum(cast(int, span.attributes[names.ROUND_EMITTED]) for span in rounds if span.attributes)
    assert emitted == 40
    parts = [span for span in spans if span not in rounds and span is not root]
    for part in parts:
        assert part.parent is not None and by_id[part.parent.span_id] in rounds
        above = by_id[part.parent.span_id]
        assert above.start_time is not None and part.start_time is not None
        assert part.end_time is not None and above.end_time is not None
        assert above.start_time - 1000 <= part.start_time <= part.end_time <= above.end_time + 1000
    assert {names.SPAN_VERIFY, names.SPAN_WIRE, names.SPAN_SAMPLE} <= {part.name for part in parts}
    assert all(opened.traceparent.split("-")[1] == TRACE for opened in target.opens)
    assert target.opens[0].traceparent.split("-")[2] == f"{root.context.span_id:016x}"


async def test_an_error_is_on_the_root_span(tokenizer: Tokenizer) -> None:
    spans = await traced(tokenizer, TracerProvider(shutdown_on_exit=False), ToyTarget(available=False))
    assert len(spans) == 1 and spans[0].attributes is not None
    assert spans[0].attributes[names.ERROR_TYPE] == "UNAVAILABLE" and not spans[0].status.is_ok


async def test_what_is_not_sampled_builds_nothing(tokenizer: Tokenizer) -> None:
    target = ToyTarget()
    provider = TracerProvider(sampler=ALWAYS_OFF, shutdown_on_exit=False)
    assert not await traced(tokenizer, provider, target)
    assert target.opens[0].traceparent.startswith(f"00-{TRACE}-") and target.opens[0].traceparent.endswith("-00")


@pytest.mark.parametrize(("trust", "passed"), [(True, REQUEST.traceparent), (False, "")])
async def test_without_a_provider_a_trusted_context_passes_through(
    tokenizer: Tokenizer, trust: bool, passed: str
) -> None:
    target = ToyTarget()
    engine = GenerationEngine(tokenizer, target, config=EngineConfig(trust_traceparent=trust))
    async for _ in engine.generate(REQUEST):
        pass
    assert target.opens[0].traceparent == passed


@pytest.mark.parametrize("trust", [False, True])
async def test_a_client_that_is_not_trusted_forces_no_recording(tokenizer: Tokenizer, trust: bool) -> None:
    """The sampler would follow its parent, and drops what has none."""
    target = ToyTarget()
    provider = TracerProvider(sampler=ParentBased(ALWAYS_OFF), shutdown_on_exit=False)
    assert bool(await traced(tokenizer, provider, target, trust)) == trust
    flags = int(target.opens[0].traceparent.rpartition("-")[2], 16)
    assert flags & 1 == trust  # the sampled one


async def test_the_trace_of_a_client_that_is_not_trusted_is_linked(tokenizer: Tokenizer) -> None:
    target = ToyTarget()
    root = (await traced(tokenizer, TracerProvider(shutdown_on_exit=False), target, trust=False))[-1]
    assert root.context is not None and root.parent is None and f"{root.context.trace_id:032x}" != TRACE
    (link,) = root.links
    assert (f"{link.context.trace_id:032x}", f"{link.context.span_id:016x}") == (TRACE, SPAN)
    assert f"{root.context.trace_id:032x}" in target.opens[0].traceparent


async def spans_of(tokenizer: Tokenizer, request: GenerationRequest, target: ToyTarget, take: int = 0) -> ReadableSpan:
    """The root span of a request, of which the caller takes so many deltas (0: all) before it goes away."""
    provider, exporter = TracerProvider(shutdown_on_exit=False), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    engine = GenerationEngine(tokenizer, target, ToyDraft(), tracer=provider.get_tracer("test"))
    deltas = engine.generate(request)
    with suppress(OutriderError):
        async for count, _ in aenumerate(deltas):
            if count == take:
                break
    await deltas.aclose()
    return exporter.get_finished_spans()[-1]


async def aenumerate(items: AsyncIterator[Any]) -> AsyncIterator[tuple[int, Any]]:
    count = 0
    async for item in items:
        count += 1
        yield count, item


HTTP = ServerCall(
    {names.HTTP_REQUEST_METHOD: "POST", names.HTTP_ROUTE: "/v1/completions"},
    names.HTTP_RESPONSE_STATUS_CODE,
    lambda error, answered: 200 if error is None else http_status(error),
)
ENDS: list[tuple[Failure | None, int, str, int, str | None]] = [
    (None, 0, "OK", 200, None),
    (None, 2, "CANCELLED", 499, None),  # the caller went away: no error
    (Failure(0, 3, "no such field"), 0, "INVALID_ARGUMENT", 400, None),  # nor what the caller did wrong
    (Failure(0, 13, "a bug"), 0, "INTERNAL", 500, "INTERNAL"),
    (Failure(0, 4, "too late"), 0, "DEADLINE_EXCEEDED", 504, "DEADLINE_EXCEEDED"),
]


@pytest.mark.parametrize(("failure", "take", "grpc_status", "http", "kind"), ENDS)
async def test_how_a_call_ended_by_the_conventions(
    tokenizer: Tokenizer, failure: Failure | None, take: int, grpc_status: str, http: int, kind: str | None
) -> None:
    for call, attribute, status in (
        (CALL, names.RPC_RESPONSE_STATUS_CODE, grpc_status),
        (HTTP, names.HTTP_RESPONSE_STATUS_CODE, http),
    ):
        request = replace(REQUEST, call=call, sampling=replace(REQUEST.sampling or SamplingParams(), max_tokens=60))
        root = await spans_of(tokenizer, request, ToyTarget(full=failure), take)
        assert root.attributes is not None and root.kind is SpanKind.SERVER
        assert root.attributes.items() >= call.attributes.items()
        assert root.attributes[attribute] == status
        expected = None if kind is None else str(status)
        assert root.attributes.get(names.ERROR_TYPE) == expected
        assert (root.status.status_code is StatusCode.ERROR) == (kind is not None)


async def test_a_constraint_is_told_by_its_kind(tokenizer: Tokenizer) -> None:
    for constraint, kind in ((None, None), (StructuredOutput(choice=("a",)), "choice")):
        target = ToyTarget()
        capabilities = (*target.info.capabilities, "sampling.structured_output")
        target.info = replace(target.info, capabilities=capabilities)
        sampling = replace(REQUEST.sampling or SamplingParams(), structured_output=constraint)
        root = await spans_of(tokenizer, replace(REQUEST, call=CALL, sampling=sampling), target, 0)
        assert root.attributes is not None and root.attributes.get(names.REQUEST_CONSTRAINT) == kind


@pytest.mark.parametrize("trace_rounds", [256, 2])
async def test_what_a_constraint_did_is_in_the_trace(tokenizer: Tokenizer, trace_rounds: int) -> None:
    """The same sums, whichever rounds have spans of their own."""
    provider, exporter = TracerProvider(shutdown_on_exit=False), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    target = ToyTarget(num_forced=2)
    target.info = replace(target.info, capabilities=(*target.info.capabilities, "sampling.structured_output"))
    config = EngineConfig(trace_rounds=trace_rounds)
    engine = GenerationEngine(tokenizer, target, ToyDraft(wrong_every=7), config, provider.get_tracer("test"))
    sampling = SamplingParams(temperature=0.0, max_tokens=20, structured_output=StructuredOutput(regex="x"))
    last = [delta async for delta in engine.generate(replace(REQUEST, n=1, sampling=sampling))][-1]
    found = [span.attributes or {} for span in exporter.get_finished_spans()]
    assert last.speculation is not None and last.speculation.num_accepted_forced_tokens > 0

    def total(name: str) -> int:
        return sum(cast(int, attributes.get(name, 0)) for attributes in found)

    assert total(names.ROUND_FORCED) == last.speculation.num_forced_tokens == 2 * last.speculation.num_rounds
    assert total(names.ROUND_FORCED_ACCEPTED) == last.speculation.num_accepted_forced_tokens
    assert total(names.ROUND_MASK_US) == 20 * last.speculation.num_rounds
    assert found[-1][names.REQUEST_COMPILE_US] == 1500


async def test_reasoning_is_told_of_the_request() -> None:
    thinking = thinking_tokenizer()
    ids = thinking.encode("<think>the fox</think>the lazy dog", add_special_tokens=False)
    request = replace(REQUEST, n=1, token_ids=None, messages=({"role": "user", "content": "x"},))
    root = await spans_of(thinking, request, ToyTarget(rule=scripted([*ids, EOS])))
    count = len(thinking.encode("the fox", add_special_tokens=False))
    assert root.attributes is not None and root.attributes[names.GEN_AI_USAGE_REASONING_TOKENS] == count
    plain = await spans_of(thinking, REQUEST, ToyTarget())
    assert plain.attributes is not None and names.GEN_AI_USAGE_REASONING_TOKENS not in plain.attributes


@pytest.mark.parametrize("trust", [False, True])
async def test_what_is_refused_before_it_runs_has_a_span(tokenizer: Tokenizer, trust: bool) -> None:
    provider, exporter = TracerProvider(shutdown_on_exit=False), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    config = EngineConfig(trust_traceparent=trust)
    engine = GenerationEngine(tokenizer, ToyTarget(), config=config, tracer=provider.get_tracer("test"))
    with pytest.raises(OutriderError):
        await anext(engine.generate(replace(REQUEST, call=CALL, model="another")))
    (span,) = exporter.get_finished_spans()
    assert span.name == "text_completion toy" and span.attributes is not None
    assert (span.parent is not None) == trust and len(span.links) == (not trust)
    assert span.attributes[names.RPC_RESPONSE_STATUS_CODE] == "NOT_FOUND"
    assert span.attributes[names.REQUEST_ID] == "r1" and span.status.is_unset


async def test_what_a_mode_was_chosen_by_is_asked_where_it_is_recorded(tokenizer: Tokenizer) -> None:
    for sampler, asked in ((ALWAYS_ON, True), (ALWAYS_OFF, False)):
        provider = TracerProvider(sampler=sampler, shutdown_on_exit=False)
        config, rounds = EngineConfig(mode="auto"), []
        engine = GenerationEngine(tokenizer, ToyTarget(), ToyDraft(), config, provider.get_tracer("test"))
        async for delta in engine.generate(replace(REQUEST, n=1)):
            rounds += [] if delta.round is None else [delta.round]
        assert len(rounds) > 2 and bool(rounds[-1].inputs) == asked


@pytest.mark.parametrize("max_rounds", [0, 3])
async def test_rounds_after_the_first_ones_are_one_span(tokenizer: Tokenizer, max_rounds: int) -> None:
    config = EngineConfig(trace_rounds=max_rounds)
    provider, exporter = TracerProvider(shutdown_on_exit=False), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    engine = GenerationEngine(tokenizer, ToyTarget(), ToyDraft(wrong_every=4), config, provider.get_tracer("test"))
    rounds = [delta.round async for delta in engine.generate(REQUEST) if delta.round is not None]
    spans = exporter.get_finished_spans()
    root, summed = spans[-1], [span for span in spans if span.name == names.SPAN_ROUNDS]
    assert sum(span.name == names.SPAN_ROUND for span in spans) == 2 * max_rounds
    assert {(span.attributes or {})[names.REQUEST_COMPLETION] for span in summed} == {0, 1} and len(summed) == 2
    assert all(span.parent == root.context for span in summed)
    for number, attribute in (
        (len(rounds) - 2 * max_rounds, names.ROUNDS_COUNT),
        (40 - emitted(spans), names.ROUND_EMITTED),
    ):
        assert sum(cast(int, (span.attributes or {})[attribute]) for span in summed) == number
    assert all((span.attributes or {})[names.ROUNDS_VERIFY_US] > 0 for span in summed)  # type: ignore[operator]
    assert all(span.start_time and span.end_time and span.start_time < span.end_time for span in summed)


async def test_a_request_over_grpc_reaches_a_collector(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the wire, as OTEL_EXPORTER_OTLP_ENDPOINT says."""
    installed: list[TracerProvider] = []
    monkeypatch.setattr(trace, "set_tracer_provider", installed.append)
    async with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
        stop = setup_tracing("outrider-gateway")
        engine = GenerationEngine(tokenizer, ToyTarget(), ToyDraft(), tracer=installed[0].get_tracer("test"))
        async with over_grpc(GenerationServicer(engine)) as address, Client(address) as client:
            parts = [part async for part in client.generate(token_ids=[11, 12, 13], max_tokens=8, request_id="r1")]
            assert sum(len(part.token_ids) for part in parts) == 8
        await asyncio.to_thread(stop)
    resource = collector.received[0].resource_spans[0]
    assert {one.key: one.value.string_value for one in resource.resource.attributes}[
        "service.name"
    ] == "outrider-gateway"
    spans = collector.spans
    root = next(span for span in spans if not span.parent_span_id)
    attributes = {one.key: one.value.string_value for one in root.attributes}
    assert attributes[names.RPC_SYSTEM_NAME] == "grpc"
    assert attributes[names.RPC_METHOD] == "outrider.v1.GenerationService/Generate"
    assert attributes[names.RPC_RESPONSE_STATUS_CODE] == "OK" and attributes[names.REQUEST_ID] == "r1"
    assert names.SPAN_ROUND in {span.name for span in spans} and {span.trace_id for span in spans} == {root.trace_id}


def emitted(spans: tuple[ReadableSpan, ...]) -> int:
    """Tokens of the rounds that have spans of their own."""
    own = [span.attributes or {} for span in spans if span.name == names.SPAN_ROUND]
    return sum(cast(int, attributes[names.ROUND_EMITTED]) for attributes in own)
