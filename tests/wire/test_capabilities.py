from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from outrider.rpc.codec import decode_draft_info, decode_target_info
from outrider.rpc.sampling_params import (
    BASELINE,
    SAMPLING_FIELDS,
    AcceptanceRule,
    LogprobsMode,
    SamplingParams,
    StructuredOutput,
    lacking,
)
from outrider.v1 import common_pb2, draft_pb2, target_pb2

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
    older = common_pb2.ModelInfo(name="older")
    assert decode_target_info(target_pb2.GetTargetInfoResponse(model=older)).capabilities == BASELINE
    assert decode_draft_info(draft_pb2.GetDraftInfoResponse(model=older)).capabilities == BASELINE
    everything = {field: value for field, value in SET.items() if field != "structured_output"}
    assert lacking(BASELINE, SamplingParams(**everything), AcceptanceRule.COUPLED) == []
    assert lacking(BASELINE, SamplingParams(structured_output=SET["structured_output"])) != []
