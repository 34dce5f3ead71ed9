"""/v1/responses through the real openai package: created, streamed and parsed; and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import chain, combinations, pairwise
from typing import Any

import pytest
from openai import BadRequestError
from openai.types.responses import Response
from pydantic import BaseModel
from support.fakes import EOS, ToyDraft, ToyTarget, scripted, target_info
from support.gateways import Gateway, gateway, thinking_tokenizer, toy_tokenizer
from support.tools import tool_tokenizer, writes

from outrider.gateway.http.responses import GrowingResponse
from outrider.gateway.http.responses_input import messages_of, read_responses
from outrider.gateway.text.tokenizer import TextStream
from outrider.gateway.text.tools.formats import FORMATS
from outrider.gateway.text.tools.use import ToolStream
from outrider.rpc.errors import Internal, InvalidArgument
from outrider.rpc.messages import to_failure
from outrider.rpc.words.answer import GenerationDelta
from outrider.rpc.words.sampling_params import FinishReason, SamplingParams

ADD: Any = {
    "type": "function",
    "name": "add",
    "description": "+",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    "strict": None,
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
ASKED: dict[str, Any] = {"model": "toy", "input": "the quick brown fox", "temperature": 0, "max_output_tokens": 120}
LONG = {"max_model_len": 1024}


def says(text: str, tokenizer: Any = None) -> ToyTarget:
    ids = (tokenizer or toy_tokenizer()).encode(text, add_special_tokens=False)
    return ToyTarget(rule=scripted([*ids, EOS]), info=target_info(**LONG))


async def events_of(served: Gateway, **fields: Any) -> list[dict[str, Any]]:
    """The events as they are on the wire; each is named, and they are numbered from 0."""
    events = list[dict[str, Any]]()
    body = {**ASKED, "stream": True, **fields}
    async with served.client() as client, client.stream("POST", "/v1/responses", json=body) as response:
        text = (await response.aread()).decode()
        assert response.status_code == 200, text
    for block in filter(None, text.split("\n\n")):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}" and event["sequence_number"] == len(events)
        events.append(event)
    return events


def kinds(events: list[dict[str, Any]]) -> list[str]:
    """Their types in order, repeated deltas once."""
    names = [event["type"].removeprefix("response.") for event in events]
    return [name for place, name in enumerate(names) if not place or names[place - 1] != name]


MESSAGE = ["output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done"]
REASONING = [name.replace("output_text", "reasoning_text") for name in MESSAGE]
CALLED = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]


async def test_a_text_whole_and_streamed() -> None:
    async with gateway(says("the lazy dog"), ToyDraft()) as served, served.openai() as client:
        whole = await client.responses.create(**ASKED, metadata={"a": "b"}, instructions="be brief", store=True)
        assert whole.output_text == "the lazy dog" and whole.status == "completed" and whole.id.startswith("resp_")
        (item,) = whole.output
        assert item.type == "message" and item.status == "completed" and item.id.startswith("msg_")
        assert whole.usage is not None and whole.usage.total_tokens == whole.usage.input_tokens + 4
        assert whole.metadata == {"a": "b"} and whole.instructions == "be brief" and whole.model == "toy"
        assert whole.temperature == 0 and (whole.model_extra or {})["store"] is False
        prompt = toy_tokenizer().decode(served.target.opens[0].prompt_ids)
        assert prompt == "system: be brief\nuser: the quick brown fox\nassistant:"
        events = await events_of(served)
        assert kinds(events) == ["created", "in_progress", *MESSAGE, "output_item.done", "completed"]
        created, completed = events[0]["response"], events[-1]["response"]
        assert created["status"] == "in_progress" and created["output"] == [] and created["usage"] is None
        deltas = [event["delta"] for event in events if event["type"].endswith("text.delta")]
        assert "".join(deltas) == "the lazy dog" == completed["output"][0]["content"][0]["text"] and len(deltas) > 1
        Response.model_validate(completed, strict=False)


@pytest.mark.parametrize("fields", [{"include": ["message.output_text.logprobs"]}, {"top_logprobs": 1}])
async def test_parts_of_a_message_have_their_tokens_log_probabilities(fields: dict[str, Any]) -> None:
    """However its tokens come: with reasoning and calls among them, and held back where a stop string may begin."""
    text = f"<think>\nwell</think>naïve 你 {CALL} then"
    ids = tool_tokenizer("hermes").encode(text, add_special_tokens=False)
    for num_forced in (0, 3):
        toy = ToyTarget(rule=scripted([*ids, EOS]), info=target_info(**LONG), num_forced=num_forced)
        draft = ToyDraft(rule=toy.rule) if num_forced else None
        async with gateway(toy, draft, tokenizer=tool_tokenizer("hermes")) as served:
            events = await events_of(served, tools=[ADD], stop="the end", **fields)
            plain = await events_of(served, tools=[ADD])
        parts = [item["content"][0] for item in events[-1]["response"]["output"] if item["type"] == "message"]
        assert [part["text"] for part in parts] == ["naïve 你 ", " then"]
        for part in parts:
            assert b"".join(bytes(entry["bytes"]) for entry in part["logprobs"]).decode() == part["text"]
            assert {entry["logprob"] for entry in part["logprobs"]} == {-0.5}
            assert {len(entry["top_logprobs"]) for entry in part["logprobs"]} == {fields.get("top_logprobs", 0)}
        deltas = [one["logprobs"] for one in events if one["type"] == "response.output_text.delta"]
        done = [one["logprobs"] for one in events if one["type"] == "response.output_text.done"]
        assert done == [part["logprobs"] for part in parts] and [*chain(*deltas)] == [*chain(*done)]
        assert not any(one.get("logprobs") for one in plain)


async def test_the_package_assembles_the_stream() -> None:
    async with gateway(says("the lazy dog")) as served, served.openai() as client:
        async with client.responses.stream(**ASKED) as stream:
            texts = [event.delta async for event in stream if event.type == "response.output_text.delta"]
            final = await stream.get_final_response()
        assert final.output_text == "".join(texts) == "the lazy dog"


class Answer(BaseModel):
    fox: int


async def test_parse() -> None:
    async with gateway(says('{"fox": 3}'), ToyDraft()) as served, served.openai() as client:
        parsed = await client.responses.parse(**ASKED, text_format=Answer)
        assert parsed.output_parsed == Answer(fox=3)
        sent = served.target.opens[0].sampling.structured_output
        assert sent is not None and json.loads(sent.json_schema or "")["properties"]["fox"]["type"] == "integer"
        async with client.responses.stream(**ASKED, text_format=Answer) as stream:
            assert (await stream.get_final_response()).output_parsed == Answer(fox=3)
        plain = await client.responses.create(**ASKED, text={"format": {"type": "json_object"}})
        assert plain.output_text == '{"fox": 3}'


@pytest.mark.parametrize("opens", [False, True])
async def test_reasoning_is_an_item(opens: bool) -> None:
    tokenizer = thinking_tokenizer(opens)
    target = says("the fox</think>\nthe dog" if opens else "<think>the fox</think>\nthe dog", tokenizer)
    async with gateway(target, ToyDraft(), tokenizer=tokenizer) as served, served.openai() as client:
        whole = await client.responses.create(**ASKED, reasoning={"effort": "low"})
        reasoning, message = whole.output
        assert reasoning.type == "reasoning" and reasoning.id.startswith("rs_") and reasoning.content is not None
        assert [part.text for part in reasoning.content] == ["the fox"] and whole.output_text == "\nthe dog"
        assert message.type == "message" and whole.reasoning is not None and whole.reasoning.effort == "low"
        assert whole.usage is not None and whole.usage.output_tokens_details.reasoning_tokens > 0
        assert "assistant:low" in tokenizer.decode(target.opens[0].prompt_ids)
        events = await events_of(served)
        assert kinds(events) == [
            "created", "in_progress", *REASONING, "output_item.done", *MESSAGE, "output_item.done", "completed",
        ]  # fmt: skip
        assert [event["output_index"] for event in events if event["type"] == "response.output_item.done"] == [0, 1]
        left_out = await client.responses.create(**ASKED, extra_body={"include_reasoning": False})
        assert [item.type for item in left_out.output] == ["message"] and left_out.output_text == whole.output_text
        assert left_out.usage is not None and left_out.usage.output_tokens_details == whole.usage.output_tokens_details
        events = await events_of(served, include_reasoning=False)
        assert kinds(events) == ["created", "in_progress", *MESSAGE, "output_item.done", "completed"]


async def test_calls_are_items_and_their_results_go_back() -> None:
    target = ToyTarget(rule=writes("hermes", f"\n\n{CALL}"), info=target_info(**LONG))
    tokenizer = tool_tokenizer("hermes")
    async with gateway(target, ToyDraft(), tokenizer=tokenizer) as served, served.openai() as client:
        whole = await client.responses.create(**ASKED, tools=[ADD])
        (call,) = whole.output  # white space alone is no message
        assert call.type == "function_call" and (call.name, json.loads(call.arguments)) == ("add", {"a": 1})
        assert call.call_id.startswith("call_") and call.id and call.id.startswith("fc_") and call.status == "completed"
        assert '"name": "add"' in tokenizer.decode(target.opens[0].prompt_ids)
        events = await events_of(served, tools=[ADD])
        assert kinds(events) == ["created", "in_progress", *CALLED, "completed"]
        pieces = [one["delta"] for one in events if one["type"] == "response.function_call_arguments.delta"]
        assert json.loads("".join(pieces)) == {"a": 1} and events[2]["item"]["arguments"] == ""
        async with client.responses.stream(**ASKED, tools=[ADD]) as stream:
            streamed = await stream.get_final_response()
        assert streamed.output[0].type == "function_call" and streamed.output[0].arguments == call.arguments
        history = [
            {"role": "user", "content": "hi"},
            call.model_dump(exclude_none=True),
            {"type": "function_call_output", "call_id": call.call_id, "output": "forty two"},
        ]
        await client.responses.create(**{**ASKED, "input": history}, tools=[ADD], tool_choice="none")
        prompt = tokenizer.decode(target.opens[-1].prompt_ids)
        assert "forty two" in prompt and '"a": 1' in prompt
        forced = await client.responses.create(**ASKED, tools=[ADD], tool_choice={"type": "function", "name": "add"})
        assert forced.tools[0].type == "function" and target.opens[-1].sampling.structured_output is not None


BROKEN = '<tool_call>{"name": "add", "arguments": {"a": 1, oops'
MIXED: list[tuple[str, list[tuple[str, str]]]] = [
    (f"{CALL}\nDone now", [("add", '{"a": 1}'), ("", "\nDone now")]),
    (f"So: {CALL} and {CALL}.", [("", "So: "), ("add", '{"a": 1}'), ("", " and "), ("add", '{"a": 1}'), ("", ".")]),
    (BROKEN, [("add", '{"a": 1, '), ("", "oops")]),
]


def items_of(output: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """A call's name and its arguments; of a message its text."""
    return [(one["name"], one["arguments"]) if "name" in one else ("", one["content"][0]["text"]) for one in output]


