"""How tokens are chosen: the sampling parameters of one request, with vLLM's names and meanings, every default
resolved."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Self


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
