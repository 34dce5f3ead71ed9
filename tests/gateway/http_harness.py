"""A gateway with toy backends in this process, over gRPC and HTTP at once: what is asked of one can be asked of the
other."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
from gateway.toys import ToyDraft, ToyTarget
from openai import AsyncOpenAI
from tokenizer_factory import train_byte_level

from outrider.gateway.engine import EngineConfig
from outrider.gateway.http.app import HttpServer
from outrider.gateway.http.protocol import HttpOptions
from outrider.gateway.metrics import MeteredEngine
from outrider.gateway.servicer import SERVICE_NAME, GenerationServicer
from outrider.gateway.text.detokenizer import make_detokenizer
from outrider.gateway.text.tokenizer import Tokenizer
from outrider.rpc.sampling_params import SamplingParams
from outrider.rpc.server import build_server

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


def save_toy_tokenizer(folder: Path) -> Path:
    train_byte_level().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>", "chat_template": TEMPLATE}))
    return folder


@dataclass
class Gateway:
    """One engine behind two servers."""

    engine: MeteredEngine
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
        return httpx.AsyncClient(base_url=self.url, timeout=20)


@asynccontextmanager
async def gateway(
    target: ToyTarget | None = None,
    draft: ToyDraft | None = None,
    *,
    ready: bool = True,
    options: HttpOptions | None = None,
    **config: Any,
) -> AsyncIterator[Gateway]:
    target = target or ToyTarget()
    engine = MeteredEngine(toy_tokenizer(), target, draft, EngineConfig(**config))
    http = HttpServer(engine, "127.0.0.1:0", ready=lambda: ready, grace_s=1, options=options)
    server = build_server("127.0.0.1:0", [SERVICE_NAME], GenerationServicer(engine).register)
    await server.start()
    await http.start()
    try:
        yield Gateway(engine, http, server.address, target)
    finally:
        await http.stop()
        await server.stop(0)
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
