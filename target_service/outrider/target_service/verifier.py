"""From the logits of a step to verdicts: which drafted tokens hold, and the target's own token after them.

Greedy, coupled and rejection sequences of a batch are each judged together. The acceptance rules themselves are
kernels; here rows are matched with sequences, random counters with positions.

How a window is judged.

The target's random numbers: of each position the words that judge a drafted token and draw the target's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import islice

import torch
from torch import Tensor

from outrider.engine.random import MAX_WORD_ROWS, RandomRange, RandomSource, noise_source
from outrider.engine.sampler import (
    RowLogprobs,
    SamplingRows,
    assemble,
    process,
    process_greedy,
    reported_values,
    top_logprobs,
)
from outrider.kernels.random.reference import Purpose, words
from outrider.kernels.sampling.reference import logits_to_probs
from outrider.kernels.types import DraftWeights, RowSampling, Windows
from outrider.kernels.verify.reference import accept, accept_uniforms, coupled_accept, coupled_choice, draw
from outrider.target_service.scheduler import ScheduledSequence
from outrider.target_service.sequence import TargetSequence


class VerifyRule(IntEnum):
    """On a device a later one takes what an earlier one does, and more."""

    GREEDY = 0
    COUPLED = 1
    REJECTION = 2


def rule_of(target: TargetSequence) -> VerifyRule:
    """The rule of a sequence, fixed when it was opened."""
    return VerifyRule.GREEDY if target.greedy else VerifyRule.COUPLED if target.coupled else VerifyRule.REJECTION


PURPOSES = (Purpose.ACCEPT, Purpose.RECOVERED, Purpose.BONUS)  # the order within a row
ACCEPT, RECOVERED, BONUS = range(len(PURPOSES))


def verify_source(device: torch.device) -> RandomSource:
    """Rows are [3, 4] int64: four words under each purpose."""

    def generate(seeds: Tensor, positions: Tensor, completions: Tensor) -> Tensor:  # [n] each -> [n, 3, 4]
        repeated = [column.repeat_interleave(len(PURPOSES)) for column in (seeds, positions, completions)]
        purposes = torch.tensor([int(purpose) for purpose in PURPOSES], device=device).repeat(len(seeds))
        return words(repeated[0], repeated[1], purposes, repeated[2]).view(-1, len(PURPOSES), 4)

    return RandomSource(generate, MAX_WORD_ROWS, device)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the target says of one window. `ids` are the accepted tokens and, if there is one, its own token after
    them."""

    entry: ScheduledSequence
    ids: tuple[int, ...]
    num_accepted: int
    invalid: bool  # a row that mattered held NaN, +inf or no allowed token: an error, never a token
    logprobs: tuple[RowLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class VerifyRows:
    """One sequence of a step with the rows that judge its window."""

    entry: ScheduledSequence
    rows: range  # rows of the step's logits

    @property
    def plan(self) -> SamplingRows:
        """The sampling state at every row."""
        drafted = self.entry.window.ids
        return SamplingRows(self.entry.target.sampler, drafted if self.entry.takes_next else drafted[:-1])


HOST = torch.device("cpu")
RANKED_ON_DEVICE = 1 << 27  # logits of a prompt at once
RANKED_ON_HOST = 1 << 20  # what a cache holds is ranked faster
VerifyResult = tuple[Tensor, Tensor, Tensor]  # accepted [n] int64, next id or -1 [n] int64, invalid [rows] bool
VerifyFunction = Callable[[Tensor, Sequence[VerifyRows]], VerifyResult]


class HostVerifier:
    """Judges windows of many sequences on the host; holds nothing but the sources of random numbers."""

    def __init__(self, vocab_size: int) -> None:
        self._noise = noise_source(vocab_size, HOST)
        self._words = verify_source(HOST)

    @torch.inference_mode()
    def verify(self, logits: Tensor, verify_rows: Sequence[VerifyRows]) -> list[Verdict]:
        """Judges every window; logits are [rows of the step that want logits, vocab] float32. Verdicts are in no fixed
        order."""
        verdicts: list[Verdict] = []
        verify_functions: dict[VerifyRule, VerifyFunction] = {
            VerifyRule.GREEDY: _verify_greedy,
            VerifyRule.COUPLED: self._verify_coupled,
            VerifyRule.REJECTION: self._verify_rejection,
        }
        for rule, members in _by_rule(verify_rows).items():
            rows = [row for member in members for row in member.rows]
            chosen = logits if len(rows) == len(logits) else logits[torch.tensor(rows)]
            accepted, next_ids, invalid = verify_functions[rule](chosen, members)
            verdicts += verdicts_of(chosen, members, accepted, next_ids, invalid)
        return verdicts

    @torch.inference_mode()
    def prepare(self, target: TargetSequence) -> bool:
        """Draws a sequence's random numbers of its next window while there is time; whether any were missing."""
        if target.greedy:
            return False
        source = self._noise if target.coupled else self._words
        first, count = target.committed, target.max_window + 1
        return source.prepare(RandomRange(target.random_key, target.random_ahead, first, count, first + count))

    def _verify_coupled(self, logits: Tensor, members: Sequence[VerifyRows]) -> VerifyResult:
        probs, invalid = process(logits, [member.plan for member in members])
        noise = self._noise.rows(_spans(members, [len(member.rows) for member in members]))  # [rows, vocab]
        return *_accept(coupled_choice(probs, noise), members), invalid

    def _verify_rejection(self, logits: Tensor, members: Sequence[VerifyRows]) -> VerifyResult:
        target_probs, invalid = process(logits, [member.plan for member in members])  # [rows, vocab]
        windows, draft_ids = _windows(members), _draft_ids(members)
        # One more position than drafted tokens: a bonus (or plain) token has its own.
        counts = [len(member.entry.window.ids) + 1 for member in members]
        words = self._words.rows(_spans(members, counts))  # [positions, 3, 4] int64
        first = windows.draft_starts + torch.arange(len(members))  # [n]: each window's first row of words
        uniforms = accept_uniforms(words[first[windows.window_of_draft] + windows.offset_of_draft, ACCEPT])  # [drafted]
        vectors = [(w.ids, w.weights) if w is not None else None for m in members for w in m.entry.window.weights]
        accepted, next_weights = accept(target_probs, windows, draft_ids, DraftWeights.of(vectors), uniforms)
        purposes = torch.where(accepted == windows.num_drafted, BONUS, RECOVERED)  # [n]
        return accepted, draw(next_weights, words[first + accepted, purposes]), invalid


def _by_rule(verify_rows: Sequence[VerifyRows]) -> dict[VerifyRule, list[VerifyRows]]:
    groups: dict[VerifyRule, list[VerifyRows]] = {}
    for member in verify_rows:
        groups.setdefault(rule_of(member.entry.target), []).append(member)
    return groups


def _verify_greedy(logits: Tensor, members: Sequence[VerifyRows]) -> VerifyResult:
    choices, invalid = process_greedy(logits, [member.plan for member in members])
    return *_accept(choices.masked_fill(invalid, -1), members), invalid


def _accept(own: Tensor, members: Sequence[VerifyRows]) -> tuple[Tensor, Tensor]:  # own tokens [rows] -> [n] each
    """How many drafted tokens are the target's own, and the next id after them. Plain tokens alone need no comparison,
    and every operation costs: a pass leaves the processor's caches full of weights."""
    if not any(member.entry.window.ids for member in members):
        return torch.zeros_like(own), own
    return coupled_accept(own, _windows(members), _draft_ids(members))


def _spans(members: Sequence[VerifyRows], counts: Sequence[int]) -> list[RandomRange]:
    """The first `counts` positions of every window. The counter is the absolute position of the token that is judged or
    drawn."""
    return [
        RandomRange(
            m.entry.target.random_key, m.entry.target.random_ahead, m.entry.committed, count, m.entry.committed + count
        )
        for m, count in zip(members, counts, strict=True)
    ]


def _windows(members: Sequence[VerifyRows]) -> Windows:
    return Windows.of([len(m.entry.window.ids) for m in members], [len(m.rows) for m in members])


def _draft_ids(members: Sequence[VerifyRows]) -> Tensor:
    return torch.tensor([token for member in members for token in member.entry.window.ids], dtype=torch.int64)


def verdicts_of(
    logits: Tensor, members: Sequence[VerifyRows], accepted: Tensor, next_ids: Tensor, invalid: Tensor
) -> list[Verdict]:
    """Verdicts from what was judged: [n] each but for `invalid`, [rows]."""
    first_row = 0
    verdicts: list[Verdict] = []
    reported: list[tuple[int, range]] = []  # which verdict, and the rows of its tokens
    flags = invalid.tolist()
    for member, num_accepted, next_id in zip(members, accepted.tolist(), next_ids.tolist(), strict=True):
        num_rows = len(member.rows)
        used = min(num_accepted + 1, num_rows)
        bad = any(flags[first_row : first_row + used]) or (next_id < 0 and num_accepted < num_rows)
        ids = (*member.entry.window.ids[:num_accepted], *((next_id,) if next_id >= 0 else ()))
        if not bad and ids and member.entry.target.open.sampling.logprobs is not None:
            reported.append((len(verdicts), range(first_row, first_row + len(ids))))
        verdicts.append(Verdict(member.entry, ids, num_accepted, bad))
        first_row += num_rows
    return _with_logprobs(verdicts, reported, logits) if reported else verdicts


def _with_logprobs(verdicts: list[Verdict], reported: Sequence[tuple[int, range]], logits: Tensor) -> list[Verdict]:
    """Adds what is asked of the committed tokens, together for all that ask for values of the same kind."""
    by_mode: dict[str, list[tuple[int, range]]] = {}
    for index, rows in reported:
        mode = verdicts[index].entry.target.open.sampling.logprobs_mode.value
        by_mode.setdefault(mode, []).append((index, rows))
    for mode, members in by_mode.items():
        owners = [verdicts[index] for index, _ in members]
        own = logits[torch.tensor([row for _, rows in members for row in rows], device=logits.device)]
        sampling, probs = RowSampling(), own
        if mode.startswith("processed"):
            sampling = assemble([SamplingRows(o.entry.target.sampler, o.ids[:-1]) for o in owners], logits.device)
            probs, _ = logits_to_probs(own, sampling)
        counts = [owner.entry.target.open.sampling.logprobs or 0 for owner in owners for _ in owner.ids]
        chosen = [token for owner in owners for token in owner.ids]
        ranked = iter(top_logprobs(reported_values(mode, own, sampling, probs), chosen, counts))
        for (index, _), owner in zip(members, owners, strict=True):
            verdicts[index] = replace(owner, logprobs=tuple(islice(ranked, len(owner.ids))))
    return verdicts


@torch.inference_mode()
def prompt_logprobs(logits: Tensor, next_ids: Sequence[int], count: int, mode: str) -> list[RowLogprobs]:
    """Of the prompt tokens that follow each row, [rows, vocab]; processors do not apply to a prompt."""
    raw = f"raw_{mode.rpartition('_')[2]}"
    at_once = RANKED_ON_HOST if logits.device == HOST else RANKED_ON_DEVICE
    num_rows = max(1, at_once // logits.shape[1])
    found: list[RowLogprobs] = []
    for start in range(0, len(next_ids), num_rows):
        ids, rows = next_ids[start : start + num_rows], logits[start : start + num_rows]
        found += top_logprobs(reported_values(raw, rows, RowSampling(), rows), ids, [count] * len(ids))
    return found
