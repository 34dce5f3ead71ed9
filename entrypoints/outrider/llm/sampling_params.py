"""SamplingParams with vLLM's fields, defaults and checks, and their way to the project's own parameters.

The checks of SamplingParams: values become what the fields hold, then each field's bounds."""

from __future__ import annotations

import copy
import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from outrider.llm.config import Unsupported, is_finite, is_int, keywords_of, listed, require
from outrider.rpc.sampling_params import LogprobsMode
from outrider.rpc.sampling_params import SamplingParams as WireSampling
from outrider.rpc.validate import ALL_LOGPROBS

log = logging.getLogger(__name__)

MIN_TEMPERATURE = 1e-2  # what is above 0 and below it is raised to it
MAX_BIAS = 100.0
LEAST_SEED, MOST_SEED = -(2**63), 2**64 - 1  # torch's; a negative one is its remainder by 2**64

# What a finite number may be.
NUMBERS: dict[str, tuple[Callable[[float], bool], str]] = {
    "presence_penalty": (lambda value: -2 <= value <= 2, "a number in [-2, 2]"),
    "frequency_penalty": (lambda value: -2 <= value <= 2, "a number in [-2, 2]"),
    "repetition_penalty": (lambda value: value > 0, "a number greater than zero"),
    "temperature": (lambda value: value >= 0, "a number, finite and non-negative"),
    "top_p": (lambda value: 0 < value <= 1, "a number in (0, 1]"),
    "min_p": (lambda value: 0 <= value <= 1, "a number in [0, 1]"),
}
# What a whole number may be.
INTEGERS: dict[str, tuple[Callable[[int], bool], str]] = {
    "n": (lambda value: value >= 1, "an integer of at least 1"),
    "top_k": (lambda value: value >= -1, "an integer: 0 or -1 (off), or at least 1"),
    "seed": (lambda value: LEAST_SEED <= value <= MOST_SEED, "an integer from -2**63 to 2**64 - 1, or None"),
    "max_tokens": (lambda value: value >= 1, "an integer of at least 1, or None"),
    "min_tokens": (lambda value: value >= 0, "an integer of at least 0"),
    "logprobs": (lambda value: value >= -1, "a non-negative integer, -1 for all, or None"),
    "prompt_logprobs": (lambda value: value >= -1, "a non-negative integer, -1 for all, or None"),
    "truncate_prompt_tokens": (lambda value: value >= 1 or value == -1, "an integer of at least 1, -1, or None"),
}
FLAGS = (
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "skip_reading_prefix_cache",
)
MAY_BE_NONE = (
    "seed",
    "max_tokens",
    "logprobs",
    "prompt_logprobs",
    "truncate_prompt_tokens",
    "skip_reading_prefix_cache",
)


def check_numbers(params: SamplingParams) -> None:
    """Every number and flag; numpy's become Python's, True of the log probabilities is 1, a seed of -1 is None."""
    for name in ("logprobs", "prompt_logprobs"):
        if isinstance(value := getattr(params, name), bool):
            setattr(params, name, 1 if value else None)
    for name, (holds, allowed) in NUMBERS.items():
        value = getattr(params, name)
        require(is_finite(value) and holds(value), name, value, allowed)
        setattr(params, name, float(value))
    for name, (within, allowed) in INTEGERS.items():
        value = getattr(params, name)
        if value is not None or name not in MAY_BE_NONE:
            require(is_int(value) and within(value), name, value, allowed)
            setattr(params, name, int(value))
    for name in FLAGS:
        value = getattr(params, name)
        if value is not None or name not in MAY_BE_NONE:
            require(isinstance(value, bool), name, value, "True or False")
    if params.seed == -1:
        params.seed = None
    if params.max_tokens is not None:
        require(params.min_tokens <= params.max_tokens, "min_tokens", params.min_tokens, "at most max_tokens")
    if 0 < params.temperature < MIN_TEMPERATURE:
        log.warning("temperature %s is raised to %s, below which logits overflow", params.temperature, MIN_TEMPERATURE)
        params.temperature = MIN_TEMPERATURE


def check_lists(params: SamplingParams) -> None:
    """Texts, token ids and biases; one text may stand without a list."""
    params.stop = _texts("stop", params.stop)
    if params.stop and not params.detokenize:
        raise ValueError("stop strings need text: set detokenize=True to use stop.")
    params.bad_words = _texts("bad_words", params.bad_words)
    ids = params.stop_token_ids
    params.stop_token_ids = [] if ids is None else _ids("stop_token_ids", ids, "a list of integers, or None")
    if params.allowed_token_ids is not None:
        allowed = "a list of integers, not empty, or None"
        params.allowed_token_ids = _ids("allowed_token_ids", params.allowed_token_ids, allowed)
        require(bool(params.allowed_token_ids), "allowed_token_ids", params.allowed_token_ids, allowed)
    if params.logit_bias is not None:
        params.logit_bias = _biases(params.logit_bias)


def _texts(name: str, value: Any) -> list[str]:
    allowed = "a string or a list of strings, none of them empty"
    if value is None:
        return []
    texts = [value] if isinstance(value, str) and value else listed(name, value, allowed)
    require(all(isinstance(text, str) and text for text in texts), name, value, allowed)
    return texts


