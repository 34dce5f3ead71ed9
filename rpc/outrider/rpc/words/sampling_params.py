"""How tokens are chosen: the sampling parameters of one request, with vLLM's names and meanings.

SamplingParams is one table. A row says a parameter's type and default, what it may be (`Check`), how far it travels
(`Reach`) and whether HTTP has it; validation, protobuf codec (`sampling_codec`), HTTP's reading and the list of
capabilities follow. Who adds a parameter adds it to generation.proto, to this table, and to what computes with it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, IntEnum
from typing import Annotated, Any, Self, get_type_hints

from outrider.rpc.words.checks import (
    Check,
    Checks,
    Limits,
    biases,
    check_flag,
    check_logprobs,
    id_lists,
    integer,
    number,
    texts,
    token_ids,
)
from outrider.rpc.words.structured import REASONING, TEXT_KINDS, Reasoning
from outrider.rpc.words.structured import StructuredOutput as StructuredOutput


class AcceptanceRule(IntEnum):
    """How drafted tokens are accepted; the numbers are those of the protocol."""

    AUTO = 0
    REJECTION = 1
    COUPLED = 2
    BLOCK = 3

    @property
    def weighs(self) -> bool:
        """Whether drafted tokens are judged against what they were drawn from."""
        return self in (AcceptanceRule.REJECTION, AcceptanceRule.BLOCK)


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
    TOOL_CALLS = 5  # the gateway's alone: a stop, and the output has calls of tools


class LogprobsMode(Enum):
    """What returned log probabilities are of."""

    RAW_LOGPROBS = "raw_logprobs"
    RAW_LOGITS = "raw_logits"
    PROCESSED_LOGPROBS = "processed_logprobs"
    PROCESSED_LOGITS = "processed_logits"


def check_mode(found: Checks, name: str, value: Any, limits: Limits) -> None:
    """A LogprobsMode."""
    if not isinstance(value, LogprobsMode):
        found.add(name, "is unknown", ", ".join(mode.value for mode in LogprobsMode))


def constraint(longest: int, most_choices: int) -> Check:
    """A StructuredOutput with one constraint, neither empty nor of more characters or choices."""

    def check(found: Checks, name: str, value: Any, limits: Limits) -> None:
        given = sum(getattr(value, kind) is not None for kind in (*TEXT_KINDS, "choice")) + bool(value.json_object)
        if given != 1:
            found.add(name, f"sets {given} constraints", "exactly one")
        for kind in TEXT_KINDS:
            if getattr(value, kind) is not None:
                found.text(f"{name}.{kind}", getattr(value, kind), longest, empty=False)
        if value.choice is not None:
            texts(most_choices, longest)(found, f"{name}.choice", value.choice, limits)
            if not value.choice:
                found.add(f"{name}.choice", "is empty", f"1 to {most_choices} texts")

    return check


class Reach(Enum):
    """How far a parameter goes. One that changes what is generated or reported goes only to a peer that names it among
    its capabilities: a peer that does not know it would drop it unseen, and generate by another law."""

    NAMED = "to a draft or target that names it"
    FIRST = "the same; it is older than the list of capabilities, and a peer without a list does it"  # none is added
    KNOWN = "to every draft and target: all know it, or none reads it"
    GATEWAY = "it ends at the gateway, which resolves it"


@dataclass(frozen=True, slots=True)
class Parameter:
    """A row of the table."""

    check: Check
    reach: Reach = Reach.NAMED
    http: str | None = ""  # its name in HTTP's bodies; empty: the same; None: HTTP has it not
    recommended: bool = False  # a model's authors may recommend it, in generation_config.json


MAX_LOGPROBS = 20  # of a position, where no flag says another number
MAX_SCORED_ROWS = 1 << 16  # of a prompt, for which single ids are listed
# Below this, logits divided by it leave float32's range; 0 alone is greedy.
MIN_DIVISOR = 1e-5
_FIRST, _KNOWN, _GATEWAY = Reach.FIRST, Reach.KNOWN, Reach.GATEWAY
_TEMPERATURE = number(MIN_DIVISOR, 100, f"0 (greedy), or {MIN_DIVISOR:g} to 100", zero=True)
_TOP_P = number(1e-9, 1, "above 0 and at most 1")
_REPETITION = number(MIN_DIVISOR, 100, "above 0 and at most 100")


def _context(limits: Limits) -> int:
    return limits.max_model_len


def _max_tokens(limits: Limits) -> int:
    return limits.max_tokens


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The table: one row a parameter. An instance has every default resolved."""

    temperature: Annotated[float, Parameter(_TEMPERATURE, _FIRST, recommended=True)] = 1.0
    top_p: Annotated[float, Parameter(_TOP_P, _FIRST, recommended=True)] = 1.0
    top_k: Annotated[int, Parameter(integer(-1, 2**31 - 1), _FIRST, recommended=True)] = 0  # 0 and -1: off
    min_p: Annotated[float, Parameter(number(0, 1), _FIRST, recommended=True)] = 0.0
    repetition_penalty: Annotated[float, Parameter(_REPETITION, _FIRST, recommended=True)] = 1.0
    presence_penalty: Annotated[float, Parameter(number(-2, 2), _FIRST)] = 0.0
    frequency_penalty: Annotated[float, Parameter(number(-2, 2), _FIRST)] = 0.0
    logit_bias: Annotated[dict[int, float], Parameter(biases(1024, 100), _FIRST)] = field(default_factory=dict)
    allowed_token_ids: Annotated[tuple[int, ...], Parameter(token_ids(), _FIRST)] = ()  # empty: all
    # The gateway turns texts into ids: one text becomes several lists, with and without a space before it.
    bad_words: Annotated[tuple[str, ...], Parameter(texts(128, 256), _GATEWAY)] = ()
    bad_words_ids: Annotated[tuple[tuple[int, ...], ...], Parameter(id_lists(4 * 128, 256), _FIRST, http=None)] = ()
    max_tokens: Annotated[int, Parameter(integer(1, _context), _KNOWN)] = 16
    min_tokens: Annotated[int, Parameter(integer(0, _max_tokens), _FIRST)] = 0
    stop: Annotated[tuple[str, ...], Parameter(texts(16, 256), _GATEWAY)] = ()
    stop_token_ids: Annotated[tuple[int, ...], Parameter(token_ids(128), _FIRST)] = ()
    ignore_eos: Annotated[bool, Parameter(check_flag, _FIRST)] = False
    include_stop_str_in_output: Annotated[bool, Parameter(check_flag, _KNOWN)] = False
    logprobs: Annotated[int | None, Parameter(check_logprobs, _FIRST)] = None  # -1: all
    # In place of the most probable ones.
    logprob_token_ids: Annotated[tuple[int, ...], Parameter(token_ids(128))] = ()
    # A list for each of the rows from `prompt_logprob_start` on, each of which scores the next token; one: for all.
    prompt_logprob_token_ids: Annotated[
        tuple[tuple[int, ...], ...], Parameter(id_lists(MAX_SCORED_ROWS, 128), http=None)
    ] = ()
    prompt_logprob_start: Annotated[int, Parameter(integer(0, _context), http=None)] = 0
    prompt_logprobs: Annotated[int | None, Parameter(check_logprobs, _FIRST)] = None  # -1: all
    logprobs_mode: Annotated[LogprobsMode, Parameter(check_mode, _FIRST, http=None)] = LogprobsMode.RAW_LOGPROBS
    skip_special_tokens: Annotated[bool, Parameter(check_flag, _KNOWN)] = True
    spaces_between_special_tokens: Annotated[bool, Parameter(check_flag, _KNOWN)] = True
    detokenize: Annotated[bool, Parameter(check_flag, _KNOWN, http=None)] = True
    structured_output: Annotated[
        StructuredOutput | None, Parameter(constraint(64 * 1024, 1024), http="response_format")
    ] = None
    truncate_prompt_tokens: Annotated[int | None, Parameter(integer(1, _context, also=-1), _GATEWAY)] = None
    seed: Annotated[int | None, Parameter(integer(0, 2**64 - 1), _GATEWAY)] = None

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is taken, with ties to the lowest id."""
        return self.temperature == 0.0

    @property
    def cuts(self) -> bool:
        """Whether tokens of little probability are left out of the law."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def num_entries(self) -> int:
        """Of its maps and lists together."""
        return sum(_num_entries(getattr(self, name)) for name in _SIZED)


