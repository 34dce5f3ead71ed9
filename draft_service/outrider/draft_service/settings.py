"""The settings of `outrider draft`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator

from outrider.proposers.registry import MethodName, MethodSettings, check_method, method_of
from outrider.rpc.settings import CHECKPOINT, Address, ModelSettings, ServerSettings


class DraftSettings(ServerSettings, ModelSettings, MethodSettings):
    """What a draft service is told at start, besides what all services are."""

    section: ClassVar[str] = "draft"

    model: Annotated[Path | None, CHECKPOINT] = None
    listen: Address = "127.0.0.1:50052"
    method: MethodName = "draft_model"
    target_tokenizer: list[Path] = Field(
        default_factory=list,
        description="folder of a target's checkpoint or tokenizer, or its hub id: a model of another vocabulary then "
        "drafts for that target, too",
    )
    allow_reload: bool = Field(
        False, description="other weights may be put in the model's place while it serves: outrider reload"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if method_of(check_method(self.method, self.allow_code)).needs_model and self.model is None:
            raise ValueError("give --model DIR, or --method ngram, which needs no model")
        if self.allow_reload and self.model is None:
            raise ValueError("allow_reload (--allow-reload) is for a draft with a model; give --model DIR, too")
        return self
