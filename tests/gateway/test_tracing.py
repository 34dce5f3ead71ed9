"""One span a request, one a round, and in it what its time went to."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased
from support.fakes import ToyDraft, ToyTarget
from support.models import train_byte_level

from outrider.gateway.engine import EngineConfig, GenerationEngine
from outrider.gateway.request import GenerationRequest
from outrider.gateway.text.tokenizer import Tokenizer
from outrider.gateway.tracing import spans_for
from outrider.planner.policy import Round
from outrider.rpc import telemetry as names
from outrider.rpc.errors import OutriderError
from outrider.rpc.messages import Commit, StepTimings
from outrider.rpc.sampling_params import SamplingParams, TokenOrigin

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
    emitted = sum(int(span.attributes[names.ROUND_EMITTED]) for span in rounds if span.attributes)  # type: ignore[arg-type]
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
    assert spans[0].attributes[names.ERROR_TYPE] == "Unavailable" and not spans[0].status.is_ok


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