PARAMETERS: Mapping[str, Parameter] = {
    name: parameter
    for name, hint in get_type_hints(SamplingParams, include_extras=True).items()
    for parameter in hint.__metadata__
}
DEFAULT_SAMPLING = SamplingParams()
_SIZED = tuple(name for name in PARAMETERS if isinstance(getattr(DEFAULT_SAMPLING, name), (dict, tuple)))
# What a draft or target must name before it gets it.
SAMPLING_FIELDS = tuple(name for name, row in PARAMETERS.items() if row.reach in (Reach.FIRST, Reach.NAMED))
# What every peer does, also one that is older than the list of capabilities and names none. It never grows: what came
# later has to be named.
BASELINE = (
    *(f"sampling.{name}" for name, row in PARAMETERS.items() if row.reach is Reach.FIRST),
    "acceptance.rejection",
    "acceptance.coupled",
)
_NEWER = (f"sampling.{name}" for name, row in PARAMETERS.items() if row.reach is Reach.NAMED)
CAPABILITIES = (*BASELINE, "acceptance.block", *_NEWER)  # what our own services do
FRESH_SEED = "fresh_seed"  # the capability of a draft that recalls nothing for a seed that may have come before
RECOMMENDED = tuple(name for name, row in PARAMETERS.items() if row.recommended)
_OPTIONAL = {name for name in PARAMETERS if getattr(DEFAULT_SAMPLING, name) is None}


