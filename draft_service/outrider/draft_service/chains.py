"""What is drafted for one sequence: its chain, and branches: chains for other outcomes of the verification under way.

While the target verifies a window, the outcome is not known: j drafted tokens hold and then another token stands where
the chain has its own. For the likeliest pairs of j and token the draft goes on from there at once, so that a window is
at the target, or nearly, when the verification ends. A branch has likely outcomes of its own, for the verification
after this one: the likeliest of those get branches too, and leave once that outcome has come, so that a draft far away
still keeps up. After Kumar et al., arXiv 2603.03251, and DESIGN's coupling: with shared noise the runner-up
of the draft's own race is what the target most often takes instead."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

from outrider.engine.kv_cache_manager import CachedSequence, KVCacheManager
from outrider.planner.estimates import PRIOR_WEIGHT, Acceptance
from outrider.planner.method_choice import Kind, Offer
from outrider.proposers.draft_rows import DraftedToken
from outrider.proposers.draft_text import DraftText
from outrider.rpc.messages import Commit, DraftTokens, TokenWeights

MAX_TOP_TOKENS = 4  # other tokens considered at one position
MEMORY = 50.0  # verifications that an estimate looks back on
PRIOR_RANKS = (0.4, 0.15, 0.1, 0.05)  # chance that the correction is the first, second, ... of the top tokens
LEAST_CHANCE = 0.004  # of an outcome that is worth a branch

TopTokens = dict[int, tuple[int, ...]]  # other tokens for a position, the likeliest first


class MethodRun(NamedTuple):
    """Tokens of a chain that one of several methods drafted."""

    start: int  # position of the first
    method: str
    kind: Kind

    @classmethod
    def of_model(cls, start: int, method: str) -> Self:
        """A run of tokens that the model drafts."""
        return cls(start, method, Offer.of_model(method, 1).kind)


@dataclass(slots=True, eq=False)
class Chain:
    """Drafted tokens in a row. `text` holds all tokens from the prompt on."""

    number: int
    text: DraftText
    sent: int  # tokens below it left in a piece, or are committed
    weights: list[TokenWeights | None] = field(default_factory=list)  # of the tokens from `sent` on
    top_tokens: TopTokens = field(default_factory=dict)
    draft_us: int = 0  # device time since the last piece
    ended: bool = False  # it cannot go on
    runs: list[MethodRun] = field(default_factory=list)  # where several methods draft in turn
    chosen_at: int = -1  # the length at which it was last chosen how to go on
    drawn: int = 0  # tokens up to the last one that was drawn from weights
    start: int = field(init=False)  # position of its first drafted token

    def __post_init__(self) -> None:
        self.start = self.sent

    @property
    def sequence(self) -> CachedSequence:
        """The draft's own tokens and their blocks."""
        return self.text.sequence

    @property
    def num_unsent(self) -> int:
        """Tokens that did not leave yet."""
        return len(self.text) - self.sent

    @property
    def num_uncomputed(self) -> int:
        """The draft's own tokens that are rows of the next pass."""
        return len(self.sequence) - self.sequence.num_computed_tokens

    def note(self, drafted: Sequence[DraftedToken]) -> None:
        """Notes of the tokens just appended to `text` what they were drawn from, and what might have stood in their
        place."""
        first = len(self.text) - len(drafted)
        weights = [_weights_of(token) for token in drafted]
        self.weights += weights
        if any(weights):
            self.drawn = len(self.text)
        self.top_tokens |= {first + index: token.top_tokens for index, token in enumerate(drafted) if token.top_tokens}

    def begin_run(self, method: str, kind: Kind) -> None:
        """What is drafted from here on is another method's, or the same one's as before."""
        if not self.runs or self.runs[-1][1:] != (method, kind):
            self.runs.append(MethodRun(len(self.text), method, kind))

    def run_at(self, position: int) -> tuple[MethodRun, int] | None:
        """The run that holds a position, and where it ends; None where it is not known which method drafted it."""
        index = bisect_right(self.runs, position, key=lambda run: run.start) - 1
        if index < 0:
            return None
        return self.runs[index], self.runs[index + 1].start if index + 1 < len(self.runs) else len(self.text)

    def take(self, sequence_id: int, count: int, more: bool = False, parent: int | None = None) -> DraftTokens:
        """The next `count` tokens that are unsent, as a piece."""
        position, weights = self.sent, tuple(self.weights[:count])
        self.sent += count
        ids = tuple(self.text.tokens[position : self.sent])
        weights = weights if any(entry is not None for entry in weights) else ()
        method = self.runs[-1].method if self.runs else ""
        piece = DraftTokens(
            sequence_id, self.number, position, ids, weights, parent, more, draft_us=self.draft_us, method=method
        )
        del self.weights[:count]
        self.draft_us = 0
        return piece

    def roll_back(self, cache: KVCacheManager) -> None:
        """Takes off the tokens that were not noted, as after a step that failed between the two."""
        length = self.sent + len(self.weights)
        if length < len(self.text):
            self.text.truncate(length, cache)
            self.ended = False


