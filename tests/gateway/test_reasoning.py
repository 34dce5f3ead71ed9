"""Reasoning is told from the answer by ids: in every window, on every resume, whole and streamed."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fakes import EOS, ToyDraft, ToyTarget, scripted, target_info
from support.gateways import Gateway, ask, gateway, stream_events, thinking_tokenizer
from support.gateways import serving as grpc_serving
from support.metrics import scraped

from outrider.client import Client, Part
from outrider.gateway.text.chat_template import ChatTemplate
from outrider.gateway.text.reasoning import (
    AUTO,
    MARKERS,
    ReasoningMarkers,
    ReasoningPlan,
    ReasoningStream,
    find_markers,
    template_variables,
)
from outrider.gateway.text.tokenizer import TextStream, Tokenizer
from outrider.rpc.errors import FailedPrecondition, InvalidArgument
from outrider.rpc.words.request import ReasoningOptions
from outrider.rpc.words.sampling_params import CAPABILITIES, FinishReason, SamplingParams
from outrider.rpc.words.structured import REASONING, Reasoning

TOKENIZER = thinking_tokenizer()
START, END = (TOKENIZER.encode(text, add_special_tokens=False)[0] for text in ("<think>", "</think>"))
OURS = ReasoningMarkers((START,), (END,))
PROMPT = [11, 12, 13]
MESSAGES: Any = [{"role": "user", "content": "the quick brown fox"}]


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def plan(opens: bool = False) -> ReasoningPlan:
    return ReasoningPlan(OURS, opens, True, None)


def stream(opens: bool, output: Sequence[int] = (), **sampling: Any) -> ReasoningStream:
    return ReasoningStream(TOKENIZER, SamplingParams(max_tokens=200, **sampling), PROMPT, output, plan(opens))


def test_the_markers_are_one_token_each_and_found() -> None:
    assert ids_of("<think>") == [START] and ids_of("</think>") == [END] and START not in TOKENIZER.special_ids
    assert find_markers(TOKENIZER, AUTO) == find_markers(TOKENIZER, "qwen3") == OURS
    assert find_markers(TOKENIZER, "none") is None
    with pytest.raises(FailedPrecondition, match=r"has no tokens \[THINK\]"):
        find_markers(TOKENIZER, "mistral")
    with pytest.raises(FailedPrecondition, match="'guess'; allowed: auto, none, deepseek_r1"):
        find_markers(TOKENIZER, "guess")
    assert all(len(set(texts)) == len(texts) >= 2 for texts in MARKERS.values())


@pytest.mark.parametrize(
    ("text", "is_open"),
    [
        ("a<think>", True), ("a<think>\n", True), ("a<think>\n \n", True), ("a", False), ("a<think>b", False),
        ("<think>\n\n</think>\n\n", False), ("<think>a</think>b<think>", True), ("say <think> and stop", False),
    ],
)  # fmt: skip
def test_what_the_prompt_has_opened(text: str, is_open: bool) -> None:
    """Only at its end: a marker that a user wrote is no opening."""
    planned = OURS.plan(None, True, SamplingParams(), TOKENIZER, ids_of(text), CAPABILITIES)
    assert planned.open is is_open and planned.message is None and planned.splits


@pytest.mark.parametrize(
    ("opens", "output", "reasoning", "text"),
    [
        (False, "<think>the fox</think>the dog", "the fox", "the dog"),
        (True, "the fox</think>the dog", "the fox", "the dog"),
        (True, "</think>the dog", "", "the dog"),
        (False, "the dog", "", "the dog"),
        (False, "the <think>dog</think>", "", "the <think>dog</think>"),
        (False, "<think>a</think>b</think>c<think>d", "a", "b</think>c<think>d"),
        (True, "the fox", "the fox", ""),
        (True, "naïve 你好</think>你", "naïve 你好", "你"),
    ],
)
def test_every_window_tells_the_same(opens: bool, output: str, reasoning: str, text: str) -> None:
    ids = ids_of(output)
    num_reasoning = len(ids_of(reasoning))
    for size in (1, 2, 3, len(ids)):
        parts = stream(opens)
        deltas = [parts.push(ids[at : at + size]) for at in range(0, len(ids), size)]
        last = parts.push((), FinishReason.LENGTH)
        deltas.append(last)
        assert "".join(delta.reasoning for delta in deltas) == reasoning, size
        assert "".join(delta.text for delta in deltas) == text, size
        assert sum(delta.num_ids for delta in deltas) == len(ids)
        assert sum(delta.num_reasoning for delta in deltas) == num_reasoning
        assert parts.finished


@settings(max_examples=300)
@given(
    ids=st.lists(st.one_of(st.sampled_from([START, END, *ids_of("abab ")]), st.integers(0, 399)), max_size=24),
    cuts=st.lists(st.integers(0, 24), max_size=6),
    resumed_at=st.integers(0, 24),
    opens=st.booleans(),
    stops=st.sampled_from([(), ("ab",), ("b ", "aba")]),
    min_tokens=st.integers(0, 6),
)
def test_windows_and_resumes_equal_one_token_at_a_time(
    ids: list[int], cuts: list[int], resumed_at: int, opens: bool, stops: tuple[str, ...], min_tokens: int
) -> None:
    def run(edges: Sequence[int], resumed: Sequence[int] = ()) -> tuple[str, str, int, int, object]:
        parts = stream(opens, resumed, stop=stops, min_tokens=min_tokens)
        begun, rest = parts.resumed, ids[len(resumed) :]
        marks = sorted({0, len(rest), *(edge for edge in edges if edge < len(rest))})
        deltas = [begun, *(parts.push(rest[low:high]) for low, high in itertools.pairwise(marks))]
        if not parts.finished:
            deltas.append(parts.push((), FinishReason.LENGTH))
        texts = ("".join(delta.reasoning for delta in deltas), "".join(delta.text for delta in deltas))
        finish = next((delta.stop_string for delta in deltas if delta.finish_reason is not None), None)
        return *texts, sum(d.num_ids for d in deltas), sum(d.num_reasoning for d in deltas), finish

    slowly = run(range(len(ids)))
    assert run(cuts) == slowly
    assert run(cuts, ids[: min(resumed_at, slowly[2])]) == slowly
    if START not in ids and not opens:
        plain = TextStream(TOKENIZER, SamplingParams(max_tokens=200, stop=stops, min_tokens=min_tokens), PROMPT)
        deltas = [plain.push(ids)]
        if not plain.finished:
            deltas.append(plain.push((), FinishReason.LENGTH))
        assert slowly[:2] == ("", "".join(delta.text for delta in deltas))


def test_stop_strings_end_either_text_and_match_within_one() -> None:
    ids = ids_of("the fox</think>the dog")
    for stop, reasoning, text in (("fox", "the ", ""), ("dog", "the fox", "the "), ("foxthe", "the fox", "the dog")):
        for size in (1, len(ids)):
            parts = stream(True, stop=(stop,))
            deltas = [parts.push(ids[at : at + size]) for at in range(0, len(ids), size)]
            deltas.append(parts.push((), FinishReason.LENGTH))
            assert "".join(delta.reasoning for delta in deltas) == reasoning
            assert "".join(delta.text for delta in deltas) == text


def thinking(opens: bool = False, output: str = "<think>the fox</think>the lazy dog") -> Any:
    """A gateway whose model reasons first."""
    ids = ids_of(output.removeprefix("<think>") if opens else output)
    rule = scripted([*ids, EOS])
    target, draft = ToyTarget(rule=rule), ToyDraft(rule=rule, wrong_every=3)
    return gateway(target, draft, tokenizer=thinking_tokenizer(opens))


async def post(served: Gateway, **fields: Any) -> Any:
    async with served.client() as client:
        body = {"messages": MESSAGES, "max_tokens": 60, "temperature": 0, **fields}
        if not fields.get("stream"):
            return (await client.post("/v1/chat/completions", json=body)).json()
        events = await stream_events(client, "/v1/chat/completions", body)
        return [json.loads(line) for line in events[:-1]]


@pytest.mark.parametrize("opens", [False, True])
async def test_over_http_whole_and_streamed(opens: bool) -> None:
    async with thinking(opens) as served:
        answer = await post(served, n=2)
        for choice in answer["choices"]:
            message = choice["message"]
            assert message["reasoning_content"] == message["reasoning"] == "the fox"
            assert message["content"] == "the lazy dog" and choice["finish_reason"] == "stop"
        count = len(ids_of("the fox"))
        assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2 * count}
        chunks = await post(served, stream=True, n=2, stream_options={"include_usage": True})
        for index in range(2):
            deltas = [one["delta"] for chunk in chunks for one in chunk["choices"] if one["index"] == index]
            for name, text in (("reasoning_content", "the fox"), ("reasoning", "the fox"), ("content", "the lazy dog")):
                assert "".join(delta.get(name) or "" for delta in deltas) == text
        assert chunks[-1]["usage"] == answer["usage"]
        metrics = scraped(served.metrics)
        assert metrics["reasoning_tokens_total", ()] == 4 * count < metrics["generation_tokens_total", ()]


async def test_what_the_openai_client_sees() -> None:
    async with thinking(True) as served, served.openai() as client:
        raw = await client.chat.completions.create(model="toy", messages=MESSAGES, max_tokens=60)
        message = raw.choices[0].message
        assert message.content == "the lazy dog" and (message.model_extra or {})["reasoning_content"] == "the fox"
        assert raw.usage is not None and raw.usage.completion_tokens_details is not None
        assert raw.usage.completion_tokens_details.reasoning_tokens == len(ids_of("the fox"))
        cut = await client.chat.completions.create(model="toy", messages=MESSAGES, max_tokens=2)
        assert cut.choices[0].message.content is None and cut.choices[0].finish_reason == "length"


async def test_it_can_be_left_out_or_left_in() -> None:
    async with thinking() as served:
        message = (await post(served, include_reasoning=False))["choices"][0]["message"]
        assert message == {"role": "assistant", "content": "the lazy dog", "refusal": None}
        for asked in ({}, {"return_token_ids": True}):
            chunks = await post(served, include_reasoning=False, stream=True, **asked)
            choices = [choice for chunk in chunks for choice in chunk["choices"]]
            assert not any("reasoning" in choice["delta"] for choice in choices)
            assert "".join(choice["delta"].get("content") or "" for choice in choices) == "the lazy dog"
            opening, *pieces, last = choices
            assert opening["delta"]["role"] and last["finish_reason"] == "stop"
            if asked:  # tokens are told, whatever they say
                ids = [token for choice in choices for token in choice.get("token_ids", ())]
                assert ids == [*ids_of("<think>the fox</think>the lazy dog"), EOS]
            else:
                assert pieces and all(choice["delta"]["content"] for choice in pieces)
        async with served.client() as client:
            body = {"prompt": "x", "max_tokens": 60, "temperature": 0}
            text = (await client.post("/v1/completions", json=body)).json()["choices"][0]["text"]
            assert text == "<think>the fox</think>the lazy dog"  # of a prompt all is text
    served_plain = gateway(
        ToyTarget(rule=scripted([*ids_of("<think>a</think>b"), EOS])),
        tokenizer=TOKENIZER,
        reasoning_parser="none",
    )
    async with served_plain as plain:
        message = (await post(plain))["choices"][0]["message"]
        assert message["content"] == "<think>a</think>b" and "reasoning" not in message


async def test_effort_is_told_to_a_template_that_knows_it() -> None:
    async with thinking() as served, served.client() as client:
        for effort in ("none", "minimal", "low", "medium", "high"):
            body = {"messages": MESSAGES, "reasoning_effort": effort}
            tokens = (await client.post("/tokenize", json=body)).json()["tokens"]
            assert TOKENIZER.decode(tokens).endswith(f"assistant:{effort}")
        refused = await post(served, reasoning_effort="huge")
        assert refused["error"]["param"] == "reasoning_effort"
        assert "allowed: none, minimal, low, medium, high" in refused["error"]["message"]
    async with gateway() as plain:  # its template knows nothing of it
        assert "choices" in await post(plain, reasoning_effort="low", max_tokens=2)
    switch = ReasoningOptions(effort="none")
    assert template_variables(switch, ["enable_thinking", "messages"]) == {"enable_thinking": False}
    assert template_variables(switch, ["thinking", "reasoning_effort"]) == {
        "thinking": False,
        "reasoning_effort": "none",
    }


@pytest.mark.parametrize("opens", [False, True])
async def test_peers_learn_of_it_where_a_constraint_or_a_bound_needs_them(opens: bool) -> None:
    """A target that cannot track it constrains the output from its first token, if that is the answer's."""
    knows = (*CAPABILITIES, "sampling.structured_output", REASONING)
    target = ToyTarget(info=replace(target_info(), capabilities=knows))
    async with gateway(target, ToyDraft(), tokenizer=thinking_tokenizer(opens)) as served:
        schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
        await post(served, max_tokens=2)
        await post(served, max_tokens=2, response_format=schema)
        await post(served, max_tokens=2, max_reasoning_tokens=7)
        await post(served, max_tokens=2, thinking_token_budget=8)
        await post(served, max_tokens=2, thinking_token_budget=-1)
        told = [message.reasoning for message in target.opens]
        assert told == [None, *(Reasoning((END,), (START,), most, opens) for most in (0, 7, 8)), None]
        async with served.client() as client:  # of a text that is not parted the constraint is on all
            for prompt in ("x", "x<think>"):
                body = {"prompt": prompt, "max_tokens": 2, "response_format": schema}
                assert (await client.post("/v1/completions", json=body)).status_code == 200
        assert [message.reasoning for message in target.opens[5:]] == [None, Reasoning((END,), (START,), 0, True)]
    target = ToyTarget(info=replace(target_info(), capabilities=knows[:-1]))
    async with gateway(target, tokenizer=thinking_tokenizer(opens)) as served:
        answer = await post(served, max_tokens=2, response_format=schema)
        assert ("error" in answer) is opens and [message.reasoning for message in target.opens] == [None] * (not opens)
        assert (await post(served, max_reasoning_tokens=7))["error"]["param"] == "max_reasoning_tokens"


