"""One sequence in the draft: the committed tokens, the chain drafted past them, its branches, and how far it may go.

Committed tokens are one append-only list that only the target extends. A commit that agrees with the chain lets it go
on; where it parts from it and a branch agrees, the branch takes the chain's place; else a new chain starts at the
committed length, as when a commit runs past the chain's end or names it as dropped. What is in the cache of their
common prefix stays there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from outrider.draft_service.chains import MAX_TOP_TOKENS, Branch, Branches, Chain
from outrider.engine.kv_cache_manager import CachedSequence, KVCacheManager
from outrider.engine.sampler import SequenceSampler
from outrider.proposers.base import ProposerState, SequenceContext
from outrider.proposers.draft_rows import DraftRows, DraftRule, DraftSampling
from outrider.proposers.draft_text import DraftText
from outrider.rpc.errors import FailedPrecondition
from outrider.rpc.messages import Commit, Credit, DraftEvent, DraftTokens

SequenceKey = tuple[int, int]  # stream number, sequence id
Sink = Callable[[DraftEvent], None]  # called on the device thread
MAX_AHEAD = 512  # tokens past the committed ones, whatever the credit: a target holds no more


@dataclass(frozen=True, slots=True)
class ModelState:
    """What drafting with the model needs beside the tokens."""

    sampler: SequenceSampler  # counts the committed tokens
    draft_sampling: DraftSampling


@dataclass(slots=True)
class DraftLimits:
    """How far a sequence may be drafted: the gateway's credit, and the end of the context."""

    capacity: int  # own tokens
    until: int = 0
    piece_len: int = 0  # tokens of a full piece
    max_branches: int = 0

    def grant(self, credit: Credit) -> None:
        """Applies a credit at once; `until` never falls."""
        self.until = max(self.until, credit.until)
        self.piece_len = credit.max_window
        self.max_branches = credit.max_branches

    def end(self, committed: int, num_own: int) -> int:
        """Positions below it may be drafted now, where the committed tokens are so many of the draft's own."""
        room = self.capacity - num_own  # a drafted token is one of its own
        return min(self.until, committed + min(room, MAX_AHEAD)) if self.piece_len else 0


