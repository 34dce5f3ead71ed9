"""Adapters loaded and unloaded over real gRPC while a target serves: who has a stream hears of it, what cannot be used
is told and changes nothing, and nobody may where it was not allowed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from safetensors.torch import load_file
from support.adapters import WEIGHTS_FILE, save_adapter
from support.engines import opened
from support.metrics import samples_of
from support.models import save_tiny

from outrider.engine.adapters import loader
from outrider.rpc.channel import connect
from outrider.rpc.codec import ADAPTER, TARGET_INFO, TARGET_STREAM
from outrider.rpc.errors import OutriderError
from outrider.rpc.messages import Adapter, Close, Closed, Commit, Credit, Failure, TargetInfo
from outrider.rpc.status import from_rpc_error
from outrider.rpc.stream import client_stream
from outrider.target_service import adapter_changes
from outrider.target_service.boot import TargetService, build, load
from outrider.target_service.settings import TargetSettings
from outrider.v1 import target_pb2, target_pb2_grpc


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def folders(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    state, folder = load_file(base / "model.safetensors"), tmp_path_factory.mktemp("adapters")
    found = {name: save_adapter(folder / name, state, seed=seed) for seed, name in enumerate(("one", "two"))}
    found["same"] = save_adapter(folder / "same", state, seed=0)
    found["large"] = save_adapter(folder / "large", state, r=65)
    found["cut"] = save_adapter(folder / "cut", state)
    whole = (found["cut"] / WEIGHTS_FILE).read_bytes()
    (found["cut"] / WEIGHTS_FILE).write_bytes(whole[:-1])
    return found


def settings_of(base: Path, **options: Any) -> TargetSettings:
    return TargetSettings(**{"model": base, "listen": "127.0.0.1:0", "num_blocks": 64, "threads": 1} | options)


class Running:
    """A target service, and a channel to it."""

    def __init__(self, service: TargetService, channel: grpc.aio.Channel) -> None:
        self.service, self.channel = service, channel
        self.stub = target_pb2_grpc.TargetServiceStub(channel)

    async def load(self, name: str, path: Path | str) -> Adapter:
        request = target_pb2.LoadAdapterRequest(name=name, path=str(path))
        return ADAPTER.decode((await self._call(self.stub.LoadAdapter, request)).adapter)

    async def unload(self, name: str) -> int:
        answer = await self._call(self.stub.UnloadAdapter, target_pb2.UnloadAdapterRequest(name=name))
        return int(answer.num_sequences)

    async def info(self) -> TargetInfo:
        return TARGET_INFO.decode(await self.stub.GetTargetInfo(target_pb2.GetTargetInfoRequest()))

    async def _call(self, method: Any, request: Any) -> Any:
        try:
            return await method(request)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error


@pytest.fixture
async def running(base: Path, folders: dict[str, Path]) -> AsyncIterator[Running]:
    adapter = [f"start={folders['two']}"]
    settings = settings_of(base, adapter=adapter, allow_adapter_changes=True, metrics="127.0.0.1:0")
    service = build(settings, load(settings))
    await service.server.start()
    channel = connect(service.server.address)
    yield Running(service, channel)
    await channel.close()
    await service.stop()


async def tokens_of(stream: Any, count: int) -> list[int]:
    ids: list[int] = []
    async with asyncio.timeout(30):
        while len(ids) < count:
            for message in await anext(stream):
                assert isinstance(message, Commit), message
                ids += message.ids
    return ids


async def test_streams_go_on_and_hear_of_what_comes_and_goes(running: Running, folders: dict[str, Path]) -> None:
    before = await running.info()
    assert [(one.name, one.rank) for one in before.adapters] == [("start", 4)]
    async with client_stream(TARGET_STREAM, running.stub.Verify()) as stream:
        stream.send(opened(1, range(30), max_tokens=100, adapter="start"), Credit(1, 34, 0))
        first = await tokens_of(stream, 4)
        added = await running.load("one", folders["one"])
        assert added.rank == 4 and added.digest not in (before.model.digest, before.adapters[0].digest, "")
        info = await running.info()
        assert info.adapters == (*before.adapters, added) and info.info_version == before.info_version + 1
        assert info.digest_of("one") == added.digest and info.digest_of("two") is None
        stream.send(opened(2, range(30), max_tokens=100, adapter="one", model_digest=added.digest), Credit(2, 34, 0))
        second = await tokens_of(stream, 4)
        assert second != first
        async with asyncio.timeout(30):
            while stream.peer_info_version != info.info_version:  # noqa: ASYNC110 (a heartbeat brings it)
                await asyncio.sleep(0.01)
        assert await running.unload("one") == 1
        assert (await running.info()).adapters == before.adapters
        stream.send(opened(3, range(30), max_tokens=100, adapter="one"))
        async with asyncio.timeout(30):
            [refused] = await anext(stream)
        assert isinstance(refused, Failure) and refused.reason == "NO_ADAPTER"
        stream.send(Credit(2, 38, 0))
        assert len(await tokens_of(stream, 4)) == 4, "what has it goes on"
        stream.send(Close(2))
        async with asyncio.timeout(30):
            assert await anext(stream) == [Closed(2)]
        again = await running.load("one", folders["same"])
        assert again == added, "the same weights, wherever they are"
        stream.send(opened(4, range(30), max_tokens=100, adapter="one"), Credit(4, 34, 0))
        assert await tokens_of(stream, 4) == second


async def test_the_same_weights_may_come_twice_and_others_may_not(running: Running, folders: dict[str, Path]) -> None:
    added, version = await running.load("one", folders["one"]), (await running.info()).info_version
    assert await running.load("one", folders["same"]) == added and (await running.info()).info_version == version
    with pytest.raises(OutriderError, match="stands for other weights") as refused:
        await running.load("one", folders["two"])
    assert refused.value.code == grpc.StatusCode.ALREADY_EXISTS
    with pytest.raises(OutriderError, match=r"name: is 'absent'; allowed: one, start") as refused:
        await running.unload("absent")
    assert refused.value.code == grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize(
    ("name", "path", "said"),
    [
        ("x", "absent", "there is no such folder"),
        ("x", "base", "holds no adapter_config.json"),
        ("x", "large", "r: is 65; allowed: 1 to 64"),
        ("x", "cut", "damaged or cut off"),
        ("", "one", "name: is empty"),
        ("x" * 129, "one", "name: has 129 characters"),
        ("a\nb", "one", "name: has control characters"),
        ("base", "one", "the model's own"),
    ],
)
async def test_what_cannot_be_used_changes_nothing(
    running: Running, base: Path, folders: dict[str, Path], name: str, path: str, said: str
) -> None:
    before = await running.info()
    name = before.model.name if name == "base" else name
    with pytest.raises(OutriderError, match=said) as refused:
        await running.load(name, {**folders, "base": base}.get(path, path))
    assert refused.value.code == grpc.StatusCode.INVALID_ARGUMENT
    after = await running.info()
    assert (after.adapters, after.info_version) == (before.adapters, before.info_version)
    async with client_stream(TARGET_STREAM, running.stub.Verify()) as stream:
        stream.send(opened(1, range(30), max_tokens=4, adapter="start"), Credit(1, 100, 0))
        assert len(await tokens_of(stream, 4)) == 4


async def test_without_room_it_is_refused(
    running: Running, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, pytest.raises(OutriderError, match="0 MiB are free") as refused:
        patch.setattr(adapter_changes, "free_bytes", lambda device: 0)
        await running.load("one", folders["one"])
    assert (refused.value.code, refused.value.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "NO_MEMORY")
    monkeypatch.setattr(adapter_changes, "MOST_ADAPTERS", 1)
    with pytest.raises(OutriderError, match="1 adapters are there; allowed: at most 1") as refused:
        await running.load("one", folders["one"])
    assert (refused.value.code, refused.value.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_ADAPTERS")


async def test_it_serves_while_one_loads_and_a_caller_that_leaves_does_not_stop_it(
    running: Running, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, let_go, read = threading.Event(), threading.Event(), loader.load_adapter

    def slow(*arguments: Any, **options: Any) -> Any:
        begun.set()
        assert let_go.wait(60)
        return read(*arguments, **options)

    monkeypatch.setattr(adapter_changes, "load_adapter", slow)
    request = target_pb2.LoadAdapterRequest(name="one", path=str(folders["one"]))
    call = running.stub.LoadAdapter(request)
    waiting = asyncio.ensure_future(call)
    try:
        assert await asyncio.to_thread(begun.wait, 60)
        async with client_stream(TARGET_STREAM, running.stub.Verify()) as stream:
            stream.send(opened(1, range(30), max_tokens=4), Credit(1, 100, 0))
            assert len(await tokens_of(stream, 4)) == 4
        unloading = asyncio.create_task(running.unload("start"))  # waits for its turn
        call.cancel()
        with pytest.raises((asyncio.CancelledError, grpc.aio.AioRpcError)):
            await waiting
    finally:
        let_go.set()
    assert await unloading == 0
    assert [one.name for one in (await running.info()).adapters] == ["one"]
    running.service.servicer.drain()
    with pytest.raises(OutriderError) as refused:
        await running.unload("one")
    assert refused.value.reason == "DRAINING"


async def test_it_has_to_be_allowed(base: Path, folders: dict[str, Path]) -> None:
    settings = settings_of(base, adapter=[f"one={folders['one']}"])
    service = build(settings, load(settings))
    await service.server.start()
    async with connect(service.server.address) as channel:
        running = Running(service, channel)
        for change in (running.load("two", folders["two"]), running.unload("one")):
            with pytest.raises(OutriderError, match="--allow-adapter-changes") as refused:
                await change
            assert refused.value.code == grpc.StatusCode.PERMISSION_DENIED
        assert [one.name for one in (await running.info()).adapters] == ["one"]
    await service.stop()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"adapter": ["one"]}, "is 'one'; allowed: NAME=DIR"),
        ({"adapter": ["=x"]}, "is '=x'; allowed: NAME=DIR"),
        ({"adapter": ["one="]}, "is 'one='; allowed: NAME=DIR"),
        ({"adapter": ["one=a", "one=b"]}, "has 'one' more than once"),
        ({"adapter": ["one=a"], "expand": True}, "leave --expand out"),
        ({"max_adapter_rank": 65}, r"is 65; allowed: 1 to 64, with --engine vllm to 512"),
        ({"allow_adapter_changes": True, "listen": ":0", "insecure": True}, "others reach listen"),
    ],
)
def test_settings_that_are_none(base: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        settings_of(base, **options)


def test_an_adapter_is_not_called_as_the_model_is(base: Path, folders: dict[str, Path]) -> None:
    settings = settings_of(base, name="m", adapter=[f"m={folders['one']}"])
    with pytest.raises(ValueError, match="the model's own name"):
        build(settings, load(settings))


async def test_the_metrics_count_by_adapter(running: Running) -> None:
    metrics = running.service.metrics
    assert metrics is not None

    def read(name: str) -> dict[str, float]:
        found = samples_of(metrics.render("")[0].decode())
        return {dict(labels).get("adapter", ""): value for (series, labels), value in found.items() if series == name}

    async with client_stream(TARGET_STREAM, running.stub.Verify()) as stream:
        stream.send(opened(1, range(30), max_tokens=100, adapter="start"), Credit(1, 34, 0))
        await tokens_of(stream, 4)
        assert read("target_adapters_loaded") == {"": 1}
        assert read("target_adapter_sequences") == {"start": 1}
        assert read("target_adapter_swaps_total") == {"": 1}
