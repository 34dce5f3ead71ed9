"""SpeculativeConfig with vLLM's fields and checks. It says what is meant; `require_supported` says what is there."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from outrider.gateway.schedule import BatchSchedule
from outrider.llm.config_checks import check_numbers, check_together, num_tokens_of_heads
from outrider.llm.errors import Unsupported, unknown_keyword
from outrider.llm.methods import NGRAM_NAMES, NOT_THERE, SUPPORTED, method_of_model, named_method, require_method

NEED_NO_MODEL = ("ngram", "ngram_gpu", "suffix", "mtp", "extract_hidden_states")
DEFAULT_LOOKUP = 5

# Fields that must keep these values, with the reason.
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "quantization": ((None,), "drafts are computed in float32 or bfloat16"),
    "draft_lm_head_quantization": ((None,), "drafts are computed in float32 or bfloat16"),
    "revision": ((None,), "models are folders: give the folder of that revision"),
    "code_revision": ((None,), "models are folders: give the folder of that revision"),
    "speculative_token_tree": ((None,), "drafts are chains"),
    "parallel_drafting": ((False,), "it is not there yet"),
    "use_heterogeneous_vocab": ((False,), "draft and target must share a tokenizer"),
    "use_local_argmax_reduction": ((False,), "it is for tensor parallel drafts"),
    "rejection_sample_method": ((None, "standard"), "the others are lossy, or not there yet; allowed: standard"),
    "synthetic_acceptance_rates": ((None,), "acceptance is never made up"),
    "synthetic_acceptance_length": ((None,), "acceptance is never made up"),
    "enable_adaptive_verification": ((False,), "it is not there yet"),
    "fly_window_size": ((None,), "lossy acceptance is not offered"),
    "fly_entropy_threshold": ((None,), "lossy acceptance is not offered"),
    "fly_entropy_top_k": ((None,), "lossy acceptance is not offered"),
    "draft_load_config": ((None,), "checkpoints are read as safetensors"),
    "moe_backend": ((None,), "there is one backend"),
    "attention_backend": ((None,), "there is one backend"),
    "kv_cache_dtype": ((None, "auto"), "the cache has the model's dtype"),
    "dspark_draft_topk": ((None,), "dspark is not there"),
    "xpress_topc": ((None,), "xpress is not there"),
    "index_share_for_mtp_iteration": ((None,), "mtp is not there yet"),
}


@dataclass
class SpeculativeConfig:
    """How to draft; vLLM's names. Exactly the given fields are checked, the others keep their defaults."""

    num_speculative_tokens: int | None = None
    model: str | Path | None = None
    method: str | None = None  # or a list of one
    draft_tensor_parallel_size: int | None = None
    tensor_parallel_size: int | None = None  # only to say that it is the other name
    disable_by_batch_size: int | None = None
    num_speculative_tokens_per_batch_size: list[tuple[int, int, int]] | None = None
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None
    max_model_len: int | None = None
    enforce_eager: bool | None = None
    disable_padded_drafter_batch: bool = False
    draft_sample_method: str | None = None  # vLLM: "greedy"; here None is "probabilistic", which accepts more
    quantization: str | None = None
    draft_lm_head_quantization: str | None = None
    revision: str | None = None
    code_revision: str | None = None
    speculative_token_tree: str | None = None
    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_cached_requests: int = 10000
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1
    parallel_drafting: bool = False
    use_heterogeneous_vocab: bool = False
    use_local_argmax_reduction: bool = False
    rejection_sample_method: str | None = None
    synthetic_acceptance_rates: list[float] | None = None
    synthetic_acceptance_length: float | None = None
    enable_adaptive_verification: bool = False
    fly_window_size: int | None = None
    fly_entropy_threshold: float | None = None
    fly_entropy_top_k: int | None = None
    draft_load_config: Any = None
    moe_backend: str | None = None
    attention_backend: str | None = None
    kv_cache_dtype: str | None = None
    disable_eagle_block_drop: bool = False
    disable_lookahead_block_hashes: bool = False
    dspark_draft_topk: int | None = None
    xpress_topc: int | None = None
    index_share_for_mtp_iteration: bool | None = None
    schedule: BatchSchedule = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.tensor_parallel_size is not None:
            raise ValueError("'tensor_parallel_size' is the target's; for the draft give 'draft_tensor_parallel_size'.")
        self.method = self._method()
        if self.method not in (*SUPPORTED, *NOT_THERE):
            known = ", ".join((*SUPPORTED, *NOT_THERE))
            raise ValueError(f"unknown speculative method {self.method!r}; vLLM's are: {known}")
        if self.model is None and self.method not in NEED_NO_MODEL:
            raise ValueError(f"method {self.method!r} needs 'model': the folder of the draft's checkpoint")
        self.num_speculative_tokens = self._num_speculative_tokens()
        check_numbers(self)
        if self.method == "ngram":
            self._resolve_lookup()
        check_together(self)
        self.schedule = BatchSchedule.of(
            self.num_speculative_tokens or 0, self.disable_by_batch_size, self.num_speculative_tokens_per_batch_size
        )

    @classmethod
    def of(cls, given: SpeculativeConfig | Mapping[str, Any] | None) -> SpeculativeConfig | None:
        """The configuration of a dict as in vLLM; unknown keys are an error."""
        if given is None or isinstance(given, SpeculativeConfig):
            return given
        check_names(given)
        return cls(**given)

    @classmethod
    def supported(cls, given: SpeculativeConfig | Mapping[str, Any] | None) -> SpeculativeConfig | None:
        """The configuration of a dict, if this version can do it; a method that it has not is refused before all
        else."""
        if isinstance(given, Mapping):
            method, model = named_method(given.get("method")), given.get("model")
            if method is None and isinstance(model, str | Path):
                require_method(_method_of(model), model)
            require_method(method or SUPPORTED[0])
        config = cls.of(given)
        if config is not None:
            config.require_supported()
        return config

    def require_supported(self, tensor_parallel_size: int = 1) -> None:
        """Raises Unsupported for what this version cannot do, by name."""
        require_method(self.method or "")
        for name, (allowed, reason) in REFUSED.items():
            if getattr(self, name) not in allowed:
                raise Unsupported(f"speculative_config[{name!r}] is not supported: {reason}")
        if self.draft_tensor_parallel_size not in (None, 1, tensor_parallel_size):
            raise ValueError(f"draft_tensor_parallel_size must be 1 or the target's, {tensor_parallel_size}")

    def _method(self) -> str:
        """As in vLLM: given, else by the model's name or its config.json, else a draft model."""
        method = named_method(self.method)
        if not isinstance(self.model, str | Path | None):
            raise ValueError(f"speculative_config['model'] is {self.model!r:.100}; allowed: the path of a checkpoint")
        if method in NGRAM_NAMES or (method is None and str(self.model) in NGRAM_NAMES):
            self.model = None
            return "ngram"
        if method is not None and method.endswith("_mtp"):
            warnings.warn(f"method {method!r}: an old name of 'mtp'", DeprecationWarning, stacklevel=4)
            return "mtp"
        if method is not None:
            return method
        if self.model is None:
            raise ValueError("speculative_config needs 'method' or 'model'")
        return _method_of(self.model)

    def _num_speculative_tokens(self) -> int | None:
        """k, where a head or a method has one of its own."""
        k = self.num_speculative_tokens
        if self.method == "suffix":
            k = self.suffix_decoding_max_tree_depth if k is None else k
        elif self.method not in SUPPORTED:
            k = num_tokens_of_heads(k, _checkpoint(self.model).get("n_predict"))
        if k is None and self.method not in ("mtp", "mlp_speculator"):  # whose checkpoints say it
            raise ValueError("num_speculative_tokens is needed: how many tokens to draft in a round")
        return k

    def _resolve_lookup(self) -> None:
        """One bound that is absent copies the other; both are 5 without either."""
        least, most = self.prompt_lookup_min, self.prompt_lookup_max
        self.prompt_lookup_min = next(n for n in (least, most, DEFAULT_LOOKUP) if n is not None)
        self.prompt_lookup_max = next(n for n in (most, least, DEFAULT_LOOKUP) if n is not None)
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min={self.prompt_lookup_min} must be <= prompt_lookup_max={self.prompt_lookup_max}"
            )


def check_names(given: Iterable[str]) -> None:
    """Raises TypeError for a field that does not exist."""
    known = [entry.name for entry in fields(SpeculativeConfig) if entry.init]
    for name in given:
        if name not in known:
            raise unknown_keyword(name, known, "speculative_config")


def _method_of(model: str | Path) -> str:
    return method_of_model(model, str(_checkpoint(model).get("model_type", "")))


def _checkpoint(model: str | Path | None) -> dict[str, Any]:
    """The draft's config.json; empty where there is none."""
    file = Path(model or "") / "config.json"
    if model is None or not file.is_file():
        return {}
    read: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return read
