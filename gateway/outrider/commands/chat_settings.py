"""The settings of `outrider chat`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from outrider.wire.config import ServiceSettings
from outrider.wire.sampling import AcceptanceRule

SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "stop",
    "seed",
)  # fmt: skip


class ChatSettings(ServiceSettings):
    """Whom to talk to, how answers are chosen, and how they are shown."""

    section: ClassVar[str] = "chat"

    gateway: str = Field("127.0.0.1:50050", description="address of the gateway")
    system: str = Field("", description="the system message that every conversation begins with")
    max_tokens: int = Field(512, ge=1, lt=2**32, description="most tokens of an answer; fewer where the context ends")
    temperature: float | None = Field(None, description="divides the logits; 0 is greedy (default: the model's)")
    top_p: float | None = Field(None, description="keep the smallest set of tokens with this mass")
    top_k: int | None = Field(None, description="keep the k most probable tokens; 0 and -1: all")
    min_p: float | None = Field(None, description="drop tokens below this share of the largest probability")
    repetition_penalty: float | None = Field(None, description="divides the logits of tokens in prompt and output")
    presence_penalty: float | None = Field(None, description="subtracted from the logits of tokens in the output")
    frequency_penalty: float | None = Field(None, description="the same, times the token's count")
    stop: tuple[str, ...] | None = Field(None, description="a text that ends an answer")
    seed: int | None = Field(None, ge=0, lt=2**64, description="makes the answers reproducible")
    speculation: bool = Field(True, description="draft at all; /speculation switches it during the chat")
    num_draft_tokens: int | None = Field(
        None, ge=0, lt=2**32, description="tokens drafted a round (default: the gateway's)"
    )
    mode: Literal["auto", "sequential", "chains", "branches"] | None = Field(
        None, description="how far the draft runs ahead (default: the gateway's)"
    )
    acceptance: Literal["auto", "rejection", "coupled"] = Field("auto", description="how drafted tokens are accepted")
    tokenizer: Path | None = Field(None, description="the target's folder, to colour token by token")
    plain: bool = Field(False, description="no colours and no line that is drawn anew, also on a terminal")
    stats: bool = Field(True, description="a line on each answer; on standard error where the output is no terminal")
    timeout: float | None = Field(None, gt=0, description="seconds until an answer is given up")
    priority: int = Field(0, description="lower is served first under load")
    salt: str = Field("", description="separates prefix caches")

    def options(self) -> dict[str, Any]:
        """What every request of the chat has, as the client takes it."""
        given = {name: getattr(self, name) for name in SAMPLING}
        return {name: value for name, value in given.items() if value is not None} | {
            "num_draft_tokens": self.num_draft_tokens,
            "mode": self.mode or "",
            "acceptance": AcceptanceRule[self.acceptance.upper()],
            "timeout": self.timeout,
            "priority": self.priority,
            "salt": self.salt,
        }