@pytest.mark.parametrize(("text", "items"), MIXED)
async def test_text_after_a_call_in_one_commit_comes_after_it(text: str, items: list[tuple[str, str]]) -> None:
    """However many tokens a commit has, whole and as a stream."""
    tokenizer = tool_tokenizer("hermes")
    toy = ToyTarget(rule=writes("hermes", text), info=target_info(**LONG))
    async with gateway(toy, ToyDraft(rule=toy.rule), tokenizer=tokenizer) as served, served.client() as client:
        answer = await client.post("/v1/responses", json={**ASKED, "tools": [ADD]})
        assert answer.status_code == 200 and items_of(answer.json()["output"]) == items
        events = await events_of(served, tools=[ADD])
        assert events[-1]["type"] == "response.completed" and items_of(events[-1]["response"]["output"]) == items
        done = [one["item"] for one in events if one["type"] == "response.output_item.done"]
        assert items_of(done) == items
        ids = tokenizer.encode(text, add_special_tokens=False)
        asked = read_responses({**ASKED, "tools": [ADD]}, None, served.engine)
        for cuts in [(), *combinations(range(1, len(ids)), 1), *combinations(range(1, len(ids), 3), 2)]:
            stream = TextStream(tokenizer, SamplingParams(), [])
            tools = ToolStream(stream, FORMATS["hermes"].parser("call_{}".format, {"add": {}}))
            built = GrowingResponse(served.engine, asked)
            for start, end in pairwise((0, *cuts, len(ids))):
                cut = tools.push(ids[start:end], FinishReason.LENGTH if end == len(ids) else None)
                built.add(GenerationDelta("r", 0, cut.text, cut.tool_calls, finish_reason=cut.finish_reason))
            assert items_of(built.shape()["output"]) == items, cuts