def lacking(
    capabilities: Collection[str],
    sampling: SamplingParams,
    acceptance: AcceptanceRule = AcceptanceRule.AUTO,
    reasoning: Reasoning | None = None,
) -> list[str]:
    """What a request needs, and a peer with these capabilities does not do."""
    unset = DEFAULT_SAMPLING
    needed = [f"sampling.{name}" for name in SAMPLING_FIELDS if getattr(sampling, name) != getattr(unset, name)]
    if acceptance is not AcceptanceRule.AUTO:
        needed.append(f"acceptance.{acceptance.name.lower()}")
    if reasoning is not None:
        needed.append(REASONING)
    return [name for name in needed if name not in capabilities]


def check_sampling(
    found: Checks,
    params: SamplingParams,
    vocab_size: int,
    max_model_len: int,
    max_logprobs: int = MAX_LOGPROBS,
    prefix: str = "sampling.",
) -> None:
    """Every parameter; what is wrong is added to `found`, as of fields with this prefix."""
    here, most = Checks(prefix), params.max_tokens
    most = most if isinstance(most, int) and 1 <= most <= max_model_len else max_model_len
    limits = Limits(vocab_size, max_model_len, max_logprobs, most)
    for name, row in PARAMETERS.items():
        value = getattr(params, name)
        if value is not None or name not in _OPTIONAL:
            row.check(here, name, value, limits)
    if params.stop and params.detokenize is False:
        here.add("stop", "needs text, and detokenize is false", "stop strings with detokenize true")
    if params.logprob_token_ids and params.logprobs is None:
        here.add("logprob_token_ids", "is given without logprobs", "only with logprobs")
    if params.prompt_logprob_token_ids and params.prompt_logprobs is None:
        here.add("prompt_logprob_token_ids", "is given without prompt_logprobs", "only with prompt_logprobs")
    found.add_all(here)


def _num_entries(value: Collection[object]) -> int:
    return len(value) + sum(len(one) for one in value if isinstance(one, (tuple, str)))


def without_prompt_logprobs(params: SamplingParams) -> SamplingParams:
    """Where the prompt's log probabilities have been told, or are told by another completion."""
    return replace(params, prompt_logprobs=None, prompt_logprob_token_ids=(), prompt_logprob_start=0)


def sampling_for_peers(params: SamplingParams) -> SamplingParams:
    """Without what ends at the gateway."""
    ends = [name for name, row in PARAMETERS.items() if row.reach is Reach.GATEWAY]
    return replace(params, **{name: getattr(DEFAULT_SAMPLING, name) for name in ends})
