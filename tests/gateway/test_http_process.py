"""The gateway's process with --http, over a real target and draft, and without it."""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import re
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway.http_harness import PROMPT, gateway, save_toy_tokenizer
from gateway.toys import TargetServicer, ToyTarget, expected, serving
from openai import AsyncOpenAI
from target_harness import hf_greedy
from tiny import save_tiny, tiny_hf_model
from tokenizer_factory import train_byte_level

VOCAB = 300
START_S = 60
LIBRARIES = ("starlette", "uvicorn", "prometheus_client")


@asynccontextmanager
async def started(*arguments: str) -> AsyncIterator[Process]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, stdout=PIPE, stderr=PIPE, env=environment
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def announced(process: Process, pattern: str) -> str:
    """The address in the line that a process prints when it can be reached."""
    assert process.stdout is not None
    async with asyncio.timeout(START_S):
        while line := (await process.stdout.readline()).decode():
            if found := re.fullmatch(pattern, line.strip()):
                return found[1]
    raise AssertionError(f"the process ended before it printed {pattern}")


async def until_healthy(client: httpx.AsyncClient) -> None:
    async with asyncio.timeout(START_S):
        while (await client.get("/health")).status_code != 200:  # noqa: ASYNC110 (another process)
            await asyncio.sleep(0.05)


@pytest.fixture(scope="module")
async def url(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    """Draft, target and gateway as three processes, with tiny models."""
    target_folder = save_tiny(tmp_path_factory.mktemp("target"), seed=1, vocab_size=VOCAB)
    draft_folder = save_tiny(tmp_path_factory.mktemp("draft"), seed=1, vocab_size=VOCAB, num_hidden_layers=1)
    for folder in (target_folder, draft_folder):
        train_byte_level(VOCAB).save(str(folder / "tokenizer.json"))
    common = ("--listen", "127.0.0.1:0", "--threads", "1", "--model")
    async with (
        started("-m", "outrider.target_service", *common, str(target_folder), "--batch-invariant") as target,
        started("-m", "outrider.draft_service", *common, str(draft_folder)) as draft,
    ):
        addresses = await asyncio.gather(
            announced(target, r"\S+ listening on (\S+)"), announced(draft, r"\S+ listening on (\S+)")
        )
        peers = ("--target", addresses[0], "--draft", addresses[1], "--tokenizer", str(target_folder))
        ports = ("--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--model-name", "tiny")
        async with started("-m", "outrider.gateway", *peers, *ports) as process:
            address = await announced(process, r"gateway http on (\S+)")
            async with httpx.AsyncClient(base_url=f"http://{address}") as client:
                await until_healthy(client)
            yield f"http://{address}"


@pytest.fixture
async def openai(url: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


async def ask(client: AsyncOpenAI, prompt: Any, speculation: dict[str, Any] | None = None, **fields: Any) -> Any:
    extra = {"return_token_ids": True, "ignore_eos": True, "speculation": speculation or {}}
    fields = {"model": "tiny", "prompt": prompt, "max_tokens": 24, **fields}
    return await client.completions.create(**fields, extra_body=extra)


def ids_of(answer: Any, index: int = 0) -> list[int]:
    return list(answer.choices[index].model_extra["token_ids"])


@pytest.mark.parametrize("k", [0, 3])
async def test_greedy_equals_transformers(openai: AsyncOpenAI, k: int) -> None:
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


async def test_a_structure_is_refused_by_name(url: str) -> None:
    """This target has none; its refusal names the field as HTTP does."""
    async with httpx.AsyncClient(base_url=url) as client:
        body = {"prompt": PROMPT, "response_format": {"type": "json_object"}}
        answer = await client.post("/v1/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "response_format")


async def test_waits_for_its_target_and_drains(tmp_path: Path) -> None:
    save_toy_tokenizer(tmp_path)
    async with serving(TargetServicer(ToyTarget())) as server:
        target = server.address
    arguments = ("--target", target, "--tokenizer", str(tmp_path), "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0")
    arguments = (*arguments, "--drain-delay-s", "0.3")
    async with started("-m", "outrider.gateway", *arguments) as process:
        address = await announced(process, r"gateway http on (\S+)")
        async with httpx.AsyncClient(base_url=f"http://{address}", timeout=20) as client:
            statuses = [(await client.get(path)).status_code for path in ("/livez", "/readyz", "/health")]
            assert statuses == [200, 503, 503]
            early = await client.get("/v1/models")
            assert (early.status_code, early.json()["error"]["code"]) == (503, "no_target")
            async with serving(TargetServicer(ToyTarget(step_s=0.01)), target):
                await until_healthy(client)
                body = {"prompt": PROMPT, "max_tokens": 60, "temperature": 0, "stream": True, "return_token_ids": True}
                ids: list[int] = []
                async with client.stream("POST", "/v1/completions", json=body) as response:
                    async for line in response.aiter_lines():
                        if line.startswith("data: {"):
                            if not ids:
                                process.send_signal(signal.SIGTERM)
                                while (await client.get("/readyz")).status_code == 200:  # noqa: ASYNC110 (another process)
                                    await asyncio.sleep(0.01)
                                assert (await client.get("/livez")).status_code == 200
                                late = await client.post("/v1/completions", json={**body, "stream": False})
                                assert late.status_code == 200, "what comes within the drain delay is served"
                            ids += json.loads(line.removeprefix("data: "))["choices"][0]["token_ids"]
                assert ids == expected(PROMPT, 60), "the stream was cut short"
                with pytest.raises(httpx.TransportError):  # refused, or closed on a connection kept from before
                    await client.get("/health")
                assert await asyncio.wait_for(process.wait(), 10) == 0


async def test_nothing_of_http_is_imported_without_it(tmp_path: Path) -> None:
    save_toy_tokenizer(tmp_path)
    arguments = ("--target", "127.0.0.1:1", "--tokenizer", str(tmp_path), "--listen", "127.0.0.1:0")
    for http, imported in (((), False), (("--http", "127.0.0.1:0"), True)):
        async with started("-X", "importtime", "-m", "outrider.gateway", *arguments, *http) as process:
            reading = asyncio.create_task(process.stderr.read())  # type: ignore[union-attr]
            await announced(process, r"gateway listening on (\S+)")
            process.kill()
            log = (await reading).decode()
        assert "outrider.gateway.engine" in log
        assert [library in log for library in LIBRARIES] == [imported] * len(LIBRARIES)


async def test_signals_stay_the_gateway_s() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    async with gateway():
        assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


async def test_an_address_in_use_ends_the_start(tmp_path: Path) -> None:
    save_toy_tokenizer(tmp_path)
    async with serving(TargetServicer(ToyTarget())) as server:
        arguments = ("--target", "127.0.0.1:1", "--tokenizer", str(tmp_path), "--listen", "127.0.0.1:0")
        async with started("-m", "outrider.gateway", *arguments, "--http", server.address) as process:
            assert await asyncio.wait_for(process.wait(), START_S) == 2
            assert process.stderr is not None
            assert b"cannot listen on" in await process.stderr.read()
