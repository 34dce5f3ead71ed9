"""A completion as it grows: the parts that a gateway streams, put together."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import Any

from outrider.client import Part, SpeculationStats, Usage
from outrider.wire.messages import PositionLogprobs


@dataclass(slots=True)
class Answer:
    """One completion. Enumerations are their names in lower case, as JSON shows them."""

    index: int
    request_id: str = ""
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    usage: Usage | None = None
    speculation: SpeculationStats | None = None
    seed: int | None = None
    prompt_token_ids: tuple[int, ...] = ()
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    prompt_logprobs: list[PositionLogprobs] = field(default_factory=list)
    first_at: float = 0.0  # when the first tokens came, by the monotonic clock
    last_at: float = 0.0
    num_first: int = 0

    def add(self, part: Part) -> None:
        """Takes what one response adds."""
        self.request_id = part.request_id
        self.text += part.text
        self.token_ids += part.token_ids
        self.origins += [origin.name.lower() for origin in part.origins]
        self.logprobs += part.logprobs
        self.prompt_logprobs += part.prompt_logprobs
        self.prompt_token_ids += part.prompt_token_ids
        self.seed = self.seed if part.seed is None else part.seed
        if part.token_ids:
            self._clock(len(part.token_ids))
        if part.finish_reason is not None:
            self.finish_reason = part.finish_reason.name.lower()
            self.stop_reason, self.usage, self.speculation = part.stop_reason, part.usage, part.speculation

    @property
    def acceptance(self) -> str:
        """The acceptance rule that was used."""
        return "" if self.speculation is None else self.speculation.acceptance.name.lower()

    @property
    def tokens_per_s(self) -> float:
        """The decoding speed: the tokens after the first response by the time after it; 0 where there are none."""
        seconds = self.last_at - self.first_at
        return (len(self.token_ids) - self.num_first) / seconds if seconds > 0 else 0.0

    def as_json(self) -> dict[str, Any]:
        """What `outrider generate --json` prints. Log probabilities are there if they were asked for."""
        shown = {
            "request_id": self.request_id,
            "index": self.index,
            "text": self.text,
            "token_ids": self.token_ids,
            "origins": self.origins,
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
            "usage": None if self.usage is None else asdict(self.usage),
            "speculation": None if self.speculation is None else self._speculation(self.speculation),
            "seed": self.seed,
        }
        for name, positions in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if positions:
                shown[name] = [[candidate._asdict() for candidate in position] for position in positions]
        return shown

    def _speculation(self, stats: SpeculationStats) -> dict[str, Any]:
        return {
            **asdict(stats),
            "acceptance": self.acceptance,
            "acceptance_rate": stats.acceptance_rate,
            "mean_acceptance_length": stats.mean_acceptance_length,
        }

    def _clock(self, num_tokens: int) -> None:
        self.last_at = time.monotonic()
        if not self.first_at:
            self.first_at, self.num_first = self.last_at, num_tokens