def _weights_of(drafted: DraftedToken) -> TokenWeights | None:
    return TokenWeights(drafted.ids, drafted.weights) if drafted.ids else None


class Outcome(NamedTuple):
    """One outcome of a verification: the chain or branch of this number holds up to `position`, and there stands
    `token_id` instead."""

    chain: int
    position: int
    token_id: int


@dataclass(slots=True, eq=False, kw_only=True)
class Branch(Chain):
    """A chain that goes on from an outcome: its first token is a guess, and carries no weights."""

    outcome: Outcome
    chance: float = 0.0  # of the outcome, as last estimated
    goes_on: bool = False  # whether a second window is worth drafting, too

    @classmethod
    def of(cls, number: int, outcome: Outcome, text: DraftText) -> Self:
        """A branch of which nothing is sent. `text` ends with the guess."""
        return cls(number=number, text=text, sent=outcome.position, weights=[None], outcome=outcome)

    @property
    def parent(self) -> int:
        """Number of the chain that it leaves."""
        return self.outcome.chain

    @property
    def position(self) -> int:
        """The position of its first token."""
        return self.outcome.position

    def agrees(self, committed: int, new: Sequence[int]) -> bool:
        """Whether it goes on from `new` at position `committed`."""
        return self.text.tokens[committed : committed + len(new)] == list(new)

    def end(self, piece_len: int, limit: int) -> int:
        """Where it rests until it is chosen: after a window, and after two where all of one may well hold."""
        whole = self.position + 1 + piece_len
        return min(whole + self.goes_on * (piece_len + 1), limit)

    def pieces(self, sequence_id: int, piece_len: int, limit: int) -> Iterator[DraftTokens]:
        """The pieces that are due: first the guess and a window as a whole, then full ones, and the rest where it
        rests."""
        rests = self.ended or len(self.text) >= self.end(piece_len, limit)
        while unsent := self.num_unsent:
            first = self.sent == self.position
            count = min(unsent, piece_len + first)
            if not count or (count < piece_len + first and not rests):  # none: no window is wanted any more
                return
            yield self.take(sequence_id, count, parent=self.parent if first else None)


@dataclass(slots=True)
class OutcomeRates:
    """What verifications of late said: acceptance by offset in the window, and the rank of the correction."""

    acceptance: Acceptance = field(default_factory=lambda: Acceptance(memory=MEMORY))
    ranked: list[float] = field(default_factory=lambda: [0.0] * MAX_TOP_TOKENS)
    corrections: float = 0.0

    def observe(self, num_drafted: int, num_accepted: int, rank: int | None) -> None:
        """Counts one verification. `rank` of the token after the accepted ones among the top tokens of its position,
        from 0; -1 where it was none of them, None where there were none to compare with."""
        self.acceptance.add(num_drafted, num_accepted)
        if rank is not None:
            fade = 1 - 1 / MEMORY
            self.corrections = fade * self.corrections + 1
            self.ranked = [fade * count + (index == rank) for index, count in enumerate(self.ranked)]

    def chance(self, rank: int) -> float:
        """Chance that a correction is the top token of this rank."""
        return (self.ranked[rank] + PRIOR_WEIGHT * PRIOR_RANKS[rank]) / (self.corrections + PRIOR_WEIGHT)

    def table(self, window: int) -> OutcomeTable:
        """What the next two verifications of `window` tokens of one chain may come to."""
        ranks = [self.chance(rank) for rank in range(MAX_TOP_TOKENS)]
        by_offset = self.acceptance.first(window)
        by_offset.append(by_offset[-1])  # the token after a window is the target's own
        chances, reaches = [], [1.0]
        for acceptance in 2 * by_offset:
            chances.append([reaches[-1] * (1 - acceptance) * chance for chance in ranks])
            reaches.append(reaches[-1] * acceptance)
        return OutcomeTable(chances, reaches[window + 1])


