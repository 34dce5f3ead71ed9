"""Continuous batching over ragged windows: which sequences run in the next step, with how many rows, and who gives
up blocks.

Every step takes each sequence that may run, with its window or one plain token; what is left of the token budget
goes to chunks of prompts. There is no prefill phase: a sequence only has tokens that are not computed yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from outrider.engine.batch import BatchEntry
from outrider.engine.blocks import OutOfBlocks
from outrider.engine.sequence import SequenceCache
from outrider.target.chains import EMPTY_WINDOW, Window
from outrider.target.goodput import Goodput, Wish
from outrider.target.state import SequenceKey, TargetSequence


@dataclass(frozen=True, slots=True)
class StepEntry:
    """What one sequence does in a step."""

    target: TargetSequence
    committed: int  # the committed length before the step
    start: int  # position of the first row
    num_rows: int
    window: Window
    takes_next: bool  # draws a token after the window: bonus, plain, or where a drafted one is refused
    num_logits: int  # rows from the end that want logits

    @property
    def samples(self) -> bool:
        """Whether the sequence's last committed token is computed in this step, so that tokens can be committed."""
        return self.start + self.num_rows >= self.committed

    @property
    def num_judging(self) -> int:
        """Rows, at the end, that judge the window or give the next token; the others belong to the prompt."""
        return self.start + self.num_rows - self.committed + 1 if self.samples else 0

    @property
    def num_further(self) -> int:
        """Rows that a shorter window would save at most. In rejection mode one drafted token always stays: a cut then
        puts tokens off and gives up none. A sequence's first window is whole: it shows what its draft is worth."""
        stays = not self.target.acceptance.tested or (self.target.rejects and len(self.window.ids) == 1)
        return 0 if stays else self.num_judging - 1

    def wish(self) -> Wish:
        """The same, as the choice of windows takes it."""
        further = self.num_further
        return Wish(self.target.acceptance, self.num_rows - further, self.num_judging - 1 - further, further)

    def cut_to(self, further: int) -> int:
        """The longest window with so many of those rows, or fewer. In rejection mode the target's own token does not
        follow a cut window, so k drafted tokens take k rows."""
        drafted = len(self.window.ids)
        if further >= self.num_further:
            return drafted
        return min(further + 1, drafted - 1) if self.target.rejects else further

    def batch_entry(self) -> BatchEntry:
        """The rows as the runner takes them; the sequence's tokens include the window by then."""
        sequence = self.target.sequence
        ids = sequence.tokens[self.start : self.start + self.num_rows]
        return BatchEntry(ids, self.start, sequence.block_table, self.num_logits)


