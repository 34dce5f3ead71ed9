"""Other weights in a target's place while it serves: what was begun ends with the weights of before, what comes is of
the new ones, through gateways and drafts that run on; and what cannot be used changes nothing."""

from __future__ import annotations

import asyncio
import gc
import re
import shutil
import threading
import weakref
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from safetensors.torch import load_file
from support.adapters import save_adapter
from support.deployment import Deployment, deployed
from support.engines import opened
from support.fakes import until
from support.gateways import save_toy_tokenizer
from support.metrics import samples_of
from support.models import other_weights, save_tiny

from outrider.cli.reload import main
from outrider.gateway.peers.remote import load_adapter, reload_weights
from outrider.gateway.speculation.backends import VerifierLink
from outrider.llm import LLM, SamplingParams, TokensPrompt
from outrider.llm.lora.request import LoRARequest
from outrider.rpc.errors import FailedPrecondition, InvalidArgument, PermissionDenied
from outrider.rpc.messages import Close, Credit, TargetInfo
from outrider.rpc.servicer import Deliver, Detach
from outrider.target_service.engine import TargetEngine
from outrider.target_service.reload import Successor
from outrider.target_service.succession import Succession

PROMPT, LONG = [11, 12, 13], 250
GREEDY = {"temperature": 0, "ignore_eos": True}


def plainly(folder: Path, num_tokens: int) -> list[int]:
    with LLM(folder, threads=1, max_model_len=400, batch_invariant=True) as llm:
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        (output,) = llm.generate([TokensPrompt(prompt_token_ids=PROMPT)], sampling, use_tqdm=False)
        return list(output.outputs[0].token_ids)


async def decoded(deployment: Deployment, num_tokens: int = 24) -> list[int]:
    speculation = {"num_draft_tokens": 3, "acceptance": 2}
    sampling = {**GREEDY, "max_tokens": num_tokens}
    answer = await deployment.generate(token_ids={"ids": PROMPT}, sampling=sampling, speculation=speculation)
    return [token for part in answer for token in part.token_ids]


def held_open(deployment: Deployment) -> VerifierLink:
    """A sequence of the present weights that runs no step, and stays until it is closed."""
    verifier = deployment.gateway.engine.verifier
    request = replace(opened(0, PROMPT, max_tokens=4), model_digest=verifier.info.model.digest)
    link = verifier.open(request, lambda event: None)
    assert link is not None
    return link


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[tuple[Deployment, Path, Path]]:
    async with deployed(tmp_path, allow_target_reload=True) as deployment:
        first = tmp_path / "target"
        yield deployment, first, other_weights(first, tmp_path / "second", noise=0.5)
        await deployment.settled()


async def test_what_was_begun_ends_with_the_weights_of_before(running: tuple[Deployment, Path, Path]) -> None:
    """Prompts that both weights have cached, a long answer under way, and others that wait for its end."""
    deployment, first, second = running
    old, new = await asyncio.to_thread(plainly, first, LONG), await asyncio.to_thread(plainly, second, LONG)
    assert old[:24] != new[:24] and await decoded(deployment) == old[:24]
    before = deployment.target.engine
    link = held_open(deployment)
    long = asyncio.create_task(decoded(deployment, LONG))
    await until(lambda: len(before.scheduler.sequences) == 2)
    change = asyncio.create_task(reload_weights(deployment.to_target, str(second), 60))
    await until(lambda: before.succession is not None)
    digest = deployment.gateway.engine.verifier.info.model.digest
    await until(lambda: deployment.gateway.engine.verifier.info.model.digest != digest)
    others = [asyncio.create_task(decoded(deployment)) for _ in range(3)]
    assert await long == old
    await asyncio.sleep(0.05)
    assert not any(other.done() for other in others) and not change.done()
    link.close()
    assert [await other for other in others] == [new[:24]] * 3
    done = await change
    assert done.num_sequences == 0 and done.before.digest == digest != done.after.digest
    assert done.after.name == done.before.name
    assert deployment.target.engine is not before and not before.scheduler.sequences
    assert await decoded(deployment, LONG) == new
    back = await reload_weights(deployment.to_target, str(first), 60)
    assert back.after.digest == digest and await decoded(deployment) == old[:24]


async def almost_changed(deployment: Deployment, folder: Path, **how: Any) -> tuple[threading.Event, asyncio.Task[Any]]:
    """A change that waits for nothing, up to the point where it would begin: once the event is set."""
    reloads, built, may_go_on = deployment.target.servicer._reloads, threading.Event(), threading.Event()  # type: ignore[attr-defined]
    read = reloads.read

    def held_back(folder: Path, present: TargetInfo) -> Successor:
        successor: Successor = read(folder, present)

        def build() -> TargetEngine:
            made = successor.build()
            built.set()
            may_go_on.wait(60)
            return made

        return replace(successor, build=build)

    reloads.read = held_back
    change = asyncio.create_task(reload_weights(deployment.to_target, str(folder), 0, **how))
    await asyncio.to_thread(built.wait, 60)
    return may_go_on, change


