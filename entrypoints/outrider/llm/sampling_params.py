"""SamplingParams with vLLM's fields, defaults and checks, and their way to the project's own parameters."""

from __future__ import annotations

import copy
import hashlib
import logging
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from enum import Enum
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, InstanceOf
from pydantic.dataclasses import dataclass

from outrider.llm.structured_outputs import GuidedDecodingParams, StructuredOutputsParams, of_guided_options
from outrider.llm.validation import (
    CONFIG,
    Flag,
    Integer,
    MinusOneIsNone,
    Number,
    Only,
    as_int,
    fixed_fields,
    integer,
    plain_errors,
    require_fixed,
)
from outrider.rpc.words.checks import ALL_LOGPROBS
from outrider.rpc.words.request import ReasoningOptions
from outrider.rpc.words.sampling_params import LogprobsMode
from outrider.rpc.words.sampling_params import SamplingParams as WireSampling

__all__ = ["GuidedDecodingParams", "RequestOutputKind", "SamplingParams", "StructuredOutputsParams"]  # vLLM's, here

log = logging.getLogger(__name__)

MIN_TEMPERATURE = 1e-2  # what is above 0 and below it is raised to it
GREEDY_BELOW = 1e-5
MAX_BIAS = 100.0  # either way; others are cut to it
NO_BOUND = 2**31 - 1  # max_tokens=None: cut to what the context leaves


def number(least: float, most: float) -> Any:
    """The bounds of a field, both included, and its description."""
    return Field(ge=least, le=most, description=f"a number in [{least}, {most}]")


def absent(why: str) -> Only:
    """A field of vLLM's that is refused unless it says nothing."""
    return Only(None, False, why=why)


def _list(value: object) -> object:
    """Nothing is a list of none, one text a list of one."""
    if value is None:
        return []
    return [value] if isinstance(value, str) and value else value


def _count(value: object) -> object:
    """True is one, False is none."""
    return (1 if value else None) if isinstance(value, bool) else as_int(value)


def _token_id(value: object) -> object:
    """Digits, too, as keys are in JSON."""
    return int(value) if isinstance(value, str) and value.isdecimal() else value


Text = Annotated[str, Field(strict=True, min_length=1)]
Texts = Annotated[
    Text | list[Text] | None,
    BeforeValidator(_list),
    Field(validate_default=True, description="a string or a list of strings, none of them empty"),
]
Biases = dict[
    Annotated[Integer, BeforeValidator(_token_id)],
    Annotated[Number, AfterValidator(lambda bias: min(MAX_BIAS, max(-MAX_BIAS, bias)))],
]
Count = Annotated[
    Annotated[Integer, Field(ge=-1)] | None,
    BeforeValidator(_count),
    Field(description="a non-negative integer, -1 for all, or None"),
]


