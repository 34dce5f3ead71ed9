"""SamplingParams with vLLM's fields, defaults and checks, and their way to the project's own parameters."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from outrider.llm.checks import require
from outrider.llm.errors import Unsupported, keywords_of
from outrider.llm.sampling_checks import check_lists, check_numbers
from outrider.wire.sampling import LogprobsMode
from outrider.wire.sampling import SamplingParams as WireSampling
from outrider.wire.validate import ALL_LOGPROBS

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


def one_each(given: Any, count: int) -> Sequence[SamplingParams]:
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
