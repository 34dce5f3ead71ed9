"""Every field of vLLM's three endpoints: it is served (the answer differs, or what the target is asked), is without
effect on any answer, or is refused by name. What is taken and dropped would be a wrong answer that nobody sees."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

import httpx
import pytest
from openai.types.shared import ReasoningEffort
from support.fakes import EOS, ToyTarget, scripted, target_info, with_adapters
from support.gateways import Gateway, gateway, stream_events, toy_tokenizer
from support.tools import tool_tokenizer, writes
from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing

from outrider.gateway.text.chat_template import ChatTemplate
from outrider.gateway.text.tokenizer import Tokenizer
from outrider.rpc.words.sampling_params import CAPABILITIES
from outrider.rpc.words.structured import REASONING, StructuredOutput

DOCS = (Path(__file__).parents[2] / "docs/http.md").read_text("utf-8")
SERVED = "served"  # the answer differs, or what the target is asked: what the toy answers does not depend on all of it
IDLE, REFUSED = "without effect", "refused by name"


@dataclass(frozen=True)
class Row:
    """A value that is no default, what becomes of it, and what it needs beside it."""

    value: Any
    verdict: str = SERVED
    beside: dict[str, Any] = field(default_factory=dict)


def rows(verdict: str, **values: Any) -> dict[str, Row]:
    return {name: Row(value, verdict) for name, value in values.items()}


FUNCTION = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
TOOL, FLAT = {"type": "function", "function": FUNCTION}, {"type": "function", **FUNCTION}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
SAMPLING = rows(
    SERVED, temperature=0.5, top_p=0.5, top_k=3, repetition_penalty=1.5, logit_bias={"5": 1.0}, seed=2, ignore_eos=True,
    presence_penalty=0.5, frequency_penalty=0.5, priority=3, cache_salt="pepper",
)  # fmt: skip
FURTHER = {
    **rows(
        SERVED, min_p=0.5, stop_token_ids=[7], min_tokens=2, allowed_token_ids=[5, 6], bad_words=["fox"],
        thinking_token_budget=4,
    ),
    **rows(SERVED, max_tokens=3, n=2, prompt_logprobs=1, truncate_prompt_tokens=4),
    "truncation_side": Row("right", SERVED, {"truncate_prompt_tokens": 4}),
    "stream_options": Row({"include_usage": True}, SERVED, {"stream": True}),
    "stream_options.continuous_usage_stats": Row(True, SERVED, {"stream": True, "stream_options": {}}),
    "return_token_ids": Row(True),
    "response_format": Row({"type": "json_object", "value": SCHEMA}, SERVED, {"tools": []}),
    "response_format.schema": Row(SCHEMA, SERVED, {"tools": [], "response_format": {"type": "json_object"}}),
    "spaces_between_special_tokens": Row(False, SERVED),
    **rows(
        REFUSED, use_beam_search=True, return_token_offsets=True, repetition_detection={"max_pattern_size": 3},
    ),
    **rows(IDLE, length_penalty=2.0, routed_experts_prompt_start=1, return_mm_kwargs=False, stream_interval=4),
}  # fmt: skip
EVERYWHERE = {
    **rows(SERVED, request_id="mine", stream=True, stop=" "),
    **rows(SERVED, skip_special_tokens=False),
    "include_stop_str_in_output": Row(True, SERVED, {"stop": " "}),
    "model": Row("sql"),
    "structured_outputs": Row({"regex": "a+"}, SERVED, {"tools": []}),
    **rows(REFUSED, watermarking=True, vllm_xargs={"a": 1}, kv_transfer_params={"a": 1}, ec_transfer_params={"a": 1}),
    **rows(IDLE, user="me", session_id="mine"),
}
OF_CHATS = {
    "tool_choice": Row("none"),
    "parallel_tool_calls": Row(False, SERVED, {"max_tokens": 120}),
    **rows(SERVED, chat_template_kwargs={"mood": "good"}),
    **rows(REFUSED, media_io_kwargs={"image": {}}, mm_processor_kwargs={"a": 1}),
}
COMPLETIONS = {
    **SAMPLING, **FURTHER, **EVERYWHERE,
    **rows(SERVED, prompt="the lazy dog", echo=True, logprobs=0),
    "return_tokens_as_token_ids": Row(True, SERVED, {"logprobs": 1}),
    "logprob_token_ids": Row([5, 6], SERVED, {"logprobs": 1}),
    "add_special_tokens": Row(False, SERVED),
    **rows(REFUSED, suffix="end", prompt_embeds="AAAA"),
}  # fmt: skip
CHAT = {
    **SAMPLING, **FURTHER, **EVERYWHERE, **OF_CHATS,
    "messages": Row([{"role": "user", "content": "the lazy dog"}]),
    "echo": Row(True, SERVED, {"messages": [{"role": "assistant", "content": "So far"}]}),
    "logprobs": Row(True),
    "top_logprobs": Row(1, SERVED, {"logprobs": True}),
    "return_tokens_as_token_ids": Row(True, SERVED, {"logprobs": True}),
    "logprob_token_ids": Row([5, 6], SERVED, {"logprobs": True}),
    "max_completion_tokens": Row(3),
    "reasoning_effort": Row("max", SERVED),
    "include_reasoning": Row(False),
    "add_generation_prompt": Row(False, SERVED),
    "add_special_tokens": Row(True, SERVED),
    "tools": Row([TOOL], SERVED, {"tools": []}),
    "continue_final_message": Row(True, SERVED),
    **rows(REFUSED, return_prompt_text=True, documents=[{"text": "a"}], chat_template="a"),  # the latter by flag
}  # fmt: skip
RESPONSES = {
    **SAMPLING, **EVERYWHERE, **OF_CHATS,
    "parallel_tool_calls": Row(False, SERVED, {"max_output_tokens": 120}),
    **rows(
        SERVED, input="the lazy dog", instructions="be brief", max_output_tokens=3, metadata={"a": "b"},
        include=["message.output_text.logprobs"], top_logprobs=1, max_tool_calls=3, include_reasoning=False,
    ),
    "reasoning": Row({"effort": "xhigh"}),
    "text": Row({"verbosity": "low"}),
    "text.format": Row({"type": "json_schema", "name": "a", "schema": SCHEMA}, SERVED, {"text": {}, "tools": []}),
    "tools": Row([FLAT], SERVED, {"tools": []}),
    **rows(
        REFUSED, background=True, previous_response_id="resp_1", previous_response={"id": "resp_1"}, truncation="auto",
        previous_input_messages=[{}], enable_response_messages=True, prompt={"id": "a"},
    ),
    **rows(IDLE, service_tier="flex", store=True, prompt_cache_key="mine"),
}  # fmt: skip
PATHS = {"/v1/completions": COMPLETIONS, "/v1/chat/completions": CHAT, "/v1/responses": RESPONSES}
BASE: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "the quick brown fox", "max_tokens": 12},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 20, "tools": [TOOL]},
    "/v1/responses": {"input": "hi", "max_output_tokens": 20, "tools": [FLAT]},
}
COMMON = {"model": "toy", "temperature": 0, "seed": 1, "request_id": "r"}


def tokenizer() -> Tokenizer:
    """One whose texts begin with a token of their own, and whose template shows what it may be told."""
    own = tool_tokenizer("hermes")
    backend = Backend.from_str(own.backend.to_str())
    backend.post_processor = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", EOS)])
    assert own.chat_template is not None
    template = ChatTemplate("{{ reasoning_effort }}{{ verbosity }}" + own.chat_template.source)
    return Tokenizer(backend, "fields", {"eos_token": "<|endoftext|>"}, template)


def target() -> ToyTarget:
    info = replace(
        target_info(max_model_len=1024), capabilities=(*CAPABILITIES, "sampling.structured_output", REASONING)
    )
    rule = writes("hermes", f"<think>\nwell</think>a b{CALL}{CALL}")
    return ToyTarget(rule=rule, info=with_adapters(info, sql="d2"), adapter_rules={"sql": rule})


def says(text: str) -> ToyTarget:
    return ToyTarget(rule=scripted([*toy_tokenizer().encode(text, add_special_tokens=False), EOS]))


async def answered(client: httpx.AsyncClient, toy: ToyTarget, path: str, body: dict[str, Any]) -> tuple[int, str, str]:
    """The status, the answer without its times, and what the target was asked."""
    toy.opens.clear()
    answer = await client.post(path, json=body)
    text = re.sub(r'"created(_at)?":\d+', "", answer.text)
    text = re.sub(r"(msg|rs|fc)_[0-9a-f]{32}", r"\1", text)
    return answer.status_code, text, repr([replace(one, timeout_ms=0) for one in toy.opens])


def with_field(body: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    """`name` may be a field of an object's."""
    outer, _, inner = name.partition(".")
    return {**body, outer: {**body.get(outer, {}), inner: value} if inner else value}


