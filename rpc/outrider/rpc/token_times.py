"""When the tokens of one completion came, and how fast: the same for a gateway, which sees commits, and for a client,
which sees responses."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class TokenTimes:
    """Moments and durations in seconds, on a monotonic clock. Tokens that come together are one delivery."""

    first: float = 0.0  # 0: none has come
    last: float = 0.0
    num_first: int = 0  # tokens of the first delivery
    num_tokens: int = 0
    gap_s: float = 0.0  # of the last delivery after the first: from the one before it
    decoding_s: float = 0.0  # all gaps together

    def add(self, at: float, num_tokens: int, gap_s: float | None = None) -> None:
        """Notes a delivery. `gap_s` is what it took where that is not the time since the one before, as where a reader
        took its time between them."""
        if self.num_first:
            self.gap_s = at - self.last if gap_s is None else gap_s
            self.decoding_s += self.gap_s
        if not num_tokens:
            return
        if not self.num_first:
            self.first, self.num_first = at, num_tokens
        self.last = at
        self.num_tokens += num_tokens

    @property
    def is_first(self) -> bool:
        """Whether the last delivery was the first."""
        return self.num_tokens == self.num_first

    @property
    def seconds_per_token(self) -> float | None:
        """The decoding time of a token that came after the first delivery; None where there is none."""
        after = self.num_tokens - self.num_first
        return self.decoding_s / after if after > 0 else None
