"""Which drafted tokens hold, and the target's own token after them, judged from the logits of a step.

`judge` applies acceptance rules, which are kernels, to windows that lie one behind the other. On the host the windows
of each rule are a batch of their own, with random numbers that idle time prepared: of each position the words that
judge a drafted token and draw the target's own. On a device (see `device_verifier`) all windows of a step are one batch
under every rule that one of them has, and random numbers are drawn from their counters where they are used."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import IntEnum
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from outrider.engine.random import MAX_WORD_ROWS, RandomRange, RandomSource, noise_source
from outrider.engine.sampler import assemble
from outrider.kernels.random.reference import Purpose, words
from outrider.kernels.sampling.reference import greedy_choice, logits_to_probs
from outrider.kernels.types import DraftWeights, PackedEntries, RowSampling, Windows
from outrider.kernels.verify.reference import (
    accept,
    accept_uniforms,
    coupled_accept,
    coupled_accept_tree,
    coupled_choice,
    draw,
)
from outrider.target_service.grammars import StepMasks
from outrider.target_service.lazy_masks import takes_masks_lazily, under_constraints
from outrider.target_service.outputs import LaunchedVerify, VerifiedWindow, verified_windows
from outrider.target_service.scheduler import ScheduledSequence
from outrider.target_service.sequence import TargetSequence

PURPOSES = (Purpose.ACCEPT, Purpose.RECOVERED, Purpose.BONUS)  # the order within a row
ACCEPT, RECOVERED, BONUS = range(len(PURPOSES))
HOST = torch.device("cpu")


class VerifyRule(IntEnum):
    """How windows are judged, in an order: on a device a batch is under all rules up to the last one of its windows."""

    GREEDY = 0
    COUPLED = 1
    REJECTION = 2
    BLOCK = 3


def rule_of(target: TargetSequence) -> VerifyRule:
    """The rule of a sequence, fixed when it was opened."""
    if target.greedy:
        return VerifyRule.GREEDY
    if target.coupled:
        return VerifyRule.COUPLED
    return VerifyRule.BLOCK if target.by_block else VerifyRule.REJECTION


class VerifyBatch(Protocol):
    """Windows that are judged in one call, and the random numbers of their rows."""

    @property
    def rules(self) -> Collection[VerifyRule]:
        """All that are applied; with several, the next two say which holds where."""

    @property
    def greedy_rows(self) -> Tensor | None:  # [rows] bool
        """Which rows are under the greedy rule; None where all are under one rule."""

    @property
    def rejecting(self) -> Tensor | None:  # [n] bool
        """Which windows are judged by rejection, token by token or by blocks; None where all are under one rule."""

    @property
    def by_block(self) -> Tensor | None:  # [n] bool
        """Which windows are judged by blocks; None where none is."""

    @property
    def is_plain(self) -> bool:
        """Whether nothing was drafted, so that every window is one row."""

    @property
    def windows(self) -> Windows:
        """Which rows judge which drafted tokens."""

    @property
    def draft_ids(self) -> Tensor:  # [drafted] int64
        """The drafted tokens of all."""

    @property
    def parents(self) -> Tensor | None:  # [drafted] int64
        """The row of its window that judges each drafted token, where there are trees."""

    @property
    def draft_weights(self) -> DraftWeights | PackedEntries:
        """What they were drawn from."""

    def race(self, probs: Tensor) -> Tensor:
        """The token of least noise / probability of each row, [rows, vocab] -> [rows] int64; -1: none."""

    def uniforms(self, rows: Tensor) -> Tensor:
        """What tests the drafted tokens that these rows judge, [drafted] -> [drafted] float64."""

    def next_words(self, rows: Tensor, is_bonus: Tensor) -> Tensor:
        """What draws a bonus token, or else a recovered one, from each of these rows, [n] each -> [n, 4] int64."""


# Accepted [n] int64, next id or -1 [n] int64, invalid [rows] bool; where there are trees, what holds, [drafted] bool.
VerifyResult = tuple[Tensor, Tensor, Tensor, Tensor | None]


def judge(logits: Tensor, sampling: RowSampling, batch: VerifyBatch) -> VerifyResult:  # logits: [rows, vocab] float32
    """Says how many drafted tokens of each window hold, and the token after them. Plain tokens need no comparison, and
    every operation costs: a pass leaves the processor's caches full of weights."""
    own: list[Tensor] = []  # [rows] each: the target's own tokens, which drafted ones must equal
    judged: list[tuple[Tensor, Tensor]] = []  # accepted and next ids, [n] each
    held = None
    if VerifyRule.GREEDY in batch.rules:
        ids, invalid = greedy_choice(logits, sampling)  # [rows] each
        own.append(ids.masked_fill(invalid, -1))
    if max(batch.rules) > VerifyRule.GREEDY:
        probs, invalid = logits_to_probs(logits, sampling)  # [rows, vocab], [rows]
        if VerifyRule.COUPLED in batch.rules:
            own.append(batch.race(probs))
        if max(batch.rules) >= VerifyRule.REJECTION:
            judged.append(_judge_by_rejection(probs, invalid, batch))
    if own:
        ids = _either(batch.greedy_rows, own)
        if batch.is_plain:
            judged.append((torch.zeros_like(ids), ids))
        elif batch.parents is None:
            judged.append(coupled_accept(ids, batch.windows, batch.draft_ids))
        else:
            *found, held = coupled_accept_tree(ids, batch.windows, batch.draft_ids, batch.parents)
            judged.append((found[0], found[1]))
    accepted, next_ids = (_either(batch.rejecting, parts) for parts in zip(*judged, strict=True))
    return accepted, next_ids, invalid, held


