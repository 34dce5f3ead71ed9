"""Reasoning and a constraint on the answer after it, with services: a gateway, a target and a draft of tiny models,
whose random weights mind neither."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
from openai import AsyncOpenAI
from support.gateways import over_grpc, save_thinking

from outrider.client import Client, Part
from outrider.draft_service.boot import start as start_draft
from outrider.draft_service.settings import DraftSettings
from outrider.gateway.engine import EngineConfig, GenerationEngine
from outrider.gateway.http.server import HttpServer
from outrider.gateway.peers.remote import RemoteDrafts, RemoteTargets
from outrider.gateway.servicer import GenerationServicer
from outrider.gateway.text.tokenizer import Tokenizer
from outrider.rpc.words.structured import StructuredOutput
from outrider.target_service.boot import build, load
from outrider.target_service.settings import TargetSettings

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "colour": {"enum": ["red", "green"]}},
    "required": ["ok", "colour"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
MESSAGES: list[Any] = [{"role": "user", "content": "the quick brown fox"}]
MOST = 6  # tokens of reasoning


@dataclass(frozen=True)
class Served:
    http: AsyncOpenAI
    grpc: Client
    tokenizer: Tokenizer


@pytest.fixture(scope="module", params=[True, False], ids=["opened", "not opened"])
async def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    folder = tmp_path_factory.mktemp("thinking")
    large, small = (save_thinking(folder / name, seed, request.param) for name, seed in (("large", 0), ("small", 1)))
    common: dict[str, Any] = {"listen": "127.0.0.1:0", "threads": 1}
    target_settings = TargetSettings(model=large, num_blocks=64, batch_invariant=True, **common)
    target = build(target_settings, load(target_settings))
    await target.server.start()
    draft = await start_draft(DraftSettings(model=small, num_blocks=64, **common))
    await draft.server.start()
    tokenizer = Tokenizer.load(large)
    async with RemoteTargets([target.server.address]) as targets, RemoteDrafts([draft.server.address]) as drafts:
        await targets.wait_usable()
        await drafts.wait_usable()
        config = EngineConfig(num_draft_tokens=4, draft_patience_ms=20_000)
        engine = GenerationEngine(tokenizer, targets, drafts, config)
        http = HttpServer(engine, "127.0.0.1:0", grace_s=1)
        await http.start()
        async with over_grpc(GenerationServicer(engine)) as address, Client(address) as client:
            openai = AsyncOpenAI(base_url=f"http://{http.address}/v1", api_key="none", max_retries=0, timeout=60)
            async with openai:
                yield Served(openai, client, tokenizer)
        await http.stop()
    await draft.stop()
    await target.stop()


async def ask(served: Served, seed: int, temperature: float, **speculation: Any) -> Any:
    extra = {"max_reasoning_tokens": MOST, "speculation": {"acceptance": "coupled", **speculation}}
    return await served.http.chat.completions.create(
        model="large",
        messages=MESSAGES,
        max_tokens=100,
        temperature=temperature,
        seed=seed,
        response_format=FORMAT,
        extra_body=extra,
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_the_answer_keeps_to_its_schema_and_reasoning_to_its_bound(served: Served, temperature: float) -> None:
    """The boundary lies where the bound puts it, inside a drafted window as well; the bytes are plain decoding's."""
    drafted = 0
    for seed in range(4):
        plain = await ask(served, seed, temperature, enabled=False)
        answer = await ask(served, seed, temperature, num_draft_tokens=3 + seed % 3)
        message = answer.choices[0].message
        said = json.loads(message.content)
        assert set(said) == {"ok", "colour"} and said["ok"] in (True, False) and said["colour"] in ("red", "green")
        assert answer.choices[0].finish_reason == "stop"
        assert message.model_dump() == plain.choices[0].message.model_dump()
        details = answer.usage.completion_tokens_details
        assert details is None or details.reasoning_tokens <= MOST
        drafted += answer.choices[0].speculation["num_draft_tokens"]
    assert drafted


async def test_a_resumed_completion_goes_on_with_both(served: Served) -> None:
    """In the middle of the reasoning, behind its end, and in the middle of the JSON text."""
    fields: dict[str, Any] = {
        "max_tokens": 100, "temperature": 0.0, "max_reasoning_tokens": MOST, "split_reasoning": True,
        "structured_output": StructuredOutput(json_schema=json.dumps(SCHEMA)),
    }  # fmt: skip

    def texts(parts: list[Part]) -> tuple[str, str]:
        return "".join(part.reasoning for part in parts), "".join(part.text for part in parts)

    whole = [part async for part in served.grpc.generate(messages=MESSAGES, **fields)]
    prompt, ids = whole[0].prompt_token_ids, [token for part in whole for token in part.token_ids]
    for cut in (1, MOST - 1, MOST, MOST + 1, MOST + 3, len(ids) - 1):
        begun = served.tokenizer.decode(ids[:cut])
        parts = [part async for part in served.grpc.generate(token_ids=prompt, output_ids=[ids[:cut]], **fields)]
        assert [token for part in parts for token in part.token_ids] == ids[cut:], begun
        assert texts(whole)[0].endswith(texts(parts)[0]) and texts(whole)[1].endswith(texts(parts)[1])
