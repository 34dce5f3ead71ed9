"""SamplingParams between dataclass and protobuf. Absent optional fields are resolved here, once, from a model's
defaults; after that every side works with whole values."""

from __future__ import annotations

from typing import Any

from outrider.v1 import common_pb2 as pb
from outrider.wire.errors import InvalidArgument, Violation
from outrider.wire.sampling import AcceptanceRule, LogprobsMode, SamplingParams, StructuredOutput

DEFAULT_SAMPLING = SamplingParams()

_OPTIONAL = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "max_tokens", "logprobs", "prompt_logprobs", "skip_special_tokens", "spaces_between_special_tokens",
    "detokenize", "truncate_prompt_tokens", "seed",
)  # fmt: skip
_PLAIN = ("min_tokens", "ignore_eos", "include_stop_str_in_output")
_MODES = {
    0: LogprobsMode.RAW_LOGPROBS,
    1: LogprobsMode.RAW_LOGPROBS,
    2: LogprobsMode.RAW_LOGITS,
    3: LogprobsMode.PROCESSED_LOGPROBS,
    4: LogprobsMode.PROCESSED_LOGITS,
}
_MODE_NUMBERS = {mode: number for number, mode in _MODES.items()}  # the last wins: raw log probabilities are 1


def encode_sampling(params: SamplingParams) -> pb.SamplingParams:
    """Every field, with optional ones written even at their default: the receiver resolves nothing."""
    out = pb.SamplingParams(
        logit_bias=params.logit_bias,
        allowed_token_ids=params.allowed_token_ids,
        bad_words=params.bad_words,
        stop=params.stop,
        stop_token_ids=params.stop_token_ids,
        logprobs_mode=_MODE_NUMBERS[params.logprobs_mode],  # type: ignore[arg-type]  # a protocol number
    )
    for name in _OPTIONAL:
        value = getattr(params, name)
        if value is not None:
            setattr(out, name, value)
    for name in _PLAIN:
        setattr(out, name, getattr(params, name))
    for ids in params.bad_words_ids:
        out.bad_words_ids.add(ids=ids)
    if params.structured_output is not None:
        out.structured_output.CopyFrom(encode_structured_output(params.structured_output))
    return out


def decode_sampling(
    message: pb.SamplingParams, defaults: SamplingParams = DEFAULT_SAMPLING, prefix: str = "sampling."
) -> SamplingParams:
    """The parameters of a request, absent optional fields taken from `defaults` (the model's generation config). Lists,
    maps and messages have no absence on the wire: empty ones stay empty. InvalidArgument for a mode that only a newer
    peer knows; `prefix` stands before its field."""
    if message.logprobs_mode not in _MODES:
        raise _unknown(f"{prefix}logprobs_mode", message.logprobs_mode, len(_MODES) - 1)
    values: dict[str, Any] = {
        name: getattr(message if message.HasField(name) else defaults, name) for name in _OPTIONAL
    }
    values.update({name: getattr(message, name) for name in _PLAIN})
    structured = message.structured_output if message.HasField("structured_output") else None
    return SamplingParams(
        logit_bias=dict(message.logit_bias),
        allowed_token_ids=tuple(message.allowed_token_ids),
        bad_words=tuple(message.bad_words),
        bad_words_ids=tuple(tuple(entry.ids) for entry in message.bad_words_ids),
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        logprobs_mode=_MODES[message.logprobs_mode],
        structured_output=None if structured is None else decode_structured_output(structured),
        **values,
    )


def encode_logprobs_mode(mode: LogprobsMode) -> int:
    """The protocol's number of a mode."""
    return _MODE_NUMBERS[mode]


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
        for name in ("json_schema", "regex", "grammar"):
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