def _judge_by_rejection(probs: Tensor, invalid: Tensor, batch: VerifyBatch) -> tuple[Tensor, Tensor]:
    """Numbers accepted and next ids, [n] int64 each, of probabilities [rows, vocab] float32; invalid: [rows] bool."""
    windows, drafts = batch.windows, (batch.draft_ids, batch.draft_weights)
    uniforms = batch.uniforms(windows.row_of_draft)  # [drafted]
    accepted, next_weights = accept(probs, windows, *drafts, uniforms, batch.by_block, invalid)
    is_bonus = accepted == windows.num_drafted  # [n]
    return accepted, draw(next_weights, batch.next_words(windows.next_rows(accepted), is_bonus))


def _either(is_first: Tensor | None, parts: Sequence[Tensor]) -> Tensor:
    """The first where it holds, else the second; None: there is one."""
    return parts[0] if is_first is None else torch.where(is_first, parts[0], parts[1])


def verify_source(device: torch.device) -> RandomSource:
    """Rows are [3, 4] int64: four words under each purpose."""

    def generate(*counters: Tensor) -> Tensor:  # [n] each -> [n, 3, 4]
        seeds, positions, completions, draws = (column.repeat_interleave(len(PURPOSES)) for column in counters)
        purposes = torch.tensor([int(purpose) for purpose in PURPOSES], device=device).repeat(len(counters[0]))
        return words(seeds, positions, purposes, completions, draws).view(-1, len(PURPOSES), 4)

    return RandomSource(generate, MAX_WORD_ROWS, device)


class HostVerifier:
    """Judges windows of many sequences on the host; holds nothing but the sources of random numbers."""

    def __init__(self, vocab_size: int) -> None:
        self.takes_masks_lazily = takes_masks_lazily
        self._noise = noise_source(vocab_size, HOST)
        self._words = verify_source(HOST)

    @torch.inference_mode()
    def launch(
        self, logits: Tensor, windows: Sequence[ScheduledSequence], masks: StepMasks | None = None
    ) -> LaunchedVerify:
        """Judges every window whose masks are not late, at once; logits: [rows that want them, vocab]."""
        groups: dict[VerifyRule, list[ScheduledSequence]] = {}
        for member in windows:
            groups.setdefault(rule_of(member.target), []).append(member)
        verified: list[VerifiedWindow] = []
        for rule, members in groups.items():
            chosen, rows = rows_of(members, logits), [rows for member in members for rows in member.sampling_rows]
            mask = None if masks is None else masks.rows_of(members)
            sampling = assemble(rows, token_mask=mask, for_argmax=rule is VerifyRule.GREEDY)
            judged = judge(chosen, sampling, HostBatch(rule, members, self._noise, self._words))
            if masks is not None:
                judged = under_constraints(judged, members, chosen, lambda one: self._noise.rows(_spans([one])), masks)
            verified += verified_windows(chosen, members, *judged, token_mask=mask)
        in_time = [window for window in verified if not window.scheduled.target.is_waiting]
        return LaunchedVerify(lambda: in_time)

    @torch.inference_mode()
    def prepare(self, target: TargetSequence) -> bool:
        """Draws a sequence's random numbers of its next window while there is time; whether any were missing."""
        if target.greedy:
            return False
        source = self._noise if target.coupled else self._words
        first, count = target.committed, target.max_window + 1
        return source.prepare(RandomRange(target.window_key(first), target.random_ahead, first, count, first + count))


