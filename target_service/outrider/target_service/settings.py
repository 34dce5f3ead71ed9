"""The settings of `outrider target`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, model_validator

from outrider.engine.adapters.ranks import MOST_RANK, MOST_RANK_ON_VLLM
from outrider.engine.token_tree import TokenTree
from outrider.rpc.learning.settings import LearnedSettings
from outrider.rpc.media import MAX_MEDIA_BYTES, MAX_MEDIA_PIXELS, MOST_PIXELS
from outrider.rpc.settings import (
    CHECKPOINT,
    Address,
    MaxLogprobs,
    ModelSettings,
    ServerSettings,
    VllmMetrics,
    named_folders,
)
from outrider.rpc.words.sampling_params import MAX_LOGPROBS

# No engine but ours has them.
OWN_ONLY = (
    "head",
    "head_confidence",
    "head_trial",
    "speculative_token_tree",
    "learn_from",
    "batch_invariant",
    "expand",
    "max_forced_tokens",
)
# vLLM's engine arguments that follow from the adapters' flags.
ADAPTER_ARGUMENTS = (
    "enable_lora", "max_loras", "max_lora_rank", "max_cpu_loras", "lora_target_modules", "default_mm_loras",
)  # fmt: skip


def parse_arguments(given: object) -> object:
    """A flag's JSON. Raises ValueError."""
    return json.loads(given) if isinstance(given, str) else given


class EngineSettings(BaseModel):
    """Whose engine runs the model: of a target service, and of what starts one."""

    subjects: ClassVar[Mapping[str, str]] = {"engine": "engine"}

    engine: Literal["outrider", "vllm"] = Field(
        "outrider",
        description="whose engine runs the model; vllm, for several GPUs and what else ours does "
        "not run, needs outrider[vllm]",
    )
    tensor_parallel_size: int = Field(1, ge=1, description="GPUs that share the model; more than 1 with engine vllm")
    engine_args: Annotated[dict[str, Any], BeforeValidator(parse_arguments)] = Field(
        {}, description="arguments of vLLM's engine by its names, as a JSON object; they come before the settings here"
    )

    @model_validator(mode="after")
    def _check_vllms_own(self) -> Self:
        if self.engine != "vllm":
            for name in ("tensor_parallel_size", "engine_args"):
                if getattr(self, name) != EngineSettings.model_fields[name].default:
                    raise ValueError(f"{name} (--{name.replace('_', '-')}) is for engine vllm; give --engine vllm, too")
        return self

    def of_engine(self) -> dict[str, Any]:
        """What was set, by the flags' names, for a target that is started with the same."""
        given = {name: getattr(self, name) for name in EngineSettings.model_fields if name in self.model_fields_set}
        return {name: json.dumps(value) if isinstance(value, dict) else value for name, value in given.items()}


