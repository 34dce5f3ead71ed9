"""What vLLM is given of adapters, without vLLM: a copy of what was checked, one of each content, until none has it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.adapters import CONFIG_FILE, PREFIX, WEIGHTS_FILE, save_adapter
from support.engines import opened
from support.fakes import until
from support.models import save_tiny
from target_service.vllm.test_engine import STREAM, FakeLink

from outrider.engine.adapters.config import UnsupportedAdapter
from outrider.engine.adapters.loader import LoadedAdapter, load_adapter
from outrider.engine.loader import load_model
from outrider.rpc.errors import InvalidArgument
from outrider.rpc.messages import Adapter, Close, Closed, Credit, Failure
from outrider.rpc.servicer import Deliver
from outrider.target_service.adapter_changes import MOST_ADAPTERS, AdapterChanges
from outrider.target_service.sequence import TargetLimits
from outrider.target_service.settings import TargetSettings
from outrider.vllm.target.adapters import AdapterBase, VllmAdapters, adapters_of, with_rows, write_adapter
from outrider.vllm.target.assembly import engine_args
from outrider.vllm.target.engine import VllmEngine


@dataclass
class Request:
    """In place of vLLM's LoRARequest."""

    lora_name: str
    lora_int_id: int
    lora_path: str


class FakeLlm:
    """Notes what it is given, and reads it at once, as vLLM does."""

    errored = False

    def __init__(self) -> None:
        self.added: list[Request] = []
        self.removed: list[int] = []
        self.files: dict[int, set[str]] = {}
        self.asked: list[Any] = []
        self.error: Exception | None = None
        self.goes_on = asyncio.Event()

    async def add_lora(self, request: Request) -> bool:
        if self.error is not None:
            raise self.error
        self.added.append(request)
        self.files[request.lora_int_id] = set(os.listdir(request.lora_path))
        return True

    async def remove_lora(self, number: int) -> bool:
        self.removed.append(number)
        return True

    async def generate(self, prompt: Any, params: Any, name: str, lora_request: Any = None, priority: int = 0) -> Any:
        self.asked.append(lora_request)
        try:
            await asyncio.Event().wait()
        finally:
            await self.goes_on.wait()  # an abort is under way
        yield


@pytest.fixture(autouse=True)
def vllms_request(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "vllm.lora.request", SimpleNamespace(LoRARequest=Request))
    yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("base"))


@pytest.fixture
def named(folder: Path, tmp_path: Path) -> dict[str, Path]:
    state = load_file(folder / "model.safetensors")
    made = {name: save_adapter(tmp_path / name, state, seed=seed) for seed, name in enumerate(("one", "two"))}
    made["same"] = save_adapter(tmp_path / "same", state, seed=0)
    return made


def settings_of(folder: Path, **options: Any) -> TargetSettings:
    return TargetSettings(model=folder, engine="vllm", **options)


def base_of(folder: Path, **options: Any) -> AdapterBase:
    base, _ = adapters_of(settings_of(folder, allow_adapter_changes=True, **options))
    assert base is not None
    return base


def test_without_adapters_vllm_hears_of_none(folder: Path) -> None:
    assert adapters_of(settings_of(folder)) == (None, {})
    assert "enable_lora" not in engine_args(settings_of(folder))


def test_room_and_digests_are_as_on_our_engine(folder: Path, named: dict[str, Path]) -> None:
    given = [f"{name}={named[name]}" for name in ("one", "two")]
    base, loaded = adapters_of(settings_of(folder, adapter=given, max_adapters=3))
    assert base is not None
    ours = load_model(folder)
    for name in ("one", "two"):
        assert loaded[name].digest == load_adapter(named[name], ours.model, ours.digest).digest
    said = engine_args(settings_of(folder, adapter=given), base)
    assert (said["enable_lora"], said["max_loras"], said["max_lora_rank"]) == (True, 2, 8)
    assert said["max_cpu_loras"] == MOST_ADAPTERS
    assert said["lora_target_modules"] == [
        "down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj",
    ]  # fmt: skip
    assert base_of(folder).arguments["max_lora_rank"] == 64
    assert base_of(folder, max_adapter_rank=100).arguments["max_lora_rank"] == 128
    with pytest.raises(UnsupportedAdapter, match="r: is 4; allowed: 1 to 3"):
        adapters_of(settings_of(folder, adapter=given, max_adapter_rank=3))
    with pytest.raises(ValueError, match="the model's own name"):
        adapters_of(settings_of(folder, adapter=[f"m={named['one']}"], name="m"))


