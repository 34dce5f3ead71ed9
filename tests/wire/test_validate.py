"""One table of bad values: each is refused by name, for every entry point, and fast."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import pytest

from outrider.rpc import validate as v
from outrider.rpc.errors import InvalidArgument
from outrider.rpc.messages import Commit, Credit, Open, Piece, TokenWeights
from outrider.rpc.sampling_params import SamplingParams, StructuredOutput, TokenOrigin
from outrider.rpc.validate import Violations, shown

NAN, INF = float("nan"), float("inf")
VOCAB, CONTEXT = 1000, 4096
BAD_SAMPLING: list[tuple[str, Any]] = [
    *[("temperature", x) for x in (NAN, INF, -INF, -0.1, 100.1, 1e-300, "1", True, None)],
    *[("top_p", x) for x in (NAN, INF, 0, -1, 1.5)],
    *[("top_k", x) for x in (-2, 2**31, 1.5, NAN, True)],
    *[("min_p", x) for x in (NAN, -0.1, 1.1)],
    *[("repetition_penalty", x) for x in (NAN, INF, 0, -1, 101)],
    *[("presence_penalty", x) for x in (NAN, INF, -2.1, 2.1)],
    *[("frequency_penalty", x) for x in (NAN, INF, -2.1, 2.1)],
    *[("seed", x) for x in (-1, 2**64, 0.5)],
    *[(f"logit_bias[{key}]", {2: 1.0, key: 1.0}) for key in (VOCAB, -1)],
    ("logit_bias", dict.fromkeys(range(1025), 0.0)),
    *[("logit_bias[3]", {3: x}) for x in (NAN, INF, 100.5, -101)],
    *[("allowed_token_ids[1]", (1, x)) for x in (VOCAB, -1, 2**31, "a", True, 1.0)],
    ("allowed_token_ids", (*range(VOCAB), 0)),
    *[("max_tokens", x) for x in (0, -1, CONTEXT + 1, -(2**63), 2**63, NAN)],
    *[("min_tokens", x) for x in (-1, 17)],
    ("stop", ("x",) * 17),
    ("stop[1]", ("x", "")),
    ("stop[0]", ("x" * 257,)),
    ("stop[0]", (5,)),
    ("stop_token_ids", (1,) * 129),
    ("stop_token_ids[0]", (VOCAB,)),
    ("bad_words", ("x",) * 129),
    ("bad_words[0]", ("",)),
    ("bad_words_ids[0]", ((),)),
    ("bad_words_ids[0][1]", ((1, VOCAB),)),
    *[("logprobs", x) for x in (-2, 21)],
    *[("prompt_logprobs", x) for x in (-2, 21)],
    ("logprobs_mode", "raw"),
    *[("truncate_prompt_tokens", x) for x in (0, -2, CONTEXT + 1)],
    ("detokenize", 1),
    ("ignore_eos", None),
    ("structured_output", StructuredOutput()),
    ("structured_output", StructuredOutput(regex="a", json_object=True)),
    ("structured_output.regex", StructuredOutput(regex="")),
    ("structured_output.choice", StructuredOutput(choice=())),
    ("structured_output.choice[0]", StructuredOutput(choice=("",))),
    ("structured_output.json_schema", StructuredOutput(json_schema="x" * 70_000)),
]


def fields(check: Callable[[], None]) -> list[str]:
    with pytest.raises(InvalidArgument) as caught:
        check()
    return [violation.field for violation in caught.value.violations]


@pytest.mark.parametrize(("field", "value"), BAD_SAMPLING, ids=lambda value: str(value)[:30])
def test_a_bad_value_is_refused_by_name(field: str, value: object) -> None:
    params = dataclasses.replace(SamplingParams(), **{field.partition("[")[0].partition(".")[0]: value})
    assert f"sampling.{field}" in fields(lambda: v.validate_sampling(params, VOCAB, CONTEXT))


def test_the_message_says_what_is_wrong_and_what_is_allowed() -> None:
    bad = SamplingParams(top_p=1.5, temperature=NAN)
    with pytest.raises(InvalidArgument) as caught:
        v.validate_sampling(bad, VOCAB, CONTEXT)
    assert str(caught.value) == (
        "sampling.temperature: is nan; allowed: a finite number; sampling.top_p: is 1.5; allowed: above 0 and at most 1"
    )


def test_good_extremes_are_accepted() -> None:
    for params in (
        SamplingParams(),
        SamplingParams(temperature=0, top_p=1, top_k=-1, min_p=1, repetition_penalty=100, max_tokens=CONTEXT - 1),
        SamplingParams(logit_bias={VOCAB - 1: -100.0}, logprobs=0, prompt_logprobs=20, seed=2**64 - 1),
        SamplingParams(structured_output=StructuredOutput(json_object=True), truncate_prompt_tokens=-1),
        SamplingParams(allowed_token_ids=tuple(range(VOCAB)), stop=("x" * 256,) * 16),
    ):
        v.validate_sampling(params, VOCAB, CONTEXT, prompt_len=1)


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
def test_log_probabilities_are_as_many_as_the_flag_allows(field: str) -> None:
    def asked(count: int) -> Open:
        return dataclasses.replace(GOOD_OPEN, sampling=SamplingParams(**{field: count}))  # type: ignore[arg-type]

    allowed = {20: (0, 20), 0: (0,), 50: (50,), -1: (-1, VOCAB)}
    refused = {20: (-1, 21), 0: (-1, 1), 50: (-1, 51), -1: (-2, VOCAB + 1)}
    for bound, counts in allowed.items():
        for count in counts:
            v.validate_open(asked(count), VOCAB, CONTEXT, bound)
    for bound, counts in refused.items():
        for count in counts:
            assert fields(lambda n=count, most=bound: v.validate_open(asked(n), VOCAB, CONTEXT, most)) == [  # type: ignore[misc]
                f"open.sampling.{field}"
            ]


def test_stop_strings_need_text() -> None:
    params = SamplingParams(stop=("x",), detokenize=False)
    assert fields(lambda: v.validate_sampling(params, VOCAB, CONTEXT)) == ["sampling.stop"]


def test_prompt_and_max_tokens_fit_together() -> None:
    v.validate_length(4000, 96, CONTEXT)
    assert fields(lambda: v.validate_length(4000, 97, CONTEXT)) == ["sampling.max_tokens"]
    assert fields(lambda: v.validate_length(CONTEXT, 1, CONTEXT)) == ["prompt"]
    assert fields(lambda: v.validate_prompt_ids((), VOCAB, CONTEXT)) == ["prompt_ids"]
    assert fields(lambda: v.validate_prompt_ids((1, VOCAB), VOCAB, CONTEXT)) == ["prompt_ids[1]"]
    assert fields(lambda: v.validate_prompt_ids((1,) * CONTEXT, VOCAB, CONTEXT)) == ["prompt_ids"]


GOOD_OPEN = Open(1, (1, 2), SamplingParams())
BAD_OPEN: list[tuple[str, dict[str, Any]]] = [
    ("open.prompt_ids", {"prompt_ids": ()}),
    ("open.prompt_ids[0]", {"prompt_ids": (VOCAB,)}),
    ("open.prompt_ids", {"fork_of": 1}),
    ("open.output_ids[0]", {"output_ids": (-1,)}),
    ("open.output_ids", {"output_ids": (1,) * 17}),
    ("open.completion", {"completion": 64}),
    ("open.seed", {"seed": 2**64}),
    ("open.priority", {"priority": 2**31}),
    ("open.salt", {"salt": "x" * 129}),
    ("open.method", {"method": "x" * 129}),
    ("open.sampling.top_p", {"sampling": SamplingParams(top_p=0)}),
]


@pytest.mark.parametrize(("field", "change"), BAD_OPEN)
def test_a_bad_open_is_refused_by_name(field: str, change: dict[str, Any]) -> None:
    v.validate_open(GOOD_OPEN, VOCAB, CONTEXT)
    assert field in fields(lambda: v.validate_open(dataclasses.replace(GOOD_OPEN, **change), VOCAB, CONTEXT))


@pytest.mark.parametrize(
    ("field", "piece"),
    [
        ("piece.ids", Piece(1, 0, 4, (1,) * 1025)),
        ("piece.weights", Piece(1, 0, 4, (1,), (None, None))),
        ("piece.weights[0]", Piece(1, 0, 4, (1,), (TokenWeights.of((1,) * 5000, (1,) * 5000),))),
        ("piece.parents", Piece(1, 0, 4, (1, 2), parents=(0,))),
        ("piece.parents[1]", Piece(1, 0, 4, (1, 2), parents=(0, 2))),
        ("piece.parent", Piece(1, 3, 4, (1,), parent=3)),
        ("piece.position", Piece(1, 0, 2**31, ())),
    ],
)
def test_a_bad_piece_is_refused_by_name(field: str, piece: Piece) -> None:
    assert fields(lambda: v.validate_piece(piece)) == [field]


def test_ids_and_weights_of_a_piece_are_not_judged() -> None:
    v.validate_piece(Piece(1, 0, 4, (2**32 - 1, 5), (TokenWeights.of((1, 1), (0,)), None), parents=(0, 1)))


def test_credits_commits_and_requests() -> None:
    v.validate_credit(Credit(1, 10, 128, 60_000))
    assert fields(lambda: v.validate_credit(Credit(1, -1, 129, 60_001))) == [
        "credit.until",
        "credit.max_window",
        "credit.patience_ms",
    ]
    v.validate_commit(Commit(1, 4, (5,), (TokenOrigin.PLAIN,)), VOCAB)
    bad = Commit(1, 4, (VOCAB,), (TokenOrigin.PLAIN,) * 2, num_accepted=1)
    assert fields(lambda: v.validate_commit(bad, VOCAB)) == ["commit.ids[0]", "commit.origins", "commit.num_accepted"]
    v.validate_generation(n=2, output_ids=((1,), ()), vocab_size=VOCAB)
    assert fields(lambda: v.validate_generation(n=65, num_draft_tokens=129, request_id="x" * 129, salt="x" * 129)) == [
        "n",
        "speculation.num_draft_tokens",
        "request_id",
        "salt",
    ]
    assert fields(lambda: v.validate_generation(n=2, output_ids=((1,),))) == ["output_ids"]
    assert fields(lambda: v.validate_generation(request_id="a\x1b[2Jb")) == ["request_id"]
    v.validate_generation(request_id="größe 7, 大")


def test_parts_are_collected() -> None:
    """With `found` nothing is raised before all parts were checked."""
    found = Violations()
    v.validate_generation(n=0, found=found)
    v.validate_sampling(SamplingParams(top_p=0), VOCAB, CONTEXT, found=found)
    assert fields(found.raise_if_any) == ["n", "sampling.top_p"]


def test_types_have_json_s_names() -> None:
    values: list[object] = [None, True, 1.5, "x", [1], {}, (1,)]
    assert [shown(value) for value in values] == ["null", "true", "1.5", "a text", "a list", "an object", "a list"]


def test_the_validator_is_fast_and_its_messages_hold_no_text() -> None:
    params = SamplingParams(logit_bias=dict.fromkeys(range(1000), 1.0), allowed_token_ids=tuple(range(VOCAB)))
    prompt = Open(1, tuple(i % VOCAB for i in range(100_000)), params)
    started = time.perf_counter()
    v.validate_open(prompt, VOCAB, 200_000)
    assert time.perf_counter() - started < 0.25  # measured 4 ms; the bound allows for a busy machine
    with pytest.raises(InvalidArgument) as caught:
        v.validate_sampling(SamplingParams(stop=("canary" * 100,), bad_words=("canary" * 100,)), VOCAB, CONTEXT)
    assert "canary" not in str(caught.value)