def _ids(name: str, value: Any, allowed: str) -> list[int]:
    ids = listed(name, value, allowed)
    require(all(map(is_int, ids)), name, value, allowed)
    return list(map(int, ids))


def _biases(value: Any) -> dict[int, float]:
    """Keys may be digits, as they are in JSON; biases are cut."""
    allowed = "a dict of token ids (integers) and their biases (finite numbers)"
    require(isinstance(value, Mapping), "logit_bias", value, allowed)
    for token, bias in value.items():
        is_id = is_int(token) or (isinstance(token, str) and token.isdecimal())
        require(is_id and is_finite(bias), "logit_bias", {token: bias}, allowed)
    return {int(token): min(MAX_BIAS, max(-MAX_BIAS, float(bias))) for token, bias in value.items()}


GREEDY_BELOW = 1e-5
NO_BOUND = 2**31 - 1  # max_tokens=None: cut to what the context leaves

# Fields of vLLM that are refused unless they have their default.
REFUSED: dict[str, str] = {
    "structured_outputs": "constrained decoding is not there yet",
    "guided_decoding": "constrained decoding is not there yet",
    "logits_processors": "a callable cannot run at both draft and target; use logit_bias, allowed_token_ids, bad_words",
    "flat_logprobs": "log probabilities come as one dict a position",
    "extra_args": "no plug-in reads them",
    "thinking_token_budget": "it is not there",
    "repetition_detection": "it is not there; use the penalties",
    "logprob_token_ids": "the chosen and the most probable ids are reported",
    "watermarking": "it would change the distribution",
    "stream_interval": "generate() returns whole outputs",
    "trace_decode_token_ids": "it is not there",
    "routed_experts_prompt_start": "it is not there",
}


class RequestOutputKind(Enum):
    """What vLLM's engines stream; `LLM` returns whole outputs whatever is chosen."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass
class SamplingParams:
    """How tokens are chosen; vLLM's names, defaults and checks."""

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    flat_logprobs: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    truncate_prompt_tokens: int | None = None
    structured_outputs: Any = None
    guided_decoding: Any = None
    logits_processors: Any = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: str | list[str] | None = None
    extra_args: dict[str, Any] | None = None
    skip_reading_prefix_cache: bool | None = None
    thinking_token_budget: int | None = None
    repetition_detection: Any = None
    logprob_token_ids: list[int] | None = None
    watermarking: Any = None
    stream_interval: int | None = None
    trace_decode_token_ids: Any = None
    routed_experts_prompt_start: int | None = None

    def __post_init__(self) -> None:
        for name, reason in REFUSED.items():
            if getattr(self, name) not in (None, False):
                raise Unsupported(f"SamplingParams({name}=...) is not supported: {reason}")
        check_numbers(self)
        check_lists(self)
        kind = self.output_kind
        require(isinstance(kind, RequestOutputKind), "output_kind", kind, "a RequestOutputKind")
        if self.temperature < GREEDY_BELOW:
            self.top_p, self.top_k, self.min_p = 1.0, 0, 0.0
            if self.n > 1:
                raise ValueError(f"n must be 1 when using greedy sampling, got {self.n}.")

    def clone(self) -> SamplingParams:
        """A copy that shares nothing."""
        return copy.deepcopy(self)


# Of the dataclass's own: Python's words for a field that does not exist say nothing of what was meant.
SamplingParams.__init__ = keywords_of("SamplingParams")(SamplingParams.__init__)  # type: ignore[method-assign]


def to_wire(params: SamplingParams, mode: LogprobsMode, max_logprobs: int, max_model_len: int) -> WireSampling:
    """The project's own parameters; the seed is the caller's to set where it is None."""
    keep = max_model_len - 1 if params.truncate_prompt_tokens == -1 else params.truncate_prompt_tokens
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(params, name)
        if value is not None and max_logprobs != ALL_LOGPROBS and not 0 <= value <= max_logprobs:
            raise ValueError(
                f"{name} is {value}; this LLM allows 0 to max_logprobs={max_logprobs}; -1, all, needs max_logprobs=-1"
            )
    return WireSampling(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=max(0, params.top_k),
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=dict(params.logit_bias or {}),
        allowed_token_ids=tuple(params.allowed_token_ids or ()),
        bad_words=tuple(params.bad_words or ()),
        max_tokens=NO_BOUND if params.max_tokens is None else params.max_tokens,
        min_tokens=params.min_tokens,
        stop=tuple(params.stop or ()),
        stop_token_ids=tuple(params.stop_token_ids or ()),
        ignore_eos=params.ignore_eos,
        include_stop_str_in_output=params.include_stop_str_in_output,
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
        logprobs_mode=mode,
        skip_special_tokens=params.skip_special_tokens,
        spaces_between_special_tokens=params.spaces_between_special_tokens,
        detokenize=params.detokenize,
        truncate_prompt_tokens=keep,
        seed=None if params.seed is None else params.seed % 2**64,
    )


def seeded(sampling: WireSampling, seed: int | None, number: int) -> WireSampling:
    """A request's own seed, else one that follows from the LLM's and the request's number."""
    if sampling.seed is not None or seed is None:
        return sampling
    digest = hashlib.blake2b(f"{seed}:{number}".encode(), digest_size=8).digest()
    return replace(sampling, seed=int.from_bytes(digest, "little"))


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
