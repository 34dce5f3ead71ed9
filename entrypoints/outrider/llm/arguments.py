"""The keywords of `LLM(...)`: which act, which must keep their value and why, the old names of some; and what of the
methods of vLLM's LLM is not there."""

from __future__ import annotations

import copy
import json
import warnings
from argparse import ArgumentParser, BooleanOptionalAction, Namespace
from collections.abc import Mapping
from dataclasses import MISSING, field, fields, make_dataclass, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Annotated, Any

import grpc
from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo
from pydantic.dataclasses import dataclass

from outrider.gateway.prepare import SPECULATION_MODES
from outrider.gguf.folder import is_gguf
from outrider.llm.config import SpeculativeConfig
from outrider.llm.structured_outputs import COMPILERS, ONE_COMPILER
from outrider.llm.validation import (
    CONFIG,
    Fixed,
    Flag,
    Integer,
    MinusOneIsNone,
    Number,
    OrDefault,
    Unsupported,
    integer,
    one_of,
    plain_errors,
    require_fixed,
    require_known,
)
from outrider.rpc.hub import embedded, is_hub_id, locate
from outrider.rpc.words.checks import ALL_LOGPROBS
from outrider.rpc.words.sampling_params import MAX_LOGPROBS, RECOMMENDED, AcceptanceRule, LogprobsMode

EMBEDS = "models generate; they do not embed, score or classify"
NO_WORKERS = "there are no workers: the engines are in this process"
PROFILE = "use a profiler of Python, or OpenTelemetry spans"
ONE_DEVICE = "the target runs on one device"

# Keywords of LLM that must keep their value.
FIXED: Fixed = {
    "runner": (("auto", "generate"), EMBEDS),
    "convert": (("auto", "none"), EMBEDS),
    "task": ((None, "auto", "generate"), EMBEDS),
    "tokenizer_mode": (("auto", "hf"), "the checkpoint's tokenizer.json is used"),
    "skip_tokenizer_init": ((False,), "text is made here: a tokenizer is needed"),
    "pipeline_parallel_size": ((1,), ONE_DEVICE),
    "data_parallel_size": ((1,), ONE_DEVICE),
    "enable_expert_parallel": ((False,), ONE_DEVICE),
    "distributed_executor_backend": ((None, "uni"), ONE_DEVICE),
    "revision": ((None,), "a part of the model's hub id: org/name@revision"),
    "code_revision": ((None,), "code is of the model's revision"),
    "tokenizer_revision": ((None,), "a part of the tokenizer's hub id: org/name@revision"),
    "hf_overrides": ((None, {}), "the checkpoint's config.json holds"),
    "hf_config_path": ((None,), "the checkpoint's config.json holds"),
    "config_format": (("auto", "hf"), "checkpoints are in Hugging Face's layout"),
    "load_format": (("auto", "safetensors"), "weights are safetensors; `outrider model convert` makes them"),
    "model_impl": (("auto",), "the engine chooses"),
    "swap_space": ((None, 0, 4), "what is preempted is computed again, never swapped"),
    "cpu_offload_gb": ((0,), "the whole model is on one device"),
    "kv_cache_dtype": (("auto",), "the cache has the model's dtype"),
    "block_size": ((None, 16), "blocks hold 16 tokens"),
    "enable_chunked_prefill": ((None, True), "prompts are always computed in chunks beside the windows"),
    "scheduling_policy": (("fcfs", "priority"), "requests go by priority, then by age"),
    "lora_dtype": ((None, "auto"), "adapters are computed in the model's dtype"),
    "fully_sharded_loras": ((False,), ONE_DEVICE),
    "enable_lora_bias": ((False,), "an adapter with biases is refused"),
    "enable_prompt_adapter": ((False,), "prompt adapters are not offered"),
    "mm_processor_kwargs": ((None, {}), "the checkpoint's own processor holds"),
    "allowed_media_domains": ((None, []), "nothing is fetched from the network"),
    "enable_prompt_embeds": ((False,), "prompts are text or token ids, and pictures"),
    "pooler_config": ((None,), EMBEDS),
    "structured_outputs_config": ((None, {}, *({"backend": name} for name in COMPILERS)), ONE_COMPILER),
    "guided_decoding_backend": ((None, *COMPILERS), ONE_COMPILER),
    "logits_processors": ((None,), "a callable cannot run at both draft and target"),
    "compilation_config": ((None, 0, {}), "nothing is compiled"),
    "profiler_config": ((None,), PROFILE),
    "disable_custom_all_reduce": ((False, True), ONE_DEVICE),
    "enable_return_routed_experts": ((False,), "it is not there"),
    "hf_token": ((None,), "the variable HF_TOKEN holds"),
    "download_dir": ((None,), "the variable HF_HOME holds"),
}


