"""Which branches are opened and grown in the next pass: one row for each, beside the rows of the chains."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many

from outrider.draft.branches import Branch, Outcome, appraise
from outrider.draft.state import DraftSequence, ModelState
from outrider.engine.blocks import OutOfBlocks
from outrider.engine.sequence import Sequence, SequenceCache
from outrider.proposers.draft_rows import Drafted, DraftRows

CopyBlocks = Callable[[Many[tuple[int, int]]], None]
Growth = tuple[DraftSequence, Branch]


class Grower:
    """Opens branches once a chain's window is drafted, and grows them until they rest."""

    def __init__(self, cache: SequenceCache, copy_blocks: CopyBlocks) -> None:
        self._cache = cache
        self._copy_blocks = copy_blocks

    def plan(self, drafts: Iterable[DraftSequence], room: int) -> list[Growth]:
        """The branches of the next pass, at most `room` of all sequences together, with blocks for their rows."""
        branching = [draft for draft in drafts if _may_branch(draft)]
        growing: list[Growth] = []
        for draft in branching:
            most = min(draft.max_branches, max(1, room // len(branching)))
            if draft.window_is_drafted and len(draft.branches) < most:
                self._open(draft, most)
            for branch in list(draft.branches):
                grows = not branch.ended and len(branch.sequence) < draft.end_of(branch)
                if len(growing) < room and grows and self._has_blocks(draft, branch):
                    growing.append((draft, branch))
        return growing

    def _open(self, draft: DraftSequence, most: int) -> None:
        """Starts what is missing of the likeliest outcomes, while there are less than `most` branches."""
        copies: list[tuple[int, int]] = []
        table = draft.rates.table(draft.piece_len)
        chances = appraise(table, draft.chain, draft.committed, draft.alternatives, draft.branches)
        lines = {draft.chain: draft.sequence} | {branch.chain: branch.sequence for branch in draft.branches}
        known = {branch.outcome for branch in draft.branches}
        for outcome in heapq.nlargest(most, chances, key=chances.__getitem__):  # of equal ones the first
            if len(draft.branches) >= most:
                break
            if outcome not in known and not self._fork(draft, lines[outcome.chain], outcome, copies):
                break
        self._copy_blocks(copies)

    def _fork(self, draft: DraftSequence, parent: Sequence, outcome: Outcome, copies: list[tuple[int, int]]) -> bool:
        """False where there is no room for it."""
        if outcome.position > parent.num_computed_tokens or outcome.position >= draft.limit:
            return True  # another one may fit
        try:
            sequence, copy = self._cache.fork(parent, outcome.position)
        except OutOfBlocks:
            return False
        sequence.tokens.append(outcome.token_id)
        draft.last_chain += 1
        draft.branches.append(Branch(draft.last_chain, outcome.chain, outcome.position, sequence))
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


def _may_branch(draft: DraftSequence) -> bool:
    """Whether it is asked to, has something to branch from, and did not just have to make room for others."""
    asked = draft.num_alternatives > 0 and draft.piece_len > 0
    return asked and not draft.finished and draft.crowded_at != draft.committed


def note_alternatives(line: DraftSequence | Branch, tokens: Many[Drafted]) -> None:
    """What might have stood in the place of the tokens just drawn, which end a chain or a branch."""
    first = len(line.sequence) - len(tokens)
    line.alternatives |= {first + index: token.alternatives for index, token in enumerate(tokens) if token.alternatives}


def rows_of(draft: DraftSequence, branch: Branch) -> DraftRows | None:
    """The row of a branch; None where no model drafts."""
    if not isinstance(draft.method, ModelState):
        return None
    sampler, law = draft.method.sampler, draft.method.law
    return DraftRows(branch.sequence, 1, draft.committed, sampler, law, draft.limit, draft.num_alternatives)