@pytest.mark.parametrize(
    ("given", "rows"),
    [
        ({}, 2048),
        ({"max_num_seqs": 100}, 3300),
        ({"enable_chunked_prefill": False}, 4096),
        ({"max_num_batched_tokens": 330}, 330),
    ],
)
def test_a_step_has_room_for_every_window(given: dict[str, Any], rows: int) -> None:
    arguments = {"max_num_seqs": 10, "enable_chunked_prefill": True, **given}
    assert with_rows(arguments, 32, lambda: 4096) == {**arguments, "max_num_batched_tokens": rows}


def test_fewer_rows_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"max_rows \(--max-rows\): is 329; .* at least 330, max_sequences times 33"):
        with_rows({"max_num_seqs": 10, "max_num_batched_tokens": 329}, 32, lambda: 4096)


def test_what_vllm_reads_leaves_nothing_to_interpret(folder: Path, tmp_path: Path) -> None:
    state = load_file(folder / "model.safetensors")
    odd = "model.layers.1.mlp.down_proj"
    source = save_adapter(
        tmp_path / "source", state, ("q_proj", "down_proj"), ranks={odd: 6}, target_modules=r".*(q_proj|down_proj)",
        rank_pattern={"layers.1.mlp.down_proj": 6}, alpha_pattern={r"layers\.\d.self_attn.q_proj": 3}, use_rslora=True,
    )  # fmt: skip
    adapter = base_of(folder).read(source)
    write_adapter(tmp_path / "copy", adapter)
    assert (tmp_path / "copy").stat().st_mode & 0o777 == 0o700
    said = json.loads((tmp_path / "copy" / CONFIG_FILE).read_text())
    assert not {"use_rslora", "exclude_modules", "layers_to_transform"} & said.keys()
    for name, one in adapter.modules.items():
        rank, alpha = said["r"], said["lora_alpha"]
        for pattern, value in said["rank_pattern"].items():
            rank = value if re.match(rf"(.*\.)?({pattern})$", name) else rank
        for pattern, value in said["alpha_pattern"].items():
            alpha = value if re.match(rf"(.*\.)?({pattern})$", name) else alpha
        assert rank == len(one.down) and alpha / rank == pytest.approx(one.scaling, rel=1e-12)
    written, given = load_file(tmp_path / "copy" / WEIGHTS_FILE), load_file(source / WEIGHTS_FILE)
    assert written.keys() == given.keys() and all(name.startswith(PREFIX) for name in written)
    assert all(torch.equal(written[name], given[name]) for name in given)


class Harness:
    """An engine on a vLLM that is none, whose adapters change."""

    def __init__(self, folder: Path) -> None:
        self.llm, self.events = FakeLlm(), list[Any]()
        self.store = VllmAdapters(base_of(folder), self.llm)
        limits = TargetLimits(97, 512, (2,), num_blocks=64, block_size=16, model_digest=base_of(folder).digest)
        self.engine = VllmEngine(self.llm, FakeLink(), limits, vllm_adapters=self.store)
        self.changes = AdapterChanges(self.engine.adapters, self.engine, self.store, "base", {})

    def send(self, *messages: Any) -> None:
        self.engine.submit(Deliver(STREAM, messages, self.events.append))

    async def load(self, name: str, path: Path) -> Adapter:
        return await self.changes.load(name, str(path))