class HostBatch:
    """Windows of one rule, with random numbers from sources that may have them; what is not asked for is not made."""

    greedy_rows = rejecting = None

    def __init__(
        self, rule: VerifyRule, members: Sequence[ScheduledSequence], noise: RandomSource, words: RandomSource
    ) -> None:
        self.rules = (rule,)
        self._members = members
        self._noise = noise
        self._words = words

    @cached_property
    def by_block(self) -> Tensor | None:
        return torch.ones(len(self._members), dtype=torch.bool) if VerifyRule.BLOCK in self.rules else None

    @property
    def is_plain(self) -> bool:
        return not any(member.window.ids for member in self._members)

    @cached_property
    def windows(self) -> Windows:
        return layout_of(self._members)

    @property
    def draft_ids(self) -> Tensor:
        return draft_ids_of(self._members)

    @property
    def parents(self) -> Tensor | None:
        return parents_of(self._members)

    @property
    def draft_weights(self) -> DraftWeights:
        return DraftWeights.of([vector for member in self._members for vector in weights_of(member)])

    def race(self, probs: Tensor) -> Tensor:
        return coupled_choice(probs, self._noise.rows(_spans(self._members)))

    def uniforms(self, rows: Tensor) -> Tensor:
        return accept_uniforms(self._row_words[rows, ACCEPT])

    def next_words(self, rows: Tensor, is_bonus: Tensor) -> Tensor:
        return self._row_words[rows, torch.where(is_bonus, BONUS, RECOVERED)]

    @cached_property
    def _row_words(self) -> Tensor:  # [rows, 3, 4] int64
        return self._words.rows(_spans(self._members))


def _spans(members: Sequence[ScheduledSequence]) -> list[RandomRange]:
    """The positions of the rows of every window: of the tokens that are judged or drawn."""
    spans: list[RandomRange] = []
    for member in members:
        key, ahead, first = member.target.window_key(member.committed), member.target.random_ahead, member.committed
        rows = member.num_verify_rows
        if member.window.parents:  # rows that stand in one place have the same
            spans += [RandomRange(key, ahead, first + depth, 1, first + rows) for depth in member.row_depths]
        else:
            spans.append(RandomRange(key, ahead, first, rows, first + rows))
    return spans


def rows_of(windows: Sequence[ScheduledSequence], logits: Tensor) -> Tensor:
    """The rows of a step's logits that judge these windows; the others are a prompt's, or of other windows."""
    rows = [row for window in windows for row in window.verify_rows]
    return logits if len(rows) == len(logits) else logits[torch.tensor(rows, device=logits.device)]


def layout_of(windows: Sequence[ScheduledSequence]) -> Windows:
    """Which rows judge which drafted tokens."""
    return Windows.of([len(w.window.ids) for w in windows], [w.num_verify_rows for w in windows])


def draft_ids_of(windows: Sequence[ScheduledSequence]) -> Tensor:
    """The drafted tokens of all, [drafted] int64."""
    return torch.tensor([token for window in windows for token in window.window.ids], dtype=torch.int64)


def parents_of(windows: Sequence[ScheduledSequence]) -> Tensor | None:
    """The row of its window that judges every drafted token, [drafted] int64; None where there is no tree."""
    if not any(window.window.parents for window in windows):
        return None
    parents = [row for w in windows for row in w.window.parents or range(len(w.window.ids))]
    return torch.tensor(parents, dtype=torch.int64)


def weights_of(scheduled: ScheduledSequence) -> list[tuple[bytes, bytes] | None]:
    """The ids and weights that each drafted token was drawn from, packed uint32. None is one-hot: under another rule
    than rejection, and where none came or ids and weights differ in number."""
    if not scheduled.target.rejects:
        return [None] * len(scheduled.window.ids)
    vectors = [(w.ids, w.weights) if w is not None else None for w in scheduled.window.weights]
    return [v if v is not None and len(v[0]) == len(v[1]) and len(v[0]) % 4 == 0 else None for v in vectors]
