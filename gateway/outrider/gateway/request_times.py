"""When a request was scheduled and its tokens came: what vLLM's answers and its `LLM` say of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from outrider.rpc.words.answer import GenerationDelta


@dataclass(slots=True)
class RequestTimes:
    """Seconds on the monotonic clock, of commits: how fast the caller takes them is not the service's time. 0: not yet,
    or nobody knows it here."""

    arrived: float = field(default_factory=time.monotonic)
    scheduled: float = 0.0  # at the target, whose queue it has left
    first_token: float = 0.0
    last_token: float = 0.0
    num_tokens: int = 0

    def add(self, delta: GenerationDelta) -> None:
        """One commit."""
        closed = delta.round
        if closed is not None and not self.scheduled:
            self.scheduled = min(closed.ended, closed.started + closed.commit.timings.queue_us * 1e-6)
        if delta.token_ids:
            self.last_token = time.monotonic() if closed is None else closed.ended
            self.first_token = self.first_token or self.last_token
            self.num_tokens += len(delta.token_ids)

    def shape(self) -> dict[str, float | None]:
        """The same as an answer over HTTP has it; null where it says nothing."""
        if not self.num_tokens or not self.scheduled:
            return dict.fromkeys(_NAMES)
        decoding, whole = self.last_token - self.first_token, self.last_token - self.scheduled
        values = (
            (self.first_token - self.scheduled) * 1e3,
            decoding * 1e3,
            max(0.0, self.scheduled - self.arrived) * 1e3,
            decoding * 1e3 / (self.num_tokens - 1) if self.num_tokens > 1 else None,
            self.num_tokens / whole if whole > 0 else None,
        )
        return dict(zip(_NAMES, values, strict=True))


_NAMES = ("time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms", "tokens_per_second")