class RequestOutputKind(Enum):
    """What vLLM's engines stream; `LLM` returns whole outputs whatever is chosen."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@plain_errors("SamplingParams")
@dataclass(config=CONFIG)
class SamplingParams:
    """How tokens are chosen; vLLM's names, defaults and checks. After the checks `stop`, `stop_token_ids` and
    `bad_words` are lists."""

    n: Annotated[Integer, integer(1)] = 1
    presence_penalty: Annotated[Number, number(-2, 2)] = 0.0
    frequency_penalty: Annotated[Number, number(-2, 2)] = 0.0
    repetition_penalty: Annotated[Number, Field(gt=0, description="a number greater than zero")] = 1.0
    temperature: Annotated[Number, Field(ge=0, description="a number, finite and non-negative")] = 1.0
    top_p: Annotated[Number, Field(gt=0, le=1, description="a number in (0, 1]")] = 1.0
    top_k: Annotated[Integer, Field(ge=-1, description="an integer: 0 or -1 (off), or at least 1")] = 0
    min_p: Annotated[Number, number(0, 1)] = 0.0
    seed: Annotated[  # torch's range: a negative one is its remainder by 2**64
        Integer | None,
        Field(ge=-(2**63), le=2**64 - 1, description="an integer from -2**63 to 2**64 - 1, or None"),
        MinusOneIsNone,
    ] = None
    stop: Texts = None
    stop_token_ids: Annotated[
        list[Integer] | None,
        BeforeValidator(_list),
        Field(validate_default=True, description="a list of integers, or None"),
    ] = None
    ignore_eos: Flag = False
    max_tokens: Annotated[Integer | None, integer(1, or_none=True)] = 16
    min_tokens: Annotated[Integer, integer(0)] = 0
    logprobs: Count = None
    prompt_logprobs: Count = None
    flat_logprobs: Flag = False
    detokenize: Flag = True
    skip_special_tokens: Flag = True
    spaces_between_special_tokens: Flag = True
    include_stop_str_in_output: Flag = False
    output_kind: Annotated[RequestOutputKind, Field(strict=True, description="a RequestOutputKind")] = (
        RequestOutputKind.CUMULATIVE
    )
    truncate_prompt_tokens: Annotated[
        Literal[-1] | Annotated[Integer, Field(ge=1)] | None,
        BeforeValidator(as_int),
        Field(description="an integer of at least 1, -1, or None"),
    ] = None
    structured_outputs: Annotated[
        InstanceOf[StructuredOutputsParams] | None, Field(description="a StructuredOutputsParams, or None")
    ] = None
    guided_decoding: Annotated[  # of older versions; it becomes `structured_outputs`
        InstanceOf[StructuredOutputsParams] | None, Field(description="a GuidedDecodingParams, or None")
    ] = None
    logits_processors: Annotated[
        Any, absent("a callable cannot run at both draft and target; use logit_bias, allowed_token_ids, bad_words")
    ] = None
    logit_bias: Annotated[
        Biases | None, Field(description="a dict of token ids (integers) and their biases (finite numbers)")
    ] = None
    allowed_token_ids: Annotated[
        list[Integer] | None, Field(min_length=1, description="a list of integers, not empty, or None")
    ] = None
    bad_words: Texts = None
    extra_args: Annotated[Any, absent("no plug-in reads them")] = None
    skip_reading_prefix_cache: Annotated[Flag | None, Field(description="True or False")] = None
    thinking_token_budget: Annotated[  # 0, which vLLM takes, is none of a target's bounds
        Integer | None, Field(ge=1, description="an integer of at least 1, -1 (no bound), or None"), MinusOneIsNone
    ] = None
    repetition_detection: Annotated[Any, absent("it is not there; use the penalties")] = None
    logprob_token_ids: Annotated[
        list[Integer] | None, Field(min_length=1, description="a list of integers, not empty, or None")
    ] = None
    prompt_logprob_token_ids: Annotated[
        list[Integer] | list[list[Integer]] | None,
        Field(min_length=1, description="a list of integers, or such a list for each token that is scored, or None"),
    ] = None
    prompt_logprob_start: Annotated[Integer, integer(0)] = 0
    watermarking: Annotated[Any, absent("it would change the distribution")] = None
    stream_interval: Annotated[Any, absent("generate() returns whole outputs")] = None
    trace_decode_token_ids: Annotated[Any, absent("it is not there")] = None
    routed_experts_prompt_start: Annotated[Any, absent("it is not there")] = None

    def __post_init__(self) -> None:
        require_fixed(REFUSED, vars(self), "SamplingParams({}=...)")
        if self.guided_decoding is not None:
            self._take_guided(self.guided_decoding)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens must be at most max_tokens, got {self.min_tokens}")
        if len(set(map(len, self.scored_ids))) > 1:
            raise ValueError("prompt_logprob_token_ids: its lists differ in length; allowed: lists of one length")
        if self.stop and not self.detokenize:
            raise ValueError("stop strings need text: set detokenize=True to use stop.")
        if 0 < self.temperature < MIN_TEMPERATURE:
            log.warning(
                "temperature %s is raised to %s, below which logits overflow", self.temperature, MIN_TEMPERATURE
            )
            self.temperature = MIN_TEMPERATURE
        if self.temperature < GREEDY_BELOW:
            self.top_p, self.top_k, self.min_p = 1.0, 0, 0.0
            if self.n > 1:
                raise ValueError(f"n must be 1 when using greedy sampling, got {self.n}.")

    def _take_guided(self, guided: StructuredOutputsParams) -> None:
        if self.structured_outputs is not None:
            raise ValueError("guided_decoding is given, and beside it structured_outputs; allowed: the latter alone")
        warnings.warn(
            "SamplingParams(guided_decoding=GuidedDecodingParams(...)): an old form; use "
            "structured_outputs=StructuredOutputsParams(...)",
            DeprecationWarning,
            stacklevel=5,  # the caller of SamplingParams()
        )
        self.structured_outputs, self.guided_decoding = guided, None

    @property
    def scored_ids(self) -> tuple[tuple[int, ...], ...]:
        """`prompt_logprob_token_ids`, a list for each token that is scored; one: for all of them."""
        given = self.prompt_logprob_token_ids or ()
        return tuple(tuple(one) for one in ([given] if given and isinstance(given[0], int) else given))

    @classmethod
    def from_optional(cls, **given: Any) -> SamplingParams:
        """Where None is the default, but for `max_tokens`, of which it is no bound."""
        return cls(**{name: value for name, value in given.items() if value is not None or name == "max_tokens"})

    def clone(self) -> SamplingParams:
        """A copy that shares nothing."""
        return copy.deepcopy(self)


REFUSED = fixed_fields(SamplingParams)


def to_wire(params: SamplingParams, mode: LogprobsMode, max_logprobs: int, max_model_len: int) -> WireSampling:
    """The project's own parameters, most of them under the same name; the seed is the caller's to set where it is
    None."""
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(params, name)
        if value is not None and max_logprobs != ALL_LOGPROBS and not 0 <= value <= max_logprobs:
            raise ValueError(
                f"{name} is {value}; this LLM allows 0 to max_logprobs={max_logprobs}; -1, all, needs max_logprobs=-1"
            )
    given = {entry.name: copy.copy(getattr(params, entry.name)) for entry in fields(params)}
    same = {entry.name: given[entry.name] for entry in fields(WireSampling) if given.get(entry.name) is not None}
    wire: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in same.items()}
    wire |= {"top_k": max(0, params.top_k), "logprobs_mode": mode}
    wire.setdefault("max_tokens", NO_BOUND)
    if params.scored_ids:
        wire |= {"prompt_logprob_token_ids": params.scored_ids, "prompt_logprobs": params.prompt_logprobs or 0}
    if params.truncate_prompt_tokens == -1:
        wire["truncate_prompt_tokens"] = max_model_len - 1
    if params.seed is not None:
        wire["seed"] = params.seed % 2**64
    if params.structured_outputs is not None:
        wire["structured_output"] = params.structured_outputs.constraint()
    return WireSampling(**wire)


def reasoning_options(params: SamplingParams) -> ReasoningOptions | None:
    """How long the model may reason; None where nothing is said of it."""
    budget = params.thinking_token_budget
    return None if budget is None else ReasoningOptions(max_tokens=budget)


def seeded(sampling: WireSampling, seed: int | None, number: int) -> WireSampling:
    """A request's own seed, else one that follows from the LLM's and the request's number."""
    if sampling.seed is not None or seed is None:
        return sampling
    digest = hashlib.blake2b(f"{seed}:{number}".encode(), digest_size=8).digest()
    return replace(sampling, seed=int.from_bytes(digest, "little"))


def with_guided(params: SamplingParams | Sequence[SamplingParams], options: Any) -> Any:
    """The same under `guided_options_request`, which older versions of `generate` took."""
    constraint = of_guided_options(options)
    if isinstance(params, SamplingParams):
        return replace(params, structured_outputs=constraint)
    return [replace(one, structured_outputs=constraint) for one in params]


def params_per_prompt(given: Any, count: int) -> Sequence[SamplingParams]:
    """Parameters for each of `count` prompts. Raises TypeError for what is none."""
    if isinstance(given, SamplingParams):
        return [given] * count
    for params in given if isinstance(given, Sequence) and not isinstance(given, str | bytes) else [given]:
        if not isinstance(params, SamplingParams):
            hint = ": write SamplingParams(...) with these fields" if isinstance(params, Mapping) else ""
            raise TypeError(
                f"sampling_params must be a SamplingParams, or a list of one for each prompt; got {params!r:.100}{hint}"
            )
    if len(given) != count:
        raise ValueError("The lengths of prompts and sampling_params must be the same.")
    return list(given)
