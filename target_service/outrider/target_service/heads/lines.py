"""What one sequence computes and draws after a step, where a head drafts beside the target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from operator import not_
from typing import NamedTuple

from torch import Tensor

from outrider.engine.batch import BatchEntry, PreparedAdapter
from outrider.engine.random import RandomAhead, RandomRange
from outrider.engine.sampler import SamplingRows, SequenceSampler, is_numeric_only
from outrider.proposers.draft_rows import DraftedToken, DraftRule, DraftSampling
from outrider.proposers.drawing import Drawer
from outrider.proposers.tree import Fork, GrowingTree
from outrider.rpc.messages import DraftTokens, TokenWeights
from outrider.target_service.scheduler import ScheduledSequence
from outrider.target_service.sequence import TargetSequence


class WaitingRows(NamedTuple):
    """Rows that no pass has computed yet, from a place on."""

    first: int
    states: list[Tensor]  # [rows, taps, hidden] each, of the positions before

    @property
    def end(self) -> int:
        """The place behind them."""
        return self.first + sum(map(len, self.states))


@dataclass(slots=True)
class HeadLine:
    """What one sequence computes and draws after a step."""

    target: TargetSequence
    scheduled: ScheduledSequence
    offset: int  # the step's row of its first position
    first: int  # place of its first row
    end: int  # after its last one
    count: int  # tokens to draw
    keeps: bool  # what the head computes has places in the cache
    waiting: WaitingRows | None = None  # of its first rows, where these are of steps before
    number: int = 0  # of the chain
    drawn: list[DraftedToken] = field(default_factory=list)
    tree: GrowingTree | None = None  # of which they are tokens to come; None: a chain
    adapter: PreparedAdapter | None = None  # with which the head computes it
    ahead: RandomAhead = field(default_factory=RandomAhead)  # for what is drawn by weights

    @property
    def length(self) -> int:
        """The committed length."""
        return len(self.target.sequence)

    @property
    def sampler(self) -> SequenceSampler:
        """What its tokens follow."""
        return self.target.sampler

    @property
    def draft_sampling(self) -> DraftSampling:
        """How its tokens are drawn."""
        target = self.target
        rule = DraftRule.COUPLED if target.coupled else DraftRule.REJECTION
        rule = DraftRule.ARGMAX if target.greedy or target.open.one_hot else rule
        ahead = target.random_ahead if target.coupled else self.ahead  # a coupled window meets the same noise
        sampling = DraftSampling(rule, target.random_key, ahead=ahead, by_chain=target.by_block)
        return sampling.of_chain(self.number, self.length)

    @property
    def num_top_tokens(self) -> int:
        """How many likely tokens are wanted beside the drawn one: none."""
        return 0

    @property
    def wants_confidence(self) -> bool:
        """Whether drafting ends where the head is unsure: it does not."""
        return False

    @property
    def last_id(self) -> int:
        """The token before the next one."""
        return self.drawn[-1].token_id if self.drawn else self.target.sequence.tokens[-1]

    def num_places(self, block_size: int) -> int:
        """That its blocks have."""
        return len(self.target.sequence.block_table) * block_size

    def span(self) -> RandomRange:
        """Where the random numbers of the next token are."""
        draft_sampling, end = self.draft_sampling, self.length + self.count
        limit = end + 1 if self.target.coupled else end  # with the token behind the window
        return RandomRange(draft_sampling.key, draft_sampling.ahead, self.length + len(self.drawn), 1, limit)

    def sampling_rows(self) -> SamplingRows:
        """The row after the chain, processed as if the chain were committed."""
        chain = [token.token_id for token in self.drawn]
        return SamplingRows(self.target.sampler, chain, first=len(chain))

    def first_entry(self, mask_id: int | None = None) -> BatchEntry:
        """The rows of committed tokens. With a mask token the rows behind them, for all tokens but the first."""
        sequence, ids = self.target.sequence, self.target.sequence.tokens[self.first : self.end]
        if not self.keeps:
            return _alone(ids[0])
        if mask_id is None:
            return BatchEntry(ids, self.first, sequence.block_table, int(self.count > 0), adapter=self.adapter)
        return BatchEntry([*ids, *[mask_id] * self.num_masks], self.first, sequence.block_table, self.count)

    def last_entry(self, block_size: int) -> BatchEntry:
        """The last committed token, behind which drawing begins. Without places there is no table."""
        table = self.target.sequence.block_table if self.keeps else [0] * -(-self.length // block_size)
        return BatchEntry([self.target.sequence.tokens[-1]], self.length - 1, table, 1)

    @property
    def num_masks(self) -> int:
        """Rows of tokens that are not known, where all are drafted in one pass."""
        return max(0, self.count - 1)

    def fork(self, tree: GrowingTree) -> Fork:
        """The root of a tree, where its first tokens are drawn."""
        limit = self.length + self.count + 1
        return Fork(tree, -1, self.target.sampler, self.draft_sampling, self.length, limit)

    def level_entries(self, tree: GrowingTree) -> list[BatchEntry]:
        """The rows of a tree's last level, which want logits; with places, behind those of all other nodes, since rows
        see those of their own pass."""
        if not self.keeps:
            return [_alone(tree.ids[node]) for node in tree.level]
        table, level = self.target.sequence.block_table, len(tree.level)
        return [BatchEntry(tuple(tree.ids), self.length, table, level, tuple(tree.parents), self.adapter)]

    def next_entry(self) -> BatchEntry:
        """The row of the last token drawn."""
        token_id, place = self.drawn[-1].token_id, self.length + len(self.drawn) - 1
        if not self.keeps:
            return _alone(token_id)
        return BatchEntry([token_id], place, self.target.sequence.block_table, 1, adapter=self.adapter)

    def take(self, token: DraftedToken | None) -> bool:
        """Notes a token; whether the line draws another one."""
        if token is None:
            return False
        self.drawn.append(token)
        return len(self.drawn) < self.count

    def piece(self) -> DraftTokens:
        """The chain or tree, as if it had come from a draft."""
        sequence_id = self.target.open.sequence_id
        if self.tree is not None:
            ids, parents = tuple(self.tree.ids), tuple(self.tree.parents)
            parents = () if parents == tuple(range(len(parents))) else parents
            return DraftTokens(sequence_id, self.number, self.length, ids, parents=parents)
        ids = tuple(token.token_id for token in self.drawn)
        weights = tuple(TokenWeights(token.ids, token.weights) if token.ids else None for token in self.drawn)
        weights = weights if any(entry is not None for entry in weights) else ()
        return DraftTokens(sequence_id, self.number, self.length, ids, weights)


@dataclass(frozen=True, slots=True)
class LinePlace:
    """A token of a line that hangs on none of those before it, of a sampler that counts none: all of a line can be
    drawn at once, each with the random numbers of its own position."""

    draft_sampling: DraftSampling  # the line's
    first: RandomRange  # of its first token
    plan: SamplingRows
    offset: int  # tokens of the line before it

    num_top_tokens = 0
    wants_confidence = False

    @classmethod
    def all_of(cls, line: HeadLine) -> list[LinePlace]:
        """The places of a line, in their order."""
        of_line = line.draft_sampling, line.span(), line.sampling_rows()
        return [cls(*of_line, offset) for offset in range(line.count)]

    def span(self) -> RandomRange:
        """Where its random numbers are."""
        return replace(self.first, first=self.first.first + self.offset)

    def sampling_rows(self) -> SamplingRows:
        """As the line's first."""
        return self.plan


Offset = tuple[HeadLine, int]  # a line, and its first row


def apart(lines: Sequence[Offset]) -> tuple[list[Offset], list[Offset]]:
    """Those whose samplers count no tokens, and the others."""
    free = [is_numeric_only(line.sampler) for line, _ in lines]
    return list(compress(lines, free)), list(compress(lines, map(not_, free)))


def draw_at_once(lines: Sequence[HeadLine], logits: Tensor, drawer: Drawer) -> None:
    """All tokens of lines whose places are independent of one another; [tokens of all lines, vocab]."""
    drawn = iter(drawer.draw(logits, [place for line in lines for place in LinePlace.all_of(line)]))
    for line in lines:
        tokens = [next(drawn) for _ in range(line.count)]
        for token in tokens:
            if not line.take(token):
                break


def _alone(token_id: int) -> BatchEntry:
    """A row without a place."""
    return BatchEntry([token_id], 0, [0], 1)
