"""Tools of a request, over HTTP by the real openai package and over gRPC: what the model sees of them, what comes back,
what constrains it, and what is refused."""

from __future__ import annotations

import copy
import json
import threading
from typing import Any

import openai
import pytest
from openai import BadRequestError
from openai.types.chat import ChatCompletionChunk
from pydantic import BaseModel
from support.fakes import ToyDraft, ToyTarget, target_info
from support.gateways import gateway, stream_events
from support.tools import as_written, tool_tokenizer, writes, written

from outrider.client import Client
from outrider.gateway import engine as gateway_engine
from outrider.gateway.text.chat_template import ChatTemplate
from outrider.gateway.text.tools.formats import FORMATS, Layout
from outrider.gateway.text.tools.parser import Parsed, ToolParser
from outrider.gateway.text.tools.use import MAX_TOOLS
from outrider.llm.inputs import chat_prompts
from outrider.rpc.errors import InvalidArgument
from outrider.rpc.messages import Failure
from outrider.rpc.words.request import GenerationRequest
from outrider.rpc.words.sampling_params import CAPABILITIES, FinishReason, SamplingParams

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
ADD: dict[str, Any] = {"type": "function", "function": {"name": "add", "description": "+", "parameters": PARAMETERS}}
WEATHER: dict[str, Any] = {"type": "function", "function": {"name": "weather"}}
STRICT: dict[str, Any] = {"type": "function", "function": {**ADD["function"], "strict": True}}
ASKED: dict[str, Any] = {
    "model": "toy", "messages": [{"role": "user", "content": "hi"}], "temperature": 0, "tools": [ADD, WEATHER],
    "max_tokens": 120,
}  # fmt: skip
LONG = {"max_model_len": 1024}
CALLS = [("add", '{"a": 1}'), ("weather", "{}")]


def layout_of(name: str, several: bool = True) -> Layout:
    one = FORMATS[name]
    return (one.several or one.layout) if several else one.layout


def output_of(name: str, calls: list[tuple[str, str]] = CALLS) -> str:
    layout = layout_of(name, len(calls) > 1)
    texts = [
        layout.before.replace("NAME", function) + as_written(name, arguments) + layout.after
        for function, arguments in calls
    ]
    return layout.opening + layout.between.join(texts) + layout.closing


def target(name: str, output: str) -> ToyTarget:
    return ToyTarget(rule=writes(name, output), info=target_info(**LONG))


def shown(served: Any, name: str) -> str:
    """The prompt of the last request, as text."""
    return tool_tokenizer(name).decode(served.target.opens[-1].prompt_ids)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", FORMATS)
async def test_calls_come_back_as_calls(name: str, stream: bool) -> None:
    """Special tokens mark them, and skip_special_tokens is on."""
    tokenizer = tool_tokenizer(name)
    toy = target(name, output_of(name))
    draft = ToyDraft(rule=toy.rule, wrong_every=3)
    async with gateway(toy, draft, tokenizer=tokenizer) as served, served.openai() as client:
        answer: Any = await client.chat.completions.create(**ASKED, stream=stream)
        if stream:
            chunks: list[ChatCompletionChunk] = [chunk async for chunk in answer]
            calls, reason = assembled(chunks)
        else:
            choice = answer.choices[0]
            assert choice.message.content is None
            reason = choice.finish_reason
            calls = [(call.id, call.function.name, call.function.arguments) for call in choice.message.tool_calls]
        assert reason == "tool_calls" and [call[1:] for call in calls] == CALLS
        ids = [call[0] for call in calls]
        assert len(set(ids)) == 2 and all(len(one) == (9 if "mistral" in name else 29) for one in ids)
        prompt = shown(served, name)
        assert (
            '"name": "add"' in prompt
            and '"description": "+"' in prompt
            and toy.opens[-1].sampling.structured_output is None
        )


