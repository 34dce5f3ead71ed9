"""Messages in channels: what of gpt-oss' output is reasoning and what its answer, in every window, on every resume."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from support.counting import CountedIds
from support.fakes import EOS, ToyDraft, ToyTarget, scripted, target_info
from support.gateways import TEMPLATE, gateway, stream_events, toy_tokenizer
from support.models import train_byte_level
from tokenizers import AddedToken

from outrider.gateway.text.channels import ANSWERS, CHANNEL_TOKENS, CHANNELS, REASONS
from outrider.gateway.text.chat_template import ChatTemplate
from outrider.gateway.text.reasoning import AUTO, ReasoningMarkers, ReasoningStream, find_markers
from outrider.gateway.text.tokenizer import Tokenizer
from outrider.rpc.errors import FailedPrecondition
from outrider.rpc.words.sampling_params import CAPABILITIES, FinishReason, SamplingParams
from outrider.rpc.words.structured import REASONING, Reasoning

MESSAGES = [{"role": "user", "content": "the quick brown fox"}]
NEXT = "<|end|><|start|>assistant"


@cache
def channel_tokenizer() -> Tokenizer:
    """The toy's, with the special tokens of the format; its template ends where a role's head has begun."""
    backend = train_byte_level(390)
    backend.add_tokens([AddedToken(text, special=True) for text in CHANNEL_TOKENS])
    template = TEMPLATE.replace("assistant:", "<|start|>assistant")
    return Tokenizer(backend, "channels", {"eos_token": "<|endoftext|>"}, ChatTemplate(template))


def ids_of(text: str) -> list[int]:
    return channel_tokenizer().encode(text, add_special_tokens=False)


def markers() -> ReasoningMarkers:
    found = find_markers(channel_tokenizer(), AUTO)
    assert found is not None
    return found


def test_ten_times_the_messages_are_ten_times_the_work() -> None:
    """However many come at once, as ids that a client has, and however long a head is."""
    plan = markers().plan(None, True, SamplingParams(), channel_tokenizer(), (), CAPABILITIES)
    for unit in ("<|channel|>final<|message|>x<|end|>", "<|channel|>"):
        work = []
        for count in (20, 200):
            CountedIds.work = 0
            stream = plan.stream(channel_tokenizer(), SamplingParams(), (), CountedIds(ids_of(unit) * count))
            assert stream.resumed.num_ids == len(ids_of(unit)) * count
            work.append(CountedIds.work)
        assert work[1] < 15 * work[0]


def parts_of(output: str, size: int, resumed: int = 0, prompt: str = "x", **sampling: Any) -> tuple[str, str, int, int]:
    """Reasoning and answer of an output in windows of a size behind the first ids; its ids, and those of reasoning."""
    ids = ids_of(output)
    params = SamplingParams(max_tokens=200, **sampling)
    plan = markers().plan(None, True, params, channel_tokenizer(), ids_of(prompt), CAPABILITIES)
    stream = plan.stream(channel_tokenizer(), params, ids_of(prompt), ids[:resumed])
    assert isinstance(stream, ReasoningStream)
    deltas = [stream.resumed, *(stream.push(ids[at : at + size]) for at in range(resumed, len(ids), size))]
    if not stream.finished:
        deltas.append(stream.push((), FinishReason.LENGTH))
    reasoning, text = ("".join(getattr(delta, name) for delta in deltas) for name in ("reasoning", "text"))
    return reasoning, text, sum(delta.num_ids for delta in deltas), sum(delta.num_reasoning for delta in deltas)


def test_the_markers_are_found_by_their_tokens() -> None:
    assert markers() == find_markers(channel_tokenizer(), CHANNELS)
    assert markers().start_ids == tuple(ids_of(REASONS)) and markers().end_ids == tuple(ids_of(ANSWERS))
    with pytest.raises(FailedPrecondition, match=r"reasoning_parser is openai_gptoss, .* no tokens <\|start\|> and "):
        find_markers(toy_tokenizer(), CHANNELS)


@pytest.mark.parametrize(
    ("output", "reasoning", "text"),
    [
        (f"{REASONS}the fox{ANSWERS}the dog", "the fox", "the dog"),
        (f"{REASONS}the fox", "the fox", ""),
        (f"{REASONS}the fox<|end|>", "the fox", ""),
        (f"{REASONS}the fox{NEXT}<|channel|>fin", "the fox", ""),
        ("<|channel|>final<|message|>the dog", "", "the dog"),
        (f"{REASONS}the {NEXT}{REASONS}fox{ANSWERS}dog", "the fox", "dog"),
        (f"{REASONS}fox{NEXT}<|channel|>commentary<|message|>now {ANSWERS}dog", "fox", "now dog"),
        (f"{REASONS}fox{NEXT}<|channel|>commentary to=functions.f<|message|>{{}}", "fox", "{}"),
        ("<|channel|>analysis to=python<|message|>the fox", "the fox", ""),
        ("the dog", "", "the dog"),
        (f"{REASONS}the fox<|end|>the dog", "the fox", "the dog"),
        (f"{REASONS}naïve 你好{ANSWERS}你 analysis", "naïve 你好", "你 analysis"),
    ],
)
def test_every_window_and_resume_tells_the_same(output: str, reasoning: str, text: str) -> None:
    count = len(ids_of(output))
    whole = parts_of(output, count)
    assert whole[:3] == (reasoning, text, count)
    for size in (1, 2, 3, 7):
        assert parts_of(output, size) == whole, size
    before = [parts_of(output, count, resumed=at) for at in range(count)]
    assert all(whole[0].endswith(part[0]) and whole[1].endswith(part[1]) for part in before)
    assert parts_of(output, 3, resumed=count // 2)[:2] == before[count // 2][:2]


def test_a_prompt_may_have_opened_it() -> None:
    """A head in the middle of a prompt opens nothing."""
    for prompt, told in ((f"x{REASONS}", ("the fox", "the dog")), (f"{REASONS}x{NEXT}", ("", "the foxthe dog"))):
        for size in (1, 50):
            assert parts_of(f"the fox{ANSWERS}the dog", size, prompt=prompt)[:2] == told


def test_stop_strings_match_within_one_text() -> None:
    output = f"{REASONS}the fox{ANSWERS}the dog"
    for stop, reasoning, text in (("fox", "the ", ""), ("dog", "the fox", "the "), ("foxthe", "the fox", "the dog")):
        for size in (1, 50):
            assert parts_of(output, size, stop=(stop,))[:2] == (reasoning, text)


async def test_over_http() -> None:
    rule = scripted([*ids_of(f"{REASONS}the fox{ANSWERS}the lazy dog"), EOS])
    knows = (*CAPABILITIES, "sampling.structured_output", REASONING)
    target = ToyTarget(rule=rule, info=replace(target_info(), capabilities=knows))
    path, body = "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 60, "temperature": 0}
    async with gateway(target, ToyDraft(rule=rule, wrong_every=3), tokenizer=channel_tokenizer()) as served:
        async with served.client() as client:
            answer = (await client.post(path, json=body)).json()
            message = answer["choices"][0]["message"]
            assert (message["reasoning_content"], message["content"]) == ("the fox", "the lazy dog")
            details = answer["usage"]["completion_tokens_details"]
            assert details == {"reasoning_tokens": len(ids_of("the fox"))}
            events = await stream_events(client, path, {**body, "stream": True, "thinking_token_budget": 5})
            deltas = [choice["delta"] for event in events[:-1] for choice in json.loads(event)["choices"]]
            for name, text in (("reasoning_content", "the fox"), ("content", "the lazy dog")):
                assert "".join(delta.get(name) or "" for delta in deltas) == text
        expected = Reasoning(tuple(ids_of(ANSWERS)), tuple(ids_of(REASONS)), 5, False)
        assert [message.reasoning for message in target.opens] == [None, expected]