@pytest.mark.parametrize("path", PATHS)
async def test_no_field_is_taken_and_dropped(path: str) -> None:
    wrong, plain = [], dict[str, tuple[int, str, str]]()
    async with gateway(target(), tokenizer=tokenizer()) as served, served.client() as client:
        for name, row in PATHS[path].items():
            before, key = {**COMMON, **BASE[path], **row.beside}, json.dumps(row.beside)
            plain[key] = plain.get(key) or await answered(client, served.target, path, before)
            status, *rest = await answered(client, served.target, path, with_field(before, name, row.value))
            found = SERVED if tuple(rest) != plain[key][1:] else IDLE
            if status != 200:
                found = REFUSED if json.loads(rest[0])["error"]["param"] == name else rest[0]
            if found != row.verdict or plain[key][0] != 200:
                wrong.append((name, found))
    assert not wrong


def test_what_has_no_effect_and_what_is_refused_is_documented() -> None:
    rows = {name: row for fields in PATHS.values() for name, row in fields.items()}
    told = {name for name, row in rows.items() if row.verdict in (IDLE, REFUSED)}
    assert not {name for name in told if not re.search(f"`{name}[`:]", DOCS)}


CHATTED: dict[str, Any] = {**COMMON, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
COMPLETED: dict[str, Any] = {**COMMON, "prompt": "the quick brown fox", "max_tokens": 3}


@pytest.fixture
async def toy() -> AsyncIterator[Gateway]:
    async with gateway() as served:
        yield served


async def asked(served: Gateway, fields: dict[str, Any]) -> Any:
    """The answer of the endpoint that has such a body; of a stream all chunks."""
    path = "/v1/completions" if "prompt" in fields else "/v1/chat/completions"
    async with served.client() as client:
        if fields.get("stream"):
            return [json.loads(event) for event in (await stream_events(client, path, fields))[:-1]]
        answer = await client.post(path, json=fields)
        assert answer.status_code == 200, answer.text
        return answer.json()


def ids_of(text: str) -> list[int]:
    return toy_tokenizer().encode(text)


async def test_prompt_ids_come_with_token_ids(toy: Gateway) -> None:
    prompt, many = ids_of(COMPLETED["prompt"]), {"return_token_ids": True, "n": 2}
    for prompts in ([COMPLETED["prompt"], [5, 6]], [prompt, [5, 6]]):
        whole = await asked(toy, {**COMPLETED, **many, "prompt": prompts})
        assert [choice["prompt_token_ids"] for choice in whole["choices"]] == [prompt, prompt, [5, 6], [5, 6]]
    chunks = await asked(toy, {**COMPLETED, **many, "stream": True})
    said = [(choice["index"], choice.get("prompt_token_ids")) for chunk in chunks for choice in chunk["choices"]]
    assert [ids for index, ids in said if index == 1] == [prompt, None, None]
    rendered = ids_of("user: hi\nassistant:")
    assert (await asked(toy, {**CHATTED, **many}))["prompt_token_ids"] == rendered
    first, *others = await asked(toy, {**CHATTED, "return_token_ids": True, "stream": True})
    assert first["prompt_token_ids"] == rendered and not any("prompt_token_ids" in chunk for chunk in others)
    assert "prompt_token_ids" not in json.dumps([await asked(toy, COMPLETED), await asked(toy, CHATTED)])


async def test_each_piece_says_what_its_choice_has_so_far(toy: Gateway) -> None:
    for body, num_prompt in (
        (COMPLETED, len(ids_of(COMPLETED["prompt"]))),
        (CHATTED, len(ids_of("user: hi\nassistant:"))),
    ):
        for options in ({"continuous_usage_stats": True}, {"continuous_usage_stats": True, "include_usage": True}):
            chunks = await asked(toy, {**body, "n": 2, "stream": True, "stream_options": options})
            told = [(chunk["choices"], chunk["usage"]) for chunk in chunks]
            of_first = [usage for choices, usage in told if choices and choices[0]["index"] == 0]
            assert [usage["completion_tokens"] for usage in of_first][-3:] == [1, 2, 3]
            assert {usage["prompt_tokens"] for usage in of_first} == {num_prompt}
            assert ([usage["completion_tokens"] for choices, usage in told if not choices] == [6]) == (
                len(options) == 2
            )


async def test_log_probabilities_by_id_and_of_listed_ids(toy: Gateway) -> None:
    by_id = {"return_tokens_as_token_ids": True, "logprob_token_ids": [5, 6], "return_token_ids": True}
    (choice,) = (await asked(toy, {**COMPLETED, **by_id, "logprobs": 0}))["choices"]
    names = [f"token_id:{token}" for token in choice["token_ids"]]
    assert choice["logprobs"]["tokens"] == names
    listed = {"token_id:5": -2.0, "token_id:6": -2.0}
    assert choice["logprobs"]["top_logprobs"] == [{**listed, name: -0.5} for name in names]
    (choice,) = (await asked(toy, {**CHATTED, **by_id, "logprobs": True}))["choices"]
    for entry, token in zip(choice["logprobs"]["content"], choice["token_ids"], strict=True):
        assert entry["token"] == f"token_id:{token}" and bytes(entry["bytes"]) == toy_tokenizer().token_bytes[token]
        assert {one["token"] for one in entry["top_logprobs"]} == {*listed, entry["token"]}


@pytest.mark.parametrize("stream", [False, True])
async def test_an_echo_of_a_chat_is_the_assistant_s_last_message(stream: bool) -> None:
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [{"type": "text", "text": "So far"}]},
    ]
    texts = []
    async with gateway(says("and on")) as served:
        for echo, last in ((False, messages), (True, messages), (True, messages[:1])):
            fields = {**CHATTED, "max_tokens": 20, "messages": last, "echo": echo, "stream": stream}
            answer = await asked(served, fields)
            chunks = [chunk["choices"][0]["delta"].get("content", "") for chunk in answer] if stream else []
            texts.append("".join(chunks) if stream else answer["choices"][0]["message"]["content"])
    assert texts == ["and on", "So farand on", "and on"]


