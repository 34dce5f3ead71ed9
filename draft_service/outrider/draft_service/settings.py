"""The settings of `outrider draft`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from outrider.rpc.settings import CHECKPOINT, Address, ModelSettings, ServerSettings


class DraftSettings(ServerSettings, ModelSettings):
    """What a draft service is told at start, besides what all services are."""

    section: ClassVar[str] = "draft"

    model: Annotated[Path | None, CHECKPOINT] = None
    listen: Address = "127.0.0.1:50052"
    method: Literal["draft_model", "ngram"] = Field(
        "draft_model", description="how drafts are made by default; ngram needs no model"
    )
    prompt_lookup_min: int | None = Field(None, ge=1, description="shortest n-gram that is looked up (default: 5)")
    prompt_lookup_max: int | None = Field(None, ge=1, description="longest n-gram that is looked up (default: 5)")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.method == "draft_model" and self.model is None:
            raise ValueError("give --model DIR, or --method ngram, which needs no model")
        return self
