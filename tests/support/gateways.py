"""Gateways with toy backends in this process: over gRPC and HTTP at once, so that what is asked of one can be asked
of the other; with streams that break where a test says, read by either client; and gateways as processes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import grpc.aio
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc
from openai import AsyncOpenAI
from support.environment import START_S
from support.fakes import ToyDraft, ToyTarget
from support.models import save_tiny, train_byte_level
from tokenizers import AddedToken, Regex, pre_tokenizers

from outrider.client import Client, Part, Retry, SyncClient
from outrider.gateway.engine import EngineConfig, GenerationEngine
from outrider.gateway.http.protocol import HttpOptions
from outrider.gateway.http.server import HttpServer
from outrider.gateway.metrics import GatewayMetrics
from outrider.gateway.request_metrics import measure
from outrider.gateway.servicer import SERVICE_NAME, GenerationServicer
from outrider.gateway.text.chat_template import ChatTemplate
from outrider.gateway.text.tokenizer import Tokenizer, make_detokenizer
from outrider.rpc.errors import OutriderError, Unavailable
from outrider.rpc.server import build_server
from outrider.rpc.words.sampling_params import SamplingParams
from outrider.v1 import generation_pb2 as pb

PROMPT = [11, 12, 13]
TEMPLATE = (
    "{% for message in messages %}{{ message.role + ': ' + message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@cache
def toy_tokenizer() -> Tokenizer:
    with TemporaryDirectory() as name:
        save_toy_tokenizer(Path(name))
        return Tokenizer.load(name)


PANICS = "a" * 24 + "!"
"""Of the tokenizer below the library's regular expressions give up there, by a panic."""


def panicking_tokenizer() -> Tokenizer:
    """The toy's, whose pattern takes exponential time."""
    backend = train_byte_level()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex("(a+)+$"), "isolated"), backend.pre_tokenizer]
    )
    return Tokenizer(backend, "panics", {"eos_token": "<|endoftext|>"}, ChatTemplate(TEMPLATE))


def save_toy_tokenizer(folder: Path) -> Path:
    train_byte_level().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>", "chat_template": TEMPLATE}))
    return folder


THINKING_TEMPLATE = TEMPLATE.replace("assistant:", "assistant:{{ reasoning_effort }}{% if opens %}<think>\n{% endif %}")


@cache
def thinking_tokenizer(opens: bool = False) -> Tokenizer:
    """The toy's, in which <think> and </think> are the last two tokens; `opens`: the template opens the first."""
    backend = train_byte_level(398)
    backend.add_tokens([AddedToken("<think>", special=False), AddedToken("</think>", special=False)])
    template = THINKING_TEMPLATE.replace("{% if opens %}", "{% if " + str(opens).lower() + " %}")
    return Tokenizer(backend, "thinking", {"eos_token": "<|endoftext|>"}, ChatTemplate(template))


def save_thinking(folder: Path, seed: int, opens: bool) -> Path:
    """A checkpoint of random weights with that tokenizer."""
    folder.mkdir()
    save_tiny(folder, seed=seed, vocab_size=400)
    tokenizer = thinking_tokenizer(opens)
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    assert tokenizer.chat_template is not None
    config = {"eos_token": "<|endoftext|>", "chat_template": tokenizer.chat_template.source}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@asynccontextmanager
async def over_grpc(servicer: GenerationServicer) -> AsyncIterator[str]:
    """The address of a gateway on the loopback."""
    server = build_server("127.0.0.1:0", [SERVICE_NAME], servicer.register)
    await server.start()
    try:
        yield server.address
    finally:
        await server.stop(0)


@dataclass
class Gateway:
    """One engine behind two servers."""

    engine: GenerationEngine
    metrics: GatewayMetrics
    http: HttpServer
    grpc_address: str
    target: ToyTarget

    @property
    def url(self) -> str:
        return f"http://{self.http.address}"

    def openai(self, **options: Any) -> AsyncOpenAI:
        options = {"max_retries": 0, "timeout": 20, **options}
        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", **options)

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, timeout=60)


@asynccontextmanager
async def gateway(
    target: ToyTarget | None = None,
    draft: ToyDraft | None = None,
    *,
    ready: bool = True,
    options: HttpOptions | None = None,
    tokenizer: Tokenizer | None = None,
    **config: Any,
) -> AsyncIterator[Gateway]:
    target = target or ToyTarget()
    engine = GenerationEngine(tokenizer or toy_tokenizer(), target, draft, EngineConfig(**config))
    metrics = measure(engine)
    http = HttpServer(engine, "127.0.0.1:0", ready=lambda: ready, grace_s=1, options=options, series=metrics)
    async with over_grpc(GenerationServicer(engine)) as address:
        await http.start()
        try:
            yield Gateway(engine, metrics, http, address, target)
        finally:
            await http.stop()
    assert engine.admission.num_active == 0


