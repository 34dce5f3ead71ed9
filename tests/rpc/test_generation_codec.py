"""Whatever a request or an answer says arrives: every field goes through its message and comes back, and no field is
forgotten, since the values are made from the dataclasses themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass, replace
from enum import Enum
from typing import Any, cast

import pytest

from outrider.rpc.errors import InvalidArgument
from outrider.rpc.generation_codec import (
    KNOWN_BY_THE_GATEWAY,
    NOT_SENT,
    decode_delta,
    decode_request,
    encode_delta,
    encode_request,
)
from outrider.rpc.words.answer import GenerationDelta, MethodStats, SpeculationStats, TokenLogprob, ToolCallDelta, Usage
from outrider.rpc.words.request import (
    DRAFT_OPTIONS,
    PICTURE,
    GenerationRequest,
    MediaSource,
    ReasoningOptions,
    SpeculationOptions,
)
from outrider.rpc.words.sampling_params import FinishReason, LogprobsMode, SamplingParams, TokenOrigin
from outrider.rpc.words.structured import StructuredOutput

# What stands in a field whose type alone does not say what a value looks like.
VALUES: dict[str, Any] = {
    "messages": (
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}],
            "reasoning_content": "so",
        },
        {"role": "tool", "content": "7", "tool_call_id": "a", "name": "f"},
        {"role": "user", "content": [{"type": "text", "text": "what is"}, PICTURE]},
    ),
    "chat_template_kwargs": {"enable_thinking": False},
    "tools": ({"type": "function", "function": {"name": "f", "parameters": {}}},),
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "token_ids": (3, 4),
    "prediction": (5, 6),
    "output_ids": ((1, 2), (3,)),
    "media": (MediaSource(b"png", mime_type="image/png"), MediaSource(path="a.png")),
    "logprobs": ((TokenLogprob(5, -0.5, 1), TokenLogprob(6, -1.5, 2)), (TokenLogprob(7, -2.0, 3),)),
    "prompt_logprobs": ((), (TokenLogprob(4, -0.25, 1),)),
    "origins": (TokenOrigin.ACCEPTED, TokenOrigin.BONUS),
    "finish_reason": FinishReason.STOP,
    "tool_calls": (ToolCallDelta(1, "call", "f", '{"x"'),),
    "stop_reason": "end",
    "by_method": {"ngram": MethodStats(1, 2, 3), "suffix": MethodStats(4, 5, 6)},
    "num_rounds_by_mode": {"off": 1, "chains": 6},
    "logit_bias": {3: 0.5},
    "bad_words_ids": ((1,), (2, 3)),
    "prompt_logprob_token_ids": ((4, 5),),
    "logprobs_mode": LogprobsMode.PROCESSED_LOGITS,
    "structured_output": StructuredOutput(choice=("a", "b")),
    "unset": (),
}
OF_SAMPLING = {"logprobs": 3, "prompt_logprobs": 2}  # names that a delta has, too
TYPES: dict[str, Any] = {
    "SamplingParams": SamplingParams,
    "ReasoningOptions": ReasoningOptions,
    "SpeculationOptions": SpeculationOptions,
    "SpeculationStats": SpeculationStats,
    "Usage": Usage,
}


def value_for(owner: type[Any], name: str, hint: str, default: Any, number: int) -> Any:
    """Another value than the default, and than the other fields have."""
    if owner is SamplingParams and name in OF_SAMPLING:
        return OF_SAMPLING[name]
    if name in VALUES:
        return VALUES[name]
    kind = hint.removeprefix("Annotated[").split(" | ")[0].split(",")[0].split("[")[0].strip()
    if kind in TYPES:
        return filled(TYPES[kind])
    if kind == "bool":
        return not default
    if kind == "float":
        return number / 128  # exact as a double
    if kind == "str":
        return f"{name} {number}"
    if kind == "tuple":
        return (f"{name} a", f"{name} b") if "str" in hint else (number, number + 1)
    if isinstance(default, Enum):
        return next(one for one in type(default) if one is not default)
    assert kind == "int", f"{owner.__name__}.{name} is a {hint}: say what a value of it is"
    return number


def filled(owner: type[Any], without: tuple[str, ...] = ()) -> Any:
    """An instance of which no field has its default."""
    values: dict[str, Any] = {}
    for number, one in enumerate(fields(owner), 2):
        if one.name in without:
            continue
        default = None if one.default is MISSING else one.default
        values[one.name] = value_for(owner, one.name, str(one.type), default, number)
        assert one.name in ("unset",) or values[one.name] != default, one.name
    return owner(**values)


SPECULATION = filled(SpeculationOptions, ("greedy_draft",))


@pytest.mark.parametrize("prompt", ["text", "token_ids", "messages"])
def test_every_field_of_a_request_arrives(prompt: str) -> None:
    others = {"text", "token_ids", "messages"} - {prompt}
    if prompt != "messages":
        others |= {"add_generation_prompt", "chat_template_kwargs"}
    request = replace(filled(GenerationRequest, (*NOT_SENT, *others, "speculation")), speculation=SPECULATION)
    message = encode_request(request)
    assert decode_request(type(message).FromString(message.SerializeToString()), SamplingParams()) == request


def test_what_is_not_sent_is_said_to_be() -> None:
    names = {one.name for one in fields(GenerationRequest)}
    assert set(NOT_SENT) < names and set(KNOWN_BY_THE_GATEWAY) < {one.name for one in fields(GenerationDelta)}


def test_what_a_request_leaves_open_is_the_models() -> None:
    given = SamplingParams(top_k=5, max_tokens=9)
    unset = tuple(one.name for one in fields(SamplingParams) if one.name != "top_k")
    message = encode_request(GenerationRequest(text="x", sampling=given, unset=unset))
    assert [field.name for field, _ in message.sampling.ListFields()] == ["top_k"]
    decoded = decode_request(message, SamplingParams(temperature=0.7, top_k=20, max_tokens=30))
    assert decoded.sampling == SamplingParams(temperature=0.7, top_k=5, max_tokens=30)
    assert "top_k" not in decoded.unset and "temperature" in decoded.unset and not decoded.max_tokens_given
    assert decode_request(encode_request(replace(decoded, text="x")), SamplingParams()).sampling == replace(
        SamplingParams(), top_k=5
    )


def test_a_request_that_says_nothing_has_the_defaults() -> None:
    decoded = decode_request(encode_request(GenerationRequest(text="x")), SamplingParams())
    assert replace(decoded, sampling=None, unset=()) == GenerationRequest(text="x")


@pytest.mark.parametrize("stop", ["end", 7, None])
def test_every_field_of_a_delta_arrives(stop: str | int | None) -> None:
    delta = replace(filled(GenerationDelta, KNOWN_BY_THE_GATEWAY), stop_reason=stop)
    message = encode_delta(delta)
    assert decode_delta(type(message).FromString(message.SerializeToString())) == delta


def test_a_delta_that_says_nothing_has_the_defaults() -> None:
    assert decode_delta(encode_delta(GenerationDelta("r", 0))) == GenerationDelta("r", 0)


@pytest.mark.parametrize("name", DRAFT_OPTIONS)
def test_what_the_draft_is_told_is_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidArgument, match=rf"^speculation\.{name}: is a text; allowed: "):
        encode_request(GenerationRequest(text="x", speculation=SpeculationOptions(**cast(Any, {name: "much"}))))


def test_filled_leaves_nothing_out() -> None:
    for owner in TYPES.values():
        assert isinstance(owner, type) and is_dataclass(owner)
        values: Mapping[str, Any] = {one.name: getattr(filled(owner), one.name) for one in fields(owner)}
        assert None not in values.values()
