"""The checks of SpeculativeConfig: each field's bounds, and what goes together."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from outrider.llm.checks import is_int
from outrider.wire.validate import MAX_DRAFT_TOKENS

if TYPE_CHECKING:
    from outrider.llm.config import SpeculativeConfig

LEAST = {
    "draft_tensor_parallel_size": 1,
    "disable_by_batch_size": 2,
    "prompt_lookup_max": 1,
    "prompt_lookup_min": 1,
    "max_model_len": 1,
    "suffix_decoding_max_tree_depth": 1,
    "suffix_decoding_max_cached_requests": 0,
    "fly_window_size": 1,
    "fly_entropy_top_k": 1,
}
REJECTION_METHODS = ("standard", "synthetic", "block", "fly")


def check_numbers(config: SpeculativeConfig) -> None:
    """Every field alone. Raises ValueError."""
    k = config.num_speculative_tokens
    if k is not None and not (is_int(k) and 0 < k <= MAX_DRAFT_TOKENS):
        raise ValueError(f"num_speculative_tokens must be 1 to {MAX_DRAFT_TOKENS}, got {k!r}")
    for name, bound in LEAST.items():
        value = getattr(config, name)
        if value is not None and not (is_int(value) and value >= bound):
            raise ValueError(f"{name} must be an integer of at least {bound}, got {value!r}")
    if config.suffix_decoding_max_spec_factor < 0:
        raise ValueError(
            f"suffix_decoding_max_spec_factor must be at least 0: {config.suffix_decoding_max_spec_factor}"
        )
    if not 0 <= config.suffix_decoding_min_token_prob <= 1:
        raise ValueError(f"suffix_decoding_min_token_prob must be in [0, 1]: {config.suffix_decoding_min_token_prob}")
    if config.draft_sample_method not in (None, "greedy", "probabilistic"):
        raise ValueError(f"draft_sample_method must be greedy or probabilistic, got {config.draft_sample_method!r}")
    if config.rejection_sample_method not in (None, *REJECTION_METHODS):
        known = ", ".join(REJECTION_METHODS)
        raise ValueError(f"rejection_sample_method must be one of {known}; got {config.rejection_sample_method!r}")
    if config.speculative_token_tree is not None:
        _check_tree(config.speculative_token_tree)


def check_together(config: SpeculativeConfig) -> None:
    """Fields that need or exclude one another. Raises ValueError."""
    k = config.num_speculative_tokens
    if config.use_heterogeneous_vocab:
        if config.method != "draft_model" or config.draft_sample_method not in (None, "greedy"):
            raise ValueError("use_heterogeneous_vocab is for draft models that draft greedily")
        if config.use_local_argmax_reduction:
            raise ValueError("use_heterogeneous_vocab does not go with use_local_argmax_reduction")
    rates, length = config.synthetic_acceptance_rates, config.synthetic_acceptance_length
    if config.rejection_sample_method == "synthetic" and (rates is None) == (length is None):
        raise ValueError("synthetic acceptance needs one of synthetic_acceptance_rates and synthetic_acceptance_length")
    if rates is not None:
        _check_rates(rates, k)
    if length is not None and k is not None and not 1 <= length <= k + 1:
        raise ValueError(f"synthetic_acceptance_length must be 1 to num_speculative_tokens + 1, got {length}")
    if config.fly_window_size is not None and k is not None and config.fly_window_size >= k:
        raise ValueError(f"fly_window_size must be less than num_speculative_tokens, got {config.fly_window_size}")


def num_tokens_of_heads(given: int | None, n_predict: object) -> int | None:
    """k of a draft whose config.json says how many tokens its heads predict: that many, or a multiple."""
    if not isinstance(n_predict, int) or n_predict < 1:
        return given
    if given is not None and given > n_predict and given % n_predict:
        raise ValueError(f"num_speculative_tokens={given} must be divisible by the draft's n_predict={n_predict}")
    return given or n_predict


def _check_rates(rates: Sequence[float], k: int | None) -> None:
    """They are unconditional: of all drafts, how many get so far."""
    falls = all(later <= earlier for earlier, later in itertools.pairwise(rates))
    if (k is not None and len(rates) != k) or not falls or not all(0 <= rate <= 1 for rate in rates):
        raise ValueError(
            f"synthetic_acceptance_rates must be num_speculative_tokens rates in [0, 1] that never rise, got {rates}"
        )


def _check_tree(text: str) -> None:
    """A list of paths, each a tuple of child numbers."""
    try:
        paths = ast.literal_eval(text)
    except (ValueError, SyntaxError) as error:
        raise ValueError(f"speculative_token_tree must be a list of tuples, got {text!r}") from error
    if not isinstance(paths, list) or not all(isinstance(path, tuple) and all(map(is_int, path)) for path in paths):
        raise ValueError(f"speculative_token_tree must be a list of tuples, got {text!r}")