def lengths(deployment: Deployment) -> list[int]:
    return [len(one.sequence) for one in deployment.target.engine.scheduler.sequences.values()]


async def test_what_is_to_restart_begins_anew(running: tuple[Deployment, Path, Path]) -> None:
    """An answer that comes whole, of which nothing is kept: tokens, log probabilities, counts and digest are of the new
    weights, and its first token is counted once. One of which somebody has seen something fails."""
    deployment, first, second = running
    digest = deployment.gateway.engine.verifier.info.model.digest
    may_go_on, change = await almost_changed(deployment, second, restart=True)
    body = {"prompt": PROMPT, "temperature": 0, "ignore_eos": True, "max_tokens": LONG, "logprobs": 1}
    whole = asyncio.create_task(deployment.http.post("/v1/completions", json=body | {"return_token_ids": True}))
    stream = asyncio.create_task(decoded(deployment, LONG))
    await until(lambda: len(lengths(deployment)) == 2 and min(lengths(deployment)) > 20)
    may_go_on.set()
    assert (await change).num_sequences == 2
    with pytest.raises(grpc.aio.AioRpcError, match="the target's weights are others now"):
        await asyncio.wait_for(stream, 60)
    answer = (await asyncio.wait_for(whole, 60)).json()
    (choice,) = answer["choices"]
    assert choice["token_ids"] == await asyncio.to_thread(plainly, second, LONG)
    assert choice["token_ids"] != await asyncio.to_thread(plainly, first, LONG)
    assert len(choice["logprobs"]["token_logprobs"]) == LONG == answer["usage"]["completion_tokens"]
    found = samples_of((await deployment.http.get("/metrics")).text)
    assert found["time_to_first_token_seconds_count", ()] == 2
    fresh = (await deployment.http.post("/v1/completions", json=body)).json()
    assert answer["system_fingerprint"] == fresh["system_fingerprint"]
    assert fresh["choices"][0]["logprobs"]["token_logprobs"] == choice["logprobs"]["token_logprobs"]
    assert deployment.gateway.engine.verifier.info.model.digest != digest


async def test_what_is_not_waited_for_fails(running: tuple[Deployment, Path, Path]) -> None:
    """No other target has the weights that it began with: the request says so, and others go on."""
    deployment, _, second = running
    may_go_on, change = await almost_changed(deployment, second)
    long = asyncio.create_task(decoded(deployment, LONG))
    await until(lambda: any(length > 20 for length in lengths(deployment)))
    may_go_on.set()
    assert (await change).num_sequences == 1
    assert await decoded(deployment) == (await asyncio.to_thread(plainly, second, 24))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asyncio.wait_for(long, 60)
    assert caught.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.FAILED_PRECONDITION)


async def test_what_cannot_be_used_changes_nothing(running: tuple[Deployment, Path, Path], tmp_path: Path) -> None:
    deployment, _, second = running
    wide = save_toy_tokenizer(save_tiny(tmp_path / "wide", vocab_size=400, hidden_size=128))
    family = save_toy_tokenizer(save_tiny(tmp_path / "family", "qwen2", vocab_size=400))
    broken = shutil.copytree(second, tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"no weights")
    expected = await decoded(deployment)
    wrong = [
        (wide, "hidden_size 128; allowed"),
        (family, "model_type 'qwen2'; allowed: 'llama'"),
        (broken, "cannot be used"),
        (tmp_path / "nowhere", "there is no such folder"),
    ]
    for folder, message in wrong:
        with pytest.raises(InvalidArgument, match=message):
            await reload_weights(deployment.to_target, str(folder), 1)
        assert await decoded(deployment) == expected
    same = await reload_weights(deployment.to_target)  # the present folder, read again
    assert same.before == same.after and await decoded(deployment) == expected


