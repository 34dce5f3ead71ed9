"""Sampling parameters: the table, what follows from it, and the public signatures that repeat it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from outrider.cli.chat import ChatSettings
from outrider.cli.generate import GenerateSettings
from outrider.client.request import build_request
from outrider.engine.checkpoint import SAMPLING_KEYS
from outrider.llm import SamplingParams as LLMSamplingParams
from outrider.rpc.codec import DRAFT_INFO, TARGET_INFO
from outrider.rpc.errors import InvalidArgument
from outrider.rpc.messages import DraftInfo, ModelInfo, TargetInfo, validate_sampling
from outrider.rpc.sampling_codec import decode_sampling, encode_sampling
from outrider.rpc.words import sampling_params as s
from outrider.rpc.words.sampling_params import (
    BASELINE,
    PARAMETERS,
    RECOMMENDED,
    SAMPLING_FIELDS,
    AcceptanceRule,
    LogprobsMode,
    SamplingParams,
    lacking,
    sampling_for_peers,
)
from outrider.rpc.words.structured import StructuredOutput
from outrider.v1 import draft_pb2, target_pb2
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
    st.builds(s.StructuredOutput, structural_tag=TEXTS),
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
    logprob_token_ids=tuples(UINT32),
    prompt_logprob_token_ids=tuples(tuples(UINT32)),
    prompt_logprob_start=UINT32,
    prompt_logprobs=st.none() | INT32,
    logprobs_mode=st.sampled_from(s.LogprobsMode),
    skip_special_tokens=st.booleans(),
    spaces_between_special_tokens=st.booleans(),
    detokenize=st.booleans(),
    structured_output=st.none() | STRUCTURED,
    truncate_prompt_tokens=st.none() | INT32,
    seed=st.none() | UINT64,
)


FEW = settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])


@FEW
@given(params=SAMPLING)
def test_sampling_parameters_survive_the_wire(params: SamplingParams) -> None:
    encoded = encode_sampling(params)
    defaults = SamplingParams(seed=params.seed, logprobs=params.logprobs, prompt_logprobs=params.prompt_logprobs)
    assert decode_sampling(encoded) == params
    # Whatever the receiver's defaults are, only what the sender left absent (None) is taken from them.
    other = dataclasses.replace(defaults, temperature=0.5, top_k=7, max_tokens=3, detokenize=False)
    assert decode_sampling(encoded, other) == params


def test_absent_fields_come_from_the_defaults_and_present_zeros_do_not() -> None:
    defaults = SamplingParams(temperature=0.6, top_k=20, top_p=0.95, max_tokens=16)
    assert decode_sampling(pb.SamplingParams(), defaults) == defaults
    zeros = decode_sampling(pb.SamplingParams(temperature=0.0, top_k=0, seed=0), defaults)
    assert (zeros.temperature, zeros.top_k, zeros.top_p, zeros.seed) == (0.0, 0, 0.95, 0)
    assert decode_sampling(pb.SamplingParams()).max_tokens == 16


def test_every_field_of_the_dataclasses_is_encoded() -> None:
    """A field added to SamplingParams and forgotten in the codec would silently take its default."""
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    assert names == set(pb.SamplingParams.DESCRIPTOR.fields_by_name)


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
def test_a_bad_value_is_refused_by_name(field: str, value: Any) -> None:
    params = dataclasses.replace(SamplingParams(), **{field.partition("[")[0].partition(".")[0]: value})
    assert f"sampling.{field}" in fields(lambda: validate_sampling(params, VOCAB, CONTEXT))


def test_the_message_says_what_is_wrong_and_what_is_allowed() -> None:
    bad = SamplingParams(top_p=1.5, temperature=NAN)
    with pytest.raises(InvalidArgument) as caught:
        validate_sampling(bad, VOCAB, CONTEXT)
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
        validate_sampling(params, VOCAB, CONTEXT)


def test_listed_ids_need_logprobs() -> None:
    params = SamplingParams(logprob_token_ids=(1,))
    assert fields(lambda: validate_sampling(params, VOCAB, CONTEXT)) == ["sampling.logprob_token_ids"]
    validate_sampling(dataclasses.replace(params, logprobs=0), VOCAB, CONTEXT)
    params = SamplingParams(prompt_logprob_token_ids=((1,),), prompt_logprob_start=2)
    assert fields(lambda: validate_sampling(params, VOCAB, CONTEXT)) == ["sampling.prompt_logprob_token_ids"]
    validate_sampling(dataclasses.replace(params, prompt_logprobs=0), VOCAB, CONTEXT)


def test_stop_strings_need_text() -> None:
    params = SamplingParams(stop=("x",), detokenize=False)
    assert fields(lambda: validate_sampling(params, VOCAB, CONTEXT)) == ["sampling.stop"]


# What only concerns text is the gateway's; max_tokens is every peer's.
ELSEWHERE: dict[str, Any] = {
    "bad_words": ("x",), "max_tokens": 9, "stop": ("x",), "include_stop_str_in_output": True,
    "skip_special_tokens": False, "spaces_between_special_tokens": False, "detokenize": False,
    "truncate_prompt_tokens": 9, "seed": 9,
}  # fmt: skip
SET: dict[str, Any] = {
    "temperature": 0.5, "top_p": 0.5, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "presence_penalty": 0.1,
    "frequency_penalty": 0.1, "logit_bias": {1: 2.0}, "allowed_token_ids": (1,), "bad_words_ids": ((1,),),
    "min_tokens": 1, "stop_token_ids": (1,), "ignore_eos": True, "logprobs": 1, "prompt_logprobs": 1,
    "logprob_token_ids": (1,), "prompt_logprob_token_ids": ((1,),), "prompt_logprob_start": 3,
    "logprobs_mode": LogprobsMode.RAW_LOGITS, "structured_output": StructuredOutput(json_object=True),
}  # fmt: skip


def test_every_sampling_parameter_is_a_peers_or_the_gateways() -> None:
    """One that is added has to be put here or there: a peer that does not know it would generate by another law."""
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    assert names == {*SAMPLING_FIELDS, *ELSEWHERE} and not {*SAMPLING_FIELDS} & {*ELSEWHERE}
    assert {*SET} == {*SAMPLING_FIELDS}


@pytest.mark.parametrize("field", SAMPLING_FIELDS)
def test_a_field_that_is_set_needs_its_capability(field: str) -> None:
    sampling = SamplingParams(**{field: SET[field]})
    assert lacking((), sampling) == [f"sampling.{field}"]
    assert lacking([f"sampling.{field}"], sampling) == []


def test_the_rule_is_a_capability_too() -> None:
    assert lacking((), SamplingParams()) == []
    assert lacking(["acceptance.rejection"], SamplingParams(), AcceptanceRule.COUPLED) == ["acceptance.coupled"]
    assert lacking(BASELINE, SamplingParams(), AcceptanceRule.BLOCK) == ["acceptance.block"]
    ours = ModelInfo("", "", 1, 1)
    for info in (TargetInfo(ours, 1), DraftInfo(ours, ())):
        assert lacking(info.capabilities, SamplingParams(), AcceptanceRule.BLOCK) == []


def test_a_peer_that_names_nothing_does_what_preceded_the_list() -> None:
    older = pb.ModelInfo(name="older")
    assert TARGET_INFO.decode(target_pb2.GetTargetInfoResponse(model=older)).capabilities == BASELINE
    assert DRAFT_INFO.decode(draft_pb2.GetDraftInfoResponse(model=older)).capabilities == BASELINE
    newer = ("structured_output", "logprob_token_ids", "prompt_logprob_token_ids", "prompt_logprob_start")
    everything = {field: value for field, value in SET.items() if field not in newer}
    assert lacking(BASELINE, SamplingParams(**everything), AcceptanceRule.COUPLED) == []
    assert all(lacking(BASELINE, SamplingParams(**{field: SET[field]})) for field in newer)


# Typed signatures that repeat the table: what each leaves out, and why.
SCORED = ("prompt_logprob_token_ids", "prompt_logprob_start")
SIGNATURES: dict[str, tuple[set[str], dict[str, str]]] = {
    "LLM": (
        {field.name for field in dataclasses.fields(LLMSamplingParams)},
        {
            "bad_words_ids": "vLLM has texts alone",
            "logprobs_mode": "an argument of LLM, as in vLLM",
            "structured_output": "vLLM calls it structured_outputs",
        },
    ),
    "generate": (
        {*GenerateSettings.model_fields},
        dict.fromkeys(SCORED, "a list for each token of a prompt is no flag"),
    ),
    "chat": (
        {*ChatSettings.model_fields},
        dict.fromkeys(
            (
                *("logprobs", "prompt_logprobs", "logprobs_mode", "skip_special_tokens", "detokenize"),
                *("spaces_between_special_tokens", "include_stop_str_in_output", "structured_output"),
                *("truncate_prompt_tokens", "logprob_token_ids", *SCORED),
            ),
            "an answer is shown as text, whole, and the conversation is cut by its turns",
        )
        | dict.fromkeys(
            (
                *("logit_bias", "allowed_token_ids", "bad_words", "bad_words_ids", "stop_token_ids", "min_tokens"),
                "ignore_eos",
            ),
            "nobody turns them while talking; `outrider generate` has them",
        ),
    ),
    "HTTP": (
        {name for name, row in PARAMETERS.items() if row.http is not None},
        {
            "bad_words_ids": "bad_words are its texts",
            "logprobs_mode": "OpenAI's are log probabilities",
            "detokenize": "OpenAI's answers are text",
        }
        | dict.fromkeys(SCORED, "vLLM's HTTP has them at paths of its own"),
    ),
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_a_signature_has_the_table_s_parameters(name: str) -> None:
    """A row that is added is added there, too, or it is said why not."""
    own, without = SIGNATURES[name]
    assert {*PARAMETERS} - own == {*without}


def test_the_engine_reads_what_authors_recommend() -> None:
    """The engine knows nothing of messages between processes: it has a list of its own."""
    assert set(SAMPLING_KEYS) == set(RECOMMENDED)


def test_the_client_sends_the_table_s_parameters() -> None:
    everything = SET | ELSEWHERE
    sent = build_request("x", **everything).sampling
    assert {field.name for field, _ in sent.ListFields()} == {*everything} == {*PARAMETERS}
    assert decode_sampling(sent) == SamplingParams(**everything)
    with pytest.raises(TypeError, match="unknown options"):
        build_request("x", min_q=0.5)


def test_what_ends_at_the_gateway_does_not_travel() -> None:
    params = sampling_for_peers(SamplingParams(**(SET | ELSEWHERE)))
    kept = {name for name in PARAMETERS if getattr(params, name) == getattr(SamplingParams(), name)}
    assert kept == {"bad_words", "stop", "truncate_prompt_tokens", "seed"}


def test_a_parameter_stands_where_something_is_computed_with_it() -> None:
    """The table says the rest: who repeats a parameter elsewhere says a fact twice."""
    root = Path(__file__).parents[2]
    tops = (
        "rpc",
        "planner",
        "kernels",
        "engine",
        "proposers",
        "draft_service",
        "target_service",
        "gateway",
        "outrider-vllm",
    )
    sources = [path for top in tops for path in (root / top).rglob("*.py")]
    named = {str(path.relative_to(root)) for path in sources if re.search(r"\bmin_p\b", path.read_text("utf-8"))}
    assert named == {
        "rpc/outrider/rpc/words/sampling_params.py",
        "engine/outrider/engine/sampler.py",
        "kernels/outrider/kernels/types.py",
        "kernels/outrider/kernels/sampling/reference.py",
        "kernels/outrider/kernels/sampling/triton.py",
        "target_service/outrider/target_service/lazy_masks.py",  # which it does not do
        "outrider-vllm/outrider/vllm/target/requests.py",  # which it does not do
    }
