"""Branches: chains for other outcomes of the verification under way, and which outcomes are worth one.

While the target verifies a window, the outcome is not known: j drafted tokens hold and then another token stands where
the chain has its own. For the likeliest pairs of j and token the draft goes on from there at once, so that a window is
at the target, or nearly, when the verification ends. After Kumar et al., arXiv 2603.03251, and DESIGN's coupling: with
shared noise the runner-up of the draft's own race is what the target most often takes instead.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

from outrider.engine.sequence import Sequence

MAX_ALTERNATIVES = 4  # other tokens considered at one position
DECAY = 0.98  # of what was counted before, at each verification
PRIOR_ACCEPTANCE, PRIOR_WEIGHT = 0.7, 4.0
PRIOR_RANKS = (0.4, 0.15, 0.1, 0.05)  # chance that the correction is the first, second, ... alternative


@dataclass(slots=True, eq=False)
class Branch:
    """A chain that leaves its parent at `position`. `sequence` holds all tokens from the prompt on."""

    chain: int
    parent: int  # number of the chain it leaves
    position: int  # of its first token, a guess
    sequence: Sequence
    alternatives: dict[int, tuple[int, ...]] = field(default_factory=dict)  # by position of the token they replace
    sent: int = field(init=False)  # tokens below it left in a piece
    ended: bool = False

    def __post_init__(self) -> None:
        self.sent = self.position

    def agrees(self, committed: int, new: Many[int]) -> bool:
        """Whether it goes on from `new` at position `committed`."""
        return self.sequence.tokens[committed : committed + len(new)] == list(new)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One outcome of a verification: the chain holds up to `position`, and there stands `token_id` instead."""

    position: int
    token_id: int


@dataclass(slots=True)
class OutcomeRates:
    """What verifications of late said: acceptance by offset in the window, and which alternative the correction was."""

    accepted: list[float] = field(default_factory=list)
    tested: list[float] = field(default_factory=list)
    ranked: list[float] = field(default_factory=lambda: [0.0] * MAX_ALTERNATIVES)
    corrections: float = 0.0

    def observe(self, num_drafted: int, num_accepted: int, rank: int | None) -> None:
        """Counts one verification. `rank` of the token after the accepted ones among the alternatives of its position,
        from 0; -1 where it was none of them, None where there were none to compare with."""
        num_tested = min(num_accepted + 1, num_drafted)
        unknown = max(0, num_tested - len(self.tested))
        self.accepted += [PRIOR_ACCEPTANCE * PRIOR_WEIGHT] * unknown
        self.tested += [PRIOR_WEIGHT] * unknown
        for offset in range(num_tested):
            self.tested[offset] = DECAY * self.tested[offset] + 1
            self.accepted[offset] = DECAY * self.accepted[offset] + (offset < num_accepted)
        if rank is not None:
            self.corrections = DECAY * self.corrections + 1
            self.ranked = [DECAY * count + (index == rank) for index, count in enumerate(self.ranked)]

    def acceptance(self, offset: int) -> float:
        """Chance that the drafted token at an offset is accepted if those before it are."""
        return self.accepted[offset] / self.tested[offset] if offset < len(self.tested) else PRIOR_ACCEPTANCE

    def chance(self, rank: int) -> float:
        """Chance that a correction is the alternative of this rank."""
        return (self.ranked[rank] + PRIOR_WEIGHT * PRIOR_RANKS[rank]) / (self.corrections + PRIOR_WEIGHT)


def likeliest(
    rates: OutcomeRates, alternatives: dict[int, tuple[int, ...]], first: int, window: int, count: int
) -> list[Outcome]:
    """The `count` likeliest outcomes of verifying `window` tokens from position `first` on, other than that the chain
    goes on. The token after the window counts too: there the target's own token follows."""
    return [outcome for _, _, outcome in heapq.nlargest(count, _scored(rates, alternatives, first, window))]


def _scored(
    rates: OutcomeRates, alternatives: dict[int, tuple[int, ...]], first: int, window: int
) -> Iterator[tuple[float, int, Outcome]]:
    """Every outcome with its chance; the number in between only orders equal chances."""
    reaches = 1.0
    number = 0
    for offset in range(window + 1):
        acceptance = rates.acceptance(min(offset, window - 1))
        for rank, token in enumerate(alternatives.get(first + offset, ())[:MAX_ALTERNATIVES]):
            number -= 1
            yield reaches * (1 - acceptance) * rates.chance(rank), number, Outcome(first + offset, token)
        reaches *= acceptance


def rank_of(alternatives: dict[int, tuple[int, ...]], position: int, token_id: int) -> int | None:
    """Place of a token among the alternatives of a position; -1 if it is none of them, None if there are none."""
    known = alternatives.get(position)
    if not known:
        return None
    return known.index(token_id) if token_id in known else -1


def winner(branches: Iterable[Branch], committed: int, new: Many[int]) -> Branch | None:
    """The branch of the lowest number that goes on from what was committed."""
    agreeing = [branch for branch in branches if branch.agrees(committed, new)]
    return min(agreeing, key=lambda branch: branch.chain, default=None)
