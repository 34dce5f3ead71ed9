"""A target service with a head: what it is told at start, what it says of itself, and what its rounds say."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.engines import COUPLED, VOCAB, opened
from support.fakes import until
from support.heads import METHODS, SHAPES, random_head_of, save_head
from support.models import save_tiny, tiny_hf_model
from support.proofs import on_a_diagonal

from outrider.cli.quantize import quantize
from outrider.engine.kv_cache import bytes_per_block
from outrider.engine.models.base import UnsupportedModel
from outrider.engine.quantized.rounding import Rounding
from outrider.gateway.peers.remote import RemoteTargets
from outrider.gateway.speculation.loop import speculate
from outrider.pairs.expansion import expand_llama
from outrider.planner.policy import Policy, Round
from outrider.proposers.heads.head import bytes_beside_block
from outrider.rpc.channel import connect
from outrider.rpc.codec import TARGET_INFO, TARGET_STREAM
from outrider.rpc.messages import Commit, Credit, DraftMethod, Open
from outrider.rpc.stream import client_stream
from outrider.target_service.__main__ import main
from outrider.target_service.boot import build, load, load_head, new_runner
from outrider.target_service.settings import TargetSettings
from outrider.v1 import target_pb2, target_pb2_grpc


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


def saved_head(method: str, folder: Path, **changes: Any) -> Path:
    """Of random weights, for the tiny model."""
    config, shapes = SHAPES[method](tiny_hf_model().config)
    generator = torch.Generator().manual_seed(0)
    tensors = {name: 0.2 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return save_head(folder, config | changes, tensors)


def saved_mimo(folder: Path, **options: Any) -> Path:
    """A model as MiMo's, with its MTP layer among its own tensors."""
    own = save_tiny(folder / "own", "qwen2", tie_word_embeddings=False, **options)
    head = random_head_of(own, "mtp", folder / "head")
    config = json.loads((own / "config.json").read_text()) | {"model_type": "mimo", "num_nextn_predict_layers": 1}
    tensors = load_file(own / "model.safetensors") | load_file(head / "model.safetensors")
    return save_head(folder / "whole", config | {"architectures": ["MiMoForCausalLM"]}, tensors)


def settings_of(model: Path, head: Path | None, **options: Any) -> TargetSettings:
    common = {"listen": "127.0.0.1:0", "num_blocks": 64, "threads": 1, "max_window": 6, "cut_windows": False}
    return TargetSettings.model_validate({"model": model, "head": head} | common | options)


async def served(settings: TargetSettings, requests: Iterable[Open]) -> tuple[Any, dict[int, list[Commit]]]:
    """What the service says of itself, and the commits of the requests, all open at once."""
    service = build(settings, load(settings))
    await service.server.start()
    channel = connect(service.server.address)
    commits: dict[int, list[Commit]] = {}
    try:
        stub = target_pb2_grpc.TargetServiceStub(channel)
        info = TARGET_INFO.decode(await stub.GetTargetInfo(target_pb2.GetTargetInfoRequest()))
        async with client_stream(TARGET_STREAM, stub.Verify()) as stream:
            for request in requests:
                commits[request.sequence_id] = []
                stream.send(request, Credit(request.sequence_id, 1 << 20, 5))
            while any(not found or found[-1].finish_reason is None for found in commits.values()):
                for message in await asyncio.wait_for(anext(stream), 60):
                    assert isinstance(message, Commit)
                    commits[message.sequence_id].append(message)
    finally:
        await channel.close()
        await service.stop()
    return info, commits


def tokens(commits: Iterable[Commit]) -> list[int]:
    return [token for commit in commits for token in commit.ids]


