"""Which sequences the draft model steps next, with how many rows, and who gives up blocks."""

from __future__ import annotations

from collections.abc import Iterable

from outrider.draft.state import DraftSequence
from outrider.engine.blocks import OutOfBlocks
from outrider.engine.sequence import SequenceCache

LONG_PREFILL = 32  # rows: more than this are a prompt's, and wait until the chains have theirs


class Scheduler:
    """Plans steps within a budget of rows, and reserves their blocks."""

    def __init__(self, cache: SequenceCache, max_rows: int = 512) -> None:
        self.cache = cache
        self.max_rows = max_rows

    def plan(self, sequences: Iterable[DraftSequence]) -> list[tuple[DraftSequence, int]]:
        """The sequences of the next step and their rows: chains first, then prompts in chunks, oldest first."""
        everyone = list(sequences)
        budget = self.max_rows
        planned: dict[DraftSequence, int] = {}
        for sequence in sorted(filter(_may_run, everyone), key=_order):
            if budget <= 0:
                break
            num_rows = self._enter(sequence, budget, everyone, planned)
            if num_rows:
                planned[sequence] = num_rows
                budget -= num_rows
        return list(planned.items())

    def release(self, sequence: DraftSequence) -> None:
        """Takes a sequence's blocks; it looks into the prefix cache before it computes again."""
        sequence.drop_branches(self.cache)
        self.cache.release(sequence.sequence)
        sequence.admitted = False

    def _enter(
        self,
        draft: DraftSequence,
        budget: int,
        everyone: Iterable[DraftSequence],
        planned: dict[DraftSequence, int],
    ) -> int:
        """Gives a sequence blocks for its rows, taking them from others if it must; 0 if it has to wait."""
        sequence = draft.sequence
        if not draft.admitted:
            self.cache.admit(sequence)
            draft.admitted = True
        num_rows = min(len(sequence) - sequence.num_computed_tokens, budget)
        while True:
            try:
                self.cache.extend(sequence, num_tokens=sequence.num_computed_tokens + num_rows)
                return num_rows
            except OutOfBlocks:
                if self._drop_branches(everyone):
                    continue
                victim = _victim(draft, everyone, planned)
                if victim is None:
                    return 0
                self.release(victim)

    def _drop_branches(self, everyone: Iterable[DraftSequence]) -> bool:
        """Guesses go before anything else; whether there were any."""
        holders = [draft for draft in everyone if draft.branches]
        for draft in holders:
            draft.drop_branches(self.cache)
            draft.crowded_at = draft.committed
        return bool(holders)


def _may_run(draft: DraftSequence) -> bool:
    """A fork waits for the blocks of the prompt that its parent is about to compute."""
    if draft.parent is not None and (draft.parent.released or draft.parent.prompt_is_computed):
        draft.parent = None
    return draft.wants_tokens and (draft.parent is None or not draft.parent.wants_tokens)


def _order(draft: DraftSequence) -> tuple[bool, int, int]:
    is_prefill = len(draft.sequence) - draft.sequence.num_computed_tokens > LONG_PREFILL
    return (is_prefill, draft.priority, draft.arrival)


def _victim(
    draft: DraftSequence, everyone: Iterable[DraftSequence], planned: dict[DraftSequence, int]
) -> DraftSequence | None:
    """Who gives its blocks to `draft`: sequences without credit first, then the youngest. Never one that is ahead of
    it, so that the oldest always advances."""
    holders = [
        other for other in everyone if other.sequence.block_table and other not in planned and other is not draft
    ]
    without_credit = [other for other in holders if not other.wants_tokens]
    behind = [other for other in holders if (other.priority, other.arrival) > (draft.priority, draft.arrival)]
    return max(without_credit or behind, key=lambda other: (other.priority, other.arrival), default=None)
