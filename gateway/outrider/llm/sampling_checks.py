"""The checks of SamplingParams: values become what the fields hold, then each field's bounds."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from outrider.llm.checks import is_finite, is_int, listed, require

if TYPE_CHECKING:
    from outrider.llm.sampling_params import SamplingParams

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
