"""How often may be tried again: where some fail, retries must not multiply what is asked of the others.

Time alone fills a bucket in REFILL_S, so that all which one peer has lost finds another; what is asked adds a tenth of
itself. The tenth is the bound of who asks much more than a bucket holds; of who asks less, what time brings is."""

from __future__ import annotations

from dataclasses import dataclass, field

RATIO = 0.1  # of a retry, that every sequence or request brings
REFILL_S = 10.0  # in which time alone fills a bucket: what one target has lost finds another before it gives up


@dataclass(slots=True)
class RetryBudget:
    """A token bucket of at most `most` retries, full at first: a whole target's sequences may move at once."""

    most: float
    left: float = field(init=False)
    _at: float = 0.0  # when it was last filled, on the caller's clock
    _num_counted: int = 0  # sequences or requests

    def __post_init__(self) -> None:
        self.left = self.most

    def allows(self, num_sequences: int, now: float) -> bool:
        """Whether one is in it, after so many sequences since the start."""
        self._fill(num_sequences, now)
        return self.left >= 1

    def spend(self) -> None:
        """It was tried again."""
        self.left -= 1

    def reserve(self, num_requests: int, now: float, within_s: float) -> float:
        """Takes one that is in it, or the next that time brings: seconds until it may be used. What comes too late for
        its user is not taken: it would be a debt, for which others waited after an outage."""
        self._fill(num_requests, now)
        wait = max(0.0, 1 - self.left) * REFILL_S / self.most
        if wait < within_s:
            self.left -= 1
        return wait

    def _fill(self, num_sequences: int, now: float) -> None:
        added = RATIO * (num_sequences - self._num_counted) + (now - self._at) * self.most / REFILL_S
        self.left, self._at, self._num_counted = min(self.most, self.left + added), now, num_sequences
