"""What draft and target schedule alike: a sequence takes what the prefix cache holds of it, its rows get blocks, and
where there are none left others give up theirs."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Generic, Protocol, TypeVar

from outrider.engine.kv_cache_manager import CachedSequence, KVCacheManager, OutOfBlocks


class Schedulable(Protocol):
    """A sequence, as far as it competes with others for blocks."""

    admitted: bool  # has looked into the prefix cache since it last held no blocks

    @property
    def sequence(self) -> CachedSequence:
        """Its tokens and blocks."""

    @property
    def seniority(self) -> tuple[float, int]:
        """By priority and age, then order of arrival: the least goes first, and it never changes."""

    @property
    def wants_tokens(self) -> bool:
        """Whether it has credit for one more token."""


Competitor = TypeVar("Competitor", bound=Schedulable)


class Scheduler(Generic[Competitor]):
    """Gives blocks to the sequences that run in a step of at most `max_rows` rows."""

    def __init__(self, cache: KVCacheManager, max_rows: int = 512) -> None:
        self.cache = cache
        self.max_rows = max_rows
        self.num_looked_up = self.num_found = self.num_preempted = 0  # tokens, tokens, sequences: since the start

    def admit(self, competitor: Competitor, use_prefix: bool = True) -> int:
        """Looks into the prefix cache, unless that was done; returns the number of tokens found."""
        if competitor.admitted:
            return 0
        competitor.admitted = True
        found = self.cache.admit(competitor.sequence, use_prefix)
        self.num_looked_up, self.num_found = self.num_looked_up + len(competitor.sequence), self.num_found + found
        return found

    def release(self, competitor: Competitor) -> None:
        """Takes a sequence's blocks; it looks into the prefix cache before it computes again."""
        self.cache.release(competitor.sequence)
        competitor.admitted = False

    def reserve(
        self,
        competitor: Competitor,
        num_tokens: int,
        everyone: Collection[Competitor],
        in_step: Collection[Competitor],
        ids: Iterable[int] = (),
    ) -> bool:
        """Appends ids and gives the sequence blocks for its first `num_tokens` tokens, at the expense of others that
        are not in the step; False if it has to wait."""
        while True:
            try:
                self.cache.extend(competitor.sequence, ids, num_tokens)
                return True
            except OutOfBlocks:
                if not self._make_room(competitor, everyone, in_step):
                    return False

    def _make_room(
        self, competitor: Competitor, everyone: Iterable[Competitor], in_step: Collection[Competitor]
    ) -> bool:
        """Takes the blocks of one other sequence: without credit first, then of the lowest priority, then the youngest.
        Never of one that is ahead of it, so that the oldest always advances."""
        holders = [
            other
            for other in everyone
            if other.sequence.block_table and other is not competitor and other not in in_step
        ]
        without_credit = [other for other in holders if not other.wants_tokens]
        behind = [other for other in holders if other.seniority > competitor.seniority]
        victim = max(without_credit or behind, key=lambda other: other.seniority, default=None)
        if victim is not None:
            self.num_preempted += 1
            self.release(victim)
        return victim is not None