def test_items_become_messages() -> None:
    items = [
        {"role": "developer", "content": "be brief"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "2"}]},
        {"type": "reasoning", "id": "rs_2", "summary": [{"type": "summary_text", "text": "so"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "ho"}]},
        {"role": "assistant", "content": "hum"},
        {"role": "user", "content": "on"},
    ]
    calls = [
        {"id": one, "type": "function", "function": {"name": name, "arguments": "{}"}}
        for one, name in (("c1", "f"), ("c2", "g"))
    ]
    assert messages_of(items, "first") == [
        {"role": "system", "content": "first"},
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
        {"role": "tool", "tool_call_id": "c2", "content": "2"},
        {"role": "assistant", "reasoning_content": "so", "content": "ho"},
        {"role": "assistant", "content": "hum"},
        {"role": "user", "content": "on"},
    ]


async def test_what_ends_early_is_incomplete() -> None:
    async with gateway(says("the lazy dog")) as served, served.openai() as client:
        whole = await client.responses.create(**{**ASKED, "max_output_tokens": 2})
        assert whole.status == "incomplete" and whole.incomplete_details is not None
        assert whole.incomplete_details.reason == "max_output_tokens" and whole.output[0].status == "incomplete"
        events = await events_of(served, max_output_tokens=2)
        assert events[-1]["type"] == "response.incomplete"
    async with gateway(says("")) as served:
        events = await events_of(served)  # an answer without a text is an empty one
        assert kinds(events)[2:] == [*MESSAGE, "output_item.done", "completed"]