# Other names of speculation's keywords, and keywords that do nothing: those of before `speculative_config`, which warn,
# and those of after it.
OLD: dict[str, str | None] = {
    "speculative_model": "model",
    "num_speculative_tokens": "num_speculative_tokens",
    "ngram_prompt_lookup_max": "prompt_lookup_max",
    "ngram_prompt_lookup_min": "prompt_lookup_min",
    "speculative_draft_tensor_parallel_size": "draft_tensor_parallel_size",
    "speculative_disable_by_batch_size": "disable_by_batch_size",
    "speculative_max_model_len": "max_model_len",
    "speculative_model_quantization": "quantization",
    "use_v2_block_manager": None,
    "disable_logprobs_during_spec_decoding": None,
}
SHORT = {"spec_method": "method", "spec_model": "model", "spec_tokens": "num_speculative_tokens"}

DTYPES = {name: name for name in ("auto", "float32", "bfloat16", "float16")} | {"float": "float32", "half": "float16"}
GENERATION_KEYS = (*RECOMMENDED, "max_new_tokens")
ACCEPTANCE = {rule.name.lower(): rule for rule in AcceptanceRule}


def _folder(value: object, info: ValidationInfo) -> Path | None:
    if value is None:
        return None
    if not isinstance(value, str | PathLike):
        raise TypeError(f"{info.field_name} must be a folder's path or a hub id, a str or a Path; got {value!r:.100}")
    path = Path(value)
    if not path.is_dir() and not is_gguf(path) and not is_hub_id(path) and embedded(path) is None:
        allowed = "a folder, a .gguf file, or a hub id (org/name)"
        raise ValueError(f"{info.field_name}: there is no folder {path}; allowed: {allowed}")
    return path


def _media_folder(value: object) -> str:
    if not isinstance(value, str | PathLike | None):
        raise TypeError(f"allowed_local_media_path must be a folder's path, got {value!r:.100}")
    if value and not Path(value).is_dir():
        raise ValueError(f"allowed_local_media_path: there is no folder {value}; allowed: a folder, or none")
    return str(value or "")


def _dtype(given: object) -> str:
    name = str(given).removeprefix("torch.")
    if name not in DTYPES:
        raise Unsupported(f"LLM(dtype={name!r}) is not supported: the engine computes in {', '.join(DTYPES)}")
    return DTYPES[name]


def _generation(override: Mapping[str, Any]) -> Mapping[str, Any]:
    if unknown := sorted(override.keys() - set(GENERATION_KEYS)):
        known = ", ".join(GENERATION_KEYS)
        raise ValueError(f"override_generation_config: {', '.join(unknown)} has no effect; allowed: {known}")
    return override


def _credentials(value: object) -> Any:
    if not isinstance(value, grpc.ChannelCredentials | None):
        raise TypeError(f"credentials must be of grpc.ssl_channel_credentials(...), or None; got {value!r:.100}")
    return value


Folder = Annotated[Path | None, BeforeValidator(_folder)]
Size = Annotated[Integer | None, integer(1, or_none=True)]
FlagOrDefault = Annotated[Flag, OrDefault]


