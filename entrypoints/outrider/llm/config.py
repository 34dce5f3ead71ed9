"""The keywords of `LLM(...)`: which act, which must keep their value and why, and the old names of some.

The checks of LLM's keywords that act: each one's bounds.

SpeculativeConfig with vLLM's fields and checks. It says what is meant; `require_supported` says what is there.

The checks of SpeculativeConfig: each field's bounds, and what goes together.

Which ways of drafting a speculative configuration names, given or by the model's name, and what the ones that are
not there are.

What LLM and its methods refuse, with the reason.

What the checks of every argument share. numpy's numbers are numbers; True and False are none.

What is refused, and how: a ValueError for a value that cannot be, NotImplementedError for what is not there."""

from __future__ import annotations

import ast
import difflib
import functools
import inspect
import itertools
import json
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from typing import Any, ParamSpec, TypeGuard, TypeVar

from outrider.gateway.speculation.schedule import BatchSchedule
from outrider.rpc.hub import is_hub_id, locate
from outrider.rpc.sampling_params import AcceptanceRule, LogprobsMode
from outrider.rpc.validate import ALL_LOGPROBS, MAX_DRAFT_TOKENS, MAX_LOGPROBS, SPECULATION_MODES


def is_int(value: object) -> TypeGuard[int]:
    """Whether it is a whole number."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_finite(value: object) -> TypeGuard[float]:
    """Whether it is a number, neither NaN nor infinite."""
    return isinstance(value, Real) and not isinstance(value, bool) and -math.inf < float_or_inf(value) < math.inf


def float_or_inf(value: Real) -> float:
    """The number as a float; infinity for a whole number beyond all floats."""
    try:
        return float(value)
    except OverflowError:
        return math.inf


def require(holds: bool, name: str, value: object, allowed: str) -> None:
    """Raises a ValueError that names the field, its value and what is allowed."""
    if not holds:
        raise ValueError(f"{name} must be {allowed}, got {value!r:.100}.")


def listed(name: str, value: Any, allowed: str) -> list[Any]:
    """The entries of a list, a tuple, a set, an array; what Python would take apart otherwise is refused."""
    require(isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping), name, value, allowed)
    return list(value)


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


P = ParamSpec("P")
R = TypeVar("R")


class Unsupported(NotImplementedError, AttributeError):
    """Something that vLLM has and Outrider does not, with the reason. It is an AttributeError, too, so that `hasattr`
    answers False for a method that is not there."""


def unknown_keyword(name: str, known: Iterable[str], of: str) -> TypeError:
    """The error for a keyword that does not exist; it says what was probably meant."""
    close = difflib.get_close_matches(name, list(known), n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return TypeError(f"{of} has no keyword {name!r}{hint}")


def keywords_of(of: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a function: a keyword that it has not is answered by `unknown_keyword`."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        known = [name for name in inspect.signature(function).parameters if name != "self"]

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            for name in kwargs:
                if name not in known:
                    raise unknown_keyword(name, known, of)
            return function(*args, **kwargs)

        return checked

    return decorate


SUPPORTED = ("ngram", "draft_model")
NGRAM_NAMES = ("ngram", "[ngram]")
_EAGLE = "an EAGLE head, a decoder layer that reads the target's hidden states"
_MTP = "multi-token prediction, by layers that the target's own checkpoint brings"
METHODS_NOT_THERE = {
    "eagle": _EAGLE,
    "eagle3": _EAGLE,
    "medusa": "Medusa heads, which read the target's last hidden state",
    "mlp_speculator": "an MLP speculator (an 'accelerator'), which reads the target's last hidden state",
    "suffix": "suffix decoding, which looks n-grams up in the answers to earlier requests, too",
    "mtp": _MTP,
    "ngram_gpu": "n-gram lookup on a GPU; 'ngram' proposes the same way",
    "custom_class": "a class of vLLM's own interface",
    "extract_hidden_states": "an export of hidden states, which drafts nothing",
    "dflash": "a block diffusion head, which reads the target's hidden states",
    "dspark": "a head that reads the target's hidden states",
}
INSTEAD = (
    "allowed: ngram, draft_model ('ngram' needs no model; 'draft_model' is any small model that shares the target's "
    "tokenizer)"
)
# A head's own model_type in config.json, and a word in a checkpoint's name, to the method that it is for.
_TYPES = {"medusa": "medusa", "mlp_speculator": "mlp_speculator", "eagle": "eagle", "eagle3": "eagle3"}
_WORDS = {"eagle3": "eagle3", "eagle-": "eagle", "dflash": "dflash"}
_WORDS_ALONE = {"-accelerator": "mlp_speculator"}  # where no config.json says what it is


def named_method(method: object) -> str | None:
    """The method that is meant by a value of `method`, None where it is absent. A list of one method is that method.
    ValueError for anything else."""
    if isinstance(method, list | tuple):
        if len(method) != 1:
            raise ValueError(
                f"speculative_config['method'] is a list of {len(method)} methods; allowed: one method. "
                "Several that are tried in turn are not there yet"
            )
        (method,) = method
    if method is None or isinstance(method, str):
        return method
    raise ValueError(
        f"speculative_config['method'] is {method!r:.100}; allowed: the name of a method, one of {', '.join(SUPPORTED)}"
    )


def method_of_model(model: str | Path, model_type: str) -> str:
    """The method that a model is for, as in vLLM: by its name, by the `model_type` of its config.json ("": unknown),
    else a draft model. `ngram` is no model."""
    if str(model) in NGRAM_NAMES:
        return "ngram"
    if isinstance(model, str) and _is_dotted(model):
        return "custom_class"
    if model_type in _TYPES or model_type.endswith("_mtp"):
        return _TYPES.get(model_type, "mtp")
    words = _WORDS if model_type else _WORDS | _WORDS_ALONE
    name = Path(model).name.lower()
    return next((method for word, method in words.items() if word in name), "draft_model")


def require_method(method: str, model: object = None) -> None:
    """Raises Unsupported for a method that is not there. `model` is named where the method follows from it."""
    if method not in METHODS_NOT_THERE and not method.endswith("_mtp"):
        return
    what = METHODS_NOT_THERE.get(method, _MTP)
    said = f"speculative method {method!r}" if model is None else f"speculative_config['model'] {str(model)!r:.200}"
    raise Unsupported(f"{said} is {what}: it is not there yet; {INSTEAD}")


def _is_dotted(name: str) -> bool:
    """Whether it names a class: `package.module.Class`, and no folder."""
    parts = name.split(".")
    return len(parts) > 1 and all(part.isidentifier() for part in parts) and not Path(name).exists()


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
        if self.method not in (*SUPPORTED, *METHODS_NOT_THERE):
            known = ", ".join((*SUPPORTED, *METHODS_NOT_THERE))
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


NOT_THERE = {
    "encode": "models generate; they do not embed, score or classify",
    "embed": "models generate; they do not embed, score or classify",
    "classify": "models generate; they do not embed, score or classify",
    "score": "models generate; they do not embed, score or classify",
    "reward": "models generate; they do not embed, score or classify",
    "beam_search": "it is no sampling, which is what speculation is exact for",
    "collective_rpc": "there are no workers: the engines are in this process",
    "apply_model": "there are no workers: the engines are in this process",
    "sleep": "close() frees the memory",
    "wake_up": "close() frees the memory",
    "start_profile": "use a profiler of Python, or OpenTelemetry spans",
    "stop_profile": "use a profiler of Python, or OpenTelemetry spans",
}

ARGUMENTS = {
    "lora_request": "adapters are not there yet",
    "prompt_adapter_request": "prompt adapters are not offered",
    "logits_processor": "a callable cannot run at both draft and target",
    "tokenization_kwargs": "use TokensPrompt, or SamplingParams(truncate_prompt_tokens=...)",
    "mm_processor_kwargs": "models take text alone",
}


def refuse(**given: Any) -> None:
    """Raises Unsupported for the first argument that is given."""
    for name, value in given.items():
        if value:
            raise Unsupported(f"{name} is not supported: {ARGUMENTS[name]}")
