"""Draft, target and gateway as three processes: greedy tokens equal transformers' own for every k and batch, a draft
that is killed in mid-stream costs speed only, and coupled text depends on no draft. Over HTTP it is the same, and
sampling parameters have their effect."""

from __future__ import annotations

import asyncio
import math
import random
import re
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI
from support.engines import hf_greedy
from support.environment import START_S
from support.models import save_tiny, tiny_hf_model, train_byte_level

from outrider.cli.local_services import Service, Services
from outrider.rpc.channel import connect
from outrider.v1 import generation_pb2 as pb
from outrider.v1 import generation_pb2_grpc

VOCAB = 300
PROMPT = [11, 12, 13]
HTTP = re.compile(r"gateway http on (\S+)")


@dataclass
class Trio:
    """The three services of a module."""

    services: Services
    draft: Service
    target: Service
    gateway: Service

    @property
    def address(self) -> str:
        return self.gateway.address

    @property
    def url(self) -> str:
        return f"http://{self.gateway.find(HTTP)}"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    target = save_tiny(tmp_path_factory.mktemp("target"), seed=1, vocab_size=VOCAB)
    draft = save_tiny(tmp_path_factory.mktemp("draft"), seed=1, vocab_size=VOCAB, num_hidden_layers=1)
    for folder in (target, draft):
        train_byte_level(VOCAB).save(str(folder / "tokenizer.json"))
    return target, draft


@pytest.fixture(scope="module")
def trio(folders: tuple[Path, Path]) -> Iterator[Trio]:
    target_folder, draft_folder = folders
    with Services() as services:
        draft = start(services, "draft", "--model", str(draft_folder), "--threads", "1")
        target = start(services, "target", "--model", str(target_folder), "--batch-invariant", "--threads", "1")
        services.wait(draft, START_S)
        services.wait(target, START_S)
        arguments = ["--target", target.address, "--draft", draft.address, "--tokenizer", str(target_folder)]
        gateway = start(services, "gateway", *arguments, "--http", "127.0.0.1:0", "--model-name", "tiny")
        services.wait(gateway, START_S)
        services.wait_ready(gateway, START_S)
        yield Trio(services, draft, target, gateway)


def start(services: Services, name: str, *arguments: str) -> Service:
    return services.start(name, [name, "--listen", "127.0.0.1:0", *arguments])


@pytest.fixture
async def stub(trio: Trio) -> AsyncIterator[Any]:
    channel = connect(trio.address)
    yield generation_pb2_grpc.GenerationServiceStub(channel)
    await channel.close()


async def generate(stub: Any, prompt: list[int], count: int, k: int | None = None, **sampling: Any) -> list[Any]:
    """All responses of a request."""
    sampling = {"temperature": 0.0, "max_tokens": count, "ignore_eos": True, **sampling}
    request = pb.GenerateRequest(token_ids={"ids": prompt}, sampling=sampling)
    if k is not None:
        request.speculation.num_draft_tokens = k
        request.speculation.enabled = k > 0
    return [response async for response in stub.Generate(request, timeout=60, wait_for_ready=True)]


def tokens_of(responses: list[Any]) -> list[int]:
    return [token for response in responses for token in response.token_ids]


@pytest.mark.parametrize("k", range(9))
async def test_greedy_equals_generate(stub: Any, k: int) -> None:
    hf = tiny_hf_model("llama", 1, vocab_size=VOCAB)
    rng = random.Random(k)
    batch = (1, 2, 4, 8, 16)[k % 5]
    prompts = [[rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 40))] for _ in range(batch)]
    results = await asyncio.gather(*(generate(stub, prompt, 32, k) for prompt in prompts))
    for prompt, responses in zip(prompts, results, strict=True):
        assert tokens_of(responses) == hf_greedy(hf, prompt, 32)
        last = responses[-1]
        assert last.usage.completion_tokens == 32 and last.usage.prompt_tokens == len(prompt)
        assert (last.speculation.num_draft_tokens > 0) == (k > 0)


async def test_coupled_text_depends_on_no_draft(stub: Any) -> None:
    outputs = []
    for k in (0, 1, 4, 8):
        request = pb.GenerateRequest(
            text="def f(x):\n", sampling={"max_tokens": 40, "temperature": 1.0, "seed": 99, "ignore_eos": True}
        )
        request.speculation.num_draft_tokens = k
        request.speculation.acceptance = pb.ACCEPTANCE_RULE_COUPLED
        responses = [r async for r in stub.Generate(request, timeout=60)]
        outputs.append((tokens_of(responses), "".join(r.text for r in responses)))
    assert all(output == outputs[0] for output in outputs)


