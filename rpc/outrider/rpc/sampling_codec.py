"""Sampling parameters and constraints between their dataclasses and protobuf, by the rows of their table."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from outrider.rpc.errors import InvalidArgument, Violation
from outrider.rpc.field_codec import Codec, each, message_of
from outrider.rpc.words.sampling_params import (
    DEFAULT_SAMPLING,
    PARAMETERS,
    AcceptanceRule,
    LogprobsMode,
    SamplingParams,
)
from outrider.rpc.words.structured import TEXT_KINDS, StructuredOutput
from outrider.v1 import generation_pb2 as pb

# What is the model's where a request leaves it out. Lists, maps and constraints cannot be absent, only empty.
OPTIONAL = tuple(
    one.name for one in pb.SamplingParams.DESCRIPTOR.fields if one.has_presence and one.message_type is None
)
_MODES = {
    0: LogprobsMode.RAW_LOGPROBS,
    1: LogprobsMode.RAW_LOGPROBS,
    2: LogprobsMode.RAW_LOGITS,
    3: LogprobsMode.PROCESSED_LOGPROBS,
    4: LogprobsMode.PROCESSED_LOGITS,
}
_MODE_NUMBERS = {mode: number for number, mode in _MODES.items()}  # the last wins: raw log probabilities are 1


def resolve_sampling(given: Mapping[str, Any], defaults: SamplingParams) -> SamplingParams:
    """The parameters of a request that gives some of them; others are the model's, where they can be absent."""
    inherited = {name: getattr(defaults, name) for name in OPTIONAL if name not in given}
    return SamplingParams(**{**inherited, **given})


def encode_sampling(params: SamplingParams, unset: Collection[str] = ()) -> pb.SamplingParams:
    """Every field that is not left open, with optional ones written even at their default: the receiver resolves
    nothing of these."""
    return message_of(
        pb.SamplingParams, {name: getattr(params, name) for name in PARAMETERS if name not in unset}, _CODECS
    )


def decode_sampling(
    message: pb.SamplingParams, defaults: SamplingParams = DEFAULT_SAMPLING, prefix: str = "sampling."
) -> SamplingParams:
    """The parameters of a request, absent ones taken from `defaults` (the model's generation config). InvalidArgument
    for a mode that only a newer peer knows; `prefix` stands before its field."""
    if message.logprobs_mode not in _MODES:
        raise _unknown(f"{prefix}logprobs_mode", message.logprobs_mode, len(_MODES) - 1)
    absent = absent_in(message)
    given: dict[str, Any] = {name: getattr(message, name) for name in PARAMETERS if name not in absent}
    for name, codec in _CODECS.items():
        given[name] = codec.decode(given[name])
    given["structured_output"] = given["structured_output"] if message.HasField("structured_output") else None
    return resolve_sampling(given, defaults)


def absent_in(message: pb.SamplingParams) -> tuple[str, ...]:
    """The parameters that a request leaves open."""
    return tuple(name for name in OPTIONAL if not message.HasField(name))


def decode_default_sampling(message: pb.SamplingParams) -> SamplingParams:
    """The parameters in a peer's description: a mode that only a newer peer knows reads as unspecified."""
    if message.logprobs_mode not in _MODES:
        known = pb.SamplingParams()
        known.CopyFrom(message)
        known.ClearField("logprobs_mode")
        message = known
    return decode_sampling(message)


def decode_acceptance(number: int, field: str) -> AcceptanceRule:
    """The rule of a request. InvalidArgument, which names the field, for one that only a newer peer knows."""
    if number not in set(AcceptanceRule):
        raise _unknown(field, number, max(AcceptanceRule))
    return AcceptanceRule(number)


def _unknown(field: str, number: int, highest: int) -> InvalidArgument:
    problem = f"is {number}, which this version does not know; allowed: 0 to {highest}"
    return InvalidArgument.of([Violation(field, problem)])


def encode_structured_output(structured: StructuredOutput) -> pb.StructuredOutput:
    """The one field that is set."""
    out = pb.StructuredOutput()
    if structured.choice is not None:
        out.choice.values.extend(structured.choice)
        out.choice.SetInParent()  # an empty list is still a constraint (and refused by the validator)
    elif structured.json_object:
        out.json_object = True
    else:
        for name in TEXT_KINDS:
            value = getattr(structured, name)
            if value is not None:
                setattr(out, name, value)
    return out


def decode_structured_output(message: pb.StructuredOutput) -> StructuredOutput:
    """The constraint; all fields empty if none was set, which the validator refuses."""
    kind = message.WhichOneof("constraint")
    if kind is None:
        return StructuredOutput()
    if kind == "choice":
        return StructuredOutput(choice=tuple(message.choice.values))
    return StructuredOutput(**{kind: getattr(message, kind)})


TOKEN_IDS: Codec[tuple[int, ...], pb.TokenIds] = Codec(
    lambda ids: pb.TokenIds(ids=ids), lambda message: tuple(message.ids), "a list of token ids"
)
ID_LISTS = each(TOKEN_IDS, "a list of lists of token ids")
TEXTS: Codec[Any, Any] = Codec(
    lambda texts: [texts] if isinstance(texts, str) else texts, tuple, "a text or a list of texts"
)
_TUPLE: Codec[Any, Any] = Codec(lambda values: values, tuple)
_CODECS: dict[str, Codec[Any, Any]] = {
    **{name: _TUPLE for name in PARAMETERS if isinstance(getattr(DEFAULT_SAMPLING, name), tuple)},
    "bad_words": TEXTS,
    "stop": TEXTS,
    "bad_words_ids": ID_LISTS,
    "prompt_logprob_token_ids": ID_LISTS,
    "logit_bias": Codec(dict, dict, "an object of token ids and numbers"),
    "logprobs_mode": Codec(
        lambda mode: _MODE_NUMBERS[LogprobsMode(mode)],
        _MODES.__getitem__,
        "LogprobsMode." + ", ".join(mode.name for mode in LogprobsMode),
        is_name=True,
    ),
    "structured_output": Codec(encode_structured_output, decode_structured_output, "a StructuredOutput"),
}