async def test_bounds_are_refused_where_nobody_keeps_them() -> None:
    async with gateway() as plain, thinking() as served:
        for one, value in ((plain, 5), (served, 0), (served, "many"), (served, 257)):
            for name in ("max_reasoning_tokens", "thinking_token_budget"):
                error = (await post(one, **{name: value}))["error"]
                assert error["param"] == name and error["message"].startswith(name), error
        error = (await post(served, max_reasoning_tokens=5, thinking_token_budget=5))["error"]
        assert error["message"] == "thinking_token_budget: is given beside max_reasoning_tokens; allowed: one of them"


def texts_of(parts: Sequence[Part]) -> tuple[str, str]:
    return "".join(part.reasoning for part in parts), "".join(part.text for part in parts)


async def test_over_grpc_by_choice() -> None:
    async with thinking() as served, Client(served.grpc_address) as client:
        chat = [part async for part in client.generate(messages=MESSAGES, max_tokens=60)]
        assert texts_of(chat) == ("the fox", "the lazy dog")
        assert chat[-1].usage is not None and chat[-1].usage.reasoning_tokens == len(ids_of("the fox"))
        joined = [part async for part in client.generate(messages=MESSAGES, max_tokens=60, split_reasoning=False)]
        assert texts_of(joined) == ("", "<think>the fox</think>the lazy dog")
        split = [part async for part in client.generate("x", max_tokens=60, split_reasoning=True)]
        assert texts_of(split) == ("the fox", "the lazy dog")
        with pytest.raises(InvalidArgument) as raised:
            [part async for part in client.generate("x", max_reasoning_tokens=0, reasoning_effort="huge")]
        assert [one.field for one in raised.value.violations] == ["reasoning.effort", "reasoning.max_tokens"]


