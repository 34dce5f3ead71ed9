"""How a window is judged."""

from __future__ import annotations

from enum import IntEnum

from outrider.target.state import TargetSequence


class Rule(IntEnum):
    """On a device a later one takes what an earlier one does, and more."""

    GREEDY = 0
    COUPLED = 1
    REJECTION = 2


def rule_of(target: TargetSequence) -> Rule:
    """The rule of a sequence, fixed when it was opened."""
    return Rule.GREEDY if target.greedy else Rule.COUPLED if target.coupled else Rule.REJECTION
