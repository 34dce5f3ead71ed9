"""/v1/completions through the real openai package: every parameter arrives, every answer equals what gRPC gives.

/v1/chat/completions through the real openai package."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from threading import get_ident
from typing import Any

import pytest
from openai import OpenAI
from starlette.responses import JSONResponse
from support.fakes import EOS, ToyDraft, ToyTarget, expected, scripted, target_info, with_adapters
from support.gateways import PROMPT, Gateway, gateway, stream_events, text_of, toy_tokenizer

from outrider.client import Client
from outrider.gateway import off_loop, servicer
from outrider.gateway.admission import SLOW_REQUEST_BYTES
from outrider.gateway.engine import GenerationEngine
from outrider.gateway.http import serving, sse
from outrider.gateway.http.json_text import InPieces
from outrider.gateway.http.protocol import ChatBody, CompletionBody, HttpOptions, parse_body, read_chat, read_completion
from outrider.gateway.http.responses_input import ResponsesBody, read_responses
from outrider.gateway.http.token_texts import TokenTexts
from outrider.gateway.http.tokenize import DetokenizeBody, TokenizeBody
from outrider.gateway.text.tokenizer import LONG_TEXT, Tokenizer
from outrider.rpc.generation_codec import decode_request, encode_delta
from outrider.rpc.words.answer import GenerationDelta, TokenLogprob, Usage
from outrider.rpc.words.request import DRAFT_OPTIONS
from outrider.rpc.words.sampling_params import PARAMETERS, AcceptanceRule
from outrider.rpc.words.structured import StructuredOutput
from outrider.v1 import generation_pb2 as pb

GREEDY: dict[str, Any] = {"model": "toy", "prompt": PROMPT, "max_tokens": 20, "temperature": 0}


async def grpc_ids(served: Gateway, **fields: Any) -> list[int]:
    async with Client(served.grpc_address) as client:
        parts = [part async for part in client.generate(token_ids=tuple(PROMPT), **fields)]
    return [token for part in parts for token in part.token_ids]


def test_a_prompt_had_in_the_cache_what_the_completion_found_that_computed_it() -> None:
    """Two prompts of three completions, which end in any order: whichever computed the prompt, the others found it."""
    usage = serving.UsageSum()
    for index, cached in ((2, 48), (4, 16), (0, 48), (3, 32), (1, 0), (5, 32)):
        usage.add(GenerationDelta("x", index, usage=Usage(50, 7, cached)), 3)
    assert (usage.prompt, usage.completion, usage.cached) == (100, 42, 16)


async def test_equals_grpc_and_says_what_it_did() -> None:
    async with gateway(ToyTarget(num_cached=2), ToyDraft(wrong_every=3)) as served, served.openai() as client:
        raw = await client.completions.create(**GREEDY, extra_body={"return_token_ids": True, "speculation": {}})
        choice = raw.choices[0]
        extra = choice.model_extra or {}
        assert extra["token_ids"] == await grpc_ids(served, temperature=0.0, max_tokens=20) == expected(PROMPT, 20)
        assert choice.text == text_of(expected(PROMPT, 20)) and choice.finish_reason == "length"
        assert raw.object == "text_completion" and raw.model == "toy" and raw.system_fingerprint == "fp_d1"
        assert raw.usage is not None and raw.usage.model_dump(exclude_none=True) == {
            "prompt_tokens": 3,
            "completion_tokens": 20,
            "total_tokens": 23,
            "prompt_tokens_details": {"cached_tokens": 2},
        }
        stats = extra["speculation"]
        assert stats["num_accepted_tokens"] == extra["token_origins"].count("accepted") > 0
        assert stats["acceptance"] == "block" and 0 < stats["acceptance_rate"] < 1
        assert stats["num_rounds_by_mode"] == {"sequential": stats["num_rounds"]} and stats["mode"] == "sequential"
        assert stats["method"] == "draft_model"


async def test_nothing_is_kept_of_a_field_that_nobody_knows() -> None:
    """It would be held for as long as the request is; sampling parameters stand among the further fields."""
    body: dict[str, Any] = {
        "unknown": [[]] * 100,
        "bad_words_ids": [[]],
        "top_k": 5,
        "text": {"more": [[]]},
    }
    chat = {**body, "messages": [{"role": "user", "content": "hi", "name": "me", "more": 1}]}
    reasoning = {"effort": "low", "summary": [[]], "more": [[]]}
    async with gateway() as served:
        asked = read_responses({**body, "input": "hi", "reasoning": reasoning}, None, served.engine)
        requests = [read_chat(chat, None, served.engine), read_completion({**GREEDY, **body}, None, served.engine)]
    for read in (*requests, asked.chat):
        known = set(read.body.model_extra or {})
        assert "top_k" in known and known <= {name for name, row in PARAMETERS.items() if row.http == ""}
        assert read.requests[0].sampling is not None and read.requests[0].sampling.top_k == 5
    assert "[[]" not in repr(asked.body) and requests[0].requests[0].messages is not None
    assert requests[0].requests[0].messages[0] == {"role": "user", "content": "hi", "name": "me", "more": 1}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("wanted", ["none", "summary", "detailed"])
async def test_what_became_of_drafts_in_vllm_s_shape(wanted: str, stream: bool) -> None:
    """As AIPerf reads it: beside the choices, once, of all of them together; in a stream with the last chunk."""
    options = HttpOptions(spec_decode_metrics=wanted)
    body = {**GREEDY, "n": 2, "speculation": {}, "stream": stream, "stream_options": {"include_usage": True}}
    async with gateway(draft=ToyDraft(wrong_every=3), options=options) as served, served.client() as client:
        if stream:
            *chunks, last = [json.loads(event) for event in (await stream_events(client, "/v1/completions", body))[:-1]]
            assert not any("metrics" in chunk for chunk in chunks) and last["usage"]["completion_tokens"] == 40
            tallies = [
                choice["speculation"] for chunk in chunks for choice in chunk["choices"] if "speculation" in choice
            ]
        else:
            last = (await client.post("/v1/completions", json={**body, "stream_options": None})).json()
            tallies = [choice["speculation"] for choice in last["choices"]]
        if wanted == "none":
            assert "metrics" not in last
            return
        said = last["metrics"]["speculative_decoding"]
        drafts, drafted, accepted = (
            sum(tally[name] for tally in tallies) for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
        )
        assert said["num_spec_steps"] == drafts == sum(said["acceptance_histogram"]) > 0
        assert said["num_draft_tokens"] == drafted and said["num_accepted_draft_tokens"] == accepted
        assert accepted == sum(count * steps for count, steps in enumerate(said["acceptance_histogram"]))
        assert said["mean_acceptance_length"] == 1 + accepted / drafts and said["num_spec_tokens"] == 4
        assert said["draft_acceptance_rate"] == accepted / drafted
        assert (sum(said.get("per_step_drafted", ())), sum(said.get("per_step_accepted", ()))) == (
            (drafted, accepted) if wanted == "detailed" else (0, 0)
        )


@pytest.mark.parametrize("stream", [False, True])
async def test_the_mode_is_the_request_s(stream: bool) -> None:
    """The gateway decodes in order here; each request may ask for more, and the answer says what was done."""
    async with gateway(draft=ToyDraft(wrong_every=9)) as served, served.openai() as client:
        for fields, modes in (
            ({"mode": "chains", "num_draft_tokens": 3}, {"chains"}),
            ({"mode": "branches", "num_draft_tokens": 3}, {"branches"}),
            ({"mode": "auto"}, {"off", "sequential", "chains", "branches"}),
            ({"enabled": False}, {"off"}),
        ):
            body: Any = {"extra_body": {"speculation": fields, "return_token_ids": True}}
            answer: Any = await client.completions.create(**GREEDY, stream=stream, **body)
            chunks = [chunk.choices[0] async for chunk in answer] if stream else answer.choices
            extras: list[dict[str, Any]] = [chunk.model_extra or {} for chunk in chunks]
            assert [token for extra in extras for token in extra["token_ids"]] == expected(PROMPT, 20)
            assert ["speculation" in extra for extra in extras] == [False] * (len(extras) - 1) + [True]
            did = extras[-1]["speculation"]
            assert did["mode"] in modes and set(did["num_rounds_by_mode"]) <= modes
            assert sum(did["num_rounds_by_mode"].values()) == did["num_rounds"]


async def test_without_extensions_the_answer_has_openai_s_fields_alone() -> None:
    async with gateway(draft=ToyDraft()) as served, served.client() as client:
        answer = (await client.post("/v1/completions", json={**GREEDY, "model": None})).json()
        assert set(answer) == {"id", "object", "created", "model", "system_fingerprint", "choices", "usage"}
        assert set(answer["choices"][0]) == {"index", "text", "logprobs", "finish_reason", "stop_reason"}


async def test_a_stream_is_the_whole_answer_in_pieces() -> None:
    async with gateway(draft=ToyDraft(wrong_every=4)) as served, served.openai() as client:
        whole = await client.completions.create(**GREEDY, logprobs=1)
        stream = await client.completions.create(**GREEDY, logprobs=1, stream=True)
        chunks = [chunk async for chunk in stream]
        assert len(chunks) > 2 and all(chunk.usage is None for chunk in chunks)
        assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
        assert [chunk.choices[0].finish_reason for chunk in chunks][-2:] == [None, "length"]
        pieces = [chunk.choices[0].logprobs for chunk in chunks]
        assert whole.choices[0].logprobs is not None
        for name in ("tokens", "token_logprobs", "top_logprobs"):
            joined = [value for piece in pieces if piece is not None for value in getattr(piece, name)]
            assert joined == getattr(whole.choices[0].logprobs, name) and len(joined) == 20
        assert len({chunk.id for chunk in chunks}) == 1 and chunks[0].id.startswith("cmpl-")


@pytest.mark.parametrize("stream", [False, True])
async def test_offsets_are_places_in_the_text(stream: bool) -> None:
    """Also where a token is half a character, and where text is held back for a stop string."""
    expected_text = "naïve 你好 the lazy dog"
    ids = toy_tokenizer().encode(expected_text, add_special_tokens=False)
    rule = scripted(ids)
    async with gateway(ToyTarget(rule=rule), ToyDraft(rule=rule, wrong_every=3)) as served, served.client() as client:
        body = {**GREEDY, "max_tokens": len(ids), "logprobs": 0, "stream": stream, "stop": "lazy cat"}
        if stream:
            events = await stream_events(client, "/v1/completions", body)
            choices = [json.loads(line)["choices"][0] for line in events[:-1]]
        else:
            choices = (await client.post("/v1/completions", json=body)).json()["choices"]
        text = "".join(choice["text"] for choice in choices)
        tokens = [token for choice in choices for token in choice["logprobs"]["tokens"]]
        offsets = [offset for choice in choices for offset in choice["logprobs"]["text_offset"]]
        assert text == expected_text and len(tokens) == len(ids) and len(choices) > 2 * stream
        whole = [
            (token, offset) for token, offset in zip(tokens, offsets, strict=True) if not token.startswith("bytes:")
        ]
        assert 3 < len(whole) < len(tokens)
        assert all(text[offset:].startswith(token) for token, offset in whole)


def said_by(events: list[str], path: str, index: int = 0) -> dict[str, Any]:
    """What the events of a stream say of a completion, joined."""
    said: dict[str, Any] = {"text": "", "ids": [], "tokens": [], "offsets": [], "finish": None, "seed": None}
    for event in events:
        for choice in json.loads(event).get("choices", ()) if event != "[DONE]" else ():
            if choice["index"] != index:
                continue
            said["text"] += choice["text"] if path == "/v1/completions" else choice["delta"].get("content", "")
            said["ids"] += choice.get("token_ids", ())
            said["seed"] = choice.get("seed", said["seed"])
            said["finish"] = said["finish"] or choice["finish_reason"]
            logprobs = choice["logprobs"] or {}
            said["tokens"] += logprobs.get("tokens", [entry["token"] for entry in logprobs.get("content", ())])
            said["offsets"] += logprobs.get("text_offset", ())
    return said


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("temperature", [0, 1])
async def test_a_stream_that_was_cut_goes_on_by_output_ids(path: str, temperature: float) -> None:
    """Behind whichever of its events it was cut, half a character or what might have become a stop string held back:
    text, ids, log probabilities and their places are together those of the unbroken stream, and what an earlier stream
    brought is not charged again."""
    chat = path != "/v1/completions"
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]} if chat else {"prompt": PROMPT}
    body |= {"temperature": temperature, "max_tokens": 24, "stream": True, "return_token_ids": True}
    body |= {"logprobs": True} if chat else {"logprobs": 0}
    body |= {"speculation": {"acceptance": "coupled"}, "stream_options": {"include_usage": True}}
    async with gateway(draft=ToyDraft(wrong_every=3)) as served, served.client() as client:
        first = said_by(await stream_events(client, path, body), path)
        body |= {"seed": first["seed"], "stop": [f"{one}\u2603" for one in sorted(set(first["text"]) - {"\ufffd"})[:8]]}
        events = await stream_events(client, path, body)
        unbroken = said_by(events, path)
        assert unbroken["ids"] == first["ids"] and len(first["ids"]) == 24 and unbroken["finish"] == "length"
        for cut in range(len(events)):
            begun = said_by(events[:cut], path)
            resumed = {**body, "output_ids": begun["ids"] if cut % 2 else [begun["ids"]]}
            more = await stream_events(client, path, resumed)
            rest = said_by(more, path)
            for what in ("text", "ids", "tokens", "offsets"):
                assert begun[what] + rest[what] == unbroken[what], (what, cut)
            assert rest["finish"] == "length"
            assert json.loads(more[-2])["usage"]["completion_tokens"] == 24 - len(begun["ids"])


async def test_every_completion_goes_on_by_its_own_ids() -> None:
    body = {**GREEDY, "n": 3, "stream": True, "return_token_ids": True, "seed": 5, "temperature": 1}
    async with gateway(draft=ToyDraft(wrong_every=3)) as served, served.client() as client:
        events = await stream_events(client, "/v1/completions", body)
        whole = [said_by(events, "/v1/completions", index) for index in range(3)]
        have = [whole[0]["ids"][:7], [], whole[2]["ids"]]
        events = await stream_events(client, "/v1/completions", {**body, "output_ids": have})
        for index in range(3):
            rest = said_by(events, "/v1/completions", index)
            assert have[index] + rest["ids"] == whole[index]["ids"] and rest["finish"] == "length"
            assert whole[index]["text"].endswith(rest["text"])
        answer = (await client.post("/v1/completions", json={**body, "stream": False, "output_ids": have})).json()
        assert answer["choices"][0]["token_ids"] == whole[0]["ids"][7:] and answer["choices"][0]["seed"] == 5
        assert answer["usage"]["completion_tokens"] == 20 - 7 + 20


async def test_usage_comes_last_and_only_if_asked_for() -> None:
    async with gateway() as served, served.client() as client:
        body = {**GREEDY, "stream": True, "stream_options": {"include_usage": True}}
        *chunks, last, done = await stream_events(client, "/v1/completions", body)
        assert done == "[DONE]" and json.loads(last)["choices"] == []
        assert json.loads(last)["usage"]["completion_tokens"] == 20
        assert all(json.loads(chunk)["usage"] is None for chunk in chunks)


async def test_prompts_of_every_kind_and_n() -> None:
    async with gateway(draft=ToyDraft(wrong_every=3)) as served, served.openai() as client:
        text = "the quick brown fox"
        ids = toy_tokenizer().encode(text)
        for prompts in ([text, text], [ids, ids], [ids, PROMPT]):
            answer = await client.completions.create(**{**GREEDY, "prompt": prompts, "n": 2, "max_tokens": 6})
            assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
            second = prompts[1] if isinstance(prompts[1], list) else ids
            assert answer.choices[0].text == answer.choices[1].text
            assert answer.choices[3].text == text_of(expected(second, 6), second)
            assert answer.usage is not None
            assert answer.usage.prompt_tokens == len(ids) + len(second) and answer.usage.completion_tokens == 24
        chunks = await client.completions.create(**{**GREEDY, "prompt": [PROMPT, ids], "n": 2, "stream": True})
        texts: dict[int, str] = {}
        async for chunk in chunks:
            texts[chunk.choices[0].index] = texts.get(chunk.choices[0].index, "") + chunk.choices[0].text
        assert texts[0] == texts[1] == text_of(expected(PROMPT, 20))
        assert texts[2] == texts[3] == text_of(expected(ids, 20), ids)


@pytest.mark.parametrize("stream", [False, True])
async def test_stops_cut_text_and_say_why(stream: bool) -> None:
    ids = toy_tokenizer().encode("the lazy dog stop signs", add_special_tokens=False)
    async with gateway(ToyTarget(rule=scripted(ids)), ToyDraft(rule=scripted(ids))) as served:

        async def ask(**fields: Any) -> tuple[str, Any, Any]:
            body = {**GREEDY, "max_tokens": 60, "stream": stream, **fields}
            async with served.client() as client:
                if not stream:
                    choices = (await client.post("/v1/completions", json=body)).json()["choices"]
                else:
                    events = await stream_events(client, "/v1/completions", body)
                    choices = [json.loads(line)["choices"][0] for line in events[:-1]]
            last = choices[-1]
            return "".join(choice["text"] for choice in choices), last["finish_reason"], last["stop_reason"]

        assert await ask() == ("the lazy dog stop signs", "stop", None)
        assert await ask(stop=" stop") == ("the lazy dog", "stop", " stop")
        assert await ask(stop=["none", "zy d"]) == ("the la", "stop", "zy d")
        assert await ask(stop="dog", include_stop_str_in_output=True) == ("the lazy dog", "stop", "dog")
        assert (await ask(stop_token_ids=[ids[2]]))[1:] == ("stop", ids[2])
        assert (await ask(max_tokens=2))[1] == "length"


async def test_every_parameter_reaches_the_target() -> None:
    given = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.1, "presence_penalty": 0.2,
        "frequency_penalty": -0.3, "min_tokens": 2, "max_tokens": 9, "ignore_eos": True, "seed": 77,
        "skip_special_tokens": False,
    }  # fmt: skip
    lists = {"stop_token_ids": [3, 4], "allowed_token_ids": [5, 6, 7], "logit_bias": {"5": 1.5, "6": -100}}
    target, draft = ToyTarget(), ToyDraft()
    async with gateway(target, draft) as served, served.client() as client:
        speculation = {"num_draft_tokens": 2, "acceptance": "coupled", "method": "draft_model", "mode": "sequential"}
        extra = {"bad_words": ["fox"], "priority": 3, "cache_salt": "pepper", "speculation": speculation}
        answer = await client.post("/v1/completions", json={"prompt": PROMPT, **given, **lists, **extra, "n": 2})
        assert answer.status_code == 200, answer.text
        first, second = target.opens
        for name in set(given) - {"seed"}:
            assert getattr(first.sampling, name) == given[name], name
        assert first.seed == second.seed == 77 and (first.completion, second.completion) == (0, 1)
        assert first.sampling.logit_bias == {5: 1.5, 6: -100} and first.sampling.stop_token_ids == (3, 4)
        assert first.sampling.allowed_token_ids == (5, 6, 7) and first.sampling.bad_words_ids
        assert first.priority == 3 and first.salt == "pepper" and first.acceptance is AcceptanceRule.COUPLED
        assert draft.opens[0].method == "draft_model"
        plain = await client.post("/v1/completions", json={**GREEDY, "speculation": {"enabled": False}, "seed": -1})
        assert plain.json()["choices"][0]["speculation"]["num_drafts"] == 0
        assert len(draft.opens) == 2 and target.opens[-1].seed == 2**64 - 1


@pytest.mark.parametrize(
    ("body", "sent"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, StructuredOutput(json_object=True)),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": {}}}},
            StructuredOutput(json_schema="{}"),
        ),
        (
            {"response_format": {"type": "structural_tag", "format": {"type": "any_text"}}},
            StructuredOutput(structural_tag='{"type": "structural_tag", "format": {"type": "any_text"}}'),
        ),
        (
            {"response_format": {"type": "structural_tag", "structures": [], "triggers": ["<f"]}},
            StructuredOutput(structural_tag='{"type": "structural_tag", "structures": [], "triggers": ["<f"]}'),
        ),
        ({"structured_outputs": {"json": {"type": "null"}}}, StructuredOutput(json_schema='{"type": "null"}')),
        ({"structured_outputs": {"structural_tag": "{}"}}, StructuredOutput(structural_tag="{}")),
        ({"structured_outputs": {"regex": "a+"}}, StructuredOutput(regex="a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, StructuredOutput(choice=("a", "b"))),
        ({"guided_json": {"type": "null"}}, StructuredOutput(json_schema='{"type": "null"}')),
        ({"guided_json": "{}"}, StructuredOutput(json_schema="{}")),
        ({"guided_regex": "a+"}, StructuredOutput(regex="a+")),
        ({"guided_grammar": "start: /a/"}, StructuredOutput(grammar="start: /a/")),
        ({"guided_choice": ["a"]}, StructuredOutput(choice=("a",))),
    ],
)
async def test_constraints_of_every_kind_arrive(body: dict[str, Any], sent: StructuredOutput | None) -> None:
    async with gateway() as served, served.client() as client:
        answer = await client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 2, **body})
        assert answer.status_code == 200, answer.text
        assert served.target.opens[0].sampling.structured_output == sent


def test_one_request_whatever_the_entry() -> None:
    """What HTTP reads equals what gRPC reads, field by field."""
    target = ToyTarget(info=with_adapters(target_info(), sql="a1"))
    engine = GenerationEngine(toy_tokenizer(), target)
    body = parse_body(
        b'{"prompt": [11, 12], "temperature": 0.5, "top_k": 3, "stop": ["a", "b"], "logit_bias": {"7": 2}, "n": 2,'
        b'"max_tokens": 5, "model": "sql", "logprobs": 2, "seed": 9, "min_tokens": 1, "cache_salt": "s", "priority": 1,'
        b'"prediction": {"type": "content", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},'
        b'"speculation": {"num_draft_tokens": 3, "acceptance": "coupled", "mode": "chains", "method": "ngram",'
        b'"methods": ["ngram"], %b, "enabled": true}, "request_id": "r", "output_ids": [[1, 2], []]}'
        % json.dumps(dict.fromkeys(DRAFT_OPTIONS, 0.25))[1:-1].encode()
    )
    message = pb.GenerateRequest(token_ids={"ids": [11, 12]}, request_id="r", n=2, salt="s", priority=1, adapter="sql")
    message.prediction.text = "ab"
    message.output_ids.extend([pb.TokenIds(ids=[1, 2]), pb.TokenIds()])
    for name, value in {
        "temperature": 0.5,
        "top_k": 3,
        "max_tokens": 5,
        "logprobs": 2,
        "seed": 9,
        "min_tokens": 1,
    }.items():
        setattr(message.sampling, name, value)
    message.sampling.stop.extend(["a", "b"])
    message.sampling.logit_bias[7] = 2
    message.speculation.num_draft_tokens, message.speculation.acceptance = 3, pb.ACCEPTANCE_RULE_COUPLED
    message.speculation.mode, message.speculation.method, message.speculation.enabled = "chains", "ngram", True
    message.speculation.methods.append("ngram")
    for name in DRAFT_OPTIONS:
        setattr(message.speculation, name, 0.25)
    defaults = engine.verifier.info.model.default_sampling
    for given, sent in ((body, message), (parse_body(b'{"prompt": "x"}'), pb.GenerateRequest(text="x"))):
        (read,) = read_completion(given, None, engine).requests
        decoded = decode_request(sent, defaults)
        assert replace(read, unset=decoded.unset) == decoded and read.max_tokens_given == decoded.max_tokens_given


async def test_many_log_probabilities_are_written_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []
    writers: set[str] = set()

    def seen(function: Any) -> Any:
        def wrapper(*arguments: Any) -> Any:
            threads.append(get_ident())
            writers.add(function.__qualname__)
            return function(*arguments)

        return wrapper

    for kind in (JSONResponse, InPieces):
        monkeypatch.setattr(kind, "render", seen(kind.render))
    for name in ("dumps", "dumps_in_pieces"):
        monkeypatch.setattr(sse, name, seen(getattr(sse, name)))
    monkeypatch.setattr(servicer, "encode_delta", seen(encode_delta))
    for module in (off_loop, serving):
        monkeypatch.setattr(module, "SLOW_LOGPROBS", 0)
    asked = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0}
    async with gateway(ToyTarget()) as served, served.client() as client:
        answer = await client.post("/v1/completions", json={**asked, "logprobs": 1})
        assert len(answer.json()["choices"][0]["logprobs"]["tokens"]) == 4
        await grpc_ids(served, temperature=0.0, max_tokens=4, logprobs=1)
        assert len(threads) == 5 and get_ident() not in threads
        await stream_events(client, "/v1/completions", {**asked, "logprobs": 1, "stream": True})
        assert len(threads) >= 9 and get_ident() not in threads
        assert writers == {"InPieces.render", "dumps_in_pieces", "encode_delta"}
        threads.clear()
        await grpc_ids(served, temperature=0.0, max_tokens=1, prompt_logprobs=1)
        assert threads and threads[0] != get_ident()
        threads.clear()
        await client.post("/v1/completions", json=asked)
        await grpc_ids(served, temperature=0.0, max_tokens=4)
        assert {*threads} == {get_ident()} and "JSONResponse.render" in writers


async def test_logprobs_name_tokens_by_text_or_bytes() -> None:
    tokenizer = toy_tokenizer()
    ids = tokenizer.encode(" naïve 你", add_special_tokens=False)
    async with gateway(ToyTarget(rule=scripted([*ids, EOS]))) as served, served.openai() as client:
        answer = await client.completions.create(**{**GREEDY, "logprobs": 0})
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None and logprobs.tokens is not None
        assert logprobs.top_logprobs == [{name: -0.5} for name in logprobs.tokens]  # the chosen one's, as by vLLM
        raw = b"".join(
            bytes.fromhex(name.removeprefix("bytes:").replace("\\x", ""))
            if name.startswith("bytes:")
            else name.encode()
            for name in logprobs.tokens[:-1]
        )
        assert raw.decode() == " naïve 你" and logprobs.tokens[-1] == "<|endoftext|>"
        assert logprobs.token_logprobs == [-0.5] * (len(ids) + 1)


MESSAGES: list[Any] = [{"role": "system", "content": "stop words"}, {"role": "user", "content": "the quick brown fox"}]
RENDERED = "system: stop words\nuser: the quick brown fox\nassistant:"
ASK: dict[str, Any] = {"model": "toy", "messages": MESSAGES, "max_tokens": 12, "temperature": 0}


def prompt_ids() -> list[int]:
    return toy_tokenizer().encode(RENDERED, add_special_tokens=False)


def answer_text(count: int) -> str:
    return text_of(expected(prompt_ids(), count), prompt_ids())


async def test_whole_and_streamed() -> None:
    async with gateway(draft=ToyDraft(wrong_every=3)) as served, served.openai() as client:
        whole = await client.chat.completions.create(**ASK)
        assert whole.object == "chat.completion" and whole.id.startswith("chatcmpl-")
        message = whole.choices[0].message
        assert (message.role, message.content, message.refusal) == ("assistant", answer_text(12), None)
        assert whole.choices[0].finish_reason == "length" and whole.choices[0].logprobs is None
        assert whole.usage is not None and whole.usage.prompt_tokens == len(prompt_ids())
        stream = await client.chat.completions.create(**ASK, stream=True, n=2, stream_options={"include_usage": True})
        texts, roles, finishes, usage = {0: "", 1: ""}, [], [], None
        async for chunk in stream:
            assert chunk.object == "chat.completion.chunk"
            usage = chunk.usage
            for choice in chunk.choices:
                assert usage is None and (choice.delta.role is None or not texts[choice.index])
                roles.append(choice.delta.role)
                texts[choice.index] += choice.delta.content or ""
                finishes.append(choice.finish_reason)
        assert texts == {0: answer_text(12), 1: answer_text(12)} and roles.count("assistant") == 2
        assert finishes.count("length") == 2 and usage is not None and usage.completion_tokens == 24


async def test_the_synchronous_client_and_its_stream_helper() -> None:
    def ask(base_url: str) -> tuple[str, int]:
        with OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=60) as client:
            with client.chat.completions.stream(**ASK) as stream:
                for _ in stream:
                    pass
                final = stream.get_final_completion()
            return final.choices[0].message.content or "", len(client.models.list().data)

    rule = scripted(toy_tokenizer().encode("the lazy dog", add_special_tokens=False))
    async with gateway(ToyTarget(rule=rule), ToyDraft(rule=rule)) as served:
        assert await asyncio.to_thread(ask, f"{served.url}/v1") == ("the lazy dog", 1)


async def test_without_max_tokens_it_goes_on_to_the_context_s_end() -> None:
    async with gateway() as served, served.openai() as client:
        answer = await client.chat.completions.create(model="toy", messages=MESSAGES, temperature=0)
        assert answer.usage is not None and answer.usage.total_tokens == 256
        capped = await client.chat.completions.create(model="toy", messages=MESSAGES, max_completion_tokens=3)
        assert capped.usage is not None and capped.usage.completion_tokens == 3


async def test_logprobs_with_alternatives() -> None:
    ids = toy_tokenizer().encode("the dog", add_special_tokens=False)
    async with gateway(ToyTarget(rule=scripted(ids))) as served, served.openai() as client:
        answer = await client.chat.completions.create(**ASK, logprobs=True, top_logprobs=1)
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None and logprobs.content is not None
        assert bytes(byte for entry in logprobs.content[:-1] for byte in entry.bytes or ()) == b"the dog"
        assert all(len(entry.top_logprobs) == 1 and entry.logprob == -0.5 for entry in logprobs.content)
        bare = await client.chat.completions.create(**ASK, logprobs=True)
        assert bare.choices[0].logprobs is not None and bare.choices[0].logprobs.content is not None
        assert all(entry.top_logprobs == [] for entry in bare.choices[0].logprobs.content)


def test_alternatives_are_the_most_probable_by_rank() -> None:
    """The target names the chosen token first, and does not repeat it among the others."""
    chosen = TokenLogprob(40, -3.0, 9)
    others = (TokenLogprob(41, -0.5, 1), TokenLogprob(42, float("-inf"), 2))
    entry = TokenTexts(toy_tokenizer()).chat([(chosen, *others)], 2)["content"][0]
    assert entry["logprob"] == -3.0 and [top["logprob"] for top in entry["top_logprobs"]] == [-0.5, -9999.0]
    every = TokenTexts(toy_tokenizer()).chat([(chosen, *others)], -1)["content"][0]
    assert len(every["top_logprobs"]) == 1 + len(others), "all that there are"
    within = TokenTexts(toy_tokenizer()).chat([(TokenLogprob(40, -1.0, 2), others[0])], 2)["content"][0]
    assert [top["logprob"] for top in within["top_logprobs"]] == [-0.5, -1.0]


async def test_parts_of_text_and_stops() -> None:
    target = ToyTarget(rule=scripted(toy_tokenizer().encode("the lazy dog", add_special_tokens=False)))
    async with gateway(target) as served, served.openai() as client:
        parts = [{"type": "text", "text": "the quick"}, {"type": "text", "text": "brown fox"}]
        messages: list[Any] = [{"role": "user", "content": parts}, {"role": "assistant", "content": None}]
        answer = await client.chat.completions.create(
            model="toy", messages=messages, stop=[" dog"], logit_bias={"7": 1}
        )
        assert answer.choices[0].message.content == "the lazy" and answer.choices[0].finish_reason == "stop"
        rendered = "user: the quick\nbrown fox\nassistant: \nassistant:"
        assert list(target.opens[0].prompt_ids) == toy_tokenizer().encode(rendered, add_special_tokens=False)
        assert target.opens[0].sampling.logit_bias == {7: 1}


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("num_prompts", [1, 3])
async def test_prompts_that_are_long_together_are_tokenised_beside_the_event_loop(
    num_prompts: int, echo: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []
    encode = Tokenizer.encode

    def seen(tokenizer: Tokenizer, *arguments: Any) -> list[int]:
        threads.append(get_ident())
        return encode(tokenizer, *arguments)

    monkeypatch.setattr(Tokenizer, "encode", seen)
    prompts = ["x" * (LONG_TEXT // 2)] * num_prompts
    asked = {"prompt": prompts, "truncate_prompt_tokens": 3, "max_tokens": 1, "echo": echo}
    async with gateway() as served, served.client() as client:
        answer = await client.post("/v1/completions", json=asked)
        assert answer.status_code == 200, answer.text
        assert served.engine._texts.num_active == 0
    assert len(threads) == num_prompts and (get_ident() in threads) == (num_prompts == 1)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": ""}] * 300}),
        ("/v1/responses", {"input": [{"role": "user", "content": ""}] * 300}),
        ("/tokenize", {"messages": [{"role": ""}] * 300}),
    ],
)
async def test_more_messages_than_a_context_has_tokens_are_not_read(
    path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ChatBody, "model_validate", None)
    async with gateway() as served, served.client() as client:
        answer = await client.post(path, json=body)
    error, field = answer.json()["error"], "input" if path == "/v1/responses" else "messages"
    assert (answer.status_code, error["param"], error["code"]) == (400, field, "context_length_exceeded")
    said = (
        f"{field}: has 300 messages; allowed: at most 256, the tokens of a context. This model's maximum context length"
    )
    assert error["message"] == f"{said} is 256 tokens."


@pytest.mark.parametrize(
    ("path", "model", "body"),
    [
        ("/v1/chat/completions", ChatBody, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}),
        ("/v1/completions", CompletionBody, {"prompt": "hi", "max_tokens": 1}),
        ("/v1/responses", ResponsesBody, {"input": "hi", "max_output_tokens": 1}),
        ("/tokenize", TokenizeBody, {"prompt": "hi"}),
        ("/detokenize", DetokenizeBody, {"tokens": [1]}),
    ],
)
async def test_a_large_body_is_read_beside_the_event_loop(
    path: str, model: Any, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []
    validate = model.model_validate

    def seen(values: Any) -> Any:
        threads.append(get_ident())
        return validate(values)

    monkeypatch.setattr(model, "model_validate", seen)
    async with gateway() as served, served.client() as client:
        for padding in ("", "x" * SLOW_REQUEST_BYTES):
            answer = await client.post(path, json={**body, "nobody_knows": padding})
            assert answer.status_code == 200, answer.text
    small, large = threads
    assert small == get_ident() != large