@plain_errors("LLM")
@dataclass(frozen=True, slots=True, config=CONFIG)
class EngineArguments:
    """The keywords of `LLM(...)` that act."""

    model: Folder = None
    gateway: str | None = None
    credentials: Annotated[Any, BeforeValidator(_credentials)] = None  # of grpc's: TLS to the gateway
    server_name: Annotated[str, OrDefault] = ""  # that its certificate has, in place of its host
    token: Annotated[str, OrDefault] = field(default="", repr=False)  # by which it knows this caller
    tokenizer: Folder = None
    trust_remote_code: FlagOrDefault = False
    allow_code: FlagOrDefault = False  # speculative_config may name a class, which is imported and run
    dtype: Annotated[str, BeforeValidator(_dtype)] = "auto"
    seed: Annotated[Integer | None, integer(or_none=True)] = 0
    max_model_len: Annotated[Integer | None, integer(2, or_none=True), MinusOneIsNone] = None  # a prompt and a token
    gpu_memory_utilization: Annotated[Number, Field(gt=0, le=1, description="a number in (0, 1]")] = 0.9
    kv_cache_memory_bytes: Size = None
    num_gpu_blocks_override: Size = None
    enforce_eager: FlagOrDefault = False
    enable_prefix_caching: Annotated[Flag | None, Field(description="True or False")] = None
    max_num_seqs: Annotated[Integer, integer(1, or_none=True), OrDefault] = 256
    max_num_batched_tokens: Annotated[Integer | None, integer(1, 65536, or_none=True)] = None  # 512; vLLM's own choice
    max_logprobs: Annotated[Integer, integer(ALL_LOGPROBS, or_none=True), OrDefault] = MAX_LOGPROBS
    logprobs_mode: Annotated[LogprobsMode, Field(description=f"one of {', '.join(m.value for m in LogprobsMode)}")] = (
        LogprobsMode.RAW_LOGPROBS
    )
    served_model_name: Annotated[
        str | None, BeforeValidator(lambda names: names[0] if isinstance(names, list) else names)
    ] = None
    generation_config: Annotated[str | None, one_of(("auto", "vllm"))] = "auto"
    override_generation_config: Annotated[
        Annotated[Mapping[str, Any], AfterValidator(_generation)] | None, Field(description="a dict")
    ] = None
    disable_log_stats: FlagOrDefault = False
    per_request_spec_decode_metrics: Annotated[str, one_of(("none", "summary", "detailed")), OrDefault] = "none"
    enable_lora: FlagOrDefault = False
    max_loras: Annotated[Integer, integer(1, or_none=True), OrDefault] = 1  # adapters at once
    max_cpu_loras: Size = None  # where it is more than max_loras, as many are kept loaded
    max_lora_rank: Annotated[Integer, integer(1, or_none=True), OrDefault] = 16
    engine: Annotated[str, one_of(("auto", "outrider", "vllm")), OrDefault] = "auto"  # whose runs the target; auto:
    # vLLM's where ours cannot
    tensor_parallel_size: Annotated[Integer, integer(1, or_none=True), OrDefault] = 1  # devices; more than 1 in vLLM
    quantization: str | None = None  # of the target's weights: int8 or int4, or how they are kept
    activations: Annotated[str, one_of(("int16", "float32")), OrDefault] = "int16"  # what rows are where they meet
    # quantised weights on a CPU
    limit_mm_per_prompt: Annotated[dict[str, Any] | None, Field(description="a dict such as {'image': 2}")] = None
    allowed_local_media_path: Annotated[str, BeforeValidator(_media_folder)] = ""  # file: URLs name files below it
    device: str = "auto"
    batch_invariant: FlagOrDefault = False
    mode: Annotated[str | None, one_of(SPECULATION_MODES)] = None  # of the loop: how far the draft runs ahead; None:
    # sequential, or the gateway's own
    acceptance: Annotated[str, one_of(ACCEPTANCE), OrDefault] = "auto"  # auto: coupled, and so repeatable, for requests
    # with a seed of their own; else the gateway's
    threads: Annotated[Integer | None, integer(1, 256, or_none=True)] = None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> EngineArguments:
        """Checks every keyword; those that are fixed are dropped."""
        require_fixed(FIXED, given, "LLM({}={!r})")
        known = [entry.name for entry in fields(cls)]
        require_known(given, [*known, *FIXED, *OLD, *SHORT, "speculative_config"], "LLM")
        return cls(**{name: value for name, value in given.items() if name not in FIXED})

    def __post_init__(self) -> None:
        if (self.model is None) == (self.gateway is None):
            raise ValueError("LLM takes a model's folder or hub id, or gateway='host:port' of one that runs")
        if self.gateway is None and (self.credentials is not None or self.server_name or self.token):
            raise ValueError("credentials, server_name and token are shown to a gateway; give gateway='host:port', too")

    @property
    def num_adapters(self) -> int:
        """That the target holds at once; 0: none."""
        return max(self.max_loras, self.max_cpu_loras or 0) if self.enable_lora else 0

    def located(self) -> EngineArguments:
        """With folders in place of hub ids. Raises ModelNotFound, a ValueError."""
        model, tokenizer = self.model, self.tokenizer
        return replace(
            self,
            model=None if model is None else locate(model, trust_remote_code=self.trust_remote_code),
            tokenizer=None if tokenizer is None else locate(tokenizer, weights=False),
        )

    def acceptance_for(self, seed: int | None, configured: AcceptanceRule, can_couple: bool) -> AcceptanceRule:
        """The rule of a request with this seed of its own; `configured` is what speculative_config says. Coupled tokens
        depend on prompt, seed and target alone; under rejection they also depend on when a draft came, which no seed
        fixes. That is for targets that can couple, unless it was asked for."""
        rule = ACCEPTANCE[self.acceptance] or configured
        return AcceptanceRule.COUPLED if rule is AcceptanceRule.AUTO and seed is not None and can_couple else rule


