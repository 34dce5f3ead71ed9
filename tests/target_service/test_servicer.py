"""The target service over real gRPC: frames in, commits out, release with the stream, draining, health, bad input."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.engines import VOCAB, opened
from support.fakes import until
from support.models import save_tiny

from outrider.rpc.channel import connect
from outrider.rpc.codec import TARGET_INFO, TARGET_STREAM
from outrider.rpc.messages import Close, Closed, Commit, Credit, DraftTokens, Failure
from outrider.rpc.stream import FrameStream, client_stream
from outrider.target_service.boot import TargetService, build, load
from outrider.target_service.servicer import TargetServicer
from outrider.target_service.settings import TargetSettings
from outrider.v1 import target_pb2, target_pb2_grpc

SERVICE = TargetServicer.service


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> TargetSettings:
    folder = save_tiny(tmp_path_factory.mktemp("tiny"), generation={"eos_token_id": 2, "temperature": 0.6})
    return TargetSettings(model=folder, listen="127.0.0.1:0", num_blocks=64, threads=1, batch_invariant=True)


@pytest.fixture
async def service(settings: TargetSettings) -> AsyncIterator[TargetService]:
    running = build(settings, load(settings))
    await running.server.start()
    yield running
    await running.stop()


@pytest.fixture
async def channel(service: TargetService) -> AsyncIterator[Any]:
    channel = connect(service.server.address)
    yield channel
    await channel.close()


@pytest.fixture
def stub(channel: Any) -> Any:
    return target_pb2_grpc.TargetServiceStub(channel)


async def receive(stream: FrameStream, count: int) -> list[Any]:
    """The next `count` messages."""
    messages: list[Any] = []
    while len(messages) < count:
        messages += await asyncio.wait_for(anext(stream), 30)
    return messages


async def test_two_sequences_on_one_stream(stub: Any) -> None:
    async with client_stream(TARGET_STREAM, stub.Verify()) as stream:
        for number in (1, 2):
            stream.send(opened(number, range(3, 30 + number), max_tokens=6), Credit(number, 100, 0))
        tokens: dict[int, list[int]] = {1: [], 2: []}
        finished = 0
        while finished < 2:
            for message in await receive(stream, 1):
                assert isinstance(message, Commit)
                tokens[message.sequence_id] += message.ids
                finished += message.finish_reason is not None
        assert [len(ids) for ids in tokens.values()] == [6, 6]
        assert message.timings.verify_us > 0


async def test_bad_messages_fail_one_sequence(stub: Any) -> None:
    async with client_stream(TARGET_STREAM, stub.Verify()) as stream:
        stream.send(opened(1, [VOCAB + 3], max_tokens=6))
        stream.send(opened(2, [5, 6], max_tokens=6), DraftTokens(2, 0, 2, (7,) * 5000), Credit(2, 100, 4))
        failures = {m.sequence_id: m for m in await receive(stream, 2) if isinstance(m, Failure)}
        assert failures[1].code == 3 and "prompt_ids" in failures[1].message
        assert failures[2].code == 3 and "ids" in failures[2].message
        stream.send(opened(3, [5, 6], max_tokens=1), Credit(3, 100, 0))
        (commit,) = await receive(stream, 1)
        assert isinstance(commit, Commit) and commit.sequence_id == 3


async def test_the_end_of_a_stream_releases_everything(service: TargetService, stub: Any) -> None:
    pool = service.engine.cache.pool
    async with client_stream(TARGET_STREAM, stub.Verify()) as stream:
        stream.send(opened(1, range(3, 60), max_tokens=100), Credit(1, 60, 0))
        await receive(stream, 1)
        assert pool.num_free < pool.num_blocks
        info = TARGET_INFO.decode(await stub.GetTargetInfo(target_pb2.GetTargetInfoRequest()))
        assert 0 < info.load.free_blocks < pool.num_blocks
    await until(lambda: pool.num_free == pool.num_blocks)


async def test_a_commit_that_no_frame_can_hold_ends_its_sequence_here_too(
    service: TargetService, stub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its gateway has been told that it is over, and closes nothing."""
    small = replace(TARGET_STREAM, events=replace(TARGET_STREAM.events, max_lone_bytes=200))
    monkeypatch.setattr(TargetServicer, "kind", small)
    pool, sequences = service.engine.cache.pool, service.engine.scheduler.sequences
    async with client_stream(TARGET_STREAM, stub.Verify()) as stream:
        stream.send(opened(1, range(3, 60), max_tokens=100, logprobs=20), Credit(1, 58, 0))
        stream.send(opened(2, [5, 6], max_tokens=2), Credit(2, 3, 0))
        found = {message.sequence_id: message for message in await receive(stream, 2)}
        assert isinstance(found[1], Failure) and "allowed: at most 200" in found[1].message
        await until(lambda: [key[1] for key in sequences] == [2])
        stream.send(Credit(2, 4, 0))
        (commit,) = await receive(stream, 1)
        assert isinstance(commit, Commit) and commit.finish_reason is not None
        await until(lambda: pool.num_free == pool.num_blocks)


async def becomes(channel: Any, name: str, status: Any) -> None:
    """Waits for a service's health."""
    health = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=name))
    async with asyncio.timeout(30):
        while (await health.read()).status != status:
            pass
    health.cancel()


async def test_close_draining_and_health(service: TargetService, channel: Any, stub: Any) -> None:
    await becomes(channel, SERVICE, health_pb2.HealthCheckResponse.SERVING)
    async with client_stream(TARGET_STREAM, stub.Verify()) as stream:
        stream.send(opened(1, range(3, 9), max_tokens=50), Credit(1, 7, 0))
        await receive(stream, 1)
        service.servicer.drain()
        stream.send(opened(2, range(3, 9), max_tokens=50))
        (refused,) = await receive(stream, 1)
        assert isinstance(refused, Failure) and refused.reason == "DRAINING"
        stream.send(Close(1))
        assert await receive(stream, 1) == [Closed(1)]
        await asyncio.wait_for(stream.wait_closed(), 30)  # its last sequence is gone


async def test_a_dead_device_thread_is_not_healthy(service: TargetService, channel: Any) -> None:
    """Neither alive nor ready."""
    await asyncio.to_thread(service.thread.stop)
    for name in ("", SERVICE):
        await becomes(channel, name, health_pb2.HealthCheckResponse.NOT_SERVING)


async def test_info(stub: Any, settings: TargetSettings) -> None:
    info = TARGET_INFO.decode(await stub.GetTargetInfo(target_pb2.GetTargetInfoRequest()))
    assert info.model.vocab_size == VOCAB and info.model.eos_token_ids == (2,)
    assert info.model.default_sampling.temperature == pytest.approx(0.6) and info.model.num_blocks == 64
    assert info.model.name == Path(settings.model).name and info.max_window == 32
    assert [rows for rows, _ in info.step_costs[:3]] == [1, 2, 4] and all(step_us > 0 for _, step_us in info.step_costs)


@pytest.mark.parametrize("family", ["gemma", "gemma2", "gemma3_text", "phi3"])
async def test_info_says_that_gemma_and_phi_are_batch_invariant(family: str, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, family)
    settings = TargetSettings(model=folder, listen="127.0.0.1:0", num_blocks=64, threads=1, batch_invariant=True)
    service = build(settings, load(settings))
    info = TARGET_INFO.decode(await service.servicer.GetTargetInfo(None, None))  # type: ignore[attr-defined]
    assert info.model.batch_invariant
    await asyncio.to_thread(service.thread.stop)