@dataclass(frozen=True, slots=True)
class OutcomeTable:
    """What may come of two windows and the tokens after them: the chance of another token, [2 (window + 1), ranks]; and
    that all of the first one holds."""

    chances: list[list[float]]
    whole: float


def outcome_probs(
    table: OutcomeTable, chain: int, committed: int, top_tokens: TopTokens, branches: Iterable[Branch]
) -> dict[Outcome, float]:
    """The outcomes that are worth a branch, with their chances: of verifying the chain from `committed` on, and of
    each branch if its own outcome comes. The token after a window counts too: there the target's own follows. Notes the
    branches' own chances, which are 0 where their parent's are."""
    found: dict[Outcome, float] = {}
    _add_outcomes(found, table, 1.0, chain, committed, top_tokens)
    for branch in branches:  # those that others leave come first
        branch.chance = found.get(branch.outcome, 0.0)
        branch.goes_on = branch.chance * table.whole >= LEAST_CHANCE
        _add_outcomes(found, table, branch.chance, branch.number, branch.position + 1, branch.top_tokens)
    return found


def _add_outcomes(
    found: dict[Outcome, float], table: OutcomeTable, reached: float, chain: int, first: int, top_tokens: TopTokens
) -> None:
    """Adds the outcomes of one chain or branch, to whose verification from `first` on it comes with chance
    `reached`."""
    for offset, by_rank in enumerate(table.chances):
        if reached * max(by_rank) < LEAST_CHANCE:
            continue
        for chance, token in zip(by_rank, top_tokens.get(first + offset, ()), strict=False):
            if reached * chance >= LEAST_CHANCE:
                found[Outcome(chain, first + offset, token)] = reached * chance


def rank_of(top_tokens: TopTokens, position: int, token_id: int) -> int | None:
    """Rank of a token among the top tokens of a position; -1 if it is none of them, None if there are none."""
    known = top_tokens.get(position)
    if not known:
        return None
    return known.index(token_id) if token_id in known else -1


@dataclass(slots=True, eq=False)
class Branches:
    """The branches that are held beside one sequence's chain."""

    held: list[Branch] = field(default_factory=list)
    rates: OutcomeRates = field(default_factory=OutcomeRates)
    evicted_at: int = -1  # the committed length at which they had to make room; until it grows there are none

    def __iter__(self) -> Iterator[Branch]:
        return iter(self.held)

    def __len__(self) -> int:
        return len(self.held)

    def matching(self, committed: int, new: Sequence[int]) -> Branch | None:
        """The branch of the lowest number that goes on from what was committed, its guess included."""
        end = committed + len(new)
        agreeing = [branch for branch in self.held if branch.position < end and branch.agrees(committed, new)]
        return min(agreeing, key=lambda branch: branch.number, default=None)

    def keep_open(self, committed: int, new: Sequence[int], dropped: Sequence[int], cache: KVCacheManager) -> None:
        """Gives up those that `new`, committed at `committed`, has decided, and those that the target does not hold.
        What leaves the chain, or such a branch, later on stays."""
        branches, self.held = self.held, []
        for branch in branches:
            is_open = branch.position >= committed + len(new) and branch.agrees(committed, new)
            if is_open and branch.number not in dropped:
                self.held.append(branch)
            else:
                cache.release(branch.sequence)

    def give_up(self, cache: KVCacheManager) -> None:
        """Releases all branches."""
        for branch in self.held:
            cache.release(branch.sequence)
        self.held.clear()

    def observe(self, chain: Chain, commit: Commit, new: Sequence[int]) -> None:
        """Learns from a verification of the chain's window, if its tokens are new here."""
        if not commit.num_drafted or len(new) != len(commit.ids):
            return
        place, rank = commit.position + commit.num_accepted, None
        if commit.chain == chain.number and commit.num_accepted < len(new) and place < len(chain.text):
            token = new[commit.num_accepted]
            if token != chain.text.tokens[place]:
                rank = rank_of(chain.top_tokens, place, token)
        self.rates.observe(commit.num_drafted, commit.num_accepted, rank)
