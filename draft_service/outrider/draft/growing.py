"""Which branches are opened and grown in the next pass: one row for each, beside the rows of the chains."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many

from outrider.draft.branches import Branch, Outcome, likeliest
from outrider.draft.state import DraftSequence, ModelState
from outrider.engine.blocks import OutOfBlocks
from outrider.engine.sequence import SequenceCache
from outrider.proposers.draft_model import DraftRows

CopyBlocks = Callable[[Many[tuple[int, int]]], None]
Growth = tuple[DraftSequence, Branch]


class Grower:
    """Opens branches once a chain's window is drafted, and grows them until they rest."""

    def __init__(self, cache: SequenceCache, copy_blocks: CopyBlocks) -> None:
        self._cache = cache
        self._copy_blocks = copy_blocks

    def plan(self, drafts: Iterable[DraftSequence], room: int) -> list[Growth]:
        """The branches of the next pass, at most `room`, with blocks for their rows."""
        growing: list[Growth] = []
        for draft in drafts:
            nothing = not (draft.num_alternatives and draft.piece_len)  # to branch from
            if nothing or draft.finished or draft.crowded_at == draft.committed:
                continue
            if not draft.window_is_drafted:
                continue
            self._open(draft)
            for branch in list(draft.branches):
                grows = not branch.ended and len(branch.sequence) < draft.end_of(branch)
                if len(growing) < room and grows and self._has_blocks(draft, branch):
                    growing.append((draft, branch))
        return growing

    def _open(self, draft: DraftSequence) -> None:
        """Starts what is missing of the likeliest outcomes."""
        copies: list[tuple[int, int]] = []
        known = {(branch.position, branch.sequence.tokens[branch.position]) for branch in draft.branches}
        wanted = likeliest(draft.rates, draft.alternatives, draft.committed, draft.piece_len, draft.max_branches)
        for outcome in wanted:
            if len(draft.branches) >= draft.max_branches:
                break
            if (outcome.position, outcome.token_id) not in known and not self._fork(draft, outcome, copies):
                break
        self._copy_blocks(copies)

    def _fork(self, draft: DraftSequence, outcome: Outcome, copies: list[tuple[int, int]]) -> bool:
        """False where there is no room for it."""
        if outcome.position > draft.sequence.num_computed_tokens or outcome.position >= draft.limit:
            return True  # another one may fit
        try:
            sequence, copy = self._cache.fork(draft.sequence, outcome.position)
        except OutOfBlocks:
            return False
        sequence.tokens.append(outcome.token_id)
        draft.last_chain += 1
        draft.branches.append(Branch(draft.last_chain, draft.chain, outcome.position, sequence))
        if copy is not None:
            copies.append(copy)
        return True

    def _has_blocks(self, draft: DraftSequence, branch: Branch) -> bool:
        try:
            self._cache.extend(branch.sequence)
        except OutOfBlocks:
            self._cache.release(branch.sequence)
            draft.branches.remove(branch)
            return False
        return True


def rows_of(draft: DraftSequence, branch: Branch) -> DraftRows | None:
    """The row of a branch; None where no model drafts."""
    if not isinstance(draft.method, ModelState):
        return None
    sampler, law = draft.method.sampler, draft.method.law
    return DraftRows(branch.sequence, 1, draft.committed, sampler, law, draft.limit, draft.num_alternatives)