async def test_an_engine_that_cannot_start_leaves_the_present_one(
    running: tuple[Deployment, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment, _, second = running
    expected, before = await decoded(deployment), deployment.target.engine

    def fails(engine: TargetEngine, known: Any = None) -> Any:
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(TargetEngine, "profile", fails)
        with pytest.raises(FailedPrecondition, match=r"no room; .* serves on"):
            await reload_weights(deployment.to_target, str(second), 1)
    assert deployment.target.engine is before and before.succession is None
    assert await decoded(deployment) == expected


async def test_one_change_at_a_time_and_only_where_it_is_allowed(tmp_path: Path) -> None:
    async with deployed(tmp_path) as deployment:
        with pytest.raises(PermissionDenied, match="--allow-reload"):
            await reload_weights(deployment.to_target, str(tmp_path / "target"))
    async with deployed(tmp_path / "again", allow_target_reload=True) as deployment:
        link, engine = held_open(deployment), deployment.target.engine
        await until(lambda: bool(engine.scheduler.sequences))
        first = asyncio.create_task(reload_weights(deployment.to_target, "", 60))
        await until(lambda: engine.succession is not None)
        with pytest.raises(FailedPrecondition, match="another reload is under way"):
            await reload_weights(deployment.to_target, "", 60)
        link.close()
        await first


def test_commands_are_told_apart_by_the_weights_that_they_name() -> None:
    """In order, forks and all that follows an Open with it; the end of a stream is both engines'."""

    def of(number: int, digest: str = "", **more: Any) -> Any:
        return replace(opened(number, [5, 6]), model_digest=digest, **more)

    succession, sink = Succession({"new", "new+adapter"}), lambda event: None
    first = Deliver(1, [of(1, "old"), of(2, "new"), Credit(1, 9, 0), Credit(2, 9, 0)], sink)
    own = succession.sift(first)
    assert isinstance(own, Deliver) and [message.sequence_id for message in own.messages] == [1, 1]
    fork = of(3, "", fork_of=2, prompt_ids=())
    second = Deliver(1, [fork, of(4, "new+adapter"), of(5), Close(2), Close(1)], sink)
    own = succession.sift(second)
    assert isinstance(own, Deliver) and [message.sequence_id for message in own.messages] == [5, 1]
    elsewhere = succession.sift(Deliver(2, [Credit(2, 9, 0)], sink))  # another stream's sequence of that number
    assert isinstance(elsewhere, Deliver) and len(elsewhere.messages) == 1
    assert succession.sift(Detach(1)) == Detach(1)
    held = [[message.sequence_id for message in one.messages] for one in succession.held if isinstance(one, Deliver)]
    assert held == [[2, 2], [3, 4, 2]] and succession.held[-1] == Detach(1)


async def test_the_command_says_what_serves(
    running: tuple[Deployment, Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    deployment, _, second = running
    at = ["--target", deployment.target.server.address, "--model", str(second)]
    assert await asyncio.to_thread(main, [*at, "--drain-s", "5"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"before  target \w{12}\nloaded in .* waited for \d+ ms; 0 open sequences ended before", said)
    digest = deployment.target.servicer.info.model.digest  # type: ignore[attr-defined]
    assert f"after   target {digest[:12]}" in said
    assert await asyncio.to_thread(main, [*at[:2], "--model", "nowhere"]) == 1
    assert "there is no such folder" in capsys.readouterr().err
    assert await asyncio.to_thread(main, ["--model", "x"]) == 1
    assert "draft: is not given; allowed: --draft ADDRESS, or --target ADDRESS alone" in capsys.readouterr().err


async def test_nothing_is_kept_of_what_served_before(running: tuple[Deployment, Path, Path]) -> None:
    deployment, _, second = running
    await decoded(deployment)
    engine = deployment.target.engine
    kept: list[Any] = [weakref.ref(engine.cache), weakref.ref(engine._runner.model)]
    del engine
    await reload_weights(deployment.to_target, str(second), 10)
    await decoded(deployment)
    gc.collect()
    assert [one() for one in kept] == [None, None]


async def test_adapters_are_loaded_anew_for_the_new_weights(tmp_path: Path) -> None:
    async with deployed(tmp_path, allow_adapter_changes=True, allow_target_reload=True) as deployment:
        second = other_weights(tmp_path / "target", tmp_path / "second", noise=0.5)
        state = load_file(tmp_path / "target" / "model.safetensors")
        adapter = save_adapter(tmp_path / "adapter", {n: t for n, t in state.items() if "layers" in n}, scale=0.3)
        verifier = deployment.gateway.engine.verifier

        async def adapted() -> list[int]:
            await until(lambda: bool(verifier.info.adapters))
            sampling = {**GREEDY, "max_tokens": 16}
            answer = await deployment.generate(token_ids={"ids": PROMPT}, sampling=sampling, adapter="one")
            return [token for part in answer for token in part.token_ids]

        first = await load_adapter(deployment.to_target, "one", str(adapter))
        of_first = await adapted()
        await reload_weights(deployment.to_target, str(second), 10)
        await until(lambda: not verifier.info.adapters)
        again = await load_adapter(deployment.to_target, "one", str(adapter))
        assert again.digest != first.digest and await adapted() != of_first
        asked = LoRARequest("one", 1, str(adapter))
        with LLM(second, threads=1, max_model_len=400, batch_invariant=True, enable_lora=True) as llm:
            sampling = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
            prompt = TokensPrompt(prompt_token_ids=PROMPT)
            (output,) = await asyncio.to_thread(llm.generate, [prompt], sampling, use_tqdm=False, lora_request=asked)
        assert await adapted() == list(output.outputs[0].token_ids)
        await deployment.settled()
