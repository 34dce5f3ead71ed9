"""What an answer says of its prompt. `echo`: it begins with it, and its log probabilities with the prompt's;
`prompt_logprobs`: these by themselves, as vLLM has them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from support.fakes import ToyDraft, ToyTarget, expected
from support.gateways import PROMPT, Gateway, gateway, stream_events, text_of, toy_tokenizer

from outrider.gateway.http.echo import echoed_logprobs
from outrider.gateway.http.protocol import EchoedPrompt
from outrider.gateway.http.token_texts import TextPlace, TokenTexts
from outrider.rpc.messages import PromptLogprobs
from outrider.rpc.words.answer import TokenLogprob

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


async def test_what_no_context_holds_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused, and there may be very many."""
    decoded: list[int] = []

    def decode(ids: list[int]) -> str:
        decoded.extend(ids)
        return ""

    async with gateway() as served, served.client() as client:
        monkeypatch.setattr(served.engine.tokenizer, "decode", decode)
        answer = await client.post("/v1/completions", json={**BODY, "prompt": [11] * 300})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "prompt"
    assert not decoded


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

    async with gateway(Silent()) as served, served.client() as client:
        answer = await choices_of(served, False, prompt=PROMPT, logprobs=1)
        assert answer[0]["logprobs"]["token_logprobs"] == [None] * 3 + [-0.5] * 6
        body = {"prompt": PROMPT, "max_tokens": 2, "prompt_logprobs": 1}
        assert (await client.post("/v1/completions", json=body)).json()["choices"][0]["prompt_logprobs"] is None


def of_prompt(ids: list[int]) -> list[dict[str, Any] | None]:
    """What the toy tells of a prompt, in vLLM's form."""
    shown = {token: toy_tokenizer().decode([token]) for token in ids}
    return [None, *({str(token): {"logprob": -1.0, "rank": 1, "decoded_token": shown[token]}} for token in ids[1:])]


class Slicing(ToyTarget):
    """Tells a prompt's log probabilities in two parts, as those of a long one come."""

    def open(self, request: Any, on_event: Any, *rest: Any) -> Any:
        def told(event: Any) -> None:
            if not isinstance(event, PromptLogprobs):
                on_event(event)
                return
            for start, end in ((0, 2), (2, len(event.logprobs))):
                on_event(replace(event, position=start, logprobs=event.logprobs[start:end]))

        return super().open(request, told, *rest)


async def test_prompt_logprobs_of_completions_stand_in_every_choice() -> None:
    ids = toy_tokenizer().encode(TEXT)
    async with gateway(Slicing(), ToyDraft(wrong_every=3)) as served, served.client() as client:
        for echo in (False, True):
            body = {"prompt": [ids, PROMPT], "n": 2, "max_tokens": 4, "temperature": 0, "prompt_logprobs": 5}
            answer = await client.post("/v1/completions", json={**body, "echo": echo})
            choices = answer.json()["choices"]
            assert [choice["prompt_logprobs"] for choice in choices] == [
                of_prompt(own) for own in (ids, ids, PROMPT, PROMPT)
            ]
            assert all(
                choice["logprobs"] is None and choice["text"].startswith(TEXT) is (echo and place < 2)
                for place, choice in enumerate(choices)
            )
        assert {message.sampling.prompt_logprobs for message in served.target.opens} == {5, None}
        both = {"prompt": PROMPT, "max_tokens": 2, "echo": True, "logprobs": 1, "prompt_logprobs": 3}
        (choice,) = (await client.post("/v1/completions", json=both)).json()["choices"]
        assert choice["prompt_logprobs"] == of_prompt(PROMPT) and len(choice["logprobs"]["tokens"]) == 5
        assert served.target.opens[-1].sampling.prompt_logprobs == 3


async def test_prompt_logprobs_of_a_chat_stand_beside_the_choices() -> None:
    async with gateway() as served, served.openai() as client:
        raw = await client.chat.completions.create(
            model="toy",
            messages=[{"role": "user", "content": TEXT}],
            max_tokens=2,
            n=2,
            extra_body={"prompt_logprobs": 0},
        )
        prompt = list(served.target.opens[0].prompt_ids)
        assert (raw.model_extra or {})["prompt_logprobs"] == of_prompt(prompt)
        assert not any("prompt_logprobs" in (choice.model_extra or {}) for choice in raw.choices)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
async def test_prompt_logprobs_that_cannot_be_are_refused(path: str) -> None:
    """A stream has no place for them, as with vLLM."""
    prompt = {"/v1/completions": {"prompt": TEXT}, "/v1/responses": {"input": TEXT}}
    body = prompt.get(path, {"messages": [{"role": "user", "content": TEXT}]})
    async with gateway() as served, served.client() as client:
        for fields in (
            {"prompt_logprobs": 1, "stream": True},
            {"prompt_logprobs": -2},
            {"prompt_logprobs": 21},
            {"prompt_logprobs": "a"},
        ):
            answer = await client.post(path, json={**body, **fields})
            assert answer.status_code == 400 and answer.json()["error"]["param"] == "prompt_logprobs", answer.text


def test_an_echo_has_as_many_alternatives_as_logprobs_says() -> None:
    """Where prompt_logprobs asks for more of them."""
    row = (TokenLogprob(14, -3.0, 3), TokenLogprob(12, -1.0, 1), TokenLogprob(13, -2.0, 2))
    texts, prompt = TokenTexts(toy_tokenizer()), EchoedPrompt("", (11, 14))
    for count, kept in ((1, 2), (2, 3), (-1, 3)):
        told = echoed_logprobs(texts, prompt, ((), row), TextPlace(), count)
        assert told["token_logprobs"] == [None, -3.0] and told["top_logprobs"][0] is None
        assert list(told["top_logprobs"][1].values()) == [-3.0, -1.0, -2.0][:kept]
