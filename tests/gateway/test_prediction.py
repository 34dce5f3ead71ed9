"""A request's prediction: tokenised as what follows the prompt, drafted by the draft service or here, counted in
usage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.fakes import ToyDraft, ToyTarget, draft_info, expected, scripted
from support.gateways import PROMPT, gateway, stream_events, text_of, toy_tokenizer
from support.models import train_byte_fallback, train_byte_level, train_unigram

from outrider.client import Client
from outrider.gateway.engine import EngineConfig, GenerationEngine
from outrider.gateway.prediction import encoder_after
from outrider.gateway.speculation.schedule import BatchSchedule, ScheduledDrafter
from outrider.gateway.text.tokenizer import Tokenizer
from outrider.rpc.messages import DraftMethod
from outrider.rpc.words.answer import GenerationDelta
from outrider.rpc.words.request import GenerationRequest, SpeculationOptions
from outrider.rpc.words.sampling_params import SamplingParams

ANSWER = expected(PROMPT, 40)
WRITTEN = toy_tokenizer().encode("the quick brown fox jumps over the lazy dog, and the dog sleeps on", False)
PREDICTING = replace(draft_info(), methods=(DraftMethod("draft_model"), DraftMethod("prediction")))


async def answer(engine: GenerationEngine, **fields: Any) -> list[list[GenerationDelta]]:
    """Of each completion the deltas; what they say is what the target says."""
    sampling = fields.pop("sampling", SamplingParams(temperature=0.0, max_tokens=40))
    deltas: dict[int, list[GenerationDelta]] = {}
    async for delta in engine.generate(GenerationRequest(token_ids=tuple(PROMPT), sampling=sampling, **fields)):
        deltas.setdefault(delta.index, []).append(delta)
    for given in deltas.values():
        assert [token for delta in given for token in delta.token_ids] == ANSWER
    return list(deltas.values())


def counts(deltas: Sequence[GenerationDelta]) -> tuple[int, int]:
    usage = deltas[-1].usage
    assert usage is not None
    return usage.accepted_prediction_tokens, usage.rejected_prediction_tokens


@pytest.mark.parametrize("new_draft", [lambda: None, ToyDraft, lambda: ToyDraft(info=None, available=False)])
@pytest.mark.parametrize("mode", ["sequential", "chains", "auto"])
async def test_the_gateway_drafts_where_its_draft_does_not(new_draft: Any, mode: str) -> None:
    target, draft = ToyTarget(), new_draft()
    config = EngineConfig(0 if draft is None else 8, mode=mode)
    engine = GenerationEngine(toy_tokenizer(), target, draft, config)
    guess = (*ANSWER[:10], 3, *ANSWER[11:20], *ANSWER[22:])  # one replaced, two lacking
    (deltas,) = await answer(engine, prediction=guess)
    tally = deltas[-1].speculation
    assert tally is not None and tally.method == "prediction" and counts(deltas) == (37, 1)
    assert tally.num_accepted_tokens >= 20 and (mode == "auto" or tally.num_rounds <= 12)
    assert target.opens[-1].prediction == ()
    assert draft is None or not draft.opens
    (plain,) = await answer(engine, speculation=SpeculationOptions(enabled=False), prediction=guess)
    assert counts(plain) == (37, 1) and plain[-1].speculation is not None and plain[-1].speculation.num_drafts == 0
    (without,) = await answer(engine)
    assert counts(without) == (0, 0) and engine.admission.num_active == 0


async def test_a_draft_that_has_the_method_gets_the_prediction() -> None:
    target, draft = ToyTarget(), ToyDraft(info=PREDICTING)
    engine = GenerationEngine(toy_tokenizer(), target, draft)
    await answer(engine, prediction=tuple(ANSWER), n=2, sampling=SamplingParams(temperature=0.5, max_tokens=40))
    assert [(opened.method, opened.prediction) for opened in draft.opens] == [("prediction", tuple(ANSWER))] * 2
    assert not any(opened.prediction for opened in target.opens)
    (named,) = await answer(engine, prediction=(1, 2), speculation=SpeculationOptions(method="draft_model"))
    assert draft.opens[-1].method == "draft_model" and draft.opens[-1].prediction == () and counts(named)[1] > 0


async def test_a_draft_with_a_list_goes_on_where_the_prediction_ends() -> None:
    listing = replace(draft_info(), methods=(DraftMethod("ngram"), *PREDICTING.methods))
    draft = ToyDraft(info=replace(listing, default_methods=("ngram", "draft_model")))
    engine = GenerationEngine(toy_tokenizer(), ToyTarget(), draft)
    (deltas,) = await answer(engine, prediction=tuple(ANSWER))
    opened = draft.opens[-1]
    assert opened.named_methods == ("prediction", "ngram", "draft_model") and opened.method == "prediction"
    assert opened.prediction == tuple(ANSWER)
    assert deltas[-1].speculation is not None and deltas[-1].speculation.method == "prediction,ngram,draft_model"
    draft.info = replace(listing, default_methods=("prediction", "draft_model"))
    await answer(engine, prediction=tuple(ANSWER))
    assert (draft.opens[-1].named_methods, draft.opens[-1].prediction) == ((), tuple(ANSWER))
    named = SpeculationOptions(methods=("ngram", "prediction"))
    await answer(engine, speculation=named)  # a list may have a method that this request gives nothing
    assert (draft.opens[-1].methods, draft.opens[-1].prediction) == (("ngram", "prediction"), ())


async def test_completions_logprobs_and_resumption() -> None:
    """What others refuse beside a prediction is served; counts are of the whole completion."""
    engine = GenerationEngine(toy_tokenizer(), ToyTarget())
    sampling = SamplingParams(temperature=0.0, max_tokens=40, logprobs=1)
    (deltas,) = await answer(engine, prediction=tuple(ANSWER), sampling=sampling)
    assert sum(len(delta.logprobs) for delta in deltas) == 40 and counts(deltas) == (40, 0)
    request = GenerationRequest(
        token_ids=tuple(PROMPT), sampling=sampling, prediction=tuple(ANSWER), output_ids=(tuple(ANSWER[:15]),)
    )
    resumed = [delta async for delta in engine.generate(request)]
    assert [token for delta in resumed for token in delta.token_ids] == ANSWER[15:] and counts(resumed) == (40, 0)
    assert resumed[-1].speculation is not None and resumed[-1].speculation.num_rounds <= 5


async def test_a_schedule_holds_for_predictions_as_well() -> None:
    schedule = BatchSchedule.of(4, 1, None)
    engine = GenerationEngine(toy_tokenizer(), ToyTarget(), ScheduledDrafter(ToyDraft(), schedule, lambda: 2))
    (deltas,) = await answer(engine, prediction=tuple(ANSWER))
    assert deltas[-1].speculation is not None and deltas[-1].speculation.num_draft_tokens == 0


@pytest.mark.parametrize("train", [train_byte_level, train_byte_fallback, train_unigram])
def test_a_text_becomes_the_tokens_that_follow_the_prompt(train: Any, tmp_path: Path) -> None:
    train().save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    text = "the quick brown fox jumps over the lazy dog, and the dog sleeps on"
    num_same = 0
    for end in range(1, len(text)):
        prompt, whole = tokenizer.encode(text[:end], False), tokenizer.encode(text, False)
        ids = encoder_after(tokenizer, prompt)(text[end:])
        if whole[: len(prompt)] == prompt:  # else a token spans the border, and no prompt ends so
            num_same += list(ids) == whole[len(prompt) :]
        assert tokenizer.decode([*prompt, *ids]).replace(" ", "") == text.replace(" ", "")
    assert num_same >= 9
    assert list(encoder_after(tokenizer, [])(text)) == tokenizer.encode(text, False)


@pytest.mark.parametrize("stream", [False, True])
async def test_over_http_as_openai_has_it(stream: bool) -> None:
    guess = text_of(WRITTEN).replace("quick", "slow")
    body = {"model": "toy", "prompt": PROMPT, "max_tokens": 40, "temperature": 0}
    body |= {"prediction": {"type": "content", "content": [{"type": "text", "text": guess}]}, "speculation": {}}
    async with gateway(ToyTarget(rule=scripted(WRITTEN))) as served, served.client() as client:
        if stream:
            options = {"stream": True, "stream_options": {"include_usage": True}}
            events = await stream_events(client, "/v1/completions", body | options)
            usage = httpx.Response(200, text=events[-2]).json()["usage"]
        else:
            usage = (await client.post("/v1/completions", json=body)).json()["usage"]
        details = usage["completion_tokens_details"]
        assert details["accepted_prediction_tokens"] > 20
        assert details["rejected_prediction_tokens"] >= 1
        async with served.openai() as openai:
            prediction: Any = {"type": "content", "content": guess}
            messages: Any = [{"role": "user", "content": "hello"}]
            chat = await openai.chat.completions.create(
                model="toy", messages=messages, max_tokens=40, prediction=prediction
            )
            assert chat.usage is not None and chat.usage.completion_tokens_details is not None
            assert chat.usage.completion_tokens_details.rejected_prediction_tokens is not None
        async with Client(served.grpc_address) as grpc:
            parts = [part async for part in grpc.generate(token_ids=PROMPT, prediction=WRITTEN, max_tokens=40)]
            assert parts[-1].usage is not None
            assert parts[-1].usage.accepted_prediction_tokens == min(40, len(WRITTEN))
        plain = await client.post("/v1/completions", json={"prompt": PROMPT})
        assert "completion_tokens_details" not in plain.json()["usage"]


@pytest.mark.parametrize(
    ("prediction", "param", "problem"),
    [
        ({"type": "content", "content": ""}, "prediction.content", "is empty"),
        ({"type": "content", "content": "x y " * 400}, "prediction.content", "allowed: at most 256"),
        ({"content": "x"}, "prediction.type", "is missing; allowed: content"),
        ({"type": "text", "content": "x"}, "prediction.type", "allowed: content"),
        ({"type": "content", "content": 5}, "prediction.content", "allowed: a text or a list of parts"),
        ({"type": "content", "content": [{"type": "image_url"}]}, "prediction.content[0]", "is no text"),
        ("x", "prediction", "allowed: an object"),
    ],
)
async def test_what_is_wrong_is_named(prediction: Any, param: str, problem: str) -> None:
    async with gateway(ToyTarget()) as served, served.client() as client:
        answer = await client.post("/v1/completions", json={"prompt": PROMPT, "prediction": prediction})
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["param"] == param and problem in error["message"]
        two = {"prompt": ["a", "b"], "prediction": {"type": "content", "content": "x"}}
        assert "beside 2 prompts" in (await client.post("/v1/completions", json=two)).json()["error"]["message"]