def text_of(ids: Sequence[int], prompt: Sequence[int] = PROMPT) -> str:
    """The text of generated ids, as the gateway gives it after a prompt."""
    detokenizer = make_detokenizer(toy_tokenizer(), SamplingParams(), prompt)
    return "".join(map(detokenizer.step, ids))


async def stream_events(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[str]:
    """The data of every event of a streamed answer."""
    async with client.stream("POST", path, json=body) as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"].startswith("text/event-stream")
        return [line.removeprefix("data: ") async for line in response.aiter_lines() if line]


Kind = Literal["aio", "sync"]
KINDS: tuple[Kind, ...] = ("aio", "sync")
QUICK = Retry(first_wait_s=0.001, most_wait_s=0.004)


AT_THE_END = -1  # after the last response, instead of a status that says that all is well


class _CutContext:
    """A call's context that raises instead of the write after `writes`."""

    def __init__(self, context: Any, writes: int, error: OutriderError) -> None:
        self._context, self._left, self._error = context, writes, error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def write(self, message: Any) -> None:
        if not self._left:
            raise self._error
        self._left -= 1
        await self._context.write(message)


class CuttingServicer(GenerationServicer):
    """Serves, and breaks the first streams after as many responses as `cuts` says, one entry for each stream."""

    def __init__(self, engine: GenerationEngine, cuts: list[int], error: OutriderError) -> None:
        super().__init__(engine)
        self.cuts, self.error = cuts, error
        self.requests: list[pb.GenerateRequest] = []
        self.address = ""

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> None:
        self.requests.append(request)
        cut = self.cuts.pop(0) if self.cuts else None
        if cut is not None:
            context = _CutContext(context, cut, self.error)
        await super().Generate(request, context)
        if cut == AT_THE_END:
            raise self.error


@asynccontextmanager
async def serving(
    *cuts: int, error: OutriderError | None = None, target: ToyTarget | None = None, **config: Any
) -> AsyncIterator[CuttingServicer]:
    """One gateway on the loopback."""
    engine = GenerationEngine(toy_tokenizer(), target or ToyTarget(), ToyDraft(wrong_every=3), EngineConfig(**config))
    servicer = CuttingServicer(engine, list(cuts), error or Unavailable("gone"))
    async with over_grpc(servicer) as servicer.address:
        yield servicer


async def ask(kind: Kind, *gateways: CuttingServicer, retry: Retry = QUICK, **options: Any) -> list[Part]:
    """All parts of a request, by either client."""
    addresses = [gateway.address for gateway in gateways]
    if kind == "aio":
        async with Client(addresses, retry=retry) as client:
            return [part async for part in client.generate(**options)]

    def read() -> list[Part]:
        with SyncClient(addresses, retry=retry) as client:
            return list(client.generate(**options))

    return await asyncio.to_thread(read)


def ids_of(parts: list[Part], index: int = 0) -> list[int]:
    return [token for part in parts if part.index == index for token in part.token_ids]


def text_of_parts(parts: list[Part], index: int = 0) -> str:
    return "".join(part.text for part in parts if part.index == index)


HTTP = r"gateway http on (\S+)"
METRICS = r"gateway metrics on (\S+)"
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@asynccontextmanager
async def started(*arguments: str) -> AsyncIterator[Process]:
    """A gateway's process, in which Python takes the arguments before "-m"."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, "--listen", "127.0.0.1:0", stdout=PIPE, stderr=PIPE, env=environment
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def running(folder: Path, *arguments: str) -> AbstractAsyncContextManager[Process]:
    return started("-m", "outrider.gateway", "--tokenizer", str(folder), *arguments)


async def announced(process: Process, pattern: str = r"gateway listening on (\S+)") -> str:
    """The address in the line that a process prints when it can be reached."""
    assert process.stdout is not None
    async with asyncio.timeout(START_S):
        while line := (await process.stdout.readline()).decode():
            if found := re.fullmatch(pattern, line.strip()):
                return found[1]
    raise AssertionError(f"the process ended before it printed {pattern}")


async def health(address: str, service: str = SERVICE_NAME) -> int:
    async with grpc.aio.insecure_channel(address) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
        return int(answer.status)


async def until_serving(address: str) -> None:
    async with asyncio.timeout(START_S):
        while await health(address) != SERVING:  # noqa: ASYNC110 (another process's)
            await asyncio.sleep(0.05)