@pytest.mark.parametrize("form", [{"schema": SCHEMA}, {"value": SCHEMA}])
async def test_a_json_object_has_the_schema_that_is_given(form: dict[str, Any]) -> None:
    async with gateway() as served, served.client() as client:
        for given, sent in (
            (form, StructuredOutput(json_schema=json.dumps(SCHEMA))),
            ({}, StructuredOutput(json_object=True)),
        ):
            body = {**CHATTED, "response_format": {"type": "json_object", **given}}
            assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
            assert served.target.opens[-1].sampling.structured_output == sent
        both = {"type": "json_object", "schema": SCHEMA, "value": SCHEMA}
        answer = await client.post("/v1/chat/completions", json={**CHATTED, "response_format": both})
        assert answer.json()["error"]["param"] == "response_format.value"


async def test_a_template_is_told_the_verbosity_and_every_effort() -> None:
    async with gateway(target(), tokenizer=tokenizer()) as served, served.client() as client:
        for effort in get_args(get_args(ReasoningEffort)[0]):
            body = {**CHATTED, "reasoning_effort": effort, "verbosity": "high"}
            assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
            prompt = tokenizer().decode(served.target.opens[-1].prompt_ids)
            assert prompt.startswith(f"{effort}high")
            own = {**COMMON, "input": "hi", "reasoning": {"effort": effort}, "text": {"verbosity": "high"}}
            answer = (await client.post("/v1/responses", json=own)).json()
            assert served.target.opens[-1].prompt_ids == served.target.opens[-2].prompt_ids
            assert (answer["reasoning"]["effort"], answer["text"]["verbosity"]) == (effort, "high")
        refused = await client.post("/v1/chat/completions", json={**CHATTED, "verbosity": "chatty"})
        assert refused.json()["error"]["param"] == "verbosity"
