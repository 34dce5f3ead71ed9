"""How tokens are chosen: the sampling parameters of one request, with vLLM's names and meanings, every default
resolved.

What a peer can be asked for. A field of an Open that changes what is generated or reported goes only to a peer whose
description names it: one that does not know the field would drop it unseen, and generate by another law.

SamplingParams between dataclass and protobuf. Absent optional fields are resolved here, once, from a model's
defaults; after that every side works with whole values."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Any, Self

from outrider.rpc.errors import InvalidArgument, Violation
from outrider.v1 import generation_pb2 as pb


class AcceptanceRule(IntEnum):
    """How drafted tokens are accepted; the numbers are those of the protocol."""

    AUTO = 0
    REJECTION = 1
    COUPLED = 2


class _AnswerEnum(IntEnum):
    """Numbers that a peer answers with. One that only a newer peer knows reads as UNSPECIFIED, and is passed on as it
    came."""

    @classmethod
    def _missing_(cls, value: object) -> Self | None:
        if not isinstance(value, int):
            return None
        member = int.__new__(cls, value)
        member._name_, member._value_ = "UNSPECIFIED", value
        return member


class TokenOrigin(_AnswerEnum):
    """How a committed token came about; the numbers are those of the protocol."""

    ACCEPTED = 1
    RECOVERED = 2
    BONUS = 3
    PLAIN = 4


class FinishReason(_AnswerEnum):
    """Why a completion ended; the numbers are those of the protocol."""

    STOP = 1
    LENGTH = 2
    ABORT = 3
    ERROR = 4


class LogprobsMode(Enum):
    """What returned log probabilities are of."""

    RAW_LOGPROBS = "raw_logprobs"
    RAW_LOGITS = "raw_logits"
    PROCESSED_LOGPROBS = "processed_logprobs"
    PROCESSED_LOGITS = "processed_logits"


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """A constraint on the text; exactly one field is set."""

    json_schema: str | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: tuple[str, ...] | None = None
    json_object: bool = False


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Fields that concern only text (stop strings, detokenisation) are the gateway's; all others travel to draft
    and target."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] = ()  # empty: all
    bad_words: tuple[str, ...] = ()  # texts; the gateway turns them into ids
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    max_tokens: int = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logprobs: int | None = None  # -1: all
    prompt_logprobs: int | None = None  # -1: all
    logprobs_mode: LogprobsMode = LogprobsMode.RAW_LOGPROBS
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    detokenize: bool = True
    structured_output: StructuredOutput | None = None
    truncate_prompt_tokens: int | None = None
    seed: int | None = None

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is taken, with ties to the lowest id."""
        return self.temperature == 0.0


# Fields of SamplingParams that mean something to a target or a draft. What only concerns text stays at the gateway.
SAMPLING_FIELDS = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "logit_bias", "allowed_token_ids", "bad_words_ids", "min_tokens", "stop_token_ids", "ignore_eos", "logprobs",
    "prompt_logprobs", "logprobs_mode", "structured_output",
)  # fmt: skip
_UNSET = SamplingParams()

# What every peer does, also one that is older than the list of capabilities and names none. It never grows: what came
# later has to be named.
BASELINE = (
    *(f"sampling.{field}" for field in SAMPLING_FIELDS if field != "structured_output"),
    "acceptance.rejection",
    "acceptance.coupled",
)


def lacking(
    capabilities: Collection[str], sampling: SamplingParams, acceptance: AcceptanceRule = AcceptanceRule.AUTO
) -> list[str]:
    """What a request needs, and a peer with these capabilities does not do."""
    needed = [f"sampling.{field}" for field in SAMPLING_FIELDS if getattr(sampling, field) != getattr(_UNSET, field)]
    if acceptance is not AcceptanceRule.AUTO:
        needed.append(f"acceptance.{acceptance.name.lower()}")
    return [name for name in needed if name not in capabilities]


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
