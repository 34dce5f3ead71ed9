"""What a request holds beside prompt and sampling parameters is refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
from support.fakes import VOCAB as TOY_VOCAB
from support.fakes import draft_info, target_info
from support.gateways import toy_tokenizer

from outrider.gateway.prepare import MAX_PROMPT_LOGPROBS, Served, check_request, prepare
from outrider.gateway.servicer import CALL
from outrider.rpc.errors import InvalidArgument, Violations
from outrider.rpc.messages import MAX_NAME_CHARS, DraftMethod
from outrider.rpc.words.checks import ALL_LOGPROBS
from outrider.rpc.words.request import DRAFT_OPTIONS, GenerationRequest, ServerCall, SpeculationOptions
from outrider.rpc.words.sampling_params import AcceptanceRule, SamplingParams, check_sampling

VOCAB = 100
LONG = "x" * (MAX_NAME_CHARS + 1)
GOOD: list[dict[str, Any]] = [
    {},
    {"n": 2, "output_ids": ((1,), ())},
    {"request_id": "größe 7, 大"},
    *({"speculation": SpeculationOptions(**cast(Any, {name: bounds.high}))} for name, bounds in DRAFT_OPTIONS.items()),
    {"speculation": SpeculationOptions(method="ngram", methods=("ngram",), mode="branches", num_draft_tokens=128)},
    {"speculation": SpeculationOptions(methods=("prediction", "suffix", "draft_model"))},
    {"speculation": SpeculationOptions(method="ngram, draft_model", methods=("ngram", "draft_model"))},
]
BAD: list[tuple[dict[str, Any], list[str]]] = [
    ({"n": 65, "request_id": LONG, "salt": LONG}, ["n", "request_id", "salt"]),
    ({"n": 2, "output_ids": ((1,),)}, ["output_ids"]),
    ({"output_ids": ((VOCAB,),)}, ["output_ids[0].ids[0]"]),
    ({"request_id": "a\x1b[2Jb"}, ["request_id"]),
    ({"model_digest": LONG, "priority": 2**31}, ["model_digest", "priority"]),
    ({"speculation": SpeculationOptions(num_draft_tokens=129)}, ["speculation.num_draft_tokens"]),
    ({"speculation": SpeculationOptions(methods=tuple("abcdefghi"))}, ["speculation.methods"]),
    ({"speculation": SpeculationOptions(method="a,b,c,d,e,f,g,h,i")}, ["speculation.method"]),
    ({"speculation": SpeculationOptions(methods=("ngram", "ngram"))}, ["speculation.methods"]),
    ({"speculation": SpeculationOptions(method="ngram,suffix,ngram")}, ["speculation.method"]),
    ({"speculation": SpeculationOptions(method=" ")}, ["speculation.method"]),
    ({"speculation": SpeculationOptions(methods=("",))}, ["speculation.methods[0]"]),
    ({"speculation": SpeculationOptions(method="a", methods=("b",))}, ["speculation.method"]),
    ({"speculation": SpeculationOptions(mode="fast")}, ["speculation.mode"]),
    *(
        ({"speculation": SpeculationOptions(**cast(Any, {name: value}))}, [f"speculation.{name}"])
        for name, bounds in DRAFT_OPTIONS.items()
        for value in (bounds.high + 0.1, bounds.low - 0.1, float("nan"))
    ),
]


@pytest.mark.parametrize("given", GOOD)
def test_what_is_allowed(given: dict[str, Any]) -> None:
    found = Violations()
    check_request(found, GenerationRequest(**given), VOCAB)
    found.raise_if_any()


@pytest.mark.parametrize(("given", "fields"), BAD)
def test_what_is_refused_is_named(given: dict[str, Any], fields: list[str]) -> None:
    """Beside the sampling parameters: nothing is raised before all parts were checked."""
    found = Violations()
    check_request(found, GenerationRequest(**given), VOCAB)
    check_sampling(found, SamplingParams(top_p=0), VOCAB, VOCAB)
    with pytest.raises(InvalidArgument) as caught:
        found.raise_if_any()
    assert [violation.field for violation in caught.value.violations] == [*fields, "sampling.top_p"]


@pytest.mark.parametrize(("count", "of_each"), [(0, 1), (20, 21), (-1, TOY_VOCAB)])
async def test_the_log_probabilities_of_a_prompt_are_bounded(count: int, of_each: int) -> None:
    """Nobody can hold them up: a client that reads none of them would leave them all here. A caller in this process has
    what it asks for."""
    most = MAX_PROMPT_LOGPROBS // of_each
    sampling, target = SamplingParams(prompt_logprobs=count, max_tokens=1), target_info(max_model_len=1 << 20)

    async def asked(prompt_len: int, call: ServerCall | None = CALL) -> int:
        request = GenerationRequest(token_ids=(7,) * prompt_len, sampling=sampling, call=call)
        served = Served(toy_tokenizer(), target, None, 0, max_logprobs=ALL_LOGPROBS)
        return len((await prepare(request, served)).prompt_ids)

    assert await asked(most) == most and await asked(most + 1, None) == most + 1
    with pytest.raises(InvalidArgument) as refused:
        await asked(most + 1)
    (violation,) = refused.value.violations
    asked_for = f"asks for {(most + 1) * of_each} log probabilities, {of_each} of each of {most + 1} tokens"
    assert violation.field == "sampling.prompt_logprobs"
    assert violation.problem == f"{asked_for}; allowed: at most 524288 of a prompt"


SUFFIX, MODEL = DraftMethod("suffix", learns=True), DraftMethod("draft_model")
BLOCK, COUPLED, REJECTION = AcceptanceRule.BLOCK, AcceptanceRule.COUPLED, AcceptanceRule.REJECTION


async def test_a_draft_is_told_by_a_digest_whose_a_sequence_is() -> None:
    served, found = Served(toy_tokenizer(), target_info(), draft_info(), 4), []
    request = GenerationRequest(token_ids=(7,), sampling=SamplingParams())
    alice = replace(request, caller="alice")
    asking = alice, replace(alice, salt="s"), replace(request, caller="bob"), replace(request, peer="10.0.0.1"), request
    for request in asking:
        found.append((await prepare(request, served)).open(0, 0, "").caller)
    assert found[0] == found[1] and len(set(found)) == 4 and found[4] == ""
    assert all(len(one) == 16 and "alice" not in one for one in found[:4])


@pytest.mark.parametrize(
    ("seed", "asked", "rule"),
    [
        (None, {}, BLOCK),
        (7, {}, COUPLED),
        (7, {"method": "draft_model"}, BLOCK),
        (7, {"methods": ("draft_model", "suffix")}, COUPLED),
        (7, {"methods": ("prediction", "draft_model")}, COUPLED),
        (7, {"acceptance": REJECTION}, REJECTION),
    ],
)
async def test_a_seed_of_its_callers_is_coupled_where_earlier_answers_are_drafted(
    seed: int | None, asked: dict[str, Any], rule: AcceptanceRule
) -> None:
    """Unless the request insists; only a seed that the gateway drew is told as fresh."""
    request = GenerationRequest(
        token_ids=(7,), sampling=SamplingParams(seed=seed), speculation=SpeculationOptions(**asked)
    )
    draft = replace(draft_info(), methods=(SUFFIX, MODEL, DraftMethod("prediction")))
    prepared = await prepare(request, Served(toy_tokenizer(), target_info(), draft, 4))
    opened = prepared.open(0, 0, "")
    assert prepared.acceptance is opened.acceptance is rule
    assert opened.fresh_seed is (seed is None) and opened.may_recall is (opened.fresh_seed or rule is COUPLED)
    lacks = replace(target_info(), capabilities=("acceptance.rejection",))
    if rule is not REJECTION:
        assert (await prepare(request, Served(toy_tokenizer(), lacks, draft, 4))).acceptance is REJECTION


async def test_a_prediction_without_a_draft_is_coupled_by_its_callers_seed() -> None:
    for seed, rule in ((7, COUPLED), (None, BLOCK)):
        request = GenerationRequest(token_ids=(7,), prediction=(8, 9), sampling=SamplingParams(seed=seed))
        assert (await prepare(request, Served(toy_tokenizer(), target_info(), None, 0))).acceptance is rule
