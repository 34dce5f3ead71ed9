"""What the requests of a gateway learn together. Clocks and counts alone."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from outrider.gateway.estimates import Acceptance, Mean
from outrider.gateway.step_costs import VerifyCosts

FORGETTING = 0.01  # a decision
PLAIN_MEMORY, LEAST_SEEN = 64.0, 8.0  # rounds that tell how many of them are plain


@dataclass(slots=True)
class Experience:
    """What all requests of a gateway learn together, since it says more of the machines than of a request."""

    costs: VerifyCosts
    acceptance: Acceptance = field(default_factory=Acceptance)
    hits: Mean = field(default_factory=Mean)
    between: Mean = field(default_factory=Mean)  # what a round that waits for its draft spends outside both models
    draft_pass: Mean = field(default_factory=Mean)
    share: Mean = field(default_factory=lambda: Mean(1.0))  # sequences of a step over those that run here
    plain: dict[Hashable, Mean] = field(default_factory=dict)  # share of plain rounds where none waits, by mode

    def saw(self, mode: Hashable, plain: bool) -> None:
        """A round where none waits had a window, or only the target's own token."""
        self.plain.setdefault(mode, Mean(memory=PLAIN_MEMORY)).add(float(plain))

    def plain_tokens(self, mode: Hashable) -> float | None:
        """How many are decoded between two windows where none waits; None if that was not seen lately."""
        share = self.plain.get(mode)
        if share is None or share.weight < LEAST_SEEN:
            return None
        return share.value / max(1 - share.value, 0.01)

    def fade(self) -> None:
        """What was seen long ago counts less and less."""
        for share in self.plain.values():
            share.weight *= 1 - FORGETTING
