"""The keywords of `LLM(...)`: which act, which must keep their value and why, and the old names of some."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from os import PathLike
from pathlib import Path
from typing import Any

from outrider.llm.argument_checks import BOUNDS, check_arguments
from outrider.llm.checks import is_int
from outrider.llm.config import SpeculativeConfig
from outrider.llm.errors import Unsupported, unknown_keyword
from outrider.wire.hub import locate
from outrider.wire.sampling import AcceptanceRule, LogprobsMode
from outrider.wire.validate import MAX_LOGPROBS

DTYPES = {name: name for name in ("auto", "float32", "bfloat16", "float16")} | {"float": "float32", "half": "float16"}
ACCEPTANCE = {rule.name.lower(): rule for rule in AcceptanceRule}
ONE_DEVICE = "the target runs on one device"
TEXT_ONLY = "models take text alone"

# Keywords that must have one of these values, and why no other.
FIXED: dict[str, tuple[tuple[Any, ...], str]] = {
    "runner": (("auto", "generate"), "models generate; they do not embed, score or classify"),
    "convert": (("auto", "none"), "models generate; they do not embed, score or classify"),
    "task": ((None, "auto", "generate"), "models generate; they do not embed, score or classify"),
    "tokenizer_mode": (("auto", "hf"), "the checkpoint's tokenizer.json is used"),
    "skip_tokenizer_init": ((False,), "text is made here: a tokenizer is needed"),
    "tensor_parallel_size": ((1,), ONE_DEVICE),
    "pipeline_parallel_size": ((1,), ONE_DEVICE),
    "data_parallel_size": ((1,), ONE_DEVICE),
    "enable_expert_parallel": ((False,), ONE_DEVICE),
    "distributed_executor_backend": ((None, "uni"), ONE_DEVICE),
    "quantization": ((None,), "weights are computed in float32 or bfloat16"),
    "revision": ((None,), "a part of the model's hub id: org/name@revision"),
    "code_revision": ((None,), "code is of the model's revision"),
    "tokenizer_revision": ((None,), "a part of the tokenizer's hub id: org/name@revision"),
    "hf_overrides": ((None, {}), "the checkpoint's config.json holds"),
    "hf_config_path": ((None,), "the checkpoint's config.json holds"),
    "config_format": (("auto", "hf"), "checkpoints are in Hugging Face's layout"),
    "load_format": (("auto", "safetensors"), "weights are safetensors; `outrider convert` makes them"),
    "model_impl": (("auto",), "the engine chooses"),
    "swap_space": ((None, 0, 4), "what is preempted is computed again, never swapped"),
    "cpu_offload_gb": ((0,), "the whole model is on one device"),
    "kv_cache_dtype": (("auto",), "the cache has the model's dtype"),
    "block_size": ((None, 16), "blocks hold 16 tokens"),
    "enable_chunked_prefill": ((None, True), "prompts are always computed in chunks beside the windows"),
    "scheduling_policy": (("fcfs", "priority"), "requests go by priority, then by age"),
    "enable_lora": ((False,), "adapters are not there yet"),
    "enable_prompt_adapter": ((False,), "prompt adapters are not offered"),
    "limit_mm_per_prompt": ((None, {}), TEXT_ONLY),
    "mm_processor_kwargs": ((None, {}), TEXT_ONLY),
    "allowed_local_media_path": ((None, ""), TEXT_ONLY),
    "allowed_media_domains": ((None, []), TEXT_ONLY),
    "enable_prompt_embeds": ((False,), TEXT_ONLY),
    "pooler_config": ((None,), "models generate; they do not embed, score or classify"),
    "structured_outputs_config": ((None, {}), "constrained decoding is not there yet"),
    "logits_processors": ((None,), "a callable cannot run at both draft and target"),
    "compilation_config": ((None, 0, {}), "nothing is compiled"),
    "profiler_config": ((None,), "use a profiler of Python, or OpenTelemetry spans"),
    "disable_custom_all_reduce": ((False, True), ONE_DEVICE),
    "enable_return_routed_experts": ((False,), "it is not there"),
    "hf_token": ((None,), "the variable HF_TOKEN holds"),
    "download_dir": ((None,), "the variable HF_HOME holds"),
}

# Names of before `speculative_config`, and of after it.
OLD: dict[str, str] = {
    "speculative_model": "model",
    "num_speculative_tokens": "num_speculative_tokens",
    "ngram_prompt_lookup_max": "prompt_lookup_max",
    "ngram_prompt_lookup_min": "prompt_lookup_min",
    "speculative_draft_tensor_parallel_size": "draft_tensor_parallel_size",
    "speculative_disable_by_batch_size": "disable_by_batch_size",
    "speculative_max_model_len": "max_model_len",
    "speculative_model_quantization": "quantization",
}
SHORT = {"spec_method": "method", "spec_model": "model", "spec_tokens": "num_speculative_tokens"}
WITHOUT_EFFECT = ("use_v2_block_manager", "disable_logprobs_during_spec_decoding")


@dataclass(frozen=True, slots=True)
class EngineArguments:
    """What acts."""

    model: Path | None = None
    gateway: str | None = None
    tokenizer: Path | None = None
    trust_remote_code: bool = False
    dtype: str = "auto"
    seed: int | None = 0
    max_model_len: int | None = None
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    enforce_eager: bool = False
    enable_prefix_caching: bool | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 512
    max_logprobs: int = MAX_LOGPROBS
    logprobs_mode: LogprobsMode = LogprobsMode.RAW_LOGPROBS
    served_model_name: str | None = None
    generation_config: str = "auto"
    override_generation_config: Mapping[str, Any] | None = None
    disable_log_stats: bool = False
    per_request_spec_decode_metrics: str = "none"
    device: str = "auto"
    batch_invariant: bool = False
    mode: str | None = None  # of the loop: how far the draft runs ahead; None: sequential, or the gateway's own
    acceptance: str = "auto"  # auto: coupled, and so repeatable, for requests with a seed of their own; else rejection
    threads: int | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> EngineArguments:
        """Checks every keyword; those that are fixed are dropped."""
        known = [field.name for field in fields(cls)]
        kept = {}
        for name, value in given.items():
            if name in FIXED:
                allowed, reason = FIXED[name]
                if value not in allowed:
                    raise Unsupported(f"LLM({name}={value!r}) is not supported: {reason}")
            elif name in known:
                kept[name] = value
            else:
                raise unknown_keyword(name, [*known, *FIXED, *OLD, *SHORT, "speculative_config"], "LLM")
        return cls(**_converted(kept))

    def located(self) -> EngineArguments:
        """With folders in place of hub ids. Raises ModelNotFound, a ValueError."""
        model, tokenizer = self.model, self.tokenizer
        return replace(
            self,
            model=None if model is None else locate(model, trust_remote_code=self.trust_remote_code),
            tokenizer=None if tokenizer is None else locate(tokenizer, weights=False),
        )

    def acceptance_for(self, seed: int | None) -> AcceptanceRule:
        """The rule of a request with this seed of its own. Coupled tokens depend on prompt, seed and target alone;
        under rejection they also depend on when a draft came, which no seed fixes."""
        if self.acceptance == "auto" and seed is not None:
            return AcceptanceRule.COUPLED
        return ACCEPTANCE[self.acceptance]

    def __post_init__(self) -> None:
        if (self.model is None) == (self.gateway is None):
            raise ValueError("LLM takes a model's folder or hub id, or gateway='host:port' of one that runs")
        check_arguments(self)


def _converted(given: dict[str, Any]) -> dict[str, Any]:
    """Values as the fields hold them."""
    out = dict(given)
    for name in ("model", "tokenizer"):
        if out.get(name) is not None:
            if not isinstance(out[name], str | PathLike):
                raise TypeError(f"{name} must be a folder's path or a hub id, a str or a Path; got {out[name]!r:.100}")
            out[name] = Path(out[name])
    if "dtype" in out:
        out["dtype"] = _dtype(out["dtype"])
    if "logprobs_mode" in out:
        out["logprobs_mode"] = LogprobsMode(out["logprobs_mode"])
    if isinstance(out.get("served_model_name"), list):
        out["served_model_name"] = out["served_model_name"][0]
    for name in ("max_num_seqs", "max_num_batched_tokens", "max_logprobs"):
        if name in out and out[name] is None:
            del out[name]
    out |= {name: int(out[name]) for name in BOUNDS if is_int(out.get(name))}  # numpy's, too
    if out.get("max_model_len") == -1:
        out["max_model_len"] = None  # as long as the cache holds, which is what None means, too
    return out


def _dtype(given: Any) -> str:
    name = str(given).removeprefix("torch.")
    if name not in DTYPES:
        raise Unsupported(f"LLM(dtype={name!r}) is not supported: the engine computes in {', '.join(DTYPES)}")
    return DTYPES[name]


def take_speculation(options: dict[str, Any]) -> SpeculativeConfig | Mapping[str, Any] | None:
    """What was said of speculation, taken out of the options: `speculative_config`, or its other names."""
    config = options.pop("speculative_config", None)
    named = {new: options.pop(old) for old, new in SHORT.items() if old in options}
    used = [name for name in (*OLD, *WITHOUT_EFFECT) if name in options]
    if options.pop("spec_decoding_acceptance_method", "rejection_sampler") != "rejection_sampler":
        raise Unsupported("spec_decoding_acceptance_method: typical acceptance changes the distribution")
    if used:
        warnings.warn(
            f"{', '.join(used)}: old keywords of LLM; use speculative_config={{...}}",
            DeprecationWarning,
            stacklevel=3,  # the caller of LLM()
        )
    named |= {new: options.pop(old) for old, new in OLD.items() if old in options}
    for name in WITHOUT_EFFECT:
        options.pop(name, None)
    named = {name: value for name, value in named.items() if value is not None}
    if named and config is not None:
        raise ValueError(f"speculative_config is given, and beside it {', '.join(named)}")
    if named and not named.keys() & {"model", "method"}:
        raise ValueError(f"{', '.join(named)}: without a draft there is nothing to set; give speculative_config")
    return named or config
