"""Weights and arithmetic of targets: a sequence stays with its weights, and a change of arithmetic is marked."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import httpx
import pytest
from gateway.http_harness import gateway, toy_tokenizer
from gateway.toys import QUICK, TargetServicer, ToyTarget, expected, serving, target_info, until

from outrider.gateway.http.protocol import extension_shape, join
from outrider.gateway.metrics import MeteredEngine
from outrider.gateway.peers.remote import RemoteTargets
from outrider.gateway.request import GenerationRequest
from outrider.gateway.servicer import encode_delta
from outrider.gateway.speculation.backends import Lost
from outrider.gateway.speculation.core import Emit, SpeculationCore
from outrider.gateway.speculation.loop import speculate
from outrider.planner.policy import Policy, Round
from outrider.rpc.messages import Commit, Open
from outrider.rpc.sampling_params import SamplingParams

PROMPT = (11, 12, 13)
EXACT = {"engine": "outrider", "kernels": "c-avx512", "batch_invariant": True}


def request(max_tokens: int = 200, **fields: Any) -> Open:
    return Open(0, PROMPT, SamplingParams(temperature=0.0, max_tokens=max_tokens), **fields)


async def connected(stack: AsyncExitStack, *servicers: TargetServicer) -> RemoteTargets:
    addresses = [(await stack.enter_async_context(serving(servicer))).address for servicer in servicers]
    targets = await stack.enter_async_context(RemoteTargets(addresses, stream_config=QUICK))
    await until(lambda: all(peer.usable for peer in targets.peers))
    return targets


async def test_a_sequence_is_opened_at_its_weights_alone() -> None:
    async with AsyncExitStack() as stack:
        targets = await connected(stack, TargetServicer(ToyTarget()))
        assert targets.open(request(model_digest="d1"), print) is not None
        assert targets.open(request(model_digest="d9"), print) is None


async def test_replicas_that_compute_alike_are_preferred() -> None:
    same, other = target_info(**EXACT), target_info(**EXACT | {"kernels": "c-avx2"})
    one, two = TargetServicer(ToyTarget(info=same)), TargetServicer(ToyTarget(info=other))
    async with AsyncExitStack() as stack:
        targets = await connected(stack, one, two)
        opens = [replace(request(), prompt_ids=(number, 5, 9)) for number in range(1, 17)]
        for opened in opens:
            assert targets.open(opened, print, like=same.model.arithmetic) is not None
        await until(lambda: len(one.opens) == len(opens))
        assert not two.opens
        like = replace(same.model.arithmetic, kernels="triton-sm90")
        for opened in opens:  # nobody computes so: the others take it
            assert targets.open(opened, print, like=like) is not None
        await until(lambda: len(one.opens) + len(two.opens) == 2 * len(opens))
        assert two.opens


@pytest.mark.parametrize(
    ("second", "near_ties"),
    [(EXACT, False), (EXACT | {"kernels": "c-avx2"}, True), (EXACT | {"batch_invariant": False}, True)],
    ids=["equal", "other kernels", "by batch"],
)
async def test_failover_to_other_arithmetic_is_marked(second: dict[str, Any], near_ties: bool) -> None:
    servicers = [TargetServicer(ToyTarget(step_s=0.002, info=target_info(**fields))) for fields in (EXACT, second)]
    async with AsyncExitStack() as stack:
        targets = await connected(stack, *servicers)
        rounds: list[Round] = []

        async def collect() -> None:
            async for item in speculate(None, targets, request(60, model_digest="d1"), Policy(0)):
                assert isinstance(item, Round)
                rounds.append(item)

        task = asyncio.create_task(collect())
        await until(lambda: len(rounds) > 3)
        (busy,) = (servicer for servicer in servicers if servicer.opens)
        await busy.streams[0].close()
        await asyncio.wait_for(task, 10)
        assert all(servicer.opens for servicer in servicers)
    assert [token for closed in rounds for token in closed.commit.ids] == expected(PROMPT, 60)
    (moved,) = (closed.index for closed in rounds if closed.moved)
    assert moved > 3 and [closed.near_ties for closed in rounds] == [
        near_ties and closed.index >= moved for closed in rounds
    ]


async def test_near_ties_are_told_and_counted() -> None:
    target = ToyTarget(info=target_info(**EXACT))
    engine = MeteredEngine(toy_tokenizer(), target)
    sampling = SamplingParams(temperature=0.0, max_tokens=20)
    deltas = []
    async for delta in engine.generate(GenerationRequest(token_ids=PROMPT, sampling=sampling)):
        deltas.append(delta)
        if len(deltas) == 3:
            target.info = target_info(**EXACT | {"kernels": "c-avx2"})
            target.links[0].lose()
    assert [token for delta in deltas for token in delta.token_ids] == expected(PROMPT, 20)
    marks = [delta.near_ties for delta in deltas]
    assert not any(marks[:3]) and marks[-1] and marks == sorted(marks)
    assert [delta.model_digest for delta in deltas if delta.model_digest] == ["d1"]
    text = engine.metrics.render("")[0].decode()
    assert 'outrider_target_failovers_total{output="near_ties"} 1.0' in text
    assert encode_delta(deltas[-1]).near_ties and not encode_delta(deltas[0]).near_ties
    assert extension_shape(join(deltas), False, False) == {"near_ties": True}


async def test_a_fingerprint_that_comes_back_is_compared() -> None:
    body = {"prompt": PROMPT, "max_tokens": 2}
    async with gateway() as served, httpx.AsyncClient(base_url=served.url) as client:
        answer = (await client.post("/v1/completions", json=body)).json()
        again = await client.post("/v1/completions", json=body | {"system_fingerprint": answer["system_fingerprint"]})
        assert again.status_code == 200 and again.json()["system_fingerprint"] == "fp_d1"
        refused = await client.post("/v1/completions", json=body | {"system_fingerprint": "fp_d9"})
        error = refused.json()["error"]
        assert refused.status_code == 400 and error["code"] == "other_model"
        assert "d9" in error["message"] and "d1" in error["message"]


def test_a_target_that_committed_nothing_marks_nothing() -> None:
    same, other = target_info(**EXACT).model, target_info(**EXACT | {"kernels": "c-avx2"}).model
    core = SpeculationCore(request(), Policy(0))
    core.start(0.0)
    core.on_target_open(same)
    core.on_target(Commit(0, 3, (5,)), 0.0)
    core.on_target(Lost("gone"), 0.0)
    core.on_target_open(other)
    core.on_target(Lost("gone, too"), 0.0)
    core.on_target_open(same)
    (closed,) = (effect.round for effect in core.on_target(Commit(0, 4, (6,)), 0.0) if isinstance(effect, Emit))
    assert closed.moved and not closed.near_ties
