"""/tokenize and /detokenize, in vLLM's shapes."""

from __future__ import annotations

from typing import Any

import pytest
from support.gateways import gateway, toy_tokenizer

MESSAGES = [{"role": "user", "content": "the quick brown fox"}]


async def test_a_text_and_back() -> None:
    tokenizer, text = toy_tokenizer(), "naïve 你好 the lazy dog"
    async with gateway() as served, served.client() as client:
        answer = (await client.post("/tokenize", json={"model": "toy", "prompt": text})).json()
        ids = tokenizer.encode(text)
        assert answer == {"count": len(ids), "max_model_len": 256, "tokens": ids, "token_strs": None}
        named = (await client.post("/tokenize", json={"prompt": text, "return_token_strs": True})).json()
        assert named["token_strs"] == [tokenizer.backend.id_to_token(token) for token in ids]
        assert (await client.post("/detokenize", json={"tokens": ids})).json() == {"prompt": text}
        long = (await client.post("/tokenize", json={"prompt": "the fox " * 4000})).json()
        assert long["count"] > long["max_model_len"]  # it is counted, and not refused


async def test_a_conversation_is_what_the_model_reads() -> None:
    tokenizer = toy_tokenizer()
    async with gateway() as served, served.client() as client:
        for fields in ({}, {"add_generation_prompt": False}):
            answer = (await client.post("/tokenize", json={"messages": MESSAGES, **fields})).json()
            rendered = tokenizer.render_chat(MESSAGES, **fields)
            assert answer["tokens"] == tokenizer.encode(rendered, add_special_tokens=False)
        body = {"model": "toy", "messages": MESSAGES, "max_tokens": 1}
        usage = (await client.post("/v1/chat/completions", json=body)).json()["usage"]
        counted = (await client.post("/tokenize", json={"messages": MESSAGES})).json()["count"]
        assert usage["prompt_tokens"] == counted


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"prompt": 7}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [1, -1]}, "tokens[1]"),
        ("/detokenize", {"tokens": [400]}, "tokens[0]"),
        ("/detokenize", {"tokens": [True]}, "tokens[0]"),
    ],
)
async def test_names_what_is_wrong(path: str, body: dict[str, Any], param: str) -> None:
    async with gateway() as served, served.client() as client:
        answer = await client.post(path, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
        assert (await client.post(path, json={**body, "model": "other"})).status_code in (400, 404)


async def test_another_model_is_not_found() -> None:
    async with gateway() as served, served.client() as client:
        answer = await client.post("/tokenize", json={"model": "other", "prompt": "a"})
        assert answer.status_code == 404 and answer.json()["error"]["code"] == "model_not_found"
