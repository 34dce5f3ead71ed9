"""Which model a gateway serves while its targets have more than one, as during a rolling change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


def elect(current: str | None, answers: Sequence[tuple[str, bool]]) -> str | None:
    """A model's digest, from what every target that answers serves and whether it takes new sequences, in the order of
    their addresses. The current model stays while it is served and no other has more than half of the answers; else
    it is the most common one, of equals the first. None, or the current one, where nobody takes new sequences."""
    votes = Counter(model for model, _ in answers)
    served = list(dict.fromkeys(model for model, usable in answers if usable))
    if not served:
        return current
    most = max(served, key=lambda model: votes[model])  # of equals the first
    return current if current in served and 2 * votes[most] <= len(answers) else most
