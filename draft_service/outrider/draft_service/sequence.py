"""One sequence in the draft: the committed tokens, the chain drafted past them, credit, and what is not sent yet.

Committed tokens are one append-only list that only the target extends. A commit that agrees with the chain lets it go
on; where it parts from it and a branch agrees, the branch takes the chain's place; else a new chain starts at the
committed length, as when a commit runs past the chain's end or names it as dropped. What is in the cache of their
common prefix stays there.

Branches: chains for other outcomes of the verification under way, and which outcomes are worth one.

While the target verifies a window, the outcome is not known: j drafted tokens hold and then another token stands where
the chain has its own. For the likeliest pairs of j and token the draft goes on from there at once, so that a window is
at the target, or nearly, when the verification ends. A branch has likely outcomes of its own, for the verification
after this one: the likeliest of those get branches too, and leave once that outcome has come, so that a draft far away
still keeps up. After Kumar et al., arXiv 2603.03251, and DESIGN's coupling: with shared noise the runner-up
of the draft's own race is what the target most often takes instead."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from opentelemetry.trace import Link

from outrider.engine.kv_cache_manager import CachedSequence, KVCacheManager
from outrider.engine.sampler import SequenceSampler
from outrider.planner.acceptance import PRIOR_WEIGHT, Acceptance
from outrider.proposers.base import ProposerState
from outrider.proposers.draft_rows import DraftRows, DraftRule, DraftSampling
from outrider.rpc.errors import FailedPrecondition
from outrider.rpc.messages import Commit, Credit, DraftEvent, DraftTokens, TokenWeights

MAX_TOP_TOKENS = 4  # other tokens considered at one position
MEMORY = 50.0  # verifications that an estimate looks back on
PRIOR_RANKS = (0.4, 0.15, 0.1, 0.05)  # chance that the correction is the first, second, ... of the top tokens
LEAST_CHANCE = 0.004  # of an outcome that is worth a branch

TopTokens = dict[int, tuple[int, ...]]  # other tokens for a position, the likeliest first


@dataclass(slots=True, eq=False)
class Branch:
    """A chain that leaves its parent at `position`. `sequence` holds all tokens from the prompt on."""

    chain: int
    parent: int  # number of the chain it leaves
    position: int  # of its first token, a guess
    sequence: CachedSequence
    top_tokens: TopTokens = field(default_factory=dict)
    outcome: Outcome = field(init=False)  # what it is for
    chance: float = 0.0  # of that, as last estimated
    goes_on: bool = False  # whether a second window is worth drafting, too
    sent: int = field(init=False)  # tokens below it left in a piece
    ended: bool = False

    def __post_init__(self) -> None:
        self.sent = self.position
        self.outcome = Outcome(self.parent, self.position, self.sequence.tokens[self.position])

    def agrees(self, committed: int, new: Sequence[int]) -> bool:
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
    """Of two windows and the tokens after them: chance of another token, [2 (window + 1), ranks]; and that all of the
    first one holds."""

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
        _add_outcomes(found, table, branch.chance, branch.chain, branch.position + 1, branch.top_tokens)
    return found


def _add_outcomes(
    found: dict[Outcome, float], table: OutcomeTable, reached: float, chain: int, first: int, top_tokens: TopTokens
) -> None:
    """Those of one chain or branch, to whose verification from `first` on it comes with chance `reached`."""
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


def matching_branch(branches: Iterable[Branch], committed: int, new: Sequence[int]) -> Branch | None:
    """The branch of the lowest number that goes on from what was committed, its guess included."""
    end = committed + len(new)
    agreeing = [branch for branch in branches if branch.position < end and branch.agrees(committed, new)]
    return min(agreeing, key=lambda branch: branch.chain, default=None)


SequenceKey = tuple[int, int]  # stream number, sequence id
Sink = Callable[[DraftEvent], None]  # called on the device thread
MAX_AHEAD = 512  # tokens past the committed ones, whatever the credit: a target holds no more


@dataclass(frozen=True, slots=True)
class ModelState:
    """What drafting with the model needs beside the tokens."""

    sampler: SequenceSampler  # counts the committed tokens
    draft_sampling: DraftSampling


@dataclass(slots=True, eq=False)
class DraftSequence:
    """`sequence.tokens` are the committed tokens, then those of the chain."""

    key: SequenceKey
    sequence: CachedSequence
    prompt_len: int
    chain: int
    capacity: int  # positions at or past it are never drafted
    method: ModelState | ProposerState  # a token-only method's state holds the same tokens
    sink: Sink
    arrival: int = 0  # order of arrival, for fairness and preemption
    priority: int = 0
    deadline: float | None = None  # on the device thread's clock
    parent: DraftSequence | None = None  # whose prompt this one shares
    link: Link | None = None  # the request's span
    committed: int = field(init=False)
    until: int = 0
    piece_len: int = 0
    admitted: bool = False  # has looked into the prefix cache since it last held no blocks
    ended: bool = False  # the chain cannot go on
    finished: bool = False  # the target commits nothing more
    released: bool = False
    draft_us: int = 0  # device time since the last piece
    max_branches: int = 0
    evicted_at: int = -1  # the committed length at which branches had to make room; until it grows there are none
    branches: list[Branch] = field(default_factory=list)  # of the chain, for other outcomes
    top_tokens: TopTokens = field(default_factory=dict)  # to the chain's tokens
    rates: OutcomeRates = field(default_factory=OutcomeRates)
    last_chain: int = field(init=False)  # the highest number given
    _sent: int = field(init=False)  # tokens below it left in a piece, or are committed
    _weights: list[TokenWeights | None] = field(default_factory=list)  # of the tokens not sent
    _chain_survived: bool = False  # the last commit left the chain alive
    _idle_at: int = -1  # the committed length at which an empty piece was sent

    def __post_init__(self) -> None:
        self.committed = self._sent = len(self.sequence)
        self.last_chain = self.chain

    @property
    def limit(self) -> int:
        """Positions below it may be drafted now."""
        return min(self.until, self.capacity, self.committed + MAX_AHEAD) if self.piece_len else 0

    @property
    def wants_tokens(self) -> bool:
        """Whether one more token is to be drafted."""
        return len(self.sequence) < self.limit and not (self.ended or self.finished)

    @property
    def stretch(self) -> int:
        """How many tokens come next before a piece is full, or credit ends."""
        return min(self.limit, self._sent + self.piece_len) - len(self.sequence)

    @property
    def prompt_is_computed(self) -> bool:
        """Whether the prompt can be shared."""
        return self.sequence.num_computed_tokens >= self.prompt_len - 1

    def rows(self, num_rows: int) -> DraftRows | None:
        """A step of this sequence with the model; None where it drafts without."""
        if not isinstance(self.method, ModelState):
            return None
        sampler, draft_sampling = self.method.sampler, self.method.draft_sampling
        return DraftRows(
            self.sequence, num_rows, self.committed, sampler, draft_sampling, self.limit, self.num_top_tokens
        )

    @property
    def num_top_tokens(self) -> int:
        """How many other tokens are noted at each position. A guess under rejection is hardly ever right."""
        branching = self.max_branches and isinstance(self.method, ModelState)
        return min(MAX_TOP_TOKENS, self.max_branches) if branching and not self._weighs else 0

    @property
    def _weighs(self) -> bool:
        return isinstance(self.method, ModelState) and self.method.draft_sampling.rule is DraftRule.REJECTION

    @property
    def window_is_drafted(self) -> bool:
        """Whether the chain holds all that the next verification can take: what comes now is ahead of it."""
        return self.ended or len(self.sequence) >= min(self.committed + self.piece_len, self.limit)

    def grant(self, credit: Credit) -> None:
        """Applies a credit at once; `until` never falls."""
        self.until = max(self.until, credit.until)
        self.piece_len = credit.max_window
        self.max_branches = credit.max_branches

    def on_commit(self, commit: Commit, cache: KVCacheManager) -> None:
        """Takes committed tokens; what is known already is ignored. FailedPrecondition if some are missing."""
        if commit.position > self.committed:
            message = f"commit at {commit.position}, {self.committed} tokens are committed here"
            raise FailedPrecondition(message, reason="COMMIT_GAP")
        new = commit.ids[self.committed - commit.position :]
        self._observe(commit, new)
        agreed = _common_prefix(new, self.sequence.tokens[self.committed :])
        chosen = matching_branch(self.branches, self.committed, new) if agreed < len(new) else None
        if chosen is not None and chosen.chain not in commit.dropped:
            self._promote(chosen, cache)
        elif agreed < len(new):
            self._restart(self.committed + agreed, new[agreed:], cache)
        elif self.chain in commit.dropped:
            self._restart(self.committed + agreed, (), cache)
        else:
            self._chain_survived = bool(new)
        self.committed += len(new)
        self._forget_decided(new, commit.dropped, cache)
        if isinstance(self.method, ModelState):
            self.method.sampler.append(new)
        self.finished = self.finished or commit.finish_reason is not None

    def add_weights(self, weights: TokenWeights | None) -> None:
        """Notes what the token just appended to `sequence` was drawn from; None is one-hot."""
        self._weights.append(weights)

    def roll_back(self, cache: KVCacheManager) -> None:
        """Takes tokens off the chain whose weights were not noted, as after a step that failed between the two."""
        length = self._sent + len(self._weights)
        if length < len(self.sequence):
            cache.truncate(self.sequence, length)
            self.ended = False

    def take_pieces(self) -> Iterator[DraftTokens]:
        """The pieces that are due: full ones, and the rest when nothing more will come without another message."""
        while unsent := 0 if self.finished else len(self.sequence) - self._sent:
            if unsent < self.piece_len and self.wants_tokens and not self._awaited:
                break
            count = min(unsent, self.piece_len or unsent)
            yield self._piece(count, more=unsent > count or self.wants_tokens)
        self._chain_survived = False
        yield from self._branch_pieces()
        if self._is_idle:
            self._idle_at = self.committed
            yield DraftTokens(self.key[1], self.chain, self.committed, ())

    @property
    def _is_idle(self) -> bool:
        """Whether the target has to be told, once per commit, that there is nothing to wait for."""
        has_credit = self.piece_len > 0 and self.until > self.committed and not self.finished
        at_end = len(self.sequence) == self.committed and not self.wants_tokens
        return has_credit and at_end and self._idle_at != self.committed

    def _piece(self, count: int, more: bool) -> DraftTokens:
        position, taken = self._sent, self._weights[:count]
        ids = tuple(self.sequence.tokens[position : position + count])
        weights = tuple(taken) if any(entry is not None for entry in taken) else ()
        piece = DraftTokens(self.key[1], self.chain, position, ids, weights, more=more, draft_us=self.draft_us)
        self._sent += count
        del self._weights[:count]
        self.draft_us = 0
        return piece

    def _branch_pieces(self) -> Iterator[DraftTokens]:
        """First a guess and a window as a whole, then full pieces, and the rest where a branch rests."""
        for branch in self.branches:
            if branch.parent != self.chain or branch.position > self.committed + self.piece_len:
                continue  # for the verification after this one
            rests = branch.ended or len(branch.sequence) >= self.end_of(branch)
            while unsent := len(branch.sequence) - branch.sent:
                position, first = branch.sent, branch.sent == branch.position
                count = min(unsent, self.piece_len + first)
                if count < self.piece_len + first and not rests:
                    break
                branch.sent += count
                ids = tuple(branch.sequence.tokens[position : branch.sent])
                yield DraftTokens(self.key[1], branch.chain, position, ids, parent=branch.parent if first else None)

    def end_of(self, branch: Branch) -> int:
        """Where a branch rests until it is chosen: after a window, and after two where all of one may well hold."""
        whole = branch.position + 1 + self.piece_len
        return min(whole + branch.goes_on * (self.piece_len + 1), self.limit)

    @property
    def _awaited(self) -> bool:
        """Whether the target may be waiting for what is not sent: right after a commit that the chain outlived. Only a
        chain without weights may leave early for that; with weights it would tell of tokens already drawn."""
        return self._chain_survived and not self._weighs and self._sent < self.committed + self.piece_len

    def _observe(self, commit: Commit, new: Sequence[int]) -> None:
        """Learns from a verification of this chain's window, if its tokens are new here."""
        if not commit.num_drafted or len(new) != len(commit.ids):
            return
        place = commit.position + commit.num_accepted
        known = self.top_tokens if commit.chain == self.chain else None
        differs = (
            place < len(self.sequence)
            and commit.num_accepted < len(new)
            and (new[commit.num_accepted] != self.sequence.tokens[place])
        )
        rank = rank_of(known, place, new[commit.num_accepted]) if known and differs else None
        self.rates.observe(commit.num_drafted, commit.num_accepted, rank)

    def _promote(self, branch: Branch, cache: KVCacheManager) -> None:
        """A branch takes the chain's place, which is given up."""
        self.branches.remove(branch)
        cache.release(self.sequence)
        self.sequence, self.chain, self.top_tokens = branch.sequence, branch.chain, branch.top_tokens
        self._sent, self.ended, self._chain_survived = branch.sent, branch.ended, True
        self._weights = [None] * (len(self.sequence) - self._sent)
        self.draft_us = 0

    def _forget_decided(self, new: Sequence[int], dropped: Sequence[int], cache: KVCacheManager) -> None:
        """Gives up what the tokens just committed have decided, and what the target does not hold. What leaves the
        chain, or such a branch, later on stays."""
        self.top_tokens = {at: others for at, others in self.top_tokens.items() if at >= self.committed}
        before, branches, self.branches = self.committed - len(new), self.branches, []
        for branch in branches:
            is_open = branch.position >= self.committed and branch.agrees(before, new)
            if is_open and branch.chain not in dropped:
                self.branches.append(branch)
            else:
                cache.release(branch.sequence)

    def drop_branches(self, cache: KVCacheManager) -> None:
        """Releases every branch."""
        for branch in self.branches:
            cache.release(branch.sequence)
        self.branches.clear()

    def _restart(self, length: int, ids: Sequence[int], cache: KVCacheManager) -> None:
        """Keeps the first `length` tokens, appends committed ones, and starts a new chain after them."""
        if ids:
            # Up to `length` all may be computed: the token after it is replaced, not truncated and computed again.
            cache.truncate(self.sequence, length + 1)
            self.sequence.tokens[length:] = ids
        else:
            cache.truncate(self.sequence, length)
        if not isinstance(self.method, ModelState):
            self.method.truncate(length)
            self.method.append(ids)
        self.drop_branches(cache)
        self.top_tokens = {}
        self.last_chain += 1
        self.chain, self._chain_survived = self.last_chain, False
        self._sent = len(self.sequence)
        self._weights.clear()
        self.draft_us = 0
        self.ended = False


def _common_prefix(new: Sequence[int], drafted: Sequence[int]) -> int:
    """How many tokens at the start are equal."""
    for index, (left, right) in enumerate(zip(new, drafted, strict=False)):
        if left != right:
            return index
    return min(len(new), len(drafted))
