"""What the services' own settings are for the keywords of `LLM(...)`: of a target on either engine, and of a draft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from outrider.draft_service.settings import DraftSettings
from outrider.gateway.prediction import NUM_DRAFT_TOKENS
from outrider.llm.arguments import EngineArguments
from outrider.llm.config import SpeculativeConfig
from outrider.llm.engine_choice import VLLM
from outrider.rpc.messages import MAX_N
from outrider.rpc.vocabulary import has_tokenizer
from outrider.target_service.settings import TargetSettings

MEDIA_BYTES = 1 << 30  # of a prompt's pictures: they are the caller's own
LEAST_WINDOW = 32  # drafted tokens that our own engine verifies at once, whatever is drafted
# Settings by the keywords that give them; a keyword that is None leaves its setting as it is.
OF_BOTH = {"dtype": "dtype", "activations": "activations", "threads": "threads", "max_rows": "max_num_batched_tokens"}
OF_TARGET = {
    "model": "model",
    "quantization": "quantization",
    "name": "served_model_name",
    "max_model_len": "max_model_len",
    "num_blocks": "num_gpu_blocks_override",
    "prefix_cache": "enable_prefix_caching",
    "max_logprobs": "max_logprobs",
    "trust_remote_code": "trust_remote_code",
}
OF_ADAPTERS = {
    "allow_adapter_changes": "enable_lora", "max_adapters": "max_loras", "max_adapter_rank": "max_lora_rank",
}  # fmt: skip
OF_OURS = {"batch_invariant": "batch_invariant"}
OF_VLLM = {"tensor_parallel_size": "tensor_parallel_size", "gpu_memory_utilization": "gpu_memory_utilization"}
VLLMS_OWN = ("max_num_seqs", "kv_cache_memory_bytes", "limit_mm_per_prompt")  # by vLLM's names


def our_target(arguments: EngineArguments, device: str, k: int, drafting: dict[str, Any]) -> TargetSettings:
    """Settings of a target on our engine; `drafting` is what drafts in it."""
    given = _given(arguments, OF_OURS) | {"max_window": max(LEAST_WINDOW, k)}
    return TargetSettings.model_validate(_of_target(arguments, device) | given | drafting)


def vllm_target(arguments: EngineArguments, device: str, k: int, drafting: dict[str, Any]) -> TargetSettings:
    """Settings of a target on vLLM, which keeps room for a whole window in every step: it is no longer than what is
    drafted. `drafting` are the arguments of vLLM's engine by which it drafts itself."""
    engine_args = _given(arguments, {name: name for name in VLLMS_OWN}) | drafting
    given = _given(arguments, OF_VLLM) | {
        "engine": VLLM,
        "engine_args": engine_args,
        "max_window": max(NUM_DRAFT_TOKENS, k),
        "max_media_bytes": MEDIA_BYTES,
    }
    return TargetSettings.model_validate(_of_target(arguments, device) | given)


def draft_settings(
    arguments: EngineArguments, speculation: SpeculativeConfig, folder: Path, device: str
) -> DraftSettings:
    """Settings of a draft whose model is in a folder."""
    target = arguments.tokenizer or arguments.model
    given: dict[str, Any] = {
        "model": folder,
        "method": speculation.method,
        "speculative_token_tree": None if speculation.tree is None else speculation.speculative_token_tree,
        "quantization": speculation.quantization,
        "max_model_len": speculation.max_model_len,
        "allow_code": arguments.allow_code,
        "target_tokenizer": [target] if target is not None and has_tokenizer(target, folder) else [],
    }
    if speculation.quantization is not None and device == "cpu":
        given["dtype"] = "auto"  # LLM's dtype is the target's; on a CPU rounded weights meet float32
    return DraftSettings.model_validate(_of_both(arguments, device) | given)


def _of_target(arguments: EngineArguments, device: str) -> dict[str, Any]:
    adapters = _given(arguments, OF_ADAPTERS) if arguments.enable_lora else {}
    return _of_both(arguments, device) | _given(arguments, OF_TARGET) | adapters


def _of_both(arguments: EngineArguments, device: str) -> dict[str, Any]:
    return _given(arguments, OF_BOTH) | {
        "device": device,
        "max_sequences": arguments.max_num_seqs * MAX_N,
        "cuda_graphs": not arguments.enforce_eager,
    }


def _given(arguments: EngineArguments, names: dict[str, str]) -> dict[str, Any]:
    given = {setting: getattr(arguments, keyword) for setting, keyword in names.items()}
    return {setting: value for setting, value in given.items() if value is not None}
