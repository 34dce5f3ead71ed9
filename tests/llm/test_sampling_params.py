"""SamplingParams: every default, and every value that vLLM refuses."""

from __future__ import annotations

import logging
import math
from dataclasses import fields
from typing import Any, cast

import numpy as np
import pytest

from outrider.llm import RequestOutputKind, SamplingParams, Unsupported
from outrider.llm.sampling_params import NO_BOUND, REFUSED, reasoning_options, to_wire
from outrider.rpc.words.request import ReasoningOptions
from outrider.rpc.words.sampling_params import LogprobsMode
from outrider.rpc.words.sampling_params import SamplingParams as WireSampling

DEFAULTS: dict[str, Any] = {
    "n": 1, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "temperature": 1.0,
    "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": None, "stop": [], "stop_token_ids": [], "ignore_eos": False,
    "max_tokens": 16, "min_tokens": 0, "logprobs": None, "prompt_logprobs": None, "detokenize": True,
    "skip_special_tokens": True, "spaces_between_special_tokens": True, "include_stop_str_in_output": False,
    "output_kind": RequestOutputKind.CUMULATIVE, "truncate_prompt_tokens": None, "logit_bias": None,
    "allowed_token_ids": None, "bad_words": [], "skip_reading_prefix_cache": None, "structured_outputs": None,
    "logprob_token_ids": None, "prompt_logprob_token_ids": None, "prompt_logprob_start": 0, "guided_decoding": None,
    "thinking_token_budget": None, "flat_logprobs": False,
}  # fmt: skip

WRONG: list[tuple[str, Any]] = [
    ("n", 0), ("n", 1.5), ("presence_penalty", 2.1), ("presence_penalty", -2.1), ("frequency_penalty", 3),
    ("repetition_penalty", 0), ("temperature", -0.1), ("temperature", math.inf), ("temperature", math.nan),
    ("top_p", 0), ("top_p", 1.1), ("top_k", -2), ("min_p", -0.1), ("min_p", 1.1), ("max_tokens", 0),
    ("min_tokens", -1), ("min_tokens", 17), ("logprobs", -2), ("prompt_logprobs", -2), ("stop", [""]), ("stop", [3]),
    ("stop_token_ids", ["a"]), ("allowed_token_ids", []), ("bad_words", [""]), ("truncate_prompt_tokens", 0),
    ("truncate_prompt_tokens", -2), ("output_kind", 2), ("thinking_token_budget", 0), ("thinking_token_budget", -2),
]  # fmt: skip


# A value of another kind, and what the error says is allowed.
OF_ANOTHER_KIND: list[tuple[str, Any, str]] = [
    ("temperature", "a", "a number"), ("temperature", None, "a number"), ("temperature", True, "a number"),
    ("temperature", 10**400, "finite"), ("top_p", "1", r"in \(0, 1\]"), ("min_p", [0], r"in \[0, 1\]"),
    ("presence_penalty", "1", r"in \[-2, 2\]"), ("repetition_penalty", math.nan, "greater than zero"),
    ("max_tokens", "5", "an integer of at least 1, or None"), ("max_tokens", 5.0, "an integer"),
    ("min_tokens", None, "an integer"), ("logprobs", "1", "integer"), ("truncate_prompt_tokens", 1.5, "or None"),
    ("seed", 10**30, r"from -2\*\*63 to 2\*\*64 - 1"), ("seed", -(2**63) - 1, "from"), ("seed", 2**64, "from"),
    ("seed", "a", "an integer"), ("seed", True, "an integer"), ("ignore_eos", "no", "True or False"),
    ("detokenize", 1, "True or False"), ("skip_reading_prefix_cache", "no", "True or False"),
    ("stop", 5, "a string or a list"), ("stop", "", "none of them empty"), ("stop", b"ab", "a string or a list"),
    ("bad_words", 5, "a string or a list"), ("bad_words", [5], "a string or a list"),
    ("stop_token_ids", "12", "a list of integers"), ("stop_token_ids", 5, "a list of integers"),
    ("allowed_token_ids", "12", "a list of integers"), ("allowed_token_ids", [1.5], "a list of integers"),
    ("allowed_token_ids", [True], "a list of integers"), ("logit_bias", {1: math.nan}, "finite"),
    ("logit_bias", {1: math.inf}, "finite"), ("logit_bias", {1: "2"}, "finite"), ("logit_bias", {"a": 1}, "token ids"),
    ("thinking_token_budget", 1.5, "an integer of at least 1, -1"), ("logit_bias", [1], "a dict"),
    ("n", "2", "an integer"), ("top_k", 1.5, "an integer"),
]  # fmt: skip


def wire(params: SamplingParams) -> WireSampling:
    return to_wire(params, LogprobsMode.RAW_LOGPROBS, 20, 512)


def test_defaults_are_vllms() -> None:
    params = SamplingParams()
    assert {name: getattr(params, name) for name in DEFAULTS} == DEFAULTS
    assert {field.name for field in fields(SamplingParams)} == DEFAULTS.keys() | REFUSED.keys()
    assert wire(params) == WireSampling()
    assert SamplingParams(**DEFAULTS) == params  # what says nothing may be said


