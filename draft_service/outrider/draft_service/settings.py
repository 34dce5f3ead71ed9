"""The settings of `outrider draft`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from outrider.draft_service.shares import weights_of
from outrider.engine.token_tree import TokenTree
from outrider.proposers.registry import MethodNames, MethodSettings, check_methods, needs_model
from outrider.rpc.learning.settings import LearnedSettings
from outrider.rpc.settings import CHECKPOINT, Address, ModelSettings, ServerSettings, named_folders
from outrider.rpc.words.request import split_methods

Level = Literal["auto", "token", "string"]
LEARNING_METHODS = ("draft_model", "pard")
VocabularyLevel = Annotated[
    Level,
    Field(
        description="how the draft's vocabulary is joined with a target's other one: token: drafts are tokens that "
        "both have; string: drafts are written again in the target's; auto: by how much both have in common"
    ),
]


class DraftSettings(ServerSettings, ModelSettings, MethodSettings, LearnedSettings):
    """What a draft service is told at start, besides what all services are."""

    section: ClassVar[str] = "draft"
    subjects: ClassVar[Mapping[str, str]] = {
        "model": "model and device",
        "listen": "serving",
        "method": "drafting",
        "target_tokenizer": "targets of another vocabulary",
        "share": "several models",
        "draft_adapter": "adapters",
        "allow_reload": "other weights while it serves",
        **LearnedSettings.subjects,
    }
    first: ClassVar[tuple[str, ...]] = (
        "model", "method", "listen", "device", "dtype", "threads", "max_model_len", "cache_mb", "quantization",
        "metrics",
    )  # fmt: skip

    model: Annotated[Path | None, CHECKPOINT] = None
    quantization: Literal["int8", "int4"] | None = Field(
        None, description="round the draft's weights to 8 or 4 bits: on a CPU, where they are read faster (as they are)"
    )
    listen: Address = "127.0.0.1:50052"
    method: MethodNames = "draft_model"
    speculative_token_tree: Annotated[str, AfterValidator(TokenTree.checked)] | None = Field(
        None,
        description="what draft_model drafts for greedy and coupled requests in place of chains: paths as "
        '"[(0,), (1,), (0, 0)]", whose numbers are ranks among the likeliest tokens',
    )
    target_tokenizer: list[Path] = Field(
        default_factory=list,
        description="folder of a target's checkpoint or tokenizer, or its hub id: a model of another vocabulary then "
        "drafts for that target, too",
    )
    vocabulary_level: VocabularyLevel = "auto"
    share: list[str] = Field(
        default_factory=list,
        description="NAME=WEIGHT: what a model may count on of a draft that others have, too, by the name that its "
        "gateway gives it; one that is not named has 1. What a model does not use, others may, and give it back",
    )
    draft_adapter: list[str] = Field(
        default_factory=list,
        description="NAME=DIR: a low-rank adapter of the draft's model in PEFT's layout, by which it drafts for the "
        "target's adapter of that name; for any other by the model alone",
    )
    allow_reload: bool = Field(
        False, description="other weights may be put in the model's place while it serves: outrider admin reload"
    )
    allow_hub_reload: bool = Field(
        False, description="with allow-reload: the weights may be the hub's, which are downloaded, not a folder's alone"
    )

    @property
    def tree(self) -> TokenTree | None:
        """What the model drafts; None: chains."""
        return None if self.speculative_token_tree is None else TokenTree.parse(self.speculative_token_tree)

    @property
    def adapters(self) -> dict[str, Path]:
        """The folder of the draft's adapter, by the name of the target's. ValueError for what is no NAME=DIR."""
        return named_folders(self.draft_adapter, "draft_adapter (--draft-adapter)")

    @property
    def weights(self) -> dict[str, float]:
        """The weight of a model's share, by name. ValueError for what is no NAME=WEIGHT."""
        return weights_of(self.share)

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods that draft by default, in turn."""
        return split_methods(self.method)

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = check_methods(self.method, self.allow_code)
        if self.model is None and needs_model(names):
            raise ValueError("give --model DIR, or --method ngram, which needs no model")
        adapters, _ = self.adapters, self.weights
        if self.model is None and adapters:
            raise ValueError("draft_adapter (--draft-adapter) is for a draft with a model; give --model DIR, too")
        if self.allow_reload and self.model is None:
            raise ValueError("allow_reload (--allow-reload) is for a draft with a model; give --model DIR, too")
        if self.allow_hub_reload and not self.allow_reload:
            raise ValueError("allow_hub_reload (--allow-hub-reload) is for reloads; give --allow-reload, too")
        if self.allow_reload:
            self.require_known_callers("allow_reload")
        if self.learn_from and (self.model is None or not set(LEARNING_METHODS) & set(self.methods)):
            allowed = " or ".join(LEARNING_METHODS)
            raise ValueError(f"learn_from (--learn-from) is for --method {allowed}, whose weights learn; leave it out")
        if self.learn_from:
            self.require_known_callers("learn_from")
        if self.speculative_token_tree is not None and self.methods != ("draft_model",):
            raise ValueError("speculative_token_tree is drafted by --method draft_model alone; leave it out")
        if self.quantization is not None and self.model is None:
            raise ValueError(f"quantization is {self.quantization}, and there is no model: give --model DIR")
        return self
