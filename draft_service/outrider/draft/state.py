"""One sequence in the draft: the committed tokens, the chain drafted past them, credit, and what is not sent yet.

Committed tokens are one append-only list that only the target extends. A commit that agrees with the chain lets it go
on; where it parts from it and a branch agrees, the branch takes the chain's place; else a new chain starts at the
committed length, as when a commit runs past the chain's end or names it as dropped. What is in the cache of their
common prefix stays there.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

from opentelemetry.trace import Link

from outrider.draft.branches import MAX_ALTERNATIVES, Alternatives, Branch, OutcomeRates, rank_of, winner
from outrider.engine.sampling import SequenceSampler
from outrider.engine.sequence import Sequence, SequenceCache
from outrider.proposers.base import ProposerState
from outrider.proposers.draft_rows import DraftLaw, DraftRows, DraftRule
from outrider.wire.errors import FailedPrecondition
from outrider.wire.messages import Commit, Credit, Piece, TokenWeights

SequenceKey = tuple[int, int]  # stream number, sequence id
MAX_AHEAD = 512  # tokens past the committed ones, whatever the credit: a target holds no more


@dataclass(frozen=True, slots=True)
class ModelState:
    """What drafting with the model needs beside the tokens."""

    sampler: SequenceSampler  # counts the committed tokens
    law: DraftLaw


@dataclass(slots=True, eq=False)
class DraftSequence:
    """`sequence.tokens` are the committed tokens, then those of the chain."""

    key: SequenceKey
    sequence: Sequence
    prompt_len: int
    chain: int
    capacity: int  # positions at or past it are never drafted
    method: ModelState | ProposerState  # a token-only method's state holds the same tokens
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
    crowded_at: int = -1  # the committed length at which branches had to make room; until it grows there are none
    branches: list[Branch] = field(default_factory=list)  # of the chain, for other outcomes
    alternatives: Alternatives = field(default_factory=dict)  # to the chain's tokens
    rates: OutcomeRates = field(default_factory=OutcomeRates)
    last_chain: int = field(init=False)  # the highest number given
    _sent: int = field(init=False)  # tokens below it left in a piece, or are committed
    _weights: list[TokenWeights | None] = field(default_factory=list)  # of the tokens not sent
    _outlived: bool = False  # the last commit left the chain alive
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
        sampler, law = self.method.sampler, self.method.law
        return DraftRows(self.sequence, num_rows, self.committed, sampler, law, self.limit, self.num_alternatives)

    @property
    def num_alternatives(self) -> int:
        """How many other tokens are noted at each position. A guess under rejection is hardly ever right."""
        branching = self.max_branches and isinstance(self.method, ModelState)
        return min(MAX_ALTERNATIVES, self.max_branches) if branching and not self._weighs else 0

    @property
    def _weighs(self) -> bool:
        return isinstance(self.method, ModelState) and self.method.law.rule is DraftRule.REJECTION

    @property
    def window_is_drafted(self) -> bool:
        """Whether the chain holds all that the next verification can take: what comes now is ahead of it."""
        return self.ended or len(self.sequence) >= min(self.committed + self.piece_len, self.limit)

    def grant(self, credit: Credit) -> None:
        """Applies a credit at once; `until` never falls."""
        self.until = max(self.until, credit.until)
        self.piece_len = credit.max_window
        self.max_branches = credit.max_branches

    def on_commit(self, commit: Commit, cache: SequenceCache) -> None:
        """Takes committed tokens; what is known already is ignored. FailedPrecondition if some are missing."""
        if commit.position > self.committed:
            message = f"commit at {commit.position}, {self.committed} tokens are committed here"
            raise FailedPrecondition(message, reason="COMMIT_GAP")
        new = commit.ids[self.committed - commit.position :]
        self._observe(commit, new)
        agreed = _common_prefix(new, self.sequence.tokens[self.committed :])
        chosen = winner(self.branches, self.committed, new) if agreed < len(new) else None
        if chosen is not None and chosen.chain not in commit.dropped:
            self._adopt(chosen, cache)
        elif agreed < len(new):
            self._restart(self.committed + agreed, new[agreed:], cache)
        elif self.chain in commit.dropped:
            self._restart(self.committed + agreed, (), cache)
        else:
            self._outlived = bool(new)
        self.committed += len(new)
        self._forget_decided(new, commit.dropped, cache)
        if isinstance(self.method, ModelState):
            self.method.sampler.append(new)
        self.finished = self.finished or commit.finish_reason is not None

    def add_weights(self, weights: TokenWeights | None) -> None:
        """Notes what the token just appended to `sequence` was drawn from; None is one-hot."""
        self._weights.append(weights)

    def roll_back(self, cache: SequenceCache) -> None:
        """Takes tokens off the chain whose weights were not noted, as after a step that failed between the two."""
        length = self._sent + len(self._weights)
        if length < len(self.sequence):
            cache.truncate(self.sequence, length)
            self.ended = False

    def take_pieces(self) -> Iterator[Piece]:
        """The pieces that are due: full ones, and the rest when nothing more will come without another message."""
        while unsent := 0 if self.finished else len(self.sequence) - self._sent:
            if unsent < self.piece_len and self.wants_tokens and not self._awaited:
                break
            count = min(unsent, self.piece_len or unsent)
            yield self._piece(count, more=unsent > count or self.wants_tokens)
        self._outlived = False
        yield from self._branch_pieces()
        if self._is_idle:
            self._idle_at = self.committed
            yield Piece(self.key[1], self.chain, self.committed, ())

    @property
    def _is_idle(self) -> bool:
        """Whether the target has to be told, once per commit, that there is nothing to wait for."""
        has_credit = self.piece_len > 0 and self.until > self.committed and not self.finished
        at_end = len(self.sequence) == self.committed and not self.wants_tokens
        return has_credit and at_end and self._idle_at != self.committed

    def _piece(self, count: int, more: bool) -> Piece:
        position, taken = self._sent, self._weights[:count]
        ids = tuple(self.sequence.tokens[position : position + count])
        weights = tuple(taken) if any(entry is not None for entry in taken) else ()
        piece = Piece(self.key[1], self.chain, position, ids, weights, more=more, draft_us=self.draft_us)
        self._sent += count
        del self._weights[:count]
        self.draft_us = 0
        return piece

    def _branch_pieces(self) -> Iterator[Piece]:
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
                yield Piece(self.key[1], branch.chain, position, ids, parent=branch.parent if first else None)

    def end_of(self, branch: Branch) -> int:
        """Where a branch rests until it is chosen: after a window, and after two where all of one may well hold."""
        whole = branch.position + 1 + self.piece_len
        return min(whole + branch.goes_on * (self.piece_len + 1), self.limit)

    @property
    def _awaited(self) -> bool:
        """Whether the target may be waiting for what is not sent: right after a commit that the chain outlived. Only a
        chain without weights may leave early for that; with weights it would tell of tokens already drawn."""
        return self._outlived and not self._weighs and self._sent < self.committed + self.piece_len

    def _observe(self, commit: Commit, new: Many[int]) -> None:
        """Learns from a verification of this chain's window, if its tokens are new here."""
        if not commit.num_drafted or len(new) != len(commit.ids):
            return
        place = commit.position + commit.num_accepted
        known = self.alternatives if commit.chain == self.chain else None
        differs = (
            place < len(self.sequence)
            and commit.num_accepted < len(new)
            and (new[commit.num_accepted] != self.sequence.tokens[place])
        )
        rank = rank_of(known, place, new[commit.num_accepted]) if known and differs else None
        self.rates.observe(commit.num_drafted, commit.num_accepted, rank)

    def _adopt(self, branch: Branch, cache: SequenceCache) -> None:
        """A branch takes the chain's place, which is given up."""
        self.branches.remove(branch)
        cache.release(self.sequence)
        self.sequence, self.chain, self.alternatives = branch.sequence, branch.chain, branch.alternatives
        self._sent, self.ended, self._outlived = branch.sent, branch.ended, True
        self._weights = [None] * (len(self.sequence) - self._sent)
        self.draft_us = 0

    def _forget_decided(self, new: Many[int], dropped: Many[int], cache: SequenceCache) -> None:
        """Gives up what the tokens just committed have decided, and what the target does not hold. What leaves the
        chain, or such a branch, later on stays."""
        self.alternatives = {at: others for at, others in self.alternatives.items() if at >= self.committed}
        before, branches, self.branches = self.committed - len(new), self.branches, []
        for branch in branches:
            is_open = branch.position >= self.committed and branch.agrees(before, new)
            if is_open and branch.chain not in dropped:
                self.branches.append(branch)
            else:
                cache.release(branch.sequence)

    def drop_branches(self, cache: SequenceCache) -> None:
        """Releases every branch."""
        for branch in self.branches:
            cache.release(branch.sequence)
        self.branches.clear()

    def _restart(self, length: int, ids: Many[int], cache: SequenceCache) -> None:
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
        self.alternatives = {}
        self.last_chain += 1
        self.chain, self._outlived = self.last_chain, False
        self._sent = len(self.sequence)
        self._weights.clear()
        self.draft_us = 0
        self.ended = False


def _common_prefix(new: Many[int], drafted: Many[int]) -> int:
    """How many tokens at the start are equal."""
    for index, (left, right) in enumerate(zip(new, drafted, strict=False)):
        if left != right:
            return index
    return min(len(new), len(drafted))
