"""Calls that a real target is made to write: a model of random weights knows no tools, so that all it does right is the
grammar's doing. With drafts and without them the same is written."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError
from support.models import save_tiny
from support.tools import save_tool_tokenizer

from outrider.gateway.engine import EngineConfig, GenerationEngine
from outrider.gateway.http.server import HttpServer
from outrider.gateway.peers.local_drafts import LocalDrafter
from outrider.gateway.peers.remote import RemoteTargets
from outrider.gateway.text.tokenizer import Tokenizer
from outrider.proposers.ngram import NgramProposer
from outrider.target_service.boot import build, load
from outrider.target_service.settings import TargetSettings

VOCAB = 400
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "of": {"enum": ["x", "y"]}},
    "required": ["a", "of"],
    "additionalProperties": False,
}
ADD: dict[str, Any] = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}
NAMED = {"type": "function", "function": {"name": "add"}}


@asynccontextmanager
async def served(name: str, folder: Path) -> AsyncIterator[AsyncOpenAI]:
    """A target of random weights behind a gateway, by OpenAI's client."""
    save_tool_tokenizer(name, save_tiny(folder, vocab_size=VOCAB))
    settings = TargetSettings(model=folder, listen="127.0.0.1:0", num_blocks=256, threads=1)
    target = build(settings, load(settings))
    await target.server.start()
    drafter = LocalDrafter([NgramProposer()])
    async with RemoteTargets([target.server.address]) as targets:
        await targets.wait_usable()
        engine = GenerationEngine(Tokenizer.load(folder), targets, drafter, EngineConfig(model_name="toy"))
        http = HttpServer(engine, "127.0.0.1:0", ready=lambda: True, grace_s=1)
        await http.start()
        try:
            async with AsyncOpenAI(base_url=f"http://{http.address}/v1", api_key="none", max_retries=0) as client:
                yield client
        finally:
            await http.stop()
            drafter.close()
            await target.stop()


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "llama3_json", "mistral_args", "deepseek_v3"])
async def test_what_is_required_is_called(name: str, tmp_path: Path) -> None:
    asked: dict[str, Any] = {
        "model": "toy", "messages": [{"role": "user", "content": "hi"}], "tools": [ADD], "max_tokens": 200,
        "seed": 4,
    }  # fmt: skip
    async with served(name, tmp_path) as client:
        for choice, temperature in (("required", 0), (NAMED, 0), (NAMED, 1)):
            fields = {**asked, "tool_choice": choice, "temperature": temperature, "parallel_tool_calls": False}
            ids = []
            for enabled in (True, False):
                speculation = {"enabled": enabled, "acceptance": "coupled"}
                extra = {"speculation": speculation, "return_token_ids": True, "max_reasoning_tokens": 8}
                answer = await client.chat.completions.create(**fields, extra_body=extra)
                message, told = answer.choices[0].message, answer.choices[0].model_extra or {}
                calls: Any = message.tool_calls
                assert message.content is None and answer.choices[0].finish_reason == "tool_calls"
                assert [call.function.name for call in calls] == ["add"]
                arguments = json.loads(calls[0].function.arguments)
                assert set(arguments) == {"a", "of"} and 0 <= arguments["a"] <= 99 and arguments["of"] in ("x", "y")
                ids.append(told["token_ids"])
            assert ids[0] == ids[1]
        bad = {**PARAMETERS, "properties": {"a": {"type": "string", "pattern": "("}}}
        refused = {**asked, "tools": [{"type": "function", "function": {"name": "add", "parameters": bad}}]}
        with pytest.raises(BadRequestError) as caught:
            await client.chat.completions.create(**refused, tool_choice="required")
        assert caught.value.param == "tools"