class Scheduler:
    """Owns the running sequences of a target and chooses each step."""

    def __init__(self, cache: SequenceCache, max_rows: int = 512, max_window: int = 128) -> None:
        self.cache = cache
        self.max_rows = max_rows
        self.max_window = max_window
        self.goodput: Goodput | None = None  # with one, windows are cut where sequences share a step
        self.sequences: dict[SequenceKey, TargetSequence] = {}
        self._starved: SequenceKey | None = None  # the oldest, where it found no blocks in the last step

    def add(self, target: TargetSequence) -> None:
        """Takes a new sequence."""
        self.sequences[target.key] = target

    def remove(self, target: TargetSequence) -> None:
        """Releases a sequence's blocks and forgets it."""
        self.cache.release(target.sequence)
        self.sequences.pop(target.key, None)

    def next_due(self, now: float) -> float | None:
        """When the earliest sequence may run; None when all are without credit."""
        dues = [due for target in self.sequences.values() if (due := target.due(now)) is not None]
        return min(dues, default=None)

    def plan(self, now: float) -> list[StepEntry]:
        """The next step. Windows come first, oldest first, then prompts; blocks are reserved and windows appended."""
        entries: list[StepEntry] = []
        budget = self.max_rows
        ready = self._runnable(now)
        oldest = min(ready, key=lambda target: (target.open.priority, target.arrival), default=None)
        limits = self._cut(ready, self.goodput) if self.goodput is not None and len(ready) > 1 else {}
        for target in ready:
            if budget <= 0:
                break
            entry = self._enter(target, budget, limits.get(target.key, self.max_window), entries)
            if target is oldest:
                self._starved = target.key if entry is None else None
            if entry is not None:
                entries.append(entry)
                budget -= entry.num_rows
        return entries

    def _runnable(self, now: float) -> list[TargetSequence]:
        ready = [t for t in self.sequences.values() if (due := t.due(now)) is not None and due <= now]
        computing: dict[SequenceKey, int] = {}  # per group of forks the oldest whose prompt is not computed
        for target in self.sequences.values():
            if (
                target.group is not None
                and target.has_credit
                and target.sequence.num_computed_tokens < target.prompt_len - 1
            ):
                computing[target.group] = min(target.arrival, computing.get(target.group, target.arrival))
        # The others of a group wait for the oldest and then find its prompt in the prefix cache.
        ready = [t for t in ready if t.group is None or t.arrival <= computing.get(t.group, t.arrival)]

        def order(target: TargetSequence) -> tuple[bool, bool, int, int]:
            prefilling = target.committed - target.sequence.num_computed_tokens > self.max_window
            waits = target.key != self._starved  # the oldest found no blocks: it goes first, so that it can take them
            return (waits, prefilling or not target.admitted, target.open.priority, target.arrival)

        return sorted(ready, key=order)

    def _cut(self, ready: Sequence[TargetSequence], goodput: Goodput) -> dict[SequenceKey, int]:
        """The longest window that each sequence shall verify in a step of all of them."""
        shapes = [self._shape(target, self.max_rows, self.max_window) for target in ready]
        windows = [shape for shape in shapes if shape.samples]
        other_rows = sum(shape.num_rows for shape in shapes if not shape.samples)
        further = goodput.choose([shape.wish() for shape in windows], other_rows, self.max_rows)
        return {shape.target.key: shape.cut_to(rows) for shape, rows in zip(windows, further, strict=True)}

    def _enter(
        self, target: TargetSequence, budget: int, max_window: int, entries: Iterable[StepEntry]
    ) -> StepEntry | None:
        """Gives a sequence its rows and blocks, preempting others if it must; None if it has to wait."""
        if not target.admitted:
            found = self.cache.admit(target.sequence, use_prefix=target.open.sampling.prompt_logprobs is None)
            target.num_cached_ids = max(target.num_cached_ids, min(found, target.prompt_len))
            target.admitted = True
        if target.chains.live() is None and not target.chains.draft_is_idle and target.patience > 0:
            # This round decodes a plain token because the wait ran out; it is not repeated until a piece arrives.
            target.patience_spent = True
        entry = self._shape(target, budget, max_window)
        in_step = {e.target.key for e in entries} | {target.key}
        while True:
            try:
                self.cache.extend(target.sequence, entry.window.ids, entry.start + entry.num_rows)
                return entry
            except OutOfBlocks:
                if not self._preempt_for(target, in_step):
                    if not target.sequence.num_computed_tokens:
                        self._preempt(target)
                    return None

    def _shape(self, target: TargetSequence, budget: int, max_window: int) -> StepEntry:
        """How many rows: a chunk of what is not computed, or all of it and the window."""
        start = target.sequence.num_computed_tokens
        missing = target.committed - start  # at least 1: the last token's logits are always to come
        wants_prompt = target.wants_prompt_logprobs
        if missing > budget:
            return StepEntry(
                target, target.committed, start, budget, EMPTY_WINDOW, False, budget if wants_prompt else 0
            )
        room = min(target.until - target.committed, target.tokens_left)
        window = target.chains.window(min(target.max_window, max_window, room, budget - missing))
        num_drafted = len(window.ids)
        takes_next = room > num_drafted and not (num_drafted > 0 and window.goes_on and target.rejects)
        # Without a bonus the last drafted token's row is not needed: it is computed with the next step.
        num_rows = missing + num_drafted - (0 if takes_next else 1)
        num_logits = num_rows if wants_prompt else num_rows - missing + 1
        return StepEntry(target, target.committed, start, num_rows, window, takes_next, num_logits)

    def _preempt_for(self, target: TargetSequence, in_step: set[SequenceKey]) -> bool:
        """Takes the blocks of one other sequence: without credit first, then lowest priority, then youngest. Of the
        rest the oldest always advances, so a sequence never preempts one that is ahead of it."""
        holders = [t for t in self.sequences.values() if t.sequence.block_table and t.key not in in_step]
        idle = [t for t in holders if not t.has_credit]
        behind = [t for t in holders if (t.open.priority, t.arrival) > (target.open.priority, target.arrival)]
        victims = idle or behind
        if not victims:
            return False
        self._preempt(max(victims, key=lambda t: (t.open.priority, t.arrival)))
        return True

    def _preempt(self, target: TargetSequence) -> None:
        self.cache.release(target.sequence)
        target.admitted = False
