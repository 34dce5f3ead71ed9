"""What a draft computes and draws of one sequence in a step, and what comes of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import IntEnum

from outrider.engine.batch import BatchEntry, PreparedAdapter
from outrider.engine.kv_cache_manager import CachedSequence
from outrider.engine.random import RandomAhead, RandomKey, RandomRange
from outrider.engine.sampler import SamplingRows, SequenceSampler
from outrider.proposers.draft_text import DraftText
from outrider.proposers.reencoding import PairMap

NUMBER_BITS = START_BITS = 30  # of a draw


class DraftRule(IntEnum):
    """How a token is drawn from the draft's probabilities."""

    ARGMAX = 0  # greedy requests, and one-hot drafts of sampled ones: the likeliest to be accepted
    REJECTION = 1
    COUPLED = 2


@dataclass(frozen=True, slots=True)
class DraftSampling:
    """How one sequence draws, and its random numbers."""

    rule: DraftRule
    key: RandomKey
    mapping: PairMap | None = None  # None: the target's ids are the draft's own
    ahead: RandomAhead = field(default_factory=RandomAhead)
    by_chain: bool = False  # whether every chain has random numbers of its own
    confidence: float = 0.0  # a draft ends behind a token of which the model is less sure

    def of_chain(self, number: int, start: int) -> DraftSampling:
        """How a chain from position `start` on draws. In a block, drafted tokens count also behind the one that is
        refused: the next chain must not be drawn with the same words. Its number tells it from those before; its start
        also where a client goes on with the same seed, and numbers begin again."""
        if not self.by_chain:
            return self
        draw = (start % (1 << START_BITS)) << NUMBER_BITS | number % (1 << NUMBER_BITS)
        return replace(self, key=replace(self.key, draw=draw))


@dataclass(frozen=True, slots=True)
class DraftRows:
    """What one sequence computes in a step: its next `num_rows` tokens. If these are all, it draws the next one."""

    text: DraftText
    num_rows: int  # of its own tokens
    num_committed: int  # tokens past these are drafted
    sampler: SequenceSampler  # counts the committed tokens
    draft_sampling: DraftSampling
    limit: int  # positions below it will be drawn without another message
    num_top_tokens: int = 0  # how many other tokens for the same position are wanted
    offset: int = 0  # tokens not yet drawn before the one that is: in a pass that gives several
    adapter: PreparedAdapter | None = None  # of the draft's model, that computes them

    @property
    def sequence(self) -> CachedSequence:
        """The draft's own tokens and their blocks."""
        return self.text.sequence

    @property
    def draws(self) -> bool:
        """Whether the last token is computed, so that the next one can be drawn."""
        return self.sequence.num_computed_tokens + self.num_rows == len(self.sequence)

    @property
    def position(self) -> int:
        """Where the next token will stand, for the target."""
        return len(self.text) + self.offset

    @property
    def wants_confidence(self) -> bool:
        """Whether the draft may end behind the next token."""
        return self.draft_sampling.confidence > 0

    def span(self) -> RandomRange:
        """Where its random numbers are."""
        return RandomRange(self.draft_sampling.key, self.draft_sampling.ahead, self.position, 1, self.limit)

    def batch_entry(self) -> BatchEntry:
        """The rows as the runner takes them."""
        sequence, start = self.sequence, self.sequence.num_computed_tokens
        ids = sequence.tokens[start : start + self.num_rows]
        return BatchEntry(ids, start, sequence.block_table, num_logits=int(self.draws), adapter=self.adapter)

    def sampling_rows(self) -> SamplingRows:
        """The row after the chain, processed as if the chain were committed. With an offset it holds for a sampler
        alone that does not count tokens."""
        chain = self.text.tokens[self.num_committed :]
        return SamplingRows(self.sampler, chain, first=len(chain))


@dataclass(frozen=True, slots=True)
class DraftedToken:
    """A drafted token and, under rejection, the integer weights that it was drawn from, as packed little-endian
    uint32."""

    token_id: int
    ids: bytes = b""
    weights: bytes = b""
    top_tokens: tuple[int, ...] = ()  # what may stand there instead, most likely first
    confidence: float = 1.0  # where it was wanted: the token's own probability, but under rejection, where weights
    # travel, that of the likeliest one, which does not tell what was drawn