async def test_what_was_reasoned_goes_back_to_the_template() -> None:
    """By either of its names, over HTTP and gRPC."""
    tokenizer = thinking_tokenizer()
    told = "{% for message in messages %}{{ message.reasoning_content }}+{{ message.content }};{% endfor %}"
    shown = Tokenizer(tokenizer.backend, "shown", {}, ChatTemplate(told))
    async with gateway(tokenizer=shown) as served, Client(served.grpc_address) as client:
        for name in ("reasoning", "reasoning_content"):
            messages = [{"role": "assistant", "content": "b", name: "a"}]
            await post(served, messages=messages, max_tokens=1)
            [part async for part in client.generate(messages=messages, max_tokens=1)]
        assert [shown.decode(message.prompt_ids) for message in served.target.opens] == ["a+b;"] * 4


@pytest.mark.parametrize("cut", range(1, 8))
async def test_a_broken_stream_goes_on_where_it_was(cut: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt is then sent as ids: it still counts as a conversation."""
    monkeypatch.setattr("support.gateways.toy_tokenizer", lambda: TOKENIZER)
    target = ToyTarget(rule=scripted([*ids_of("<think>the fox</think>the lazy dog"), EOS]))
    async with grpc_serving(cut, target=target) as served:
        parts = await ask("aio", served, messages=MESSAGES, max_tokens=60, speculate=False)
        assert texts_of(parts) == ("the fox", "the lazy dog") and len(served.requests) <= 2


@pytest.mark.parametrize("opens", [False, True])
def test_min_tokens_counts_from_the_output_s_beginning(opens: bool) -> None:
    ids = ids_of("the fox</think>the dog" if opens else "<think>the fox</think>the dog")
    for min_tokens, text in ((len(ids) - 1, "the "), (len(ids), "the dog")):
        for size in (1, len(ids)):
            parts = stream(opens, stop=("dog",), min_tokens=min_tokens)
            deltas = [parts.push(ids[at : at + size]) for at in range(0, len(ids), size)]
            deltas.append(parts.push((), FinishReason.LENGTH))
            assert "".join(delta.text for delta in deltas) == text, (min_tokens, size)