async def test_completions_differ_and_share_the_prompt(stub: Any) -> None:
    request = pb.GenerateRequest(
        token_ids={"ids": list(range(5, 70))}, n=3, sampling={"max_tokens": 12, "temperature": 1.0, "seed": 5}
    )
    responses = [r async for r in stub.Generate(request, timeout=60)]
    texts = {index: tokens_of([r for r in responses if r.index == index]) for index in range(3)}
    assert len({tuple(ids) for ids in texts.values()}) == 3
    assert max(r.usage.cached_tokens for r in responses) >= 48


@pytest.fixture
async def openai(trio: Trio) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{trio.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


async def ask(client: AsyncOpenAI, prompt: Any, speculation: dict[str, Any] | None = None, **fields: Any) -> Any:
    extra = {"return_token_ids": True, "ignore_eos": True, "speculation": speculation or {}}
    fields = {"model": "tiny", "prompt": prompt, "max_tokens": 24, **fields}
    return await client.completions.create(**fields, extra_body=extra)


def ids_of(answer: Any, index: int = 0) -> list[int]:
    return list(answer.choices[index].model_extra["token_ids"])


@pytest.mark.parametrize("k", [0, 3])
async def test_greedy_equals_generate_over_http(openai: AsyncOpenAI, k: int) -> None:
    model, rng = tiny_hf_model("llama", 1, vocab_size=VOCAB), random.Random(k)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 40))] for _ in range(4)]
    answer = await ask(openai, prompts, {"num_draft_tokens": k}, temperature=0, n=2)
    for place, prompt in enumerate(prompts):
        assert ids_of(answer, 2 * place) == ids_of(answer, 2 * place + 1) == hf_greedy(model, prompt, 24)
        assert (answer.choices[2 * place].model_extra["speculation"]["num_drafts"] > 0) == (k > 0)


async def test_seeds_biases_and_logprobs_have_their_effect(openai: AsyncOpenAI) -> None:
    rule = {"acceptance": "coupled"}
    first, again, other = [ids_of(await ask(openai, PROMPT, rule, temperature=1, seed=seed)) for seed in (5, 5, 6)]
    assert first == again != other
    assert ids_of(await ask(openai, PROMPT, {"enabled": False, **rule}, temperature=1, seed=5)) == first
    both = await ask(openai, PROMPT, temperature=1, seed=5, n=2)
    assert ids_of(both, 0) != ids_of(both, 1)
    biased = await ask(openai, PROMPT, temperature=0, logit_bias={"42": 100}, max_tokens=5, logprobs=3)
    assert ids_of(biased) == [42] * 5
    logprobs = biased.choices[0].logprobs
    assert all(3 <= len(top) <= 4 and top[token] == value for top, token, value in
               zip(logprobs.top_logprobs, logprobs.tokens, logprobs.token_logprobs, strict=True))  # fmt: skip
    assert all(sum(map(math.exp, top.values())) <= 1 for top in logprobs.top_logprobs)


async def test_a_structure_that_does_not_compile_is_refused_by_name(trio: Trio) -> None:
    """The target's refusal names the field as HTTP does."""
    async with httpx.AsyncClient(base_url=trio.url) as client:
        form = {"type": "json_schema", "json_schema": {"name": "none", "schema": {"type": "intger"}}}
        body = {"prompt": PROMPT, "response_format": form}
        answer = await client.post("/v1/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "response_format")


async def test_a_draft_killed_in_mid_stream_costs_speed_only(stub: Any, trio: Trio) -> None:
    """Runs last: it takes the module's draft away."""
    hf = tiny_hf_model("llama", 1, vocab_size=VOCAB)
    prompt = list(range(10, 30))
    request = pb.GenerateRequest(
        token_ids={"ids": prompt}, sampling={"max_tokens": 300, "temperature": 0.0, "ignore_eos": True}
    )
    tokens: list[int] = []
    async for response in stub.Generate(request, timeout=90):
        tokens += response.token_ids
        if len(tokens) >= 20 and trio.draft in trio.services._running:
            trio.services.stop(trio.draft)
    assert tokens == hf_greedy(hf, prompt, 300)
    again = await generate(stub, prompt, 8, 4)
    assert tokens_of(again) == tokens[:8] and again[-1].speculation.num_drafts == 0
