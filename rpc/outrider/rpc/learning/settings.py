"""What a service is told whose weights may learn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import BaseModel, Field

from outrider.rpc.learning.lessons import SALTED, UNSALTED

MOST_LEARNED_RANK = 64


class LearnedSettings(BaseModel):
    """Of whom is learned, and how much of what was learned is in use."""

    subjects: ClassVar[Mapping[str, str]] = {"learn_from": "learning from what it serves"}

    learn_from: list[str] = Field(
        default_factory=list,
        description="whose texts outrider learn may have, to make weights of them that draft for the same callers: "
        f"{UNSALTED} (those without a salt, who then teach one another), {SALTED} (every salt, for itself alone), or a "
        "salt (nobody's)",
    )
    learned_drafts: int = Field(8, ge=1, le=1024, description="with learn-from: how many such weights are in use")
    learned_rank: int = Field(32, ge=1, le=MOST_LEARNED_RANK, description="with learn-from: their greatest rank")
