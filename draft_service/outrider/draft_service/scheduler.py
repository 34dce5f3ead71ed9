"""What the draft model steps next, and who gives up blocks for it: chains and prompts with their rows (DraftScheduler),
and beside them branches, which are opened and grown by one row each (BranchPlanner)."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Sequence

from outrider.draft_service.chains import Branch, MethodRun, Outcome, outcome_probs
from outrider.draft_service.sequence import DraftSequence
from outrider.engine.kv_cache_manager import KVCacheManager, OutOfBlocks
from outrider.engine.scheduler import Scheduler
from outrider.proposers.draft_text import DraftText

LONG_PREFILL = 32  # rows: more than this are a prompt's, and wait until the chains have theirs


class DraftingScheduler(Scheduler[DraftSequence]):
    """Plans steps within a budget of rows, and reserves their blocks."""

    def plan(self, drafts: Sequence[DraftSequence]) -> list[tuple[DraftSequence, int]]:
        """The sequences of the next step and their rows: chains first, then prompts in chunks, oldest first."""
        budget = self.max_rows
        planned: dict[DraftSequence, int] = {}
        for draft in sorted(filter(_may_run, drafts), key=_order):
            if budget <= 0:
                break
            self.admit(draft)
            num_computed = draft.sequence.num_computed_tokens
            num_rows = min(len(draft.sequence) - num_computed, budget)
            if self.reserve(draft, num_computed + num_rows, drafts, planned.keys()):
                planned[draft] = num_rows
                budget -= num_rows
        return list(planned.items())

    def release(self, competitor: DraftSequence) -> None:
        """Takes a sequence's blocks, and with them its branches."""
        competitor.branches.give_up(self.cache)
        super().release(competitor)

    def _make_room(
        self, competitor: DraftSequence, everyone: Iterable[DraftSequence], in_step: Collection[DraftSequence]
    ) -> bool:
        """Guesses go before anything else."""
        holders = [draft for draft in everyone if draft.branches]
        for draft in holders:
            draft.branches.give_up(self.cache)
            draft.branches.evicted_at = draft.committed
        return bool(holders) or super()._make_room(competitor, everyone, in_step)


def _may_run(draft: DraftSequence) -> bool:
    """A fork waits for the blocks of the prompt that its parent is about to compute."""
    if draft.parent is not None and (draft.parent.released or draft.parent.prompt_is_computed):
        draft.parent = None
    return draft.wants_passes and (draft.parent is None or not draft.parent.wants_passes)


def _order(draft: DraftSequence) -> tuple[bool, tuple[int, int]]:
    is_prefill = len(draft.sequence) - draft.sequence.num_computed_tokens > LONG_PREFILL
    return is_prefill, draft.seniority


CopyBlocks = Callable[[Sequence[tuple[int, int]]], None]
BranchStep = tuple[DraftSequence, Branch]


class BranchPlanner:
    """Opens branches once a chain's window is drafted, and grows them until they rest."""

    def __init__(self, cache: KVCacheManager, copy_blocks: CopyBlocks) -> None:
        self._cache = cache
        self._copy_blocks = copy_blocks

    def plan(self, drafts: Iterable[DraftSequence], room: int) -> list[BranchStep]:
        """The branches of the next pass, at most `room` of all sequences together, with blocks for their rows."""
        branching = [draft for draft in drafts if draft.may_branch]
        branch_steps: list[BranchStep] = []
        for draft in branching:
            most = min(draft.limits.max_branches, max(1, room // len(branching)))
            if draft.window_is_drafted and len(draft.branches) < most:
                self._open(draft, most)
            for branch in tuple(draft.branches):
                grows = not branch.ended and len(branch.text) < draft.end_of(branch)
                if len(branch_steps) < room and grows and self._has_blocks(draft, branch):
                    branch_steps.append((draft, branch))
        return branch_steps

    def _open(self, draft: DraftSequence, most: int) -> None:
        """Starts what is missing of the likeliest outcomes, while there are less than `most` branches."""
        copies: list[tuple[int, int]] = []
        chain, branches = draft.chain, draft.branches
        table = branches.rates.table(draft.limits.piece_len)
        chances = outcome_probs(table, chain.number, draft.committed, chain.top_tokens, branches)
        parents = {line.number: line.text for line in (chain, *branches)}
        known = {branch.outcome for branch in branches}
        for outcome in heapq.nlargest(most, chances, key=chances.__getitem__):  # of equal ones the first
            if len(branches) >= most:
                break
            if outcome not in known and not self._fork(draft, parents[outcome.chain], outcome, copies):
                break
        self._copy_blocks(copies)

    def _fork(self, draft: DraftSequence, parent: DraftText, outcome: Outcome, copies: list[tuple[int, int]]) -> bool:
        """False where there is no room for it."""
        is_computed = parent.num_own(outcome.position) <= parent.sequence.num_computed_tokens
        if not is_computed or outcome.position >= draft.limit:
            return True  # another one may fit
        try:
            text, copy = parent.fork(outcome.position, self._cache)
        except OutOfBlocks:
            return False
        text.append([outcome.token_id])
        branch = Branch.of(draft.next_number(), outcome, text)
        if draft.choice is not None and draft.model is not None:
            branch.runs.append(MethodRun.of_model(outcome.position, draft.model.method))
        draft.branches.held.append(branch)
        if copy is not None:
            copies.append(copy)
        return True

    def _has_blocks(self, draft: DraftSequence, branch: Branch) -> bool:
        try:
            self._cache.extend(branch.sequence)
        except OutOfBlocks:
            self._cache.release(branch.sequence)
            draft.branches.held.remove(branch)
            return False
        return True
