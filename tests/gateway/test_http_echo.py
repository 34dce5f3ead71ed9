"""`echo`: the answer begins with the prompt, and its log probabilities with the prompt's."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.fakes import ToyDraft, ToyTarget, expected
from support.gateways import PROMPT, Gateway, gateway, stream_events, text_of, toy_tokenizer

TEXT = "the quick brown fox"
BODY: dict[str, Any] = {"max_tokens": 6, "temperature": 0, "echo": True}


async def choices_of(served: Gateway, stream: bool, **body: Any) -> dict[int, dict[str, Any]]:
    """By index the whole text and the log probabilities, chunks joined."""
    async with served.client() as client:
        if stream:
            events = await stream_events(client, "/v1/completions", {**BODY, **body, "stream": True})
            pieces = [choice for line in events[:-1] for choice in json.loads(line)["choices"]]
        else:
            answer = await client.post("/v1/completions", json={**BODY, **body})
            assert answer.status_code == 200, answer.text
            pieces = answer.json()["choices"]
    out: dict[int, dict[str, Any]] = {}
    for piece in pieces:
        one = out.setdefault(piece["index"], {"text": "", "logprobs": {}})
        one["text"] += piece["text"]
        for name, values in (piece["logprobs"] or {}).items():
            one["logprobs"].setdefault(name, []).extend(values)
        one["finish_reason"] = piece["finish_reason"]
    return out


@pytest.mark.parametrize("stream", [False, True])
async def test_prompts_of_every_kind_come_first(stream: bool) -> None:
    ids = toy_tokenizer().encode(TEXT)
    async with gateway(draft=ToyDraft(wrong_every=3)) as served:
        one = await choices_of(served, stream, prompt=PROMPT)
        assert one[0]["text"] == toy_tokenizer().decode(PROMPT) + text_of(expected(PROMPT, 6))
        several = await choices_of(served, stream, prompt=[TEXT, "the lazy dog"], n=2)
        assert [several[index]["text"].startswith(TEXT) for index in range(4)] == [True, True, False, False]
        assert several[1]["text"] == TEXT + text_of(expected(ids, 6), ids)
        assert several[3]["text"].startswith("the lazy dog") and several[3] == several[2]
        kept = await choices_of(served, stream, prompt=TEXT, truncate_prompt_tokens=2)
        assert kept[0]["text"].startswith(toy_tokenizer().decode(ids[-2:]))


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_begin_with_the_prompt_s(stream: bool) -> None:
    """The prompt's first token has none; every completion has them, whichever the target told them to."""
    ids = toy_tokenizer().encode(TEXT)
    async with gateway(draft=ToyDraft(wrong_every=3)) as served:
        for choice in (await choices_of(served, stream, prompt=TEXT, n=3, logprobs=1)).values():
            told = choice["logprobs"]
            assert told["token_logprobs"] == [None] + [-1.0] * (len(ids) - 1) + [-0.5] * 6
            assert told["top_logprobs"][0] is None and len(told["top_logprobs"]) == len(ids) + 6
            assert "".join(told["tokens"]).startswith(TEXT)
            for token, offset in zip(told["tokens"], told["text_offset"], strict=True):
                assert token.startswith("bytes:") or choice["text"][offset:].startswith(token)
        assert served.target.opens[0].sampling.prompt_logprobs == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_the_prompt_alone(stream: bool) -> None:
    """As harnesses ask that score texts: max_tokens 0."""
    async with gateway() as served:
        answer = await choices_of(served, stream, prompt=TEXT, max_tokens=0, logprobs=0)
        assert answer[0]["text"] == TEXT and answer[0]["finish_reason"] == "length"
        assert len(answer[0]["logprobs"]["tokens"]) == len(toy_tokenizer().encode(TEXT))
        async with served.openai() as client:
            raw = await client.completions.create(model="toy", prompt=TEXT, max_tokens=0, echo=True)
            assert raw.choices[0].text == TEXT and raw.usage is not None and raw.usage.completion_tokens == 0


async def test_a_target_that_tells_no_log_probabilities_of_prompts_ends_nothing() -> None:
    class Silent(ToyTarget):
        def open(self, request: Any, on_event: Any, *rest: Any) -> Any:
            def told(event: Any) -> None:
                if type(event).__name__ != "PromptLogprobs":
                    on_event(event)

            return super().open(request, told, *rest)

    async with gateway(Silent()) as served:
        answer = await choices_of(served, False, prompt=PROMPT, logprobs=1)
        assert answer[0]["logprobs"]["token_logprobs"] == [None] * 3 + [-0.5] * 6
