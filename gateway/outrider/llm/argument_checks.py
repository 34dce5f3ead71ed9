"""The checks of LLM's keywords that act: each one's bounds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from outrider.llm.checks import is_finite, is_int
from outrider.wire.hub import is_hub_id
from outrider.wire.sampling import AcceptanceRule
from outrider.wire.validate import ALL_LOGPROBS, SPECULATION_MODES

if TYPE_CHECKING:
    from outrider.llm.arguments import EngineArguments

GENERATION_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")
CHOICES = {
    "acceptance": tuple(rule.name.lower() for rule in AcceptanceRule),
    "mode": SPECULATION_MODES,
    "generation_config": ("auto", "vllm"),
    "per_request_spec_decode_metrics": ("none", "summary", "detailed"),
}
# Whole numbers, or None: the least and the most of each.
BOUNDS: dict[str, tuple[int | None, int | None]] = {
    "seed": (None, None),
    "threads": (1, 256),
    "max_model_len": (2, None),  # a prompt and a token
    "max_logprobs": (ALL_LOGPROBS, None),
    "max_num_seqs": (1, None),
    "max_num_batched_tokens": (1, 65536),
    "kv_cache_memory_bytes": (1, None),
    "num_gpu_blocks_override": (1, None),
}
FLAGS = ("trust_remote_code", "enforce_eager", "disable_log_stats", "batch_invariant", "enable_prefix_caching")


def check_arguments(arguments: EngineArguments) -> None:
    """Every field alone. Raises ValueError."""
    for name, path in (("model", arguments.model), ("tokenizer", arguments.tokenizer)):
        if path is not None and not path.is_dir() and not is_hub_id(path):
            raise ValueError(f"{name}: there is no folder {path}; allowed: a folder, or a hub id (org/name)")
    for name, (least, most) in BOUNDS.items():
        _check_integer(name, getattr(arguments, name), least, most)
    share: object = arguments.gpu_memory_utilization
    if not is_finite(share) or not 0 < share <= 1:
        raise ValueError(f"gpu_memory_utilization must be a number in (0, 1], got {share!r:.100}")
    for name in FLAGS:
        value = getattr(arguments, name)
        if not isinstance(value, bool | None):
            raise ValueError(f"{name} must be True or False, got {value!r:.100}")
    for name, allowed in CHOICES.items():
        if getattr(arguments, name) not in (*allowed, None):
            raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {getattr(arguments, name)!r}")
    _check_generation(arguments.override_generation_config)


def _check_integer(name: str, value: object, least: int | None, most: int | None) -> None:
    if value is None:
        return
    if not is_int(value) or (least is not None and value < least) or (most is not None and value > most):
        above = "" if least is None else f" from {least} to {most}" if most is not None else f" of at least {least}"
        raise ValueError(f"{name} must be an integer{above}, or None; got {value!r:.100}")


def _check_generation(override: object) -> None:
    if override is None:
        return
    if not isinstance(override, Mapping):
        raise ValueError(f"override_generation_config must be a dict, got {override!r:.100}")
    if unknown := override.keys() - set(GENERATION_KEYS):
        known = ", ".join(GENERATION_KEYS)
        names = ", ".join(sorted(map(str, unknown)))
        raise ValueError(f"override_generation_config: {names} has no effect; allowed: {known}")
