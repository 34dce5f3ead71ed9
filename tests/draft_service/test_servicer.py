"""The service over real gRPC on the loopback: streams, bad messages, releases, draining, health, spans."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from support.engines import GREEDY, DraftHarness, commit, credit, new_open, tiny_draft
from support.models import save_tiny

from outrider.draft_service.admission import make_methods
from outrider.draft_service.boot import build_model_method, load_methods
from outrider.draft_service.engine import DraftEngine
from outrider.draft_service.observer import DraftEngineCommand
from outrider.draft_service.servicer import DraftServicer
from outrider.draft_service.settings import DraftSettings
from outrider.engine.model_runner import RunnerOptions
from outrider.engine.worker import DeviceWorker
from outrider.proposers.ngram import NgramProposer
from outrider.rpc.channel import connect
from outrider.rpc.codec import DRAFT_INFO, DRAFT_STREAM
from outrider.rpc.engine_service import build_service
from outrider.rpc.errors import Unavailable
from outrider.rpc.messages import Close, Closed, DraftInfo, DraftMethod, DraftTokens, Failure, ModelInfo
from outrider.rpc.settings import ServerSettings
from outrider.rpc.stream import FrameStream, Outboxes, client_stream
from outrider.rpc.telemetry import StepTracer
from outrider.rpc.words.sampling_params import SamplingParams
from outrider.v1 import draft_pb2, draft_pb2_grpc

INFO = DraftInfo(ModelInfo("tiny", "d", 97, 512), (DraftMethod("draft_model"), DraftMethod("ngram")))


class Service:
    """A served engine and a channel to it."""

    def __init__(self) -> None:
        model = tiny_draft.__wrapped__()  # its own: a model is one thread's, and the test has a harness, too
        method = build_model_method(model, RunnerOptions(num_blocks=64))
        outboxes = Outboxes(asyncio.get_running_loop())
        self.engine = DraftEngine(make_methods([method, NgramProposer()]), flush=outboxes.flush)
        self.thread: DeviceWorker[DraftEngineCommand] = DeviceWorker(self.engine, "test-device", 1)
        self.servicer = DraftServicer(self.thread, outboxes, INFO)
        self.server = build_service(
            ServerSettings(listen="localhost:0"), self.engine, self.thread, self.servicer
        ).server
        self.pool = method.cache.pool

    def stream(self, channel: grpc.aio.Channel) -> FrameStream:
        return client_stream(DRAFT_STREAM, draft_pb2_grpc.DraftServiceStub(channel).Propose())

    async def num_sequences(self) -> int:
        return await asyncio.wrap_future(self.thread.call(lambda: len(self.engine.sequences)))


@pytest.fixture
async def service() -> AsyncIterator[tuple[Service, grpc.aio.Channel]]:
    service = Service()
    await service.server.start()
    channel = connect(service.server.address)
    yield service, channel
    await channel.close()
    await service.server.stop()
    service.thread.stop(5)


async def collect(stream: FrameStream, count: int) -> list[Any]:
    """The next `count` messages."""
    found: list[Any] = []
    async with asyncio.timeout(30):
        while len(found) < count:
            found += await anext(stream)
    return found


async def test_open_credit_commit_close(service: tuple[Service, grpc.aio.Channel]) -> None:
    expected = DraftHarness()
    (first,) = expected.ids(new_open(1, [4, 5, 6]), credit(1, 7))
    async with service[0].stream(service[1]) as stream:
        stream.send(new_open(1, [4, 5, 6]), credit(1, 7))
        (piece,) = await collect(stream, 1)
        assert (piece.chain, piece.position, piece.ids, piece.more) == (0, 3, first, False)
        stream.send(commit(1, 3, *first[:2], 96), credit(1, 10))
        (piece,) = await collect(stream, 1)
        assert (piece.chain, piece.position) == (1, 6)
        assert [piece.ids] == expected.ids(commit(1, 3, *first[:2], 96), credit(1, 10))
        stream.send(Close(1))
        assert await collect(stream, 1) == [Closed(1)]
    assert await service[0].num_sequences() == 0


async def test_bad_messages_fail_their_sequence_alone(service: tuple[Service, grpc.aio.Channel]) -> None:
    async with service[0].stream(service[1]) as stream:
        stream.send(new_open(1, [4], SamplingParams(temperature=-1)), new_open(2, []), new_open(3, [5, 6]))
        stream.send(new_open(4, [1]), credit(4, 9, max_window=5000), new_open(5, [97]))
        stream.send(credit(1, 9), credit(3, 4))
        events = await collect(stream, 5)
        failures = {event.sequence_id: event for event in events if isinstance(event, Failure)}
        assert {i: failure.code for i, failure in failures.items()} == {1: 3, 2: 3, 4: 3, 5: 9}
        assert "temperature" in failures[1].message
        assert [event.sequence_id for event in events if isinstance(event, DraftTokens)] == [3]
        assert await service[0].num_sequences() == 1


async def test_the_end_of_a_stream_releases_what_it_opened(service: tuple[Service, grpc.aio.Channel]) -> None:
    async with service[0].stream(service[1]) as kept, service[0].stream(service[1]) as stream:
        kept.send(new_open(1, [1, 2]))
        stream.send(*(new_open(i, [i, 5, 6]) for i in range(4)), *(credit(i, 7) for i in range(4)))
        await collect(stream, 4)
        await stream.close()
        async with asyncio.timeout(30):
            while await service[0].num_sequences() != 1:  # noqa: ASYNC110  # the device thread changes it
                await asyncio.sleep(0.01)
        assert service[0].pool.num_free == service[0].pool.num_blocks
        kept.send(credit(1, 3))
        assert len(await collect(kept, 1)) == 1


async def test_draining_refuses_opens_and_ends_after_the_last_sequence(
    service: tuple[Service, grpc.aio.Channel],
) -> None:
    async with service[0].stream(service[1]) as stream:
        stream.send(new_open(1, [1, 2]), credit(1, 4))
        await collect(stream, 1)
        service[0].servicer.drain()
        stream.send(new_open(2, [1, 2]), commit(1, 2, 9), credit(1, 5))
        failure, piece = sorted(await collect(stream, 2), key=lambda event: not isinstance(event, Failure))
        assert (failure.sequence_id, failure.reason) == (2, "DRAINING") and piece.sequence_id == 1
        stream.send(Close(1))
        await collect(stream, 1)
        async with asyncio.timeout(30):
            await stream.wait_closed()
        assert stream.peer_draining


async def test_info_and_health_follow_the_device(service: tuple[Service, grpc.aio.Channel]) -> None:
    draft, channel = service
    answer = await draft_pb2_grpc.DraftServiceStub(channel).GetDraftInfo(draft_pb2.GetDraftInfoRequest())
    assert DRAFT_INFO.decode(answer) == INFO
    health = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=DraftServicer.service))
    async with asyncio.timeout(30):
        while (await health.read()).status != health_pb2.HealthCheckResponse.SERVING:
            pass
        draft.thread.stop(5)
        while (await health.read()).status != health_pb2.HealthCheckResponse.NOT_SERVING:
            pass
        async with draft.stream(channel) as stream:
            with pytest.raises(Unavailable, match="device thread"):
                await stream.wait_closed()
    health.cancel()


def test_step_spans_link_to_the_requests() -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    harness = DraftHarness(tracer=StepTracer(provider.get_tracer("test")))
    parent = f"00-{'1' * 32}-{'2' * 16}-01"
    harness.run(new_open(1, [1, 2, 3], traceparent=parent), new_open(2, [4, 5], GREEDY), credit(1, 5), credit(2, 4))
    spans = exporter.get_finished_spans()
    assert [span.attributes["outrider.batch.sequences"] for span in spans if span.attributes] == [2, 2]
    assert [f"{link.context.span_id:x}" for link in spans[0].links] == ["2" * 16]
    assert all(span.end_time - span.start_time > 0 for span in spans if span.end_time and span.start_time)


def test_what_it_says_of_itself(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "tiny", generation={"eos_token_id": [2, 3], "temperature": 0.7})
    methods, info = load_methods(DraftSettings(model=model, num_blocks=8, dtype="float32"))
    assert [method.name for method in methods] == ["draft_model", "ngram", "prediction"]
    assert [method.name for method in info.methods] == [method.name for method in methods]
    assert (info.model.name, info.model.vocab_size, info.model.max_model_len) == ("tiny", 97, 128)  # 8 blocks
    assert info.model.eos_token_ids == (2, 3) and info.model.default_sampling.temperature == 0.7
    assert info.model.digest and info.model.num_tokens == 0 and info.model.engine.startswith("outrider-")
    digest = info.model.digest
    _, info = load_methods(DraftSettings(model=model, num_blocks=8, quantization="int8"))
    assert info.model.dtype == "int8 in float32" and info.model.digest != digest  # other weights are computed
    with pytest.raises(ValueError, match="quantization is int8, and there is no model"):
        DraftSettings(method="ngram", quantization="int8")
    methods, info = load_methods(DraftSettings(method="ngram", prompt_lookup_min=2, prompt_lookup_max=3))
    assert methods[0].name == "ngram" and info.model.vocab_size == 0
