"""Branches: chains for other outcomes of the verification under way, and which outcomes are worth one.

While the target verifies a window, the outcome is not known: j drafted tokens hold and then another token stands where
the chain has its own. For the likeliest pairs of j and token the draft goes on from there at once, so that a window is
at the target, or nearly, when the verification ends. A branch has likely outcomes of its own, for the verification
after this one: the likeliest of those get branches too, and leave once that outcome has come, so that a draft far away
still keeps up. After Kumar et al., arXiv 2603.03251, and DESIGN's coupling: with shared noise the runner-up
of the draft's own race is what the target most often takes instead.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import NamedTuple

from outrider.engine.sequence import Sequence

MAX_ALTERNATIVES = 4  # other tokens considered at one position
DECAY = 0.98  # of what was counted before, at each verification
PRIOR_ACCEPTANCE, PRIOR_WEIGHT = 0.7, 4.0
PRIOR_RANKS = (0.4, 0.15, 0.1, 0.05)  # chance that the correction is the first, second, ... alternative
LEAST_CHANCE = 0.004  # of an outcome that is worth a branch

Alternatives = dict[int, tuple[int, ...]]  # other tokens for a position, the likeliest first


@dataclass(slots=True, eq=False)
class Branch:
    """A chain that leaves its parent at `position`. `sequence` holds all tokens from the prompt on."""

    chain: int
    parent: int  # number of the chain it leaves
    position: int  # of its first token, a guess
    sequence: Sequence
    alternatives: Alternatives = field(default_factory=dict)
    outcome: Outcome = field(init=False)  # what it is for
    chance: float = 0.0  # of that, as last estimated
    goes_on: bool = False  # whether a second window is worth drafting, too
    sent: int = field(init=False)  # tokens below it left in a piece
    ended: bool = False

    def __post_init__(self) -> None:
        self.sent = self.position
        self.outcome = Outcome(self.parent, self.position, self.sequence.tokens[self.position])

    def agrees(self, committed: int, new: Many[int]) -> bool:
        """Whether it goes on from `new` at position `committed`."""
        return self.sequence.tokens[committed : committed + len(new)] == list(new)


class Outcome(NamedTuple):
    """One outcome of a verification: the chain or branch of this number holds up to `position`, and there stands
    `token_id` instead."""

    chain: int
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

    def table(self, window: int) -> Table:
        """What the next two verifications of `window` tokens of one chain may come to."""
        ranks = [self.chance(rank) for rank in range(MAX_ALTERNATIVES)]
        chances, reaches = [], [1.0]
        for offset in range(2 * (window + 1)):
            acceptance = self.acceptance(min(offset % (window + 1), window - 1))
            chances.append([reaches[-1] * (1 - acceptance) * chance for chance in ranks])
            reaches.append(reaches[-1] * acceptance)
        return Table(chances, reaches[window + 1])


@dataclass(frozen=True, slots=True)
class Table:
    """Of two windows and the tokens after them: chance of another token, [2 (window + 1), ranks]; and that all of the
    first one holds."""

    chances: list[list[float]]
    whole: float


def appraise(
    table: Table, chain: int, committed: int, alternatives: Alternatives, branches: Iterable[Branch]
) -> dict[Outcome, float]:
    """The outcomes that are worth a branch, with their chances: of verifying the chain from `committed` on, and of
    each branch if its own outcome comes. The token after a window counts too: there the target's own follows. Notes the
    branches' own chances, which are 0 where their parent's are."""
    found: dict[Outcome, float] = {}
    _add_outcomes(found, table, 1.0, chain, committed, alternatives)
    for branch in branches:  # those that others leave come first
        branch.chance = found.get(branch.outcome, 0.0)
        branch.goes_on = branch.chance * table.whole >= LEAST_CHANCE
        _add_outcomes(found, table, branch.chance, branch.chain, branch.position + 1, branch.alternatives)
    return found


def _add_outcomes(
    found: dict[Outcome, float], table: Table, reached: float, chain: int, first: int, alternatives: Alternatives
) -> None:
    """Those of one chain or branch, to whose verification from `first` on it comes with chance `reached`."""
    for offset, by_rank in enumerate(table.chances):
        if reached * max(by_rank) < LEAST_CHANCE:
            continue
        for chance, token in zip(by_rank, alternatives.get(first + offset, ()), strict=False):
            if reached * chance >= LEAST_CHANCE:
                found[Outcome(chain, first + offset, token)] = reached * chance


def rank_of(alternatives: Alternatives, position: int, token_id: int) -> int | None:
    """Place of a token among the alternatives of a position; -1 if it is none of them, None if there are none."""
    known = alternatives.get(position)
    if not known:
        return None
    return known.index(token_id) if token_id in known else -1


def winner(branches: Iterable[Branch], committed: int, new: Many[int]) -> Branch | None:
    """The branch of the lowest number that goes on from what was committed, its guess included."""
    end = committed + len(new)
    agreeing = [branch for branch in branches if branch.position < end and branch.agrees(committed, new)]
    return min(agreeing, key=lambda branch: branch.chain, default=None)