class TargetSettings(ServerSettings, ModelSettings, EngineSettings, LearnedSettings):
    """What a target service is told at start, besides what all services are."""

    section: ClassVar[str] = "target"
    subjects: ClassVar[Mapping[str, str]] = {
        "model": "model and device",
        "listen": "serving",
        "head": "drafting by a head",
        "adapter": "adapters",
        "prefix_cache": "steps",
        "max_logprobs": "what requests may ask for",
        "vllm_metrics": "serving",
        **LearnedSettings.subjects,
    }
    first: ClassVar[tuple[str, ...]] = (
        "model", "listen", "device", "dtype", "threads", "max_model_len", "cache_mb", "head", "engine", "metrics",
    )  # fmt: skip

    model: Annotated[Path, CHECKPOINT]
    quantization: str | None = Field(
        None,
        description="int8 or int4: round the target's weights to so many bits as they are loaded, on a CPU; else the "
        "name of how its checkpoint keeps them, as awq; with engine vllm one of vLLM's (as they are)",
    )
    trust_remote_code: bool = Field(False, description="run code that comes with the target's checkpoint")
    expand: bool = Field(
        False, description="compute the same function by a network of about 300M parameters (Llama; for demonstrations)"
    )
    listen: Address = "127.0.0.1:50051"
    head: Path | None = Field(
        None,
        description="folder of a head that drafts beside the model, or its hub id: EAGLE, EAGLE-3, MTP, MLP "
        "speculator, Medusa, DFlash or DSpark (of a model with MTP layers: the model's own)",
    )
    head_confidence: float = Field(
        0.0,
        ge=0,
        le=1,
        description="a dspark head drafts no token that it holds less likely to be taken than this, if those before it "
        "are, and none behind it; 0: as many as are asked for",
    )
    head_trial: Literal["refuse", "warn", "off"] = Field(
        "refuse",
        description="what becomes of a head of whose drafts the target keeps no more than of a guess, on short texts "
        "at the start: it is not used, or is with a warning; off: it is not tried",
    )
    speculative_token_tree: Annotated[str, AfterValidator(TokenTree.checked)] | None = Field(
        None,
        description='what the head drafts for greedy and coupled requests in place of chains: paths as "[(0,), (1,), '
        '(0, 0)]", whose numbers are ranks among the likeliest tokens',
    )
    adapter: list[str] = Field(
        default_factory=list,
        description="NAME=DIR: a low-rank adapter (LoRA) of the target in PEFT's layout, which requests name",
    )
    max_adapters: int = Field(4, ge=1, le=256, description="adapters of one step: as many lie on the device at once")
    max_adapter_rank: int | None = Field(
        None, ge=1, le=MOST_RANK_ON_VLLM,
        description=f"greatest rank of an adapter (default: the greatest of --adapter; with --allow-adapter-changes "
        f"{MOST_RANK}); to {MOST_RANK}, on vLLM to {MOST_RANK_ON_VLLM}",
    )  # fmt: skip
    allow_adapter_changes: bool = Field(
        False, description="adapters may be loaded and unloaded while it serves: outrider adapter"
    )
    allow_reload: bool = Field(
        False, description="other weights may be put in the model's place while it serves: outrider admin reload"
    )
    prefix_cache: bool = Field(True, description="reuse the blocks of known prompts")
    batch_invariant: bool = Field(False, description="one reduction order for any number of rows: bit-identical rows")
    max_window: int = Field(32, ge=0, le=128, description="most drafted tokens of one verification")
    max_forced_tokens: int = Field(
        8, ge=0, le=128, description="most tokens of a step that are guessed at because a grammar forces them; 0: none"
    )
    cut_windows: bool = Field(True, description="verify fewer drafted tokens where sequences share a step and it pays")
    untrusted_draft: bool = Field(False, description="ignore the draft's weights: every drafted token is one-hot")
    max_logprobs: MaxLogprobs = MAX_LOGPROBS
    max_media_bytes: int = Field(
        MAX_MEDIA_BYTES,
        ge=0,
        le=1 << 30,
        description="most bytes of a sequence's pictures, with engine vllm and a model that takes them; 0: none",
    )
    max_media_pixels: int = Field(
        MAX_MEDIA_PIXELS, ge=1, le=MOST_PIXELS, description="most pixels of a sequence's pictures, all together"
    )
    vllm_metrics: VllmMetrics = False

    @property
    def tree(self) -> TokenTree | None:
        """What the head drafts; None: chains."""
        return None if self.speculative_token_tree is None else TokenTree.parse(self.speculative_token_tree)

    @property
    def adapters(self) -> dict[str, Path]:
        """The folder of each adapter, by its name. ValueError for what is no NAME=DIR."""
        return named_folders(self.adapter, "adapter (--adapter)")

    @property
    def has_adapters(self) -> bool:
        """Whether there are any, or may be."""
        return bool(self.adapter) or self.allow_adapter_changes

    @property
    def node_rank(self) -> int:
        """Which host this is of a target that spans several; the first, 0, has the server."""
        return int(self.engine_args.get("node_rank", 0))

    @model_validator(mode="after")
    def _check_tree(self) -> Self:
        if self.speculative_token_tree is not None and self.head is None:
            raise ValueError("speculative_token_tree (--speculative-token-tree) is for a head; give --head DIR, too")
        return self

    @model_validator(mode="after")
    def _check_learning(self) -> Self:
        if self.learn_from and self.head is None:
            raise ValueError("learn_from (--learn-from) is for a head, whose weights learn; give --head DIR, too")
        if self.learn_from:
            self.require_known_callers("learn_from")
        return self

    @model_validator(mode="after")
    def _check_adapters(self) -> Self:
        adapters = self.adapters
        for name in ("allow_adapter_changes", "allow_reload"):
            if getattr(self, name):
                self.require_known_callers(name)
        if self.allow_reload and (self.engine == "vllm" or self.expand):
            other = "--engine vllm" if self.engine == "vllm" else "--expand"
            raise ValueError(f"allow_reload (--allow-reload) is for our engine's own weights; leave {other} out")
        if self.engine != "vllm" and (self.max_adapter_rank or 0) > MOST_RANK:
            given = f"max_adapter_rank (--max-adapter-rank): is {self.max_adapter_rank}"
            raise ValueError(f"{given}; allowed: 1 to {MOST_RANK}, with --engine vllm to {MOST_RANK_ON_VLLM}")
        if self.expand and (adapters or self.allow_adapter_changes):
            raise ValueError("adapter (--adapter) is for the checkpoint's own weights; leave --expand out")
        return self

    @model_validator(mode="after")
    def _check_engine(self) -> Self:
        if self.engine != "vllm" and (own := {"max_media_bytes", "max_media_pixels"} & self.model_fields_set):
            flag = sorted(own)[0]
            raise ValueError(f"{flag} (--{flag.replace('_', '-')}) is for engine vllm; give --engine vllm, too")
        if self.engine == "vllm":
            defaults = {name: type(self).model_fields[name].get_default(call_default_factory=True) for name in OWN_ONLY}
            for name in (name for name, default in defaults.items() if getattr(self, name) != default):
                raise ValueError(f"{name} (--{name.replace('_', '-')}) is for engine outrider; leave it out")
            for name in (name for name in ADAPTER_ARGUMENTS if name in self.engine_args):
                allowed = "--adapter, --max-adapters, --max-adapter-rank, --allow-adapter-changes"
                raise ValueError(f"engine_args (--engine-args): has {name}; allowed: {allowed}")
            if self.has_adapters and int(self.engine_args.get("nnodes", 1)) > 1:
                raise ValueError(
                    "adapter (--adapter) is for targets of one host: the others' workers read no weights "
                    "that were checked; leave it and --allow-adapter-changes out"
                )
        return self