@pytest.fixture
async def harness(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    made = Harness(folder)
    monkeypatch.setattr("outrider.vllm.target.engine.sampling_of", lambda *given: None)
    yield made
    made.llm.goes_on.set()
    made.store.close()


async def test_one_content_is_one_adapter_until_its_last_name_goes(harness: Harness, named: dict[str, Path]) -> None:
    one, copy = await harness.load("one", named["one"]), await harness.load("copy", named["same"])
    other = await harness.load("two", named["two"])
    assert one.digest == copy.digest != other.digest
    assert [request.lora_name for request in harness.llm.added] == [one.digest, other.digest]
    assert harness.llm.files[1] == {CONFIG_FILE, WEIGHTS_FILE}
    await harness.changes.unload("one")
    await until(lambda: not harness.store._leaving)
    assert harness.llm.removed == []
    await harness.changes.unload("copy")
    await until(lambda: harness.llm.removed == [1])
    await until(lambda: not Path(harness.llm.added[0].lora_path).exists())
    again = await harness.load("one", named["one"])
    assert again == one
    assert [request.lora_int_id for request in harness.llm.added] == [1, 2, 3], "a number is nobody else's"
    assert harness.llm.added[2].lora_path == harness.llm.added[0].lora_path, "its blocks are found again"


async def test_a_copy_is_read_and_not_what_was_changed_since(harness: Harness, named: dict[str, Path]) -> None:
    await harness.load("one", named["one"])
    before = load_file(named["one"] / WEIGHTS_FILE)
    (named["one"] / WEIGHTS_FILE).unlink()
    kept = load_file(Path(harness.llm.added[0].lora_path) / WEIGHTS_FILE)
    assert all(torch.equal(kept[name], before[name]) for name in before)


async def test_it_stays_until_vllm_has_heard_of_the_last_requests_end(harness: Harness, named: dict[str, Path]) -> None:
    info = await harness.load("one", named["one"])
    harness.send(opened(1, range(30), max_tokens=8, adapter="one", model_digest=info.digest), Credit(1, 34, 0))
    harness.send(opened(2, range(30), max_tokens=8), Credit(2, 34, 0))
    await until(lambda: len(harness.llm.asked) == 2)
    assert harness.llm.asked == [harness.llm.added[0], None]
    stats = harness.engine.stats()
    assert (stats.num_adapters, dict(stats.adapter_sequences)) == (1, {"one": 1})
    assert await harness.changes.unload("one") == 1
    harness.send(opened(3, range(30), max_tokens=8, adapter="one"))
    assert isinstance(harness.events[-1], Failure) and harness.events[-1].reason == "NO_ADAPTER"
    harness.send(Close(1))
    assert harness.events[-1:] == [Closed(1)]
    for _ in range(20):
        await asyncio.sleep(0)
    assert harness.llm.removed == [], "vLLM may be in a step of it"
    harness.llm.goes_on.set()
    await until(lambda: harness.llm.removed == [1])


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"adapter": "none"}, "adapter: is 'none'; allowed: one"),
        ({"adapter": "one", "model_digest": "f" * 64}, "the sequence is of model ffffffffffff"),
    ],
)
async def test_what_is_not_there_is_refused_as_on_our_engine(
    asked: dict[str, Any], said: str, harness: Harness, named: dict[str, Path]
) -> None:
    await harness.load("one", named["one"])
    harness.send(opened(1, range(30), max_tokens=8, **asked))
    (refused,) = harness.events
    assert isinstance(refused, Failure) and said in refused.message
    assert harness.engine.stats().adapter_sequences == {}


async def test_what_vllm_refuses_leaves_nothing(harness: Harness, named: dict[str, Path]) -> None:
    harness.llm.error = RuntimeError("its model computes no adapter of model.x")
    with pytest.raises(InvalidArgument, match=r"path: is .*vLLM refuses it: its model computes no adapter"):
        await harness.load("one", named["one"])
    assert not os.listdir(harness.store._copies.name) and not harness.changes.served
    harness.llm.error = None
    await harness.load("one", named["one"])
    assert len(harness.llm.added) == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"engine_args": {"max_loras": 2}}, r"engine_args \(--engine-args\): has max_loras; allowed: --adapter"),
        ({"engine_args": {"nnodes": 2}, "adapter": ["a=b"]}, "is for targets of one host"),
        ({"max_adapter_rank": 513}, "less than or equal to 512"),
    ],
)
def test_settings_that_are_none(options: dict[str, Any], said: str, folder: Path) -> None:
    with pytest.raises(ValueError, match=said):
        settings_of(folder, **options)


def test_loaded_adapters_know_the_names_in_their_file(folder: Path, named: dict[str, Path]) -> None:
    adapter: LoadedAdapter = base_of(folder).read(named["one"])
    stems = {name.rpartition(".lora_")[0] for name in load_file(named["one"] / WEIGHTS_FILE)}
    assert set(adapter.file_names.values()) == stems