def assembled(chunks: list[ChatCompletionChunk]) -> tuple[list[tuple[str, str, str]], str | None]:
    """What OpenAI's own helpers do: the first piece of a call has id, type and name, the others arguments alone."""
    calls: dict[int, list[str]] = {}
    reason = None
    for chunk in chunks:
        choice = chunk.choices[0]
        assert not choice.delta.content
        reason = choice.finish_reason or reason
        for piece in choice.delta.tool_calls or []:
            assert piece.function is not None
            if piece.index not in calls:
                assert piece.index == len(calls) and piece.id and piece.type == "function" and piece.function.name
                calls[piece.index] = [piece.id, piece.function.name, ""]
            else:
                assert piece.id is None and piece.type is None and piece.function.name is None
            calls[piece.index][2] += piece.function.arguments or ""
    return [(call[0], call[1], call[2]) for call in calls.values()], reason


async def test_arguments_are_streamed_as_they_come() -> None:
    toy = target("hermes", output_of("hermes", [("add", json.dumps({"a": "x" * 30}))]))
    async with gateway(toy, tokenizer=tool_tokenizer("hermes")) as served, served.openai() as client:
        stream = await client.chat.completions.create(**ASKED, stream=True)
        pieces = [piece async for chunk in stream for piece in chunk.choices[0].delta.tool_calls or []]
        assert len(pieces) > 8


async def test_text_beside_calls_n_logprobs_and_token_ids() -> None:
    name, output = "llama3_json", 'One moment.<|python_tag|>{"name": "add", "parameters": {"a": 1}}'
    async with gateway(target(name, output), tokenizer=tool_tokenizer(name)) as served, served.openai() as client:
        fields: dict[str, Any] = {**ASKED, "n": 2, "logprobs": True, "extra_body": {"return_token_ids": True}}
        answer = await client.chat.completions.create(**fields)
        ids = set()
        for choice in answer.choices:
            assert choice.message.content == "One moment." and choice.finish_reason == "tool_calls"
            assert choice.message.tool_calls is not None and choice.logprobs is not None
            ids.add(choice.message.tool_calls[0].id)
            assert len(choice.logprobs.content or ()) == len(written(name, output))
            assert (choice.model_extra or {})["token_ids"] == list(written(name, output))
        assert len(ids) == 2
        again = await client.chat.completions.create(**ASKED, stop=["parameters"])
        assert again.choices[0].message.content == 'One moment.<|python_tag|>{"name": "add", "'
        assert again.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("name", FORMATS)
async def test_calls_after_reasoning(name: str) -> None:
    """What is thought of is no call; and a grammar holds for what comes after."""
    output = f"<think>{output_of(name)}?</think>\n\n{output_of(name)}"
    toy = target(name, output)
    async with gateway(toy, tokenizer=tool_tokenizer(name)) as served, served.openai() as client:
        for stream in (False, True):
            answer: Any = await client.chat.completions.create(**{**ASKED, "max_tokens": 300}, stream=stream)
            if stream:
                deltas = [chunk.choices[0].delta async for chunk in answer]
                thought = "".join((delta.model_extra or {}).get("reasoning_content") or "" for delta in deltas)
                text = "".join(delta.content or "" for delta in deltas)
                calls = [call for delta in deltas for call in delta.tool_calls or [] if call.id]
            else:
                message = answer.choices[0].message
                thought, text = (message.model_extra or {})["reasoning_content"], message.content or ""
                calls = message.tool_calls
                assert answer.choices[0].finish_reason == "tool_calls"
            assert thought == output_of(name) + "?" and text == "" and len(calls) == 2