@dataclass(slots=True, eq=False)
class DraftSequence:
    """The chain's tokens are the committed ones, then those drafted past them."""

    key: SequenceKey
    prompt_len: int
    chain: Chain
    limits: DraftLimits
    method: ModelState | ProposerState  # a token-only method's state holds the same tokens
    sink: Sink
    method_name: str = ""
    branches: Branches = field(default_factory=Branches)
    seniority: tuple[int, int] = (0, 0)  # priority, then order of arrival: the least goes first
    deadline: float | None = None  # on the device thread's clock
    parent: DraftSequence | None = None  # whose prompt this one shares
    traceparent: str = ""  # of the request, if it is traced
    committed: int = field(init=False)  # the committed length
    admitted: bool = False  # has looked into the prefix cache since it last held no blocks
    finished: bool = False  # the target commits nothing more
    released: bool = False
    _last_chain: int = field(init=False)  # the highest number given
    _chain_survived: bool = False  # the last commit left the chain alive
    _idle_at: int = -1  # the committed length at which an empty piece was sent

    def __post_init__(self) -> None:
        self.committed = len(self.text)
        self._last_chain = self.chain.number

    @property
    def sequence(self) -> CachedSequence:
        """The draft's own tokens of the chain, and their blocks."""
        return self.chain.sequence

    @property
    def text(self) -> DraftText:
        """The chain's tokens."""
        return self.chain.text

    @property
    def context(self) -> SequenceContext:
        """What methods that learn are told beside the tokens."""
        return SequenceContext(self.prompt_len, self.sequence.salt)

    @property
    def limit(self) -> int:
        """Positions below it may be drafted now."""
        return self.limits.end(self.committed, self.text.num_own(self.committed))

    @property
    def wants_tokens(self) -> bool:
        """Whether one more token is to be drafted."""
        return len(self.text) < self.limit and not (self.chain.ended or self.finished)

    @property
    def stretch(self) -> int:
        """How many tokens come next before a piece is full, or credit ends."""
        return min(self.limit, self.chain.sent + self.limits.piece_len) - len(self.text)

    @property
    def prompt_is_computed(self) -> bool:
        """Whether the prompt can be shared."""
        return self.sequence.num_computed_tokens >= self.text.num_own(self.prompt_len) - 1

    @property
    def num_top_tokens(self) -> int:
        """How many other tokens are noted at each position. A guess under rejection is hardly ever right."""
        branching = self.limits.max_branches and isinstance(self.method, ModelState)
        return min(MAX_TOP_TOKENS, self.limits.max_branches) if branching and not self._weighs else 0

    @property
    def window_is_drafted(self) -> bool:
        """Whether the chain holds all that the next verification can take: what comes now is ahead of it."""
        return self.chain.ended or len(self.text) >= min(self.committed + self.limits.piece_len, self.limit)

    @property
    def may_branch(self) -> bool:
        """Whether it is asked to, has something to branch from, and did not just have to make room for others."""
        asked = self.num_top_tokens > 0 and self.limits.piece_len > 0
        return asked and not self.finished and self.branches.evicted_at != self.committed

    def end_of(self, branch: Branch) -> int:
        """Where a branch rests until it is chosen."""
        return branch.end(self.limits.piece_len, self.limit)

    def next_number(self) -> int:
        """For another chain: numbers only grow."""
        self._last_chain += 1
        return self._last_chain

    def rows(self, chain: Chain, num_rows: int) -> DraftRows | None:
        """A step of the chain, or of a branch, with the model; None where the sequence is drafted without."""
        if not isinstance(self.method, ModelState):
            return None
        sampler, draft_sampling = self.method.sampler, self.method.draft_sampling.of_chain(chain.number, chain.start)
        return DraftRows(chain.text, num_rows, self.committed, sampler, draft_sampling, self.limit, self.num_top_tokens)

    def on_commit(self, commit: Commit, cache: KVCacheManager) -> None:
        """Takes committed tokens; what is known already is ignored. FailedPrecondition if some are missing."""
        if commit.position > self.committed:
            message = f"commit at {commit.position}, {self.committed} tokens are committed here"
            raise FailedPrecondition(message, reason="COMMIT_GAP")
        new = commit.ids[self.committed - commit.position :]
        self.branches.observe(self.chain, commit, new)
        agreed = _common_prefix(new, self.text.tokens[self.committed :])
        branch = self.branches.matching(self.committed, new) if agreed < len(new) else None
        if branch is not None and branch.number not in commit.dropped:
            self._promote(branch, cache)
        elif agreed < len(new):
            self._restart(self.committed + agreed, new[agreed:], cache)
        elif self.chain.number in commit.dropped:
            self._restart(self.committed + agreed, (), cache)
        else:
            self._chain_survived = bool(new)
        self.branches.keep_open(self.committed, new, commit.dropped, cache)
        self.committed += len(new)
        top_tokens = self.chain.top_tokens
        self.chain.top_tokens = {at: others for at, others in top_tokens.items() if at >= self.committed}
        if isinstance(self.method, ModelState):
            self.method.sampler.append(new)
        self.finished = self.finished or commit.finish_reason is not None

    def take_pieces(self) -> Iterator[DraftTokens]:
        """The pieces that are due: full ones, and the rest when nothing more will come without another message. Of the
        branches those for the verification under way."""
        sequence_id, piece_len, limit = self.key[1], self.limits.piece_len, self.limit
        while unsent := 0 if self.finished else self.chain.num_unsent:
            if unsent < piece_len and self.wants_tokens and not self._awaited:
                break
            count = min(unsent, piece_len or unsent)
            yield self.chain.take(sequence_id, count, more=unsent > count or self.wants_tokens)
        self._chain_survived = False
        for branch in self.branches:
            if branch.parent == self.chain.number and branch.position <= self.committed + piece_len:
                yield from branch.pieces(sequence_id, piece_len, limit)
        if self._is_idle:
            self._idle_at = self.committed
            yield DraftTokens(sequence_id, self.chain.number, self.committed, ())

    @property
    def _weighs(self) -> bool:
        return isinstance(self.method, ModelState) and self.method.draft_sampling.rule is DraftRule.REJECTION

    @property
    def _is_idle(self) -> bool:
        """Whether the target has to be told, once per commit, that there is nothing to wait for."""
        has_credit = self.limits.piece_len > 0 and self.limits.until > self.committed and not self.finished
        at_end = len(self.text) == self.committed and not self.wants_tokens
        return has_credit and at_end and self._idle_at != self.committed

    @property
    def _awaited(self) -> bool:
        """Whether the target may be waiting for what is not sent: right after a commit that the chain outlived. Only a
        chain without weights may leave early for that; with weights it would tell of tokens already drawn."""
        is_due = self.chain.sent < self.committed + self.limits.piece_len
        return self._chain_survived and not self._weighs and is_due

    def _promote(self, branch: Branch, cache: KVCacheManager) -> None:
        """A branch takes the chain's place, which is given up."""
        self.branches.held.remove(branch)
        cache.release(self.sequence)
        self.chain, self._chain_survived = branch, True

    def _restart(self, length: int, ids: Sequence[int], cache: KVCacheManager) -> None:
        """Keeps the first `length` tokens, appends committed ones, and starts a new chain after them."""
        text = self.text
        text.replace(length, ids, cache)
        if not isinstance(self.method, ModelState):
            self.method.truncate(length)
            self.method.append(ids)
        self.branches.give_up(cache)
        self.chain, self._chain_survived = Chain(self.next_number(), text, sent=len(text)), False


def _common_prefix(new: Sequence[int], drafted: Sequence[int]) -> int:
    """How many tokens at the start are equal."""
    for index, (left, right) in enumerate(zip(new, drafted, strict=False)):
        if left != right:
            return index
    return min(len(new), len(drafted))
