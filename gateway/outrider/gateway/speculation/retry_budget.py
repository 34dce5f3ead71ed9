"""How often may be tried again: where targets or drafts fail, retries must not multiply what is asked of the others."""

from __future__ import annotations

from dataclasses import dataclass, field

RATIO = 0.1  # of a retry, that every sequence brings
REFILL_S = 10.0  # in which time alone fills a bucket: what one target has lost finds another before it gives up


@dataclass(slots=True)
class RetryBudget:
    """A token bucket of at most `most` retries, full at first: a whole target's sequences may move at once."""

    most: float
    left: float = field(init=False)
    _at: float = 0.0  # when it was last filled, on the caller's clock
    _num_counted: int = 0  # sequences

    def __post_init__(self) -> None:
        self.left = self.most

    def allows(self, num_sequences: int, now: float) -> bool:
        """Whether one is in it, after so many sequences since the start."""
        added = RATIO * (num_sequences - self._num_counted) + (now - self._at) * self.most / REFILL_S
        self.left, self._at, self._num_counted = min(self.most, self.left + added), now, num_sequences
        return self.left >= 1

    def spend(self) -> None:
        """It was tried again."""
        self.left -= 1


@dataclass(slots=True)
class Retries:
    """Of one gateway. A draft's outage takes nothing from what targets may need."""

    most: float
    num_sequences: int = 0  # that have begun
    targets: RetryBudget = field(init=False)
    drafts: RetryBudget = field(init=False)

    def __post_init__(self) -> None:
        self.targets, self.drafts = RetryBudget(self.most), RetryBudget(self.most)

    def allows_target(self, now: float) -> bool:
        """Whether a sequence may be opened at another target now; to be spent once one takes it."""
        return self.targets.allows(self.num_sequences, now)

    def take_draft(self, now: float) -> bool:
        """Whether a sequence may be opened at a draft again now; then it counts."""
        allowed = self.drafts.allows(self.num_sequences, now)
        if allowed:
            self.drafts.spend()
        return allowed
