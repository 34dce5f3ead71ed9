"""/v1/chat/completions through the real openai package."""

from __future__ import annotations

import asyncio
from typing import Any

from gateway.http_harness import gateway, text_of, toy_tokenizer
from gateway.toys import ToyDraft, ToyTarget, expected, scripted
from openai import OpenAI

from outrider.gateway.http.protocol import TokenTexts
from outrider.rpc.messages import TokenLogprob

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
        with OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=20) as client:
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
