"""Greedy and coupled windows under a constraint, without its masks as long as those would change nothing.

Where the token that a row would choose without the constraint is allowed, it is the best of those that are, too: a mask
only takes others away. So the host judges without masks and asks the constraint for the tokens that would be committed,
which takes microseconds. A window with a forbidden one is gone through again: in each row down the ids that score best,
and where none of these is allowed, under the row's mask. That does not serve where a mask changes more than which id is
best: what top_k, top_p and min_p keep, the probabilities of rejection, the values that are reported.

What a row chooses depends on that row and the tokens before it, never on how tokens were cut into windows."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.grammar.masks import has_bit
from outrider.engine.sampler import SamplingRows, assemble
from outrider.kernels.sampling.reference import adjust_logits, greedy_choice, logits_to_probs
from outrider.kernels.verify.reference import coupled_choice
from outrider.target_service.grammars import StepMasks
from outrider.target_service.scheduler import ScheduledSequence
from outrider.target_service.sequence import TargetSequence

MOST_LOOKS = 4  # ids of a row, the best first, before its mask is made
# Below this share of a row a token waits for the row's mask: one that is far less likely still, and may compete with it
# once the mask has taken the others, may lie below what float32 holds.
LEAST_SHARE = 1e-28

Judged = tuple[Tensor, Tensor, Tensor, Tensor | None]  # as `verifier.judge` returns it


def takes_masks_lazily(target: TargetSequence) -> bool:
    """Whether a constrained sequence's tokens are the best of every row, nothing else is asked of its masks, and asking
    for single tokens is quick."""
    params, constraint = target.open.sampling, target.sampler.constraint
    if constraint is not None and constraint.matcher.is_slow:
        return False
    if params.logprobs is not None and params.logprobs_mode.value.startswith("processed"):
        return False
    return target.greedy or (target.coupled and not target.sampler.truncated and params.min_p == 0)


def under_constraints(
    judged: Judged,
    windows: Sequence[ScheduledSequence],  # [n]
    logits: Tensor,  # [rows of the windows, vocab] float32
    noise_of: Callable[[ScheduledSequence], Tensor],  # [rows, vocab] float32, of coupling
    masks: StepMasks,
) -> Judged:
    """What was judged without masks, put right where a constraint forbids some of it. Windows whose masks are late are
    left as they are: their sequences wait."""
    started = time.perf_counter()
    accepted, next_ids, invalid, held = judged
    counts, own, flags = accepted.tolist(), next_ids.tolist(), invalid.tolist()
    again: list[ConstrainedWindow] = []
    first_row = first_draft = 0
    for index, window in enumerate(windows):
        rows = slice(first_row, first_row := first_row + window.num_verify_rows)
        drafts = slice(first_draft, first_draft := first_draft + len(window.window.ids))
        if masks.lacks(window):
            ids = _ids_of(window, counts[index], own[index], None if held is None else held[drafts])
            if any(flags[rows]) or not _allows(window.target, ids):
                noise = None if window.target.greedy else noise_of(window)
                again.append(ConstrainedWindow(index, window, rows, drafts, logits[rows], noise, flags[rows]))
    masks.wait_s += time.perf_counter() - started
    for one in _settled(again, masks):
        accepted[one.index], next_ids[one.index] = len(one.path), one.own
        invalid[one.rows] = False  # `own` says it
        if held is not None:
            held[one.drafts] = False
            held[[one.drafts.start + node for node in one.path]] = True
    return accepted, next_ids, invalid, held


def _ids_of(window: ScheduledSequence, num_accepted: int, next_id: int, held: Tensor | None) -> list[int]:
    """The ids of a window that would be committed."""
    drafted = window.window.ids
    kept = drafted[:num_accepted] if held is None else [drafted[node] for node in held.nonzero()[:, 0].tolist()]
    return [*kept, next_id] if next_id >= 0 else [*kept]


def _allows(target: TargetSequence, ids: Sequence[int]) -> bool:
    constraint = target.sampler.constraint
    return constraint is None or constraint.num_allowed(target.sampler.num_output, ids) == len(ids)


def _settled(again: list[ConstrainedWindow], masks: StepMasks) -> Iterator[ConstrainedWindow]:
    """These windows as they become whole, without those whose masks are late."""
    while again:
        started = time.perf_counter()
        wanting = [one for one in again if not one.go_on()]
        masks.wait_s += time.perf_counter() - started
        yield from (one for one in again if one not in wanting)
        made = masks.make([(one.scheduled, one.plan) for one in wanting]) if wanting else {}
        again = [one for one in wanting if one.scheduled.target.key in made]
        for one in again:
            one.mask = made[one.scheduled.target.key][0]


class ConstrainedWindow:
    """A window that is gone through again, row by row as long as a drafted token is the target's own."""

    def __init__(
        self,
        index: int,  # among the windows
        scheduled: ScheduledSequence,
        rows: slice,  # of the windows' rows
        drafts: slice,  # of the windows' drafted tokens
        logits: Tensor,  # [rows, vocab]
        noise: Tensor | None,  # [rows, vocab] float32; None: greedy
        invalid: Sequence[bool],  # [rows]
    ) -> None:
        self.index, self.scheduled, self.rows, self.drafts = index, scheduled, rows, drafts
        self._logits, self._noise, self._invalid = logits, noise, invalid
        self.path: list[int] = []  # the drafted tokens that hold, by their place in the window
        self.own = -1  # the target's own token after them; -1: there is none, or its row is invalid
        self.mask: Tensor | None = None  # [words] int32, of the row behind them, once it was needed

    @property
    def plan(self) -> SamplingRows:
        """The sampling rows behind what holds so far."""
        prefix = [self.scheduled.window.ids[node] for node in self.path]
        return SamplingRows(self.scheduled.target.sampler, prefix, len(prefix))

    def go_on(self) -> bool:
        """Whether it could be judged to its end; else it needs the mask of the row that it stands at."""
        drafted, parents = self.scheduled.window.ids, self.scheduled.window.parents
        row = self.path[-1] + 1 if self.path else 0
        while row < self.scheduled.num_verify_rows:
            own = self._choose(row)
            if own is None:
                return False
            children = (node for node in range(row, len(drafted)) if (parents[node] if parents else node) == row)
            child = next((node for node in children if drafted[node] == own), None)
            if child is None:
                self.own = own
                return True
            self.path.append(child)
            row, self.mask = child + 1, None
        return True

    def _choose(self, row: int) -> int | None:
        """The best of what is allowed, -1 where there is none or the row is invalid; None: it takes a mask to know."""
        plan = self.plan
        constraint = plan.sampler.constraint
        if constraint is None or self._invalid[row]:
            return -1
        if self.mask is None:
            own = constraint.first_allowed(plan.sampler.num_output, plan.drafted, self._best(row))
            return own if own is None or np.isfinite(self._scores[row, own]) else None
        mask = self.mask
        own = next((token for token in self._best(row) if has_bit(mask, token)), None)
        return self._masked_choice(row, plan, mask) if own is None else own

    @cached_property
    def _scores(self) -> NDArray[np.float32]:  # [rows, vocab]; the highest is chosen, of equal ones the lowest id
        plans = self.scheduled.sampling_rows
        if self._noise is None:
            return adjust_logits(self._logits, assemble(plans, for_argmax=True)).numpy()
        probs, _ = logits_to_probs(self._logits, assemble(plans))
        return (-self._noise / probs).masked_fill_(probs < LEAST_SHARE, -torch.inf).numpy()

    def _best(self, row: int) -> Iterator[int]:
        """A few ids with the best scores, the best first."""
        scores = self._scores[row].copy()  # [vocab]
        for _ in range(MOST_LOOKS):
            token = int(scores.argmax())
            if not np.isfinite(scores[token]):
                return
            yield token
            scores[token] = -np.inf

    def _masked_choice(self, row: int, plan: SamplingRows, mask: Tensor) -> int:  # [words] int32
        """The choice among all ids that the mask allows; -1: there is none."""
        logits, greedy = self._logits[row : row + 1], self._noise is None
        sampling = assemble([plan], token_mask=mask[None], for_argmax=greedy)
        if self._noise is None:
            ids, invalid = greedy_choice(logits, sampling)  # [1] each
        else:
            probs, invalid = logits_to_probs(logits, sampling)  # [1, vocab], [1]
            ids = coupled_choice(probs, self._noise[row : row + 1])
        return -1 if bool(invalid) else int(ids)
