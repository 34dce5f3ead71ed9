"""The gateway's process: it waits for its target, refuses what is no pair, and drains.

The gateway's process with --http, over a real target and draft, and without it."""

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

import grpc.aio
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from openai import AsyncOpenAI
from support.engines import hf_greedy
from support.fakes import DraftServicer, TargetServicer, ToyDraft, ToyTarget, draft_info, expected, serving, target_info
from support.gateways import PROMPT, gateway, save_toy_tokenizer
from support.models import save_tiny, tiny_hf_model, train_byte_level

from outrider.client import Client
from outrider.gateway.__main__ import GatewaySettings, main
from outrider.gateway.servicer import SERVICE_NAME
from outrider.gateway.text.tokenizer import Tokenizer
from outrider.rpc.errors import ResourceExhausted
from outrider.rpc.settings import SettingsError, load_settings

PROMPT_IDS = (11, 12, 13)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    train_byte_level().save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@asynccontextmanager
async def running(folder: Path, *arguments: str) -> AsyncIterator[Process]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "outrider.gateway", "--tokenizer", str(folder), "--listen", "127.0.0.1:0", *arguments),
        stdout=PIPE, stderr=PIPE, env=environment,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def address_of(process: Process) -> str:
    assert process.stdout is not None
    line = (await asyncio.wait_for(process.stdout.readline(), 20)).decode()
    assert "listening on" in line
    return line.split()[-1]


async def health(address: str, service: str = SERVICE_NAME) -> int:
    async with grpc.aio.insecure_channel(address) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
        return int(answer.status)


async def until_serving(address: str) -> None:
    async with asyncio.timeout(15):
        while await health(address) != health_pb2.HealthCheckResponse.SERVING:  # noqa: ASYNC110 (another process's)
            await asyncio.sleep(0.05)


async def test_waits_for_its_target_serves_and_drains(folder: Path) -> None:
    async with serving(TargetServicer(ToyTarget())) as server:
        target_address = server.address
    flags = ("--drain-delay-s", "0.3", "--max-request-bytes", "2048")
    name = f"dns:///localhost:{target_address.rpartition(':')[2]}"
    async with running(folder, "--target", name, "--draft", "127.0.0.1:1", *flags) as process:
        address = await address_of(process)
        assert await health(address) == health_pb2.HealthCheckResponse.NOT_SERVING
        assert await health(address, "") == health_pb2.HealthCheckResponse.SERVING, "it is alive without a target"
        async with serving(TargetServicer(ToyTarget(step_s=0.01)), target_address), Client(address) as client:
            await until_serving(address)
            with pytest.raises(ResourceExhausted, match="larger than max"):
                _ = [part async for part in client.generate("x" * 2048)]
            parts = []
            async for part in client.generate(token_ids=PROMPT_IDS, temperature=0.0, max_tokens=30):
                parts.append(part)
                if len(parts) == 1:
                    process.send_signal(signal.SIGTERM)
                    while await health(address) == health_pb2.HealthCheckResponse.SERVING:  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
                    assert await health(address, "") == health_pb2.HealthCheckResponse.SERVING
                    late = [part async for part in client.generate(token_ids=PROMPT_IDS, temperature=0.0, max_tokens=2)]
                    assert [token for part in late for token in part.token_ids] == expected(PROMPT_IDS, 2)
            assert [token for part in parts for token in part.token_ids] == expected(PROMPT_IDS, 30)
            assert await asyncio.wait_for(process.wait(), 10) == 0
        assert process.stderr is not None
        log = (await process.stderr.read()).decode()
        assert log.count("decoding goes on without a draft") == 1


@pytest.mark.parametrize("wrong", ["draft", "tokenizer"])
async def test_refuses_what_is_no_pair(folder: Path, wrong: str) -> None:
    fingerprint = Tokenizer.load(folder).fingerprint
    info = target_info(tokenizer_fingerprint="other" if wrong == "tokenizer" else fingerprint)
    other = draft_info(tokenizer_fingerprint="another" if wrong == "draft" else fingerprint)
    async with (
        serving(TargetServicer(ToyTarget(info=info))) as target,
        serving(DraftServicer(ToyDraft(info=other))) as draft,
        running(folder, "--target", target.address, "--draft", draft.address) as process,
    ):
        assert await asyncio.wait_for(process.wait(), 20) == 2
        assert process.stderr is not None
        last = (await process.stderr.read()).decode().splitlines()[-1]
        assert "outrider gateway: error:" in last and "toy" in last
        assert ("toy-draft" if wrong == "draft" else folder.name) in last


async def test_starts_in_the_middle_of_a_change_of_the_model(folder: Path) -> None:
    fitting = target_info(tokenizer_fingerprint=Tokenizer.load(folder).fingerprint)
    other = target_info(name="other", digest="d9", tokenizer_fingerprint="other")
    async with (
        serving(TargetServicer(ToyTarget(info=other))) as one,
        serving(TargetServicer(ToyTarget(info=fitting))) as two,
        running(folder, "--target", f"{one.address},{two.address}") as process,
    ):
        address = await address_of(process)
        await until_serving(address)
        async with Client(address) as client:
            assert (await client.info()).target.name == "toy"


@pytest.mark.parametrize("flag", ["target", "draft"])
def test_an_address_that_is_none_is_refused(tmp_path: Path, flag: str) -> None:
    given = {"target": ["a:1"], "tokenizer": str(tmp_path)} | {flag: ["b:2,ipv4:nobody"]}
    with pytest.raises(SettingsError, match=f"--{flag}: is 'ipv4:nobody'; allowed: host:port"):
        load_settings(GatewaySettings, given, environ={})


def test_settings(tmp_path: Path) -> None:
    settings = load_settings(GatewaySettings, {"target": ["a:1", "b:2"], "tokenizer": str(tmp_path)}, environ={})
    assert settings.listen == "127.0.0.1:50050" and settings.num_draft_tokens == 4 and settings.draft == []
    assert (settings.draft_patience_ms, settings.max_active, settings.max_waiting) == (500, 64, 256)
    assert (settings.max_admitted_tokens, settings.max_request_bytes) == (None, 4 << 20)
    assert (settings.drain_delay_s, settings.sse_keep_alive_s, settings.trust_traceparent) == (0, 15, False)


def test_bad_command_lines_end_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--target", "a:1"])
    assert "gateway.tokenizer is required" in capsys.readouterr().err
    assert main(["--target", "a:1", "--tokenizer", str(tmp_path / "none")]) == 2
    assert "is not a folder" in capsys.readouterr().err


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