async def test_an_error_in_the_middle_is_an_event() -> None:
    class Failing(ToyTarget):
        def open(self, request: Any, on_event: Any, *rest: Any) -> Any:
            count = 0

            def told(event: Any) -> None:
                nonlocal count
                count += 1
                on_event(event if count < 3 else to_failure(0, Internal("a bug")))

            return super().open(request, told, *rest)

    target = Failing(rule=says("the lazy dog").rule, info=target_info(**LONG))
    async with gateway(target) as served:
        events = await events_of(served)
        assert events[-1]["type"] == "response.failed" and events[-1]["response"]["error"]["code"] == "server_error"
        assert events[-1]["response"]["status"] == "failed"


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("input", {"input": None}),
    ("input", {"input": []}),
    ("input", {"input": 7}),
    ("input", {"input": "the fox " * 4000}),
    ("input[0]", {"input": ["a"]}),
    ("input[0].type", {"input": [{"type": "item_reference", "id": "x"}]}),
    ("input[0].type", {"input": [{"type": {}, "id": "x"}]}),
    ("input[0].role", {"input": [{"content": "x"}]}),
    ("input[0].content", {"input": [{"role": "user"}]}),
    ("input[0].content[0]", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}),
    ("input[0].call_id", {"input": [{"type": "function_call_output", "output": "x"}]}),
    ("input[0].arguments", {"input": [{"type": "function_call", "call_id": "x", "name": "f"}]}),
    ("previous_response_id", {"previous_response_id": "resp_1"}),
    ("output_ids", {"output_ids": [1]}),
    ("conversation", {"conversation": "x"}),
    ("background", {"background": True}),
    ("truncation", {"truncation": "auto"}),
    ("top_logprobs", {"top_logprobs": 21}),
    ("include[1]", {"include": ["reasoning.encrypted_content", "all"]}),
    ("max_tool_calls", {"max_tool_calls": "3"}),
    ("text.verbosity", {"text": {"verbosity": "chatty"}}),
    ("max_output_tokens", {"max_output_tokens": 0}),
    ("temperature", {"temperature": -1}),
    ("metadata", {"metadata": {"a": 1}}),
    ("tools[0].type", {"tools": [{"type": "web_search"}]}),
    ("tools[1].name", {"tools": [ADD, {"type": "function", "name": "a b"}]}),
    ("tool_choice", {"tools": [ADD], "tool_choice": "sometimes"}),
    ("reasoning.effort", {"reasoning": {"effort": "huge"}}),
    ("text.format.type", {"text": {"format": {"type": "xml"}}}),
    ("text.format.schema", {"text": {"format": {"type": "json_schema", "name": "x"}}}),
]


async def test_names_what_is_wrong() -> None:
    tokenizer = tool_tokenizer("hermes")
    async with gateway(ToyTarget(info=target_info(**LONG)), tokenizer=tokenizer) as served, served.client() as client:
        for stream in (False, True):
            for param, fields in REFUSED:
                answer = await client.post("/v1/responses", json={**ASKED, "stream": stream, **fields})
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
        assert not served.target.opens
        answer = await client.post("/v1/responses", json={**ASKED, "model": "other"})
        assert answer.status_code == 404
    async with served_long() as served, served.openai() as openai:
        with pytest.raises(BadRequestError) as raised:
            await openai.responses.create(**{**ASKED, "input": "the fox " * 400})
        assert raised.value.code == "context_length_exceeded"


def served_long() -> Any:
    return gateway(ToyTarget(info=replace(target_info(max_model_len=256))))


def test_messages_of_nothing_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="input: is missing; allowed: a text, or a list of items"):
        messages_of(None, "system")