@pytest.mark.parametrize("method", METHODS)
async def test_the_service_offers_its_head_and_says_what_drafting_took(
    method: str, folder: Path, tmp_path: Path
) -> None:
    head = saved_mimo(tmp_path) if method == "mtp" else saved_head(method, tmp_path)
    model = head if method == "mtp" else folder
    requests = [
        opened(number, range(3, 20 + number), max_tokens=16, ignore_eos=True, seed=5, method=name, **sampling)
        for number, (name, sampling) in enumerate(
            [(method, {}), (method, {"temperature": 1.0, "acceptance": COUPLED}), ("", {})], start=1
        )
    ]
    info, commits = await served(settings_of(model, head), requests)
    assert info.methods == (DraftMethod(method, needs_features=True, can_run_ahead=False),)
    _, plain = await served(settings_of(model, None), requests)
    assert {n: tokens(found) for n, found in commits.items()} == {n: tokens(found) for n, found in plain.items()}
    for number in (1, 2):
        assert sum(commit.num_drafted for commit in commits[number]) >= 10
        assert all((commit.timings.draft_us > 0) == (commit.num_drafted > 0) for commit in commits[number])
    assert all(commit.num_drafted == commit.timings.draft_us == 0 for commit in commits[3])


@pytest.mark.parametrize(("method", "rounding"), on_a_diagonal(METHODS, ["int8", "int4"]))
async def test_a_head_beside_a_checkpoint_in_few_bits(method: str, rounding: Rounding, tmp_path: Path) -> None:
    """As it is converted, an MTP layer among its tensors included."""
    sizes: dict[str, Any] = {"intermediate_size": 128}  # packed products have inputs by 32
    source = saved_mimo(tmp_path, **sizes) if method == "mtp" else save_tiny(tmp_path / "tiny", **sizes)
    model = tmp_path / rounding
    assert list(quantize(source, model, rounding, 32))
    head = model if method == "mtp" else saved_head(method, tmp_path / "head")
    requests = [
        opened(1, range(3, 21), max_tokens=16, ignore_eos=True, method=method),
        opened(2, range(5, 30), max_tokens=16, ignore_eos=True, method=method, temperature=1.0, acceptance=COUPLED),
    ]
    _, commits = await served(settings_of(model, head), requests)
    _, plain = await served(settings_of(model, None), requests)
    assert {n: tokens(found) for n, found in commits.items()} == {n: tokens(found) for n, found in plain.items()}
    assert all(sum(commit.num_drafted for commit in found) >= 10 for found in commits.values())


async def test_a_target_without_a_head_offers_none_and_decodes_plainly(folder: Path) -> None:
    info, commits = await served(settings_of(folder, None), [opened(1, range(3, 20), max_tokens=4, method="eagle")])
    assert info.methods == () and [commit.num_drafted for commit in commits[1]] == [0] * 4


@pytest.mark.parametrize("second", ["the same head", "none"])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "acceptance": COUPLED}], ids=["greedy", "coupled"])
async def test_a_target_that_ends_gives_way_to_another(
    sampling: dict[str, Any], second: str, folder: Path, tmp_path: Path
) -> None:
    """In mid-request, as the gateway's loop has it: what comes is the same, and the other's head drafts."""
    head = saved_head("eagle3", tmp_path)
    settings = [settings_of(folder, one) for one in (head, head if second == "the same head" else None)]
    services = [build(one, load(one)) for one in settings]
    for service in services:
        await service.server.start()
    found: list[Commit] = []
    try:
        async with RemoteTargets([service.server.address for service in services]) as targets:
            first = targets.replicas[0]
            await until(lambda: all(replica.usable for replica in targets.replicas), 60)
            for start in itertools.count(3):  # a prompt's beginning says which target is asked first
                request = opened(1, range(start, start + 30), max_tokens=60, ignore_eos=True, seed=9, method="eagle3",
                                 **sampling)  # fmt: skip
                rounds = speculate(None, targets, request, Policy(4, 0), at_target=True)
                found = [closed.commit for closed in [await anext(rounds)] if isinstance(closed, Round)]
                if first.links:
                    break
                await rounds.aclose()
            async for closed in rounds:
                assert isinstance(closed, Round)
                found.append(closed.commit)
                if len(found) == 3:
                    await services[0].stop()
    finally:
        for service in services:
            await service.stop()
    _, plain = await served(settings_of(folder, None), [request])
    assert tokens(found) == tokens(plain[1])
    assert all(commit.num_drafted for commit in found[1:3])
    assert any(commit.num_drafted for commit in found[-4:]) == (second == "the same head")


