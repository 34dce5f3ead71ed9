"""SamplingParams with vLLM's fields, defaults and checks, and their way to the project's own parameters."""

from __future__ import annotations

import copy
import hashlib
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from outrider.llm.errors import Unsupported
from outrider.wire.sampling import LogprobsMode
from outrider.wire.sampling import SamplingParams as WireSampling

log = logging.getLogger(__name__)

MIN_TEMPERATURE = 1e-2  # what is above 0 and below it is raised to it
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
    bad_words: list[str] | None = None
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
        self._normalize()
        self._check_numbers()
        self._check_lists()
        if self.temperature < GREEDY_BELOW:
            self.top_p, self.top_k, self.min_p = 1.0, 0, 0.0
            if self.n > 1:
                raise ValueError(f"n must be 1 when using greedy sampling, got {self.n}.")

    def clone(self) -> SamplingParams:
        """A copy that shares nothing."""
        return copy.deepcopy(self)

    def _normalize(self) -> None:
        self.stop = [self.stop] if isinstance(self.stop, str) else list(self.stop or ())
        self.stop_token_ids = list(self.stop_token_ids or ())
        self.bad_words = list(self.bad_words or ())
        if self.seed == -1:
            self.seed = None
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is True:
                setattr(self, name, 1)
            elif getattr(self, name) is False:
                setattr(self, name, None)
        if 0 < self.temperature < MIN_TEMPERATURE:
            log.warning(
                "temperature %s is raised to %s, below which logits overflow", self.temperature, MIN_TEMPERATURE
            )
            self.temperature = MIN_TEMPERATURE
        if self.logit_bias is not None:
            self.logit_bias = {int(k): min(100.0, max(-100.0, v)) for k, v in self.logit_bias.items()}

    def _check_numbers(self) -> None:
        _require(_is_int(self.n) and self.n >= 1, "n", self.n, "an integer of at least 1")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(-2.0 <= value <= 2.0, name, value, "in [-2, 2]")
        _require(self.repetition_penalty > 0, "repetition_penalty", self.repetition_penalty, "greater than zero")
        is_number = math.isfinite(self.temperature) and self.temperature >= 0
        _require(is_number, "temperature", self.temperature, "finite and non-negative")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]")
        _require(_is_int(self.top_k) and self.top_k >= -1, "top_k", self.top_k, "0 or -1 (off), or at least 1")
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "in [0, 1]")
        _require(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", self.max_tokens, "at least 1, or None")
        _require(self.min_tokens >= 0, "min_tokens", self.min_tokens, "at least 0")
        if self.max_tokens is not None:
            _require(self.min_tokens <= self.max_tokens, "min_tokens", self.min_tokens, "at most max_tokens")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _require(value is None or value >= 0 or value == -1, name, value, "non-negative, or -1 for all")
        keep = self.truncate_prompt_tokens
        _require(keep is None or keep >= 1 or keep == -1, "truncate_prompt_tokens", keep, "at least 1, or -1")
        _require(
            isinstance(self.output_kind, RequestOutputKind), "output_kind", self.output_kind, "a RequestOutputKind"
        )

    def _check_lists(self) -> None:
        stop = self.stop or []
        _require(all(isinstance(s, str) and s for s in stop), "stop", stop, "strings, none of them empty")
        if stop and not self.detokenize:
            raise ValueError("stop strings need text: set detokenize=True to use stop.")
        ids = self.stop_token_ids or []
        _require(all(map(_is_int, ids)), "stop_token_ids", ids, "integers")
        if self.allowed_token_ids is not None:
            _require(bool(self.allowed_token_ids), "allowed_token_ids", self.allowed_token_ids, "not empty")
        _require(all(isinstance(w, str) and w for w in self.bad_words or ()), "bad_words", self.bad_words, "not empty")


def to_wire(params: SamplingParams, mode: LogprobsMode, max_logprobs: int, max_model_len: int) -> WireSampling:
    """The project's own parameters; the seed is the caller's to set where it is None."""
    keep = max_model_len - 1 if params.truncate_prompt_tokens == -1 else params.truncate_prompt_tokens
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(params, name)
        if value is not None and value > max_logprobs:
            raise ValueError(f"{name} is {value}; this LLM allows at most max_logprobs={max_logprobs}, or -1 for all")
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


def one_each(given: SamplingParams | Sequence[SamplingParams], count: int) -> Sequence[SamplingParams]:
    """Parameters for each of `count` prompts."""
    if isinstance(given, SamplingParams):
        return [given] * count
    if len(given) != count:
        raise ValueError("The lengths of prompts and sampling_params must be the same.")
    return given


def _require(holds: bool, name: str, value: object, allowed: str) -> None:
    if not holds:
        raise ValueError(f"{name} must be {allowed}, got {value!r}.")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
