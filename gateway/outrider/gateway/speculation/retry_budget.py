"""How often sequences may be opened again: where targets or drafts fail, retries must not multiply what is asked of the
others."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.rpc.retry_budget import RetryBudget


@dataclass(slots=True)
class Retries:
    """How often a gateway tries again, for all of its sequences. A draft's outage takes nothing from what targets may
    need."""

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
