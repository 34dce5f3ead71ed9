"""/tokenize and /detokenize, in vLLM's shapes."""

from __future__ import annotations

import asyncio
import threading
from threading import get_ident
from typing import Any

import pytest
from starlette.responses import JSONResponse
from support.fakes import until
from support.gateways import gateway, toy_tokenizer

from outrider.gateway.http import tokenize
from outrider.gateway.http.json_text import InPieces
from outrider.gateway.http.tokenize import TokenizeEndpoints
from outrider.gateway.request import GenerationRequest
from outrider.gateway.text.tokenizer import LONG_TEXT, MAX_TOKENISED, Tokenizer
from outrider.rpc.sampling_params import SamplingParams

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


@pytest.mark.parametrize("long", [False, True])
async def test_a_long_answer_is_written_beside_the_event_loop(long: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []

    def seen(of: Any, name: str) -> None:
        method = getattr(of, name)

        def wrapper(*arguments: Any) -> Any:
            threads.append(get_ident())
            return method(*arguments)

        monkeypatch.setattr(of, name, wrapper)

    tokenizer, text = toy_tokenizer(), 'the "lazy" 你好 ' * (6000 if long else 1)
    ids = tokenizer.encode(text)
    seen(InPieces if long else JSONResponse, "render")
    seen(TokenizeEndpoints, "_detokenized")
    async with gateway() as served, served.client() as client:
        answer = await client.post("/tokenize", json={"prompt": text, "return_token_strs": True})
        names = [tokenizer.backend.id_to_token(token) for token in ids]
        told = {"count": len(ids), "max_model_len": 256, "tokens": ids, "token_strs": names}
        assert answer.content == JSONResponse(told).body and answer.headers["content-type"] == "application/json"
        assert (await client.post("/detokenize", json={"tokens": ids})).json() == {"prompt": text}
    assert (get_ident() in threads) != long and len(threads) >= 2


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
async def test_a_caller_s_long_texts_do_not_stand_before_another_s(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks here has its share with who generates, and the short ask without a turn."""
    monkeypatch.setattr(tokenize, "client_of", lambda _: "salt a")
    begun, go = threading.Semaphore(0), threading.Semaphore(0)
    encode, decode = Tokenizer.encode, Tokenizer.decode

    def slow(make: Any) -> Any:
        def wrapper(tokenizer: Tokenizer, given: Any, *arguments: Any) -> Any:
            if len(given) > LONG_TEXT and given[0] in ("s", 1):
                begun.release()
                assert go.acquire(timeout=60)
            return make(tokenizer, given, *arguments)

        return wrapper

    monkeypatch.setattr(Tokenizer, "encode", slow(encode))
    monkeypatch.setattr(Tokenizer, "decode", slow(decode))
    body = {"/tokenize": {"prompt": "s" * (LONG_TEXT + 1)}, "/detokenize": {"tokens": [1] * (LONG_TEXT + 1)}}[path]
    async with gateway() as served, served.client() as client:
        asked = [asyncio.create_task(client.post(path, json=body)) for _ in range(3 * MAX_TOKENISED)]
        texts = served.engine._texts
        await until(lambda: texts.num_active + texts.num_waiting == len(asked))
        assert texts.num_active == MAX_TOKENISED
        other = GenerationRequest(
            text="x" * (LONG_TEXT + 1), salt="b", sampling=SamplingParams(max_tokens=1, truncate_prompt_tokens=1)
        )
        other_ends = asyncio.create_task(anext(served.engine.generate(other)))
        assert (await client.post("/tokenize", json={"prompt": "short"})).status_code == 200
        await until(lambda: texts.num_waiting == len(asked) - MAX_TOKENISED + 1)
        go.release()  # one of them ends
        await asyncio.wait_for(other_ends, 20)
        go.release(len(asked))
        assert {answer.status_code for answer in await asyncio.gather(*asked)} == {200}
        assert texts.num_active == texts.num_waiting == 0


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