def test_none_is_the_default_of_what_is_optional() -> None:
    said = dict.fromkeys(DEFAULTS) | {"logit_bias": {"7": 200}, "top_p": 0.5, "max_tokens": 3}
    assert SamplingParams.from_optional(**said) == SamplingParams(logit_bias={7: 100}, top_p=0.5, max_tokens=3)
    assert SamplingParams.from_optional(max_tokens=None).max_tokens is None
    assert SamplingParams.from_optional().max_tokens == 16
    with pytest.raises(TypeError, match="did you mean 'temperature'"):
        SamplingParams.from_optional(temprature=1)


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_refuses(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(("name", "value", "allowed"), OF_ANOTHER_KIND)
def test_a_value_of_another_kind_names_field_value_and_what_is_allowed(name: str, value: Any, allowed: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be .*{allowed}.*, got ") as raised:
        SamplingParams(**{name: value})
    assert repr(value)[:100] in str(raised.value)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_is_not_there(name: str) -> None:
    with pytest.raises(Unsupported, match=name):
        SamplingParams(**cast(Any, {name: True}))


def test_unknown_fields_raise() -> None:
    with pytest.raises(TypeError, match="best_off"):
        SamplingParams(best_off=2)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="SamplingParams has no keyword 'temprature'; did you mean 'temperature'"):
        SamplingParams(temprature=1)  # type: ignore[call-arg]


def test_positional_arguments_are_named_in_errors() -> None:
    assert SamplingParams(2, 0.5).presence_penalty == 0.5
    with pytest.raises(ValueError, match="n must be an integer of at least 1, got 0"):
        SamplingParams(0)
    with pytest.raises(TypeError, match=f"SamplingParams takes {len(fields(SamplingParams))} arguments, got 60"):
        SamplingParams(*cast(Any, [1] * 60))


def test_values_that_are_taken_in_other_forms() -> None:
    """One text is a list of one, numpy's numbers are numbers, any list of ids is one."""
    of_tuple = SamplingParams(bad_words=("abc",))  # type: ignore[arg-type]
    assert SamplingParams(bad_words="abc").bad_words == of_tuple.bad_words == ["abc"]
    of_numpy = SamplingParams(temperature=np.float32(0.5), seed=np.int64(3), allowed_token_ids=np.array([1, 2]))  # type: ignore[arg-type]
    assert of_numpy.allowed_token_ids == [1, 2] and wire(of_numpy).seed == 3
    assert type(of_numpy.temperature) is float and type(of_numpy.seed) is int
    assert SamplingParams(stop_token_ids=np.array([4])).stop_token_ids == [4]  # type: ignore[arg-type]
    assert SamplingParams(logit_bias={1: -(10**6), 2: 5}).logit_bias == {1: -100.0, 2: 5.0}
    for seed, sent in ((2**64 - 1, 2**64 - 1), (-(2**63), 2**63)):
        assert wire(SamplingParams(seed=seed)).seed == sent


def test_how_long_a_model_may_reason() -> None:
    assert reasoning_options(SamplingParams()) is reasoning_options(SamplingParams(thinking_token_budget=-1)) is None
    assert reasoning_options(SamplingParams(thinking_token_budget=np.int64(7))) == ReasoningOptions(max_tokens=7)  # type: ignore[arg-type]


def test_greedy_and_almost_greedy(caplog: pytest.LogCaptureFixture) -> None:
    greedy = SamplingParams(temperature=0, top_p=0.5, top_k=3, min_p=0.1)
    assert (greedy.top_p, greedy.top_k, greedy.min_p) == (1.0, 0, 0.0)
    with pytest.raises(ValueError, match="n must be 1 when using greedy sampling, got 2"):
        SamplingParams(temperature=0, n=2)
    with caplog.at_level(logging.WARNING):
        assert SamplingParams(temperature=0.001, top_k=3).temperature == 0.01
    assert "0.001" in caplog.text
    assert not wire(SamplingParams(temperature=0.001)).greedy


def test_log_probabilities_are_bounded_by_the_llm() -> None:
    for most, count in ((20, 21), (20, -1), (0, 1)):
        with pytest.raises(ValueError, match=f"logprobs is {count}; this LLM allows 0 to max_logprobs={most}"):
            to_wire(SamplingParams(logprobs=count), LogprobsMode.RAW_LOGPROBS, most, 512)
    for most, count in ((20, 20), (50, 50), (-1, -1)):
        params = SamplingParams(prompt_logprobs=count)
        assert to_wire(params, LogprobsMode.RAW_LOGPROBS, most, 512).prompt_logprobs == count


def test_the_way_to_the_wire() -> None:
    params = SamplingParams(
        temperature=0.5, top_k=-1, seed=-1, stop="x", logprobs=True, max_tokens=None, logit_bias={"3": 400.0},  # type: ignore[dict-item]
        stop_token_ids=[4], bad_words=["no"], min_tokens=2, allowed_token_ids=[1, 2], truncate_prompt_tokens=5,
        logprob_token_ids=[7, 8],
    )  # fmt: skip
    out = wire(params)
    assert (out.top_k, out.seed, out.stop, out.logprobs, out.max_tokens) == (0, None, ("x",), 1, NO_BOUND)
    assert out.logprob_token_ids == (7, 8)
    assert out.logit_bias == {3: 100.0} and out.stop_token_ids == (4,) and out.bad_words == ("no",)
    assert out.allowed_token_ids == (1, 2) and out.truncate_prompt_tokens == 5 and out.min_tokens == 2
    assert wire(SamplingParams(truncate_prompt_tokens=-1)).truncate_prompt_tokens == 511
    assert wire(SamplingParams(seed=-5)).seed == 2**64 - 5
    with pytest.raises(ValueError, match="detokenize"):
        SamplingParams(stop="x", detokenize=False)
    copied = params.clone()
    assert copied == params and copied.stop_token_ids is not params.stop_token_ids