@pytest.mark.parametrize("name", FORMATS)
async def test_a_conversation_with_calls_is_rendered_by_the_template(name: str) -> None:
    """The arguments as text, as OpenAI's clients send them, or as an object: the template sees the same."""
    prompts = []
    async with gateway(target(name, "Done."), tokenizer=tool_tokenizer(name)) as served, served.openai() as client:
        for arguments in ('{"a": 1}', {"a": 1}):
            call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": arguments}}
            messages = [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "call_1", "content": "2"},
            ]
            fields: dict[str, Any] = {**ASKED, "messages": messages}
            answer = await client.chat.completions.create(**fields)
            assert answer.choices[0].message.content == "Done." and answer.choices[0].message.tool_calls is None
            assert answer.choices[0].finish_reason == "stop"
            prompts.append(shown(served, name))
    assert prompts[0] == prompts[1] and '{"a": 1}' in prompts[0] and "tool: 2 (call_1)" in prompts[0]


async def test_one_call_where_no_more_are_wanted() -> None:
    toy = target("hermes", output_of("hermes"))
    async with gateway(toy, tokenizer=tool_tokenizer("hermes")) as served, served.openai() as client:
        answer = await client.chat.completions.create(**ASKED, parallel_tool_calls=False)
        calls: Any = answer.choices[0].message.tool_calls
        assert [call.function.name for call in calls] == ["add"]
        await client.chat.completions.create(**ASKED, parallel_tool_calls=False, tool_choice="required")
        opened = toy.opens[-1].sampling.structured_output
        assert opened is not None and "next_0" not in (opened.grammar or "")


async def test_none_shows_no_tools_and_what_looks_like_a_call_is_text() -> None:
    output = output_of("hermes")
    async with (
        gateway(target("hermes", output), tokenizer=tool_tokenizer("hermes")) as served,
        served.openai() as client,
    ):
        answer = await client.chat.completions.create(
            **ASKED, tool_choice="none", response_format={"type": "json_object"}
        )
        assert answer.choices[0].message.content == output and answer.choices[0].finish_reason == "stop"
        assert "tools" not in shown(served, "hermes")


async def test_the_template_s_variables() -> None:
    async with gateway(target("json", "Hm."), tokenizer=tool_tokenizer("json")) as served, served.openai() as client:
        await client.chat.completions.create(**ASKED, extra_body={"chat_template_kwargs": {"mood": "calm"}})
        assert shown(served, "json").split("\n")[1] == "mood: calm"


NAMED = {"type": "function", "function": {"name": "add"}}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("choice", "tools"), [("required", [ADD, WEATHER]), (NAMED, [ADD, WEATHER]), ("auto", [STRICT])]
)
async def test_what_is_wanted_is_constrained(name: str, choice: Any, tools: list[Any]) -> None:
    output = output_of(name, CALLS[:1])
    async with gateway(target(name, output), tokenizer=tool_tokenizer(name)) as served, served.openai() as client:
        fields: dict[str, Any] = {**ASKED, "tools": tools, "tool_choice": choice}
        answer = await client.chat.completions.create(**fields)
        if name != "json" or choice == NAMED:  # elsewhere a list of them
            assert answer.choices[0].message.tool_calls is not None
            assert answer.choices[0].message.tool_calls[0].function.arguments == '{"a": 1}'
        assert "strict" not in shown(served, name)
        opened = served.target.opens[-1].sampling.structured_output
        assert opened is not None and opened.grammar is not None
        assert '"integer"' in opened.grammar and ("weather" in opened.grammar) == (choice == "required")