def _add_cli_args(parser: ArgumentParser) -> ArgumentParser:
    """A flag for each keyword; values that are no texts are read as JSON."""
    for entry in fields(EngineArgs):
        default = entry.default if entry.default_factory is MISSING else entry.default_factory()
        how: dict[str, Any] = {"action": BooleanOptionalAction} if isinstance(default, bool) else {"type": _from_flag}
        parser.add_argument(f"--{entry.name.replace('_', '-')}", default=default, **how)
    return parser


def _from_flag(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _from_cli_args(cls: Any, args: Namespace) -> Any:
    return cls(**{entry.name: getattr(args, entry.name) for entry in fields(cls) if hasattr(args, entry.name)})


# vLLM's class of this name: the keywords of LLM, which judges them.
EngineArgs: Any = make_dataclass(
    "EngineArgs",
    [
        *((entry.name, Any, field(default=entry.default, repr=entry.repr)) for entry in fields(EngineArguments)),
        *((name, Any, field(default_factory=partial(copy.copy, values[0]))) for name, (values, _) in FIXED.items()),
        *((name, Any, field(default=None)) for name in ("speculative_config", *SHORT)),
    ],
    namespace={
        "__doc__": "Keywords of LLM, as `LLM(**asdict(args))` or `LLM.from_engine_args(args)` takes them.",
        "add_cli_args": staticmethod(_add_cli_args),
        "from_cli_args": classmethod(_from_cli_args),
    },
)


def take_speculation(options: dict[str, Any]) -> SpeculativeConfig | Mapping[str, Any] | None:
    """What was said of speculation, taken out of the options: `speculative_config`, or its other names."""
    config = options.pop("speculative_config", None)
    short, old = ({name: options.pop(name) for name in names if name in options} for names in (SHORT, OLD))
    if options.pop("spec_decoding_acceptance_method", "rejection_sampler") != "rejection_sampler":
        raise Unsupported("spec_decoding_acceptance_method: typical acceptance changes the distribution")
    if old:
        warnings.warn(
            f"{', '.join(old)}: old keywords of LLM; use speculative_config={{...}}",
            DeprecationWarning,
            stacklevel=3,  # the caller of LLM()
        )
    meant = {(SHORT | OLD)[name]: value for name, value in (short | old).items() if value is not None}
    named = {name: value for name, value in meant.items() if name is not None}
    if named and config is not None:
        raise ValueError(f"speculative_config is given, and beside it {', '.join(named)}")
    if named and not named.keys() & {"model", "method"}:
        raise ValueError(f"{', '.join(named)}: without a draft there is nothing to set; give speculative_config")
    return named or config


# Methods of vLLM's LLM that this one has not.
NOT_THERE = {
    **dict.fromkeys(("encode", "embed", "classify", "score", "reward"), EMBEDS),
    "beam_search": "it is no sampling, which is what speculation is exact for",
    **dict.fromkeys(("collective_rpc", "apply_model"), NO_WORKERS),
    **dict.fromkeys(("start_profile", "stop_profile"), PROFILE),
}

ABSENT: tuple[Any, ...] = (None, False, "", (), [], {})
# Arguments of `generate` and `chat` that say nothing here.
ARGUMENTS: Fixed = {
    "prompt_adapter_request": (ABSENT, "prompt adapters are not offered"),
    "logits_processor": (ABSENT, "a callable cannot run at both draft and target"),
    "tokenization_kwargs": (ABSENT, "use TokensPrompt, or SamplingParams(truncate_prompt_tokens=...)"),
    "mm_processor_kwargs": (ABSENT, "the checkpoint's own processor holds"),
}
