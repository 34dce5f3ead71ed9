"""One sequence in the draft: the committed tokens, the chain drafted past them, its branches, and how far it may go.

Committed tokens are one append-only list that only the target extends. A commit that agrees with the chain lets it go
on; where it parts from it and a branch agrees, the branch takes the chain's place; else a new chain starts at the
committed length, as when a commit runs past the chain's end or names it as dropped. What is in the cache of their
common prefix stays there.

Where several methods draft in turn, one is chosen whenever all that was drafted has left. Under rejection that must
rest on nothing drawn (no peeking): a token that the model drew and the target has not judged keeps the model at work,
so that what lookups find, how much of it, and which method is chosen follow from committed tokens alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from outrider.draft_service.chains import MAX_TOP_TOKENS, Branch, Branches, Chain
from outrider.draft_service.grammar import DraftGrammar
from outrider.engine.batch import PreparedAdapter
from outrider.engine.kv_cache_manager import CachedSequence, KVCacheManager
from outrider.engine.sampler import SequenceSampler
from outrider.engine.token_tree import TokenTree
from outrider.planner.method_choice import MethodChoice, Offer
from outrider.proposers.base import Lookup, SequenceContext
from outrider.proposers.draft_rows import DraftedToken, DraftRows, DraftRule, DraftSampling
from outrider.proposers.draft_text import DraftText
from outrider.proposers.tree import GrowingTree
from outrider.rpc.errors import FailedPrecondition
from outrider.rpc.learning.lessons import Teaching
from outrider.rpc.messages import Commit, Credit, DraftEvent, DraftTokens

SequenceKey = tuple[int, int]  # stream number, sequence id
Sink = Callable[[DraftEvent], None]  # called on the device thread
MAX_AHEAD = 512  # tokens past the committed ones, whatever the credit: a target holds no more


@dataclass(frozen=True, slots=True)
class ModelState:
    """What drafting with the model needs beside the tokens."""

    sampler: SequenceSampler  # counts the committed tokens
    draft_sampling: DraftSampling
    method: str = "draft_model"
    vocab_size: int = 2**32  # ids of the target below it can be computed
    tree: TokenTree | None = None  # what is drafted in place of chains
    adapter_name: str = ""  # of the target's adapter that it is for; empty: none
    adapter: PreparedAdapter | None = None  # of the draft's model, for that one


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
    methods: tuple[str, ...]  # in the order in which they are tried
    sink: Sink
    model: ModelState | None = None  # for the method with a model
    lookups: tuple[Lookup, ...] = ()  # for those without
    choice: MethodChoice | None = None  # where there are several methods
    clock: Callable[[], float] = time.monotonic
    branches: Branches = field(default_factory=Branches)
    seniority: tuple[int, int] = (0, 0)  # priority, then order of arrival: the least goes first
    deadline: float | None = None  # on the device thread's clock
    parent: DraftSequence | None = None  # whose prompt this one shares
    traceparent: str = ""  # of the request, if it is traced
    grammar: DraftGrammar | None = None  # behind the committed tokens
    memory: str = ""  # a salt: what sequences are drafted for from what others said
    teaching: Teaching | None = None  # where what others were answered may draft for it
    committed: int = field(init=False)  # the committed length
    admitted: bool = False  # has looked into the prefix cache since it last held no blocks
    finished: bool = False  # the target commits nothing more
    released: bool = False
    _tree: DraftTokens | None = None  # that is unsent
    _last_chain: int = field(init=False)  # the highest number given
    _chain_survived: bool = False  # the last commit left the chain alive
    _idle_at: int = -1  # the committed length at which an empty piece was sent
    _verifying_since: float | None = None  # that the target has a window of the chain
    verified_method: str = field(init=False)  # that drafted the window verified last

    def __post_init__(self) -> None:
        self.committed = len(self.text)
        self._last_chain = self.chain.number
        self.verified_method = self.methods[0]

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
        return SequenceContext(self.prompt_len, self.memory)

    @property
    def limit(self) -> int:
        """Positions below it may be drafted now."""
        return self.limits.end(self.committed, self.text.num_own(self.committed))

    @property
    def wants_tokens(self) -> bool:
        """Whether one more token is to be drafted."""
        has_room = len(self.sequence) < self.limits.capacity
        return has_room and len(self.text) < self.limit and not (self.chain.ended or self.finished)

    @property
    def method(self) -> str:
        """What drafts now."""
        if self.chain.runs:
            return self.chain.runs[-1].method
        return self.methods[0] if self.model is None else self.model.method

    @property
    def is_choosing(self) -> bool:
        """Whether lookups are to be asked how the chain goes on, and one of several methods to be chosen: once a
        lookup's tokens have left, or a window of the model's."""
        if not self.lookups or not self.wants_tokens or self.chain.num_unsent:
            return False
        chosen_at, by_model = self.chain.chosen_at, self.model is not None and self.method == self.model.method
        return chosen_at < 0 or len(self.text) >= chosen_at + (self.limits.piece_len if by_model else 1)

    @property
    def wants_passes(self) -> bool:
        """Whether one more token is to be drafted with the model."""
        drafts = self.wants_tokens and self.model is not None and self.method == self.model.method
        return drafts and not self.is_choosing

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
        branching = self.limits.max_branches and self.text.can_branch and self.model is not None and not self.model.tree
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

    @property
    def tree(self) -> TokenTree | None:
        """What to draft behind the committed tokens now, if it is a tree: as large as a window, and no deeper than the
        credit or the context."""
        if self.model is None or self.model.tree is None or len(self.text) > self.committed or not self.wants_tokens:
            return None
        count = min(self.limits.piece_len, self.limit - self.committed, self.limits.capacity - len(self.sequence))
        return self.model.tree.cut(count)

    def hold_tree(self, tree: GrowingTree, draft_us: int) -> None:
        """A tree was drafted: it leaves as a whole, and nothing more is drafted before the next commit."""
        chain = self.chain
        chain.ended, self._idle_at = True, self.committed
        ids, parents = tuple(tree.ids), tuple(tree.parents)
        self._tree = DraftTokens(self.key[1], chain.number, self.committed, ids, parents=parents, draft_us=draft_us)

    def end_of(self, branch: Branch) -> int:
        """Where a branch rests until it is chosen."""
        return branch.end(self.limits.piece_len, self.limit)

    def next_number(self) -> int:
        """The number of another chain: numbers only grow."""
        self._last_chain += 1
        return self._last_chain

    def rows(self, chain: Chain, num_rows: int) -> DraftRows | None:
        """A step of the chain, or of a branch, with the model; None where the sequence is drafted without."""
        if self.model is None:
            return None
        sampler, draft_sampling = self.model.sampler, self.model.draft_sampling.of_chain(chain.number, chain.start)
        tree = self.tree if chain is self.chain else None
        num_top = self.num_top_tokens if tree is None else GrowingTree(tree).num_wanted(-1) - 1
        adapter = self.model.adapter
        parts = chain.text, num_rows, self.committed, sampler, draft_sampling, self.limit, num_top
        return DraftRows(*parts, adapter=adapter)

    def ends_behind(self, chain: Chain, drafted: Sequence[DraftedToken]) -> bool:
        """Whether a chain, or a branch, ends with what was just drawn, since what follows would hardly hold.
        With weights on the wire that must tell nothing of a token drawn: it is so before a piece's first one is, by how
        sure the draft is there, and all others of a piece leave when it is full."""
        if self.model is None or not drafted or drafted[-1].confidence >= self.model.draft_sampling.confidence:
            return False
        return not self._weighs or chain.num_unsent == 1

    def choose(self) -> None:
        """Asks how the chain goes on. What a lookup has is drafted at once, with all of the credit; the model's passes
        are the engine's business. In lock-step a lookup that has less than a window ends it."""
        chain = self.chain
        chain.chosen_at = len(self.text)
        found = self._look_up(self.limit - len(self.text))
        offers = [
            Offer.of_lookup(name, len(found[name])) if name in found else Offer.of_model(name, self.stretch)
            for name in self.methods
            if name in found or (self.model is not None and name == self.model.method)
        ]
        if not offers:
            chain.ended = True  # nothing more is found until the tokens change
            return
        chosen = offers[0]
        if self.choice is not None:
            chosen = self.choice.choose(offers, is_awaited=len(self.text) == self.committed)
            chain.begin_run(chosen.method, chosen.kind)
        if chosen.method in found:
            ids = found[chosen.method]
            self.text.append(ids)
            chain.weights += [None] * len(ids)
            in_lock_step = self.limit <= self.committed + self.limits.piece_len
            chain.ended = self.wants_tokens and (self.choice is None or in_lock_step)

    def on_commit(self, commit: Commit, cache: KVCacheManager) -> None:
        """Takes committed tokens; what is known already is ignored. FailedPrecondition if some are missing."""
        if commit.position > self.committed:
            message = f"commit at {commit.position}, {self.committed} tokens are committed here"
            raise FailedPrecondition(message, reason="COMMIT_GAP")
        new = commit.ids[self.committed - commit.position :]
        self._judge_method(commit, new)
        if self.model is not None and self.model.tree is not None and commit.dropped:
            self.model = replace(self.model, tree=None)  # this target takes none
        self._tree = None if new else self._tree
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
        if self.model is not None:
            self.model.sampler.append(new)
        if self.grammar is not None:
            self.grammar.advance(new)
        self.finished = self.finished or commit.finish_reason is not None
        self._verifying_since = self.clock() if self.choice and self.chain.sent > self.committed else None

    def take_pieces(self) -> Iterator[DraftTokens]:
        """The pieces that are due: full ones, and the rest when nothing more will come without another message. Of the
        branches those for the verification under way."""
        sequence_id, piece_len, limit = self.key[1], self.limits.piece_len, self.limit
        if self._tree is not None and not self.finished:
            tree, self._tree = self._tree, None
            yield tree
        while unsent := 0 if self.finished else max(0, min(self.chain.num_unsent, limit - self.chain.sent)):
            if unsent < piece_len and self.wants_passes and not self._awaited:
                break
            count = min(unsent, piece_len or unsent)
            if self.choice is not None and self.chain.sent == self.committed:
                self._verifying_since = self.clock()
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
        return self.model is not None and self.model.draft_sampling.rule is DraftRule.REJECTION

    def _look_up(self, room: int) -> dict[str, list[int]]:
        """What lookups have, by method; nothing while drawn tokens wait for their verdict."""
        found: dict[str, list[int]] = {}
        if self.chain.drawn > self.committed:
            return found
        for lookup in self.lookups:
            started = self.clock()
            ids = lookup.propose(self.text.tokens, room)
            if self.model is not None:  # which has to read them
                ids = _below(self.model.vocab_size, ids)
            if ids and self.grammar is not None:
                ids = self.grammar.cut(self.text.tokens[self.committed :], ids)
            if ids:
                found[lookup.method] = ids
            took_us = 1e6 * (self.clock() - started)
            self.chain.draft_us += max(1, round(took_us))
            if self.choice is not None:
                self.choice.rates.add_draft(lookup.method, len(ids), took_us)
        return found

    def _judge_method(self, commit: Commit, new: Sequence[int]) -> None:
        """Learns what came of the method that drafted the window, if its tokens are new here."""
        found = self.chain.run_at(commit.position) if commit.chain == self.chain.number else None
        if self.choice is None or found is None or not commit.num_drafted or len(new) != len(commit.ids):
            return
        run, end = found
        num_drafted = min(commit.num_drafted, end - commit.position)
        rest_us = None if self._verifying_since is None else 1e6 * (self.clock() - self._verifying_since)
        self.choice.add_round(run.kind, num_drafted, min(commit.num_accepted, num_drafted), rest_us)
        self.verified_method = run.method

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
        self._forget(branch.position)
        cache.release(self.sequence)
        self.chain, self._chain_survived = branch, True

    def _restart(self, length: int, ids: Sequence[int], cache: KVCacheManager) -> None:
        """Keeps the first `length` tokens, appends committed ones, and starts a new chain after them."""
        text = self.text
        text.replace(length, ids, cache)
        self._forget(length)
        self.branches.give_up(cache)
        self.chain, self._chain_survived = Chain(self.next_number(), text, sent=len(text)), False

    def _forget(self, length: int) -> None:
        """The tokens past the first `length` are others now."""
        for lookup in self.lookups:
            lookup.truncate(length)


def _below(bound: int, ids: list[int]) -> list[int]:
    """The leading entries below a bound, up to the first that is not."""
    return ids[: next((index for index, token_id in enumerate(ids) if token_id >= bound), len(ids))]


def _common_prefix(new: Sequence[int], drafted: Sequence[int]) -> int:
    """How many tokens at the start are equal."""
    for index, (left, right) in enumerate(zip(new, drafted, strict=False)):
        if left != right:
            return index
    return min(len(new), len(drafted))