async def test_over_grpc_too_and_resumed() -> None:
    """Ids, names and arguments that were delivered are not delivered again, wherever the stream broke."""
    name, output = "mistral", "Yes." + output_of("mistral")
    ids = written(name, output)
    fields: dict[str, Any] = {
        "messages": ASKED["messages"], "tools": [ADD, WEATHER], "temperature": 0.0, "max_tokens": 120, "seed": 3,
        "request_id": "same",
    }  # fmt: skip
    toy = target(name, output)
    async with gateway(toy, tokenizer=tool_tokenizer(name)) as served, Client(served.grpc_address) as client:
        parts = [part async for part in client.generate(**fields)]
        whole = [call for part in parts for call in part.tool_calls]
        assert "".join(part.text for part in parts) == "Yes."
        assert parts[-1].finish_reason is FinishReason.TOOL_CALLS
        assert "".join(call.arguments for call in whole if call.index == 0) == '{"a": 1}'
        for cut in range(1, len(ids)):
            before = await delivered(client, fields, cut)
            rest = [part async for part in client.generate(**fields, output_ids=[ids[:cut]])]
            calls = [call for part in rest for call in part.tool_calls]
            assert before[0] + "".join(part.text for part in rest) == "Yes."
            for index in (0, 1):
                told = [call for call in (*before[1], *calls) if call.index == index]
                assert [call.name for call in told if call.id] == [CALLS[index][0]], cut
                assert "".join(call.arguments for call in told) == CALLS[index][1]
                assert [call.id for call in told if call.id] == [
                    call.id for call in whole if call.index == index and call.id
                ]
            assert rest[-1].finish_reason is FinishReason.TOOL_CALLS


async def delivered(client: Client, fields: dict[str, Any], cut: int) -> tuple[str, list[Any]]:
    """What the first `cut` ids gave before the stream broke."""
    text, calls, num_ids = "", list[Any](), 0
    async for part in client.generate(**{**fields, "num_draft_tokens": 0}):
        num_ids += len(part.token_ids)
        if num_ids > cut:
            break
        text += part.text
        calls += part.tool_calls
    return text, calls