def test_the_head_counts_in_the_size_of_the_cache(folder: Path, tmp_path: Path) -> None:
    head = saved_head("eagle3", tmp_path)
    settings = settings_of(folder, head, num_blocks=None, cache_mb=1)
    loaded = load(settings)
    found = load_head(settings, loaded)
    assert found is not None
    of_head = 16 * 2 * 2 * 16 * 4 + 3 * 64 * 4  # keys and values of two heads, and the states of three layers
    assert bytes_beside_block(found, torch.float32) == of_head
    block = bytes_per_block(loaded.model.layers, torch.float32)
    runner = new_runner(settings, loaded, found)
    assert runner.cache.num_blocks == (1 << 20) // (block + of_head) < (1 << 20) // block
    assert runner.taps == found.taps == (0, 1, 2)
    assert bytes_beside_block(None, torch.float32) == 0


@pytest.mark.parametrize("method", ["eagle3", "mlp_speculator"])
async def test_a_head_reads_the_first_channels_of_an_expansion(
    method: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its drafts are those that it makes beside the checkpoint itself, also of what the last norm gives."""
    large = partial(expand_llama, hidden_size=128, intermediate_size=128, num_layers=4, num_heads=8, num_kv_heads=4)
    monkeypatch.setattr("outrider.target_service.boot.expand_llama", large)
    head = saved_head(method, tmp_path)
    requests = [opened(1, range(3, 40), max_tokens=24, ignore_eos=True, method=method)]
    rounds = []
    for expand in (False, True):
        settings = settings_of(folder, head, expand=expand)
        found = load_head(settings, load(settings))
        assert found is not None and found.hidden_size == 64 and found.taps[-1] == (4 if expand else 2)
        _, commits = await served(settings, requests)
        rounds.append([(commit.ids, commit.num_drafted, commit.num_accepted) for commit in commits[1]])
    assert rounds[0] == rounds[1] and sum(drafted for _, drafted, _ in rounds[0]) > 20


@pytest.mark.parametrize(
    ("method", "changes", "problem"),
    [
        ("eagle", {"hidden_size": 96}, "hidden_size: is 96; allowed: the target's, 64"),
        ("eagle", {"vocab_size": VOCAB + 1}, f"vocab_size: is {VOCAB + 1}; allowed: the target's, {VOCAB}"),
        ("eagle3", {"target_hidden_size": 48}, "target_hidden_size: is 48; allowed: the target's, 64"),
        ("eagle3", {"eagle_aux_hidden_state_layer_ids": [0, 1, 7]}, "taps: [0, 1, 7]; allowed: layers from 0 to 2"),
        ("mlp_speculator", {"emb_dim": 96}, "emb_dim 96"),
        ("eagle", {"model_type": "olmoe"}, "a head of olmoe's layers; allowed: those of models without experts"),
        ("medusa", {"hidden_size": 96}, "hidden_size 96"),
        ("medusa", {"model_type": "llama"}, "holds no head"),
    ],
)
def test_a_wrong_head_is_refused_at_start(
    method: str, changes: dict[str, Any], problem: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head = saved_head(method, tmp_path, **changes)
    settings = settings_of(folder, head)
    with pytest.raises(UnsupportedModel) as refused:
        load_head(settings, load(settings))
    assert f"head (--head {head}) does not fit the model: " in str(refused.value) and problem in str(refused.value)
    assert main(["--model", str(folder), "--head", str(tmp_path / "none"), "--listen", "127.0.0.1:0"]) == 2
    assert f"--head {tmp_path / 'none'}" in capsys.readouterr().err
