"""/tokenize and /detokenize, in vLLM's shapes."""

from __future__ import annotations

import asyncio
import signal
import threading
from asyncio.subprocess import Process
from pathlib import Path
from threading import get_ident
from typing import Any

import pytest
from starlette.responses import JSONResponse
from support.fakes import until
from support.gateways import gateway, save_toy_tokenizer, toy_tokenizer
from support.models import train_byte_level

from outrider.gateway.http import tokenize, tokenize_apart
from outrider.gateway.http.json_text import InPieces
from outrider.gateway.http.shares import Shares
from outrider.gateway.http.tokenize_apart import Work
from outrider.gateway.text.tokenizer import LONG_TEXT, MAX_CHARS_PER_TOKEN, MAX_TOKENISED, Tokenizer
from outrider.rpc.words.request import GenerationRequest
from outrider.rpc.words.sampling_params import SamplingParams

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


GOING_ON = [*MESSAGES, {"role": "assistant", "content": "jumps over"}]
ENDING = "user: the quick brown fox\nassistant: jumps over"
DOCUMENTS = [{"title": "fox", "text": "It is quick."}]
SHOWS = "{% for d in documents or [] %}{{ d.title }}: {{ d.text }}\n{% endfor %}{{ messages[-1].content }}!"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"continue_final_message": True}, ENDING),
        ({"continue_final_message": True, "add_generation_prompt": False}, ENDING),
        ({"chat_template": SHOWS}, "jumps over!"),
        ({"chat_template": SHOWS, "documents": DOCUMENTS}, "fox: It is quick.\njumps over!"),
        ({"chat_template": SHOWS, "continue_final_message": True}, "jumps over"),
    ],
)
async def test_what_a_body_says_of_the_prompt(fields: dict[str, Any], expected: str) -> None:
    """Of a chat and of /tokenize alike."""
    ids = toy_tokenizer().encode(expected, add_special_tokens=False)
    body = {"messages": GOING_ON, "max_tokens": 1, **fields}
    async with gateway(trust_request_chat_template=True) as served, served.client() as client:
        assert (await client.post("/tokenize", json=body)).json()["tokens"] == ids
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
        assert list(served.target.opens[-1].prompt_ids) == ids


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"documents": DOCUMENTS}, "documents"),
        ({"documents": ["It is quick."]}, "documents[0]"),
        ({"chat_template": SHOWS}, "chat_template"),
        ({"chat_template": "{{ ''.__class__.__mro__ }}"}, "messages"),
    ],
)
async def test_what_a_body_cannot_say_of_the_prompt(fields: dict[str, Any], field: str) -> None:
    """Documents that the template does not show, and templates where no flag allows them; those have a sandbox."""
    body = {"messages": GOING_ON, "max_tokens": 1, **fields}
    async with gateway(trust_request_chat_template=field == "messages") as served, served.client() as client:
        for path in ("/tokenize", "/v1/chat/completions"):
            answer = await client.post(path, json=body)
            assert answer.status_code == 400 and answer.json()["error"]["param"] == field, answer.text


async def test_a_variable_may_have_any_name() -> None:
    async with gateway() as served, served.client() as client:
        body = {"messages": MESSAGES, "chat_template_kwargs": {"self": 1, "template": 2}}
        assert (await client.post("/tokenize", json=body)).status_code == 200


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
    seen(tokenize, "_detokenized")
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
    monkeypatch.setattr(tokenize, "account_of", lambda _: "salt a")
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


@pytest.mark.parametrize("folder_has", ["the same", "another", "none"])
async def test_megabytes_are_tokenised_in_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder_has: str
) -> None:
    """Which the folder's tokenizer is for, if it is still the one that is served; and then nobody here waits for it."""
    monkeypatch.setattr(tokenize, "MEGABYTES", 20_000)
    tokenizer, here = Tokenizer.load(save_toy_tokenizer(tmp_path)), list[int]()
    if folder_has == "none":
        (tmp_path / "tokenizer.json").unlink()
    elif folder_has == "another":
        train_byte_level(300).save(str(tmp_path / "tokenizer.json"))
    encode, text = Tokenizer.encode, 'the "lazy" 你好 🙂 ' * 1500

    def noted(*given: Any) -> Any:
        here.append(len(given[1]))
        return encode(*given)

    monkeypatch.setattr(Tokenizer, "encode", noted)
    async with gateway(tokenizer=tokenizer) as served, served.client() as client:
        answer = await client.post("/tokenize", json={"prompt": text, "return_token_strs": True})
    assert here == ([] if folder_has == "the same" else [len(text)])
    ids = tokenizer.backend.encode(text).ids
    names = [tokenizer.backend.id_to_token(token) for token in ids]
    told = {"count": len(ids), "max_model_len": 256, "tokens": ids, "token_strs": names}
    assert answer.content == JSONResponse(told).body and answer.headers["content-type"] == "application/json"


async def test_who_leaves_ends_that_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started, start = [], asyncio.create_subprocess_exec

    async def noted(*command: str, **options: Any) -> Process:
        started.append(await start(*command, **options))
        return started[0]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", noted)
    tokenizer = Tokenizer.load(save_toy_tokenizer(tmp_path))
    work = Work("", True, False, 256, tokenizer.fingerprint, tokenizer.name)
    asked = asyncio.create_task(tokenize_apart.apart(work, "a fox"))
    await until(lambda: started)
    asked.cancel()
    await asyncio.wait((asked,))
    assert started[0].returncode == -signal.SIGKILL


async def test_what_no_context_holds_is_refused_at_once_and_the_rest_is_charged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken, take = [], Shares.take

    def noted(shares: Shares, who: str, amount: int = 1) -> None:
        taken.append((shares._what, who, amount))
        take(shares, who, amount)

    monkeypatch.setattr(Shares, "take", noted)
    async with gateway() as served, served.client() as client:
        answer = await client.post("/tokenize", json={"prompt": "x" * (MAX_CHARS_PER_TOKEN * 256 + 1)})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")
        for path, body, size in (
            ("/tokenize", {"prompt": "x " * LONG_TEXT}, 2 * LONG_TEXT),
            ("/detokenize", {"tokens": [5] * (LONG_TEXT + 1)}, LONG_TEXT + 1),
        ):
            assert (await client.post(path, json=body)).status_code == 200
            assert taken[-1] == ("bytes of bodies under way", "127.0.0.1", size)


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