async def test_what_is_long_is_read_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a client says that it has, and a call that has not ended, of which the end may say that it is text."""
    name, output = "qwen3_coder", "<tool_call>\n<function=add>\n<parameter=a>\n" + "x" * 60
    ids, threads, push = written(name, output)[:-1], list[int](), ToolParser.push
    monkeypatch.setattr(gateway_engine, "LONG_TEXT", 32)

    def noting(self: ToolParser, text: str) -> Parsed:
        threads.append(threading.get_ident())
        return push(self, text)

    monkeypatch.setattr(ToolParser, "push", noting)
    async with gateway(target(name, output), tokenizer=tool_tokenizer(name)) as served:
        for given in (ids[:-4], ids[:4]):
            threads.clear()
            request = GenerationRequest(
                messages=tuple(ASKED["messages"]), tools=(ADD,), output_ids=(given,),
                sampling=SamplingParams(temperature=0.0, max_tokens=len(ids)),
            )  # fmt: skip
            text = "".join([delta.text async for delta in served.engine.generate(request)])
            assert output.endswith(text) and len(text) >= 4
            beside = [thread != threading.get_ident() for thread in threads]
            assert beside == sorted(beside, reverse=given != ids[:4]) and beside[-1]


def allowed_tools(mode: str, *names: Any) -> dict[str, Any]:
    listed = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": listed}}


async def test_of_allowed_tools_these_alone_may_be_called() -> None:
    """All are shown to the model: its prompt is the one without a choice."""
    async with gateway(target("hermes", "x"), tokenizer=tool_tokenizer("hermes")) as served, served.openai() as client:
        await client.chat.completions.create(**ASKED)
        shape = {"type": "allowed_tools", "tools": [{"type": "function", "name": "add"}]}
        for mode, start in (("auto", "start: (head calls)* TEXT"), ("required", "start: calls\n")):
            fields: dict[str, Any] = {**ASKED, "tool_choice": allowed_tools(mode, "add")}
            await client.chat.completions.create(**fields)
            tools: list[Any] = [{"type": "function", **tool["function"]} for tool in (ADD, WEATHER)]
            choice: Any = {**shape, "mode": mode}
            await client.responses.create(model="toy", input="hi", tools=tools, tool_choice=choice)
            plain, *opened = served.target.opens[0], *served.target.opens[-2:]
            for one in opened:
                assert one.prompt_ids == plain.prompt_ids and one.sampling.structured_output is not None
                grammar = one.sampling.structured_output.grammar or ""
                assert start in grammar and "add" in grammar and "weather" not in grammar


@pytest.mark.parametrize("choice", ["auto", "none", None])
async def test_an_answer_of_a_form_beside_tools(choice: str | None) -> None:
    """Agents with typed output send just this: calls, or else the answer."""
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    typed = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    for output in ('{"city": "Oslo"}', output_of("hermes")):
        async with gateway(target("hermes", output), tokenizer=tool_tokenizer("hermes")) as served:
            fields = {**ASKED, "response_format": typed, **({"tool_choice": choice} if choice else {})}
            async with served.openai() as client:
                answer = await client.chat.completions.create(**fields)
            opened = served.target.opens[-1].sampling.structured_output
            if choice == "none":
                assert opened is not None and json.loads(opened.json_schema or "") == schema
                assert answer.choices[0].message.content == output
                continue
            assert opened is not None and "start: calls | answer\n" in (opened.grammar or "")
            calls = answer.choices[0].message.tool_calls or []
            assert [(call.type == "function" and call.function.name) for call in calls] == (
                [] if "Oslo" in output else [name for name, _ in CALLS]
            )
            assert answer.choices[0].message.content == (output if "Oslo" in output else None)


@pytest.mark.parametrize("choice", ["required", NAMED])
async def test_where_calls_are_required_a_form_of_the_answer_has_no_effect(choice: Any) -> None:
    """Agents that require a call of their first step send both."""
    async with gateway(target("hermes", "x"), tokenizer=tool_tokenizer("hermes")) as served, served.openai() as client:
        fields = {**ASKED, "tool_choice": choice}
        for form in ({}, {"response_format": {"type": "json_object"}}, {"structured_outputs": {"regex": "a"}}):
            await client.chat.completions.create(**fields, extra_body=form)
        first, *others = (opened.sampling.structured_output for opened in served.target.opens)
        assert first is not None and others == [first, first]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
async def test_where_nothing_but_calls_may_come_there_is_no_text(choice: Any) -> None:
    """However `max_tokens` cuts them, in any endpoint."""
    output = output_of("hermes", CALLS[:1])
    async with gateway(target("hermes", output), tokenizer=tool_tokenizer("hermes")) as served:
        for most in range(1, len(written("hermes", output))):
            fields: dict[str, Any] = {**ASKED, "max_tokens": most, "tool_choice": choice}
            async with served.openai() as client:
                answer = await client.chat.completions.create(**fields)
            assert answer.choices[0].finish_reason == "length" and not answer.choices[0].message.content


async def test_a_function_without_parameters_takes_none() -> None:
    """As OpenAI has it; one whose parameters are any object takes any."""
    free = {"type": "function", "function": {"name": "free", "parameters": {"type": "object"}}}
    async with gateway(target("hermes", "x"), tokenizer=tool_tokenizer("hermes")) as served, served.openai() as client:
        for tool, closed in ((WEATHER, True), (free, False)):
            await client.chat.completions.create(**{**ASKED, "tools": [tool], "tool_choice": "required"})
            opened = served.target.opens[-1].sampling.structured_output
            assert opened is not None
            assert ('"additionalProperties": false, "properties": {}' in (opened.grammar or "")) == closed


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("tools[0].function.name", {"tools": [{"type": "function", "function": {}}]}),
    ("tools[0].function.name", {"tools": [{"type": "function", "function": {"name": "a b"}}]}),
    ("tools[0].type", {"tools": [{**ADD, "type": "custom"}]}),
    ("tools[0].function.parameters", {"tools": [{"type": "function", "function": {"name": "f", "parameters": 1}}]}),
    ("tools[0].function.parameters.type", {"tools": [{"function": {"name": "f", "parameters": {"type": "array"}}}]}),
    (
        "tools[0].function.parameters.properties",
        {"tools": [{"function": {"name": "f", "parameters": {"properties": 1}}}]},
    ),
    ("tools[0].function.strict", {"tools": [{"type": "function", "function": {"name": "f", "strict": "yes"}}]}),
    ("tools[1].function.name", {"tools": [ADD, ADD]}),
    ("tools", {"tools": [{"function": {"name": f"f{index}"}} for index in range(MAX_TOOLS + 1)]}),
    ("tools", {"tools": [{"function": {"name": "f", "description": "x" * 300_000}}]}),
    ("tools", {"tools": 3}),
    ("tools", {"structured_outputs": {"regex": "a"}}),
    ("tool_choice", {"tool_choice": "sometimes"}),
    ("tool_choice.allowed_tools", {"tool_choice": {"type": "allowed_tools"}}),
    ("tool_choice.allowed_tools.tools[0]", {"tool_choice": allowed_tools("auto", 7)}),
    ("tool_choice.allowed_tools.tools[1].function.name", {"tool_choice": allowed_tools("auto", "add", "other")}),
    ("tool_choice", {"tools": [], "tool_choice": "required"}),
    ("tool_choice.function.name", {"tool_choice": {"type": "function", "function": {"name": "other"}}}),
    ("parallel_tool_calls", {"parallel_tool_calls": "yes"}),
    ("chat_template_kwargs", {"chat_template_kwargs": 1}),
    ("chat_template_kwargs.tools", {"chat_template_kwargs": {"tools": []}}),
    ("chat_template_kwargs", {"chat_template_kwargs": {"a": "x" * 70_000}}),
    ("messages[0].tool_calls[0].function", {"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}),
]


async def test_refusals_name_the_field() -> None:
    async with gateway(target("hermes", "x"), tokenizer=tool_tokenizer("hermes")) as served, served.client() as client:
        for param, fields in REFUSED:
            answer = await client.post("/v1/chat/completions", json={**ASKED, **fields})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), (fields, answer.json())
        assert not served.target.opens


async def test_a_message_of_calls_alone_comes_back_by_every_way() -> None:
    """As the server itself answers it: with null for its content."""
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "[1]"},
    ]
    items = [
        messages[0],
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "[1]"},
    ]
    told = "{{ m.content }}{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}"
    tokenizer = copy.copy(tool_tokenizer("json"))
    expected = '<user>go<assistant>{"name": "add", "arguments": {"a": 1}}<tool>[1]'
    for content in ("m.content", "'' + m.content"):
        source = "{% for m in messages %}<{{ m.role }}>" + told.replace("m.content", content) + "{% endfor %}"
        tokenizer.chat_template = ChatTemplate(source)
        asked: dict[str, Any] = {"model": "toy", "temperature": 0}
        async with gateway(target("json", "x"), tokenizer=tokenizer) as served, served.client() as client:
            for path, body in (
                ("/v1/chat/completions", {"messages": messages, "max_tokens": 1}),
                ("/v1/responses", {"input": items, "max_output_tokens": 1}),
            ):
                assert (await client.post(path, json=asked | body)).status_code == 200
            async with Client(served.grpc_address) as by_grpc:
                assert [part async for part in by_grpc.generate(messages=messages, max_tokens=1)]
            counted = (await client.post("/tokenize", json={"messages": messages})).json()["tokens"]
            read = [*(opened.prompt_ids for opened in served.target.opens), counted]
        (in_process,) = chat_prompts(tokenizer, messages)
        assert [tokenizer.decode(ids) for ids in read] == [expected] * 4 and in_process.text == expected


async def test_a_target_without_grammars_refuses_what_needs_one() -> None:
    toy = ToyTarget(rule=writes("hermes", "x"), info=target_info(**LONG))
    toy.info = type(toy.info)(toy.info.model, 16, capabilities=tuple(c for c in CAPABILITIES if "structured" not in c))
    async with gateway(toy, tokenizer=tool_tokenizer("hermes")) as served, served.openai() as client:
        for fields, param in (({"tool_choice": "required"}, "tool_choice"), ({"tools": [STRICT]}, "tools")):
            with pytest.raises(BadRequestError) as caught:
                await client.chat.completions.create(**{**ASKED, **fields})
            assert caught.value.param == param
        assert (await client.chat.completions.create(**ASKED)).choices[0].message.content == "x"


async def test_a_grammar_that_the_target_refuses_is_the_tools() -> None:
    toy = target("hermes", "x")
    toy.full = Failure(0, 3, "sampling.structured_output.grammar: is nested too deeply")
    fields: dict[str, Any] = {**ASKED, "tool_choice": "required"}
    async with gateway(toy, tokenizer=tool_tokenizer("hermes")) as served, served.openai() as client:
        with pytest.raises(BadRequestError, match="tools: is nested") as caught:
            await client.chat.completions.create(**fields)
        assert caught.value.param == "tools"
        async with Client(served.grpc_address) as by_grpc:
            with pytest.raises(InvalidArgument) as refused:
                async for _ in by_grpc.generate(messages=ASKED["messages"], tools=[ADD], tool_choice="required"):
                    pass
            assert [violation.field for violation in refused.value.violations] == ["tools"]


async def test_a_completion_that_is_whole_ends_as_it_did() -> None:
    """Another one of the same request is resumed."""
    output = output_of("hermes", CALLS[:1])
    ids = written("hermes", output)
    async with gateway(target("hermes", output), tokenizer=tool_tokenizer("hermes")) as served:
        request = GenerationRequest(
            messages=tuple(ASKED["messages"]), tools=(ADD,), n=2, output_ids=(ids, ids[:9]),
            sampling=SamplingParams(temperature=0.0, max_tokens=120),
        )  # fmt: skip
        ends = [delta async for delta in served.engine.generate(request) if delta.finish_reason is not None]
    assert [delta.finish_reason for delta in ends] == [FinishReason.TOOL_CALLS] * 2


async def test_a_template_without_tools_takes_none() -> None:
    async with gateway() as served, served.client() as client:
        answer = await client.post("/v1/chat/completions", json={**ASKED, "max_tokens": 5})
        assert answer.json()["error"]["param"] == "tools" and "--tool-parser" in answer.json()["error"]["message"]
        body = {**ASKED, "max_tokens": 5, "tool_choice": "none"}
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200


class Add(BaseModel):
    """Adds."""

    a: int


async def test_openai_s_own_helpers_parse_the_arguments() -> None:
    """`parse` and `stream` send strict tools, and make objects of what comes back."""
    toy = target("hermes", output_of("hermes", [("Add", '{"a": 1}'), ("Add", '{"a": 23}')]))
    fields: dict[str, Any] = {**ASKED, "tools": [openai.pydantic_function_tool(Add)]}
    async with gateway(toy, tokenizer=tool_tokenizer("hermes")) as served, served.openai() as client:
        parsed = await client.chat.completions.parse(**fields)
        calls = parsed.choices[0].message.tool_calls or []
        assert [call.function.parsed_arguments for call in calls] == [Add(a=1), Add(a=23)]
        async with client.chat.completions.stream(**fields) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_completion()
        done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
        assert [event.parsed_arguments for event in done] == [Add(a=1), Add(a=23)]
        assert any(event.type == "tool_calls.function.arguments.delta" for event in events)
        assert final.choices[0].finish_reason == "tool_calls"
        assert [call.id for call in final.choices[0].message.tool_calls or []] != [call.id for call in calls]
        opened = toy.opens[-1].sampling.structured_output
        assert opened is not None and '"additionalProperties": false' in (opened.grammar or "")


async def test_a_stream_s_usage_and_end() -> None:
    async with (
        gateway(target("json", output_of("json")), tokenizer=tool_tokenizer("json")) as served,
        served.client() as client,
    ):
        body = {**ASKED, "stream": True, "stream_options": {"include_usage": True}}
        events = [json.loads(event) for event in (await stream_events(client, "/v1/chat/completions", body))[:-1]]
        assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] == len(
            written("json", output_of("json"))
        )
        assert [event["choices"][0]["finish_reason"] for event in events[:-1]][-1] == "tool_calls"
