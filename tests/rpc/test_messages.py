"""Every message survives the wire, byte for byte; what has no sense is refused by name, for every entry point; and
what a service says that it supports."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from outrider.rpc import codec, sampling_params
from outrider.rpc import codec as rpc_codec
from outrider.rpc import messages as m
from outrider.rpc import sampling_params as s
from outrider.rpc import validate as v
from outrider.rpc.codec import decode_draft_info, decode_target_info
from outrider.rpc.errors import InvalidArgument
from outrider.rpc.messages import Commit, Credit, DraftTokens, Failure, Open, TokenLogprob, TokenWeights
from outrider.rpc.sampling_params import (
    BASELINE,
    SAMPLING_FIELDS,
    AcceptanceRule,
    LogprobsMode,
    SamplingParams,
    StructuredOutput,
    TokenOrigin,
    lacking,
)
from outrider.rpc.validate import Violations, shown
from outrider.v1 import common_pb2, draft_pb2, target_pb2
from outrider.v1 import generation_pb2 as pb

UINT32 = st.integers(0, 2**32 - 1)
UINT64 = st.integers(0, 2**64 - 1)
INT32 = st.integers(-(2**31), 2**31 - 1)
DOUBLES = st.floats(allow_nan=False)
FLOATS = st.floats(width=32, allow_nan=False)
TEXTS = st.text(st.characters(codec="utf-8"), max_size=20)


def tuples(elements: SearchStrategy, max_size: int = 5, min_size: int = 0) -> SearchStrategy:
    return st.lists(elements, min_size=min_size, max_size=max_size).map(tuple)


STRUCTURED = st.one_of(
    st.builds(s.StructuredOutput, json_schema=TEXTS),
    st.builds(s.StructuredOutput, regex=TEXTS),
    st.builds(s.StructuredOutput, grammar=TEXTS),
    st.builds(s.StructuredOutput, choice=tuples(TEXTS)),
    st.just(s.StructuredOutput(json_object=True)),
    st.just(s.StructuredOutput()),
)
SAMPLING = st.builds(
    s.SamplingParams,
    temperature=DOUBLES,
    top_p=DOUBLES,
    top_k=INT32,
    min_p=DOUBLES,
    repetition_penalty=DOUBLES,
    presence_penalty=DOUBLES,
    frequency_penalty=DOUBLES,
    logit_bias=st.dictionaries(UINT32, FLOATS, max_size=4),
    allowed_token_ids=tuples(UINT32),
    bad_words=tuples(TEXTS),
    bad_words_ids=tuples(tuples(UINT32)),
    max_tokens=UINT32,
    min_tokens=UINT32,
    stop=tuples(TEXTS),
    stop_token_ids=tuples(UINT32),
    ignore_eos=st.booleans(),
    include_stop_str_in_output=st.booleans(),
    logprobs=st.none() | INT32,
    prompt_logprobs=st.none() | INT32,
    logprobs_mode=st.sampled_from(s.LogprobsMode),
    skip_special_tokens=st.booleans(),
    spaces_between_special_tokens=st.booleans(),
    detokenize=st.booleans(),
    structured_output=st.none() | STRUCTURED,
    truncate_prompt_tokens=st.none() | INT32,
    seed=st.none() | UINT64,
)
WEIGHTS = st.builds(m.TokenWeights.of, ids=tuples(UINT32, min_size=1), weights=tuples(UINT32, min_size=1))
LOGPROBS = tuples(tuples(st.builds(m.TokenLogprob, id=UINT32, logprob=FLOATS, rank=UINT32)))
TIMINGS = st.builds(m.StepTimings, *[UINT32] * 5)
LOAD = st.builds(m.Load, *[UINT32] * 3)
MESSAGES: dict[str, SearchStrategy] = {
    "open": st.builds(
        m.Open,
        sequence_id=UINT32,
        prompt_ids=tuples(UINT32),
        sampling=SAMPLING,
        output_ids=tuples(UINT32),
        fork_of=st.none() | UINT32,
        completion=UINT32,
        acceptance=st.sampled_from(s.AcceptanceRule),
        seed=UINT64,
        timeout_ms=UINT64,
        first_chain=UINT32,
        priority=INT32,
        features=st.booleans(),
        salt=TEXTS,
        traceparent=TEXTS,
        one_hot=st.booleans(),
        method=TEXTS,
        model_digest=TEXTS,
        suspect=st.booleans(),
    ),
    "close": st.builds(m.Close, UINT32),
    "closed": st.builds(m.Closed, UINT32),
    "failure": st.builds(
        m.Failure, UINT32, st.integers(0, 16), TEXTS, reason=TEXTS, retry_after_ms=st.integers(0, 10**9)
    ),
    "piece": st.builds(
        m.DraftTokens,
        sequence_id=UINT32,
        chain=UINT32,
        position=UINT32,
        ids=tuples(UINT32),
        weights=tuples(st.none() | WEIGHTS),
        parent=st.none() | UINT32,
        more=st.booleans(),
        parents=tuples(UINT32),
        draft_us=UINT32,
    ),
    "credit": st.builds(m.Credit, *[UINT32] * 5),
    "commit": st.builds(
        m.Commit,
        sequence_id=UINT32,
        position=UINT32,
        ids=tuples(UINT32),
        origins=tuples(st.sampled_from(s.TokenOrigin)),
        chain=st.none() | UINT32,
        num_drafted=UINT32,
        num_accepted=UINT32,
        logprobs=LOGPROBS,
        features=st.binary(max_size=40),
        finish_reason=st.none() | st.sampled_from(s.FinishReason),
        stop_token_id=st.none() | UINT32,
        dropped=tuples(UINT32),
        timings=TIMINGS,
        load=LOAD,
        num_cached_ids=UINT32,
    ),
    "prompt_logprobs": st.builds(m.PromptLogprobs, UINT32, UINT32, LOGPROBS),
    "header": st.builds(m.FrameHeader, UINT64, UINT64, UINT64, UINT32, st.booleans()),
    "load": LOAD,
    "timings": TIMINGS,
}
MODEL_INFO = st.builds(
    m.ModelInfo,
    name=TEXTS,
    digest=TEXTS,
    vocab_size=UINT32,
    max_model_len=UINT32,
    num_tokens=UINT32,
    tokenizer_fingerprint=TEXTS,
    eos_token_ids=tuples(UINT32),
    default_sampling=SAMPLING,
    dtype=TEXTS,
    device=TEXTS,
    batch_invariant=st.booleans(),
    num_blocks=UINT32,
    block_size=UINT32,
    protocol_major=UINT32,
    protocol_minor=UINT32,
    engine=TEXTS,
    kernels=TEXTS,
)
INFOS: dict[str, SearchStrategy] = {
    "model_info": MODEL_INFO,
    "draft_info": st.builds(
        m.DraftInfo,
        MODEL_INFO,
        tuples(st.builds(m.DraftMethod, TEXTS, st.booleans(), st.booleans())),
        capabilities=tuples(TEXTS, min_size=1),
    ),
    "target_info": st.builds(
        m.TargetInfo, MODEL_INFO, UINT32, LOAD, tuples(st.tuples(UINT32, UINT32)), tuples(TEXTS, min_size=1)
    ),
}

FEW = settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.parametrize("name", [*MESSAGES, *INFOS])
@FEW
@given(data=st.data())
def test_a_message_survives_the_wire(name: str, data: st.DataObject) -> None:
    module = next(m for m in (codec, rpc_codec, rpc_codec) if hasattr(m, f"encode_{name}"))
    message = data.draw((MESSAGES | INFOS)[name])
    encoded = getattr(module, f"encode_{name}")(message)
    parsed = type(encoded).FromString(encoded.SerializeToString())
    assert getattr(module, f"decode_{name}")(parsed) == message


@FEW
@given(params=SAMPLING)
def test_sampling_parameters_survive_the_wire(params: SamplingParams) -> None:
    encoded = sampling_params.encode_sampling(params)
    defaults = SamplingParams(seed=params.seed, logprobs=params.logprobs, prompt_logprobs=params.prompt_logprobs)
    assert sampling_params.decode_sampling(encoded) == params
    # Whatever the receiver's defaults are, only what the sender left absent (None) is taken from them.
    other = dataclasses.replace(defaults, temperature=0.5, top_k=7, max_tokens=3, detokenize=False)
    assert sampling_params.decode_sampling(encoded, other) == params


def test_absent_fields_come_from_the_defaults_and_present_zeros_do_not() -> None:
    defaults = SamplingParams(temperature=0.6, top_k=20, top_p=0.95, max_tokens=16)
    assert sampling_params.decode_sampling(pb.SamplingParams(), defaults) == defaults
    zeros = sampling_params.decode_sampling(pb.SamplingParams(temperature=0.0, top_k=0, seed=0), defaults)
    assert (zeros.temperature, zeros.top_k, zeros.top_p, zeros.seed) == (0.0, 0, 0.95, 0)
    assert sampling_params.decode_sampling(pb.SamplingParams()).max_tokens == 16


def test_every_field_of_the_dataclasses_is_encoded() -> None:
    """A field added to SamplingParams and forgotten in the codec would silently take its default."""
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    assert names == set(pb.SamplingParams.DESCRIPTOR.fields_by_name)


def test_an_enum_of_a_newer_peer_reads_as_unspecified_in_an_answer() -> None:
    newer = common_pb2.Commit(ids=[1, 2], origins=[77, 4], finish_reason=9)  # type: ignore[list-item, arg-type]
    commit = codec.decode_commit(newer)
    assert [origin.name for origin in commit.origins] == ["UNSPECIFIED", "PLAIN"]
    assert commit.finish_reason is not None and commit.finish_reason.name == "UNSPECIFIED"  # it has ended
    assert codec.encode_commit(commit) == newer  # and whoever knows the number gets it
    described = pb.ModelInfo(default_sampling=pb.SamplingParams(top_k=7, logprobs_mode=9))  # type: ignore[arg-type]
    assert rpc_codec.decode_model_info(described).default_sampling == SamplingParams(top_k=7)


def test_an_enum_of_a_newer_peer_is_refused_in_a_request() -> None:
    with pytest.raises(InvalidArgument, match=r"^sampling.logprobs_mode: is 9, which .*; allowed: 0 to 4$"):
        sampling_params.decode_sampling(pb.SamplingParams(logprobs_mode=9))  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match=r"^open.acceptance: is 3, which .*; allowed: 0 to 2$"):
        codec.decode_open(common_pb2.Open(acceptance=3))  # type: ignore[arg-type]


def test_a_number_that_no_field_holds_is_a_value_error() -> None:
    with pytest.raises(ValueError):
        codec.encode_commit(Commit(1, -1, ()))


def test_small_codecs_of_parts() -> None:
    unspecified = pb.SamplingParams(logprobs_mode=pb.LOGPROBS_MODE_UNSPECIFIED)
    assert sampling_params.decode_sampling(unspecified).logprobs_mode is LogprobsMode.RAW_LOGPROBS
    empty = StructuredOutput(choice=())
    encoded = sampling_params.encode_structured_output(empty)
    assert sampling_params.decode_structured_output(encoded) == empty
    position = (TokenLogprob(1, -0.5, 2), TokenLogprob(2**32 - 1, float("-inf"), 1))
    assert rpc_codec.decode_position_logprobs(rpc_codec.encode_position_logprobs(position)) == position


def test_a_failure_is_a_rich_status() -> None:
    encoded = codec.encode_failure(Failure(3, 8, "no blocks", "NO_BLOCKS", 250))
    assert encoded.status.code == 8
    assert [detail.TypeName() for detail in encoded.status.details] == [
        "google.rpc.ErrorInfo",
        "google.rpc.RetryInfo",
    ]


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
        ("piece.ids", DraftTokens(1, 0, 4, (1,) * 1025)),
        ("piece.weights", DraftTokens(1, 0, 4, (1,), (None, None))),
        ("piece.weights[0]", DraftTokens(1, 0, 4, (1,), (TokenWeights.of((1,) * 5000, (1,) * 5000),))),
        ("piece.parents", DraftTokens(1, 0, 4, (1, 2), parents=(0,))),
        ("piece.parents[1]", DraftTokens(1, 0, 4, (1, 2), parents=(0, 2))),
        ("piece.parent", DraftTokens(1, 3, 4, (1,), parent=3)),
        ("piece.position", DraftTokens(1, 0, 2**31, ())),
    ],
)
def test_a_bad_piece_is_refused_by_name(field: str, piece: DraftTokens) -> None:
    assert fields(lambda: v.validate_piece(piece)) == [field]


def test_ids_and_weights_of_a_piece_are_not_judged() -> None:
    v.validate_piece(DraftTokens(1, 0, 4, (2**32 - 1, 5), (TokenWeights.of((1, 1), (0,)), None), parents=(0, 1)))


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


# What only concerns text is the gateway's; max_tokens is every peer's.
ELSEWHERE = {
    "bad_words", "max_tokens", "stop", "include_stop_str_in_output", "skip_special_tokens",
    "spaces_between_special_tokens", "detokenize", "truncate_prompt_tokens", "seed",
}  # fmt: skip
SET: dict[str, Any] = {
    "temperature": 0.5, "top_p": 0.5, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "presence_penalty": 0.1,
    "frequency_penalty": 0.1, "logit_bias": {1: 2.0}, "allowed_token_ids": (1,), "bad_words_ids": ((1,),),
    "min_tokens": 1, "stop_token_ids": (1,), "ignore_eos": True, "logprobs": 1, "prompt_logprobs": 1,
    "logprobs_mode": LogprobsMode.RAW_LOGITS, "structured_output": StructuredOutput(json_object=True),
}  # fmt: skip


def test_every_sampling_parameter_is_a_peers_or_the_gateways() -> None:
    """One that is added has to be put here or there: a peer that does not know it would generate by another law."""
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    assert names == {*SAMPLING_FIELDS} | ELSEWHERE and not {*SAMPLING_FIELDS} & ELSEWHERE
    assert {*SET} == {*SAMPLING_FIELDS}


@pytest.mark.parametrize("field", SAMPLING_FIELDS)
def test_a_field_that_is_set_needs_its_capability(field: str) -> None:
    sampling = SamplingParams(**{field: SET[field]})
    assert lacking((), sampling) == [f"sampling.{field}"]
    assert lacking([f"sampling.{field}"], sampling) == []


def test_the_rule_is_a_capability_too() -> None:
    assert lacking((), SamplingParams()) == []
    assert lacking(["acceptance.rejection"], SamplingParams(), AcceptanceRule.COUPLED) == ["acceptance.coupled"]


def test_a_peer_that_names_nothing_does_what_preceded_the_list() -> None:
    older = pb.ModelInfo(name="older")
    assert decode_target_info(target_pb2.GetTargetInfoResponse(model=older)).capabilities == BASELINE
    assert decode_draft_info(draft_pb2.GetDraftInfoResponse(model=older)).capabilities == BASELINE
    everything = {field: value for field, value in SET.items() if field != "structured_output"}
    assert lacking(BASELINE, SamplingParams(**everything), AcceptanceRule.COUPLED) == []
    assert lacking(BASELINE, SamplingParams(structured_output=SET["structured_output"])) != []
