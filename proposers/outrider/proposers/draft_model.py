"""Drafting with a model: one batched forward per drafted token, for many sequences at once.

A sequence brings the rows it has not computed yet: one in the middle of a chain, two after a bonus token, a chunk of a
prompt at the start. Drafts are drawn from the logits after the same processors as the target's: under rejection from
integer weights that travel with the token, under coupling by the noise that both sides share, else by the arg max.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

import torch
from torch import Tensor

from outrider.engine.model_runner import ModelRunner
from outrider.engine.random import RandomRange, noise_source, word_source
from outrider.engine.sampler import assemble
from outrider.kernels.sampling.reference import (
    DEFAULT_MASS,
    adjust_logits,
    best_ids,
    draft_sample,
    greedy_choice,
    logits_to_probs,
)
from outrider.kernels.verify.reference import coupled_choice
from outrider.proposers.device_draft import MOST_PASSES, DeviceChains
from outrider.proposers.draft_rows import DraftedToken, DraftRows, DraftRule, DraftSampling


class DraftModelProposer:
    """Steps the chains of many sequences. Their blocks must hold the rows of the step."""

    name = "draft_model"

    def __init__(self, runner: ModelRunner, mass: float = DEFAULT_MASS) -> None:
        self.runner = runner
        self._mass = mass
        self._words = word_source(runner.model.device)
        self._noise = noise_source(runner.model.vocab_size, runner.model.device)
        self._chains = _chains(runner, mass)

    def passes_for(self, rows: Sequence[DraftRows], wanted: int) -> int:
        """How many tokens of each sequence `run` draws at once, of those wanted: with captured passes several."""
        return max(1, min(wanted, MOST_PASSES)) if self._chains is not None and self._chains.holds(rows) else 1

    def run(self, rows: Sequence[DraftRows], num_passes: int) -> list[list[DraftedToken]]:
        """The next tokens of each sequence, `num_passes` of them where `passes_for` said so; fewer where its logits are
        not finite, and none for a chunk of a prompt. For several, blocks hold as many tokens more."""
        if num_passes > 1 and self._chains is not None:
            return self._chains.run(rows, num_passes)
        return [[] if token is None else [token] for token in self.step(rows)]

    @torch.inference_mode()
    def step(self, rows: Sequence[DraftRows]) -> list[DraftedToken | None]:
        """One forward. Returns what each sequence drew, in the order of `rows`: None for a chunk of a prompt, and where
        the logits are not finite. Tokens drawn are appended to their sequences."""
        order = sorted(range(len(rows)), key=lambda index: _group(rows[index]))
        logits = self.runner.forward([rows[index].batch_entry() for index in order])  # [rows that draw, vocab]
        drafted: list[DraftedToken | None] = [None] * len(rows)
        start = 0
        for group, members in groupby(order, key=lambda index: _group(rows[index])):
            indices = list(members)
            if group != _NO_DRAW:
                drawn = self._draw(DraftRule(group), logits[start : start + len(indices)], [rows[i] for i in indices])
                start += len(indices)
                for index, token in zip(indices, drawn, strict=True):
                    drafted[index] = token
        for row, token in zip(rows, drafted, strict=True):
            _advance(row, token)
        return drafted

    @torch.inference_mode()
    def prepare(self, draft_sampling: DraftSampling, first: int, end: int) -> bool:
        """Draws a sequence's random numbers of positions `first` to `end` - 1 while there is time; whether any were
        missing."""
        if draft_sampling.rule is DraftRule.ARGMAX or self._chains is not None:
            return False  # captured draws compute them where they use them
        source = self._noise if draft_sampling.rule is DraftRule.COUPLED else self._words
        return source.prepare(RandomRange(draft_sampling.key, draft_sampling.ahead, first, end - first, end))

    def _draw(self, rule: DraftRule, logits: Tensor, rows: list[DraftRows]) -> list[DraftedToken | None]:
        """`logits` are [rows, vocab]."""
        sampling = assemble([row.sampling_rows() for row in rows], logits.device)
        if rule is DraftRule.ARGMAX:
            ids, invalid = greedy_choice(logits, sampling)  # [rows] each
            return _without_weights(ids, invalid, _top_tokens(lambda: adjust_logits(logits, sampling), rows), rows)
        probs, invalid = logits_to_probs(logits, sampling)  # [rows, vocab], [rows]
        if rule is DraftRule.COUPLED:
            noise = self._noise.rows([row.span() for row in rows])  # [rows, vocab]
            ids = coupled_choice(probs, noise)
            return _without_weights(ids, invalid, _top_tokens(lambda: -noise / probs, rows), rows)
        return self._draw_weighted(probs, invalid, rows)

    def _draw_weighted(self, probs: Tensor, invalid: Tensor, rows: list[DraftRows]) -> list[DraftedToken | None]:
        """`probs` are [rows, vocab], `invalid` [rows]."""
        if bool(invalid.any()):
            probs[invalid] = 1.0 / probs.shape[1]  # drawn like the others, and not used
        words = self._words.rows([row.span() for row in rows])  # [rows, 4]
        samples = draft_sample(probs, words, self._mass)
        tokens, bad = samples.token_ids.tolist(), invalid.tolist()
        starts = (4 * samples.entry_starts).tolist()  # in bytes
        ids, weights = _packed(samples.entry_ids), _packed(samples.entry_weights)
        return [
            None
            if bad[row] or token < 0
            else DraftedToken(token, ids[starts[row] : starts[row + 1]], weights[starts[row] : starts[row + 1]])
            for row, token in enumerate(tokens)
        ]


def _chains(runner: ModelRunner, mass: float) -> DeviceChains | None:
    """Where passes are captured."""
    if runner.captured is None:
        return None
    with torch.cuda.device(runner.model.device):
        return DeviceChains(runner.captured, runner.model.vocab_size, mass)


_NO_DRAW = len(DraftRule)  # a group of its own, after the rules: these rows have no logits


def _group(row: DraftRows) -> int:
    return int(row.draft_sampling.rule) if row.draws else _NO_DRAW


def _packed(values: Tensor) -> bytes:
    """Values are [entries] int64 below 2^32."""
    return values.cpu().numpy().astype("<u4").tobytes()


def _top_tokens(score: Callable[[], Tensor], rows: Sequence[DraftRows]) -> list[list[int]]:
    """The tokens of the best finite scores, one more than wanted: the drawn one may be among them; [rows, vocab]. Under
    coupling the scores hold the noise that the target will meet, so that they rank what it will take instead."""
    wanted = max(row.num_top_tokens for row in rows)
    return best_ids(score(), wanted + 1).tolist() if wanted else [[]] * len(rows)


def _without_weights(
    ids: Tensor, invalid: Tensor, best: Sequence[Sequence[int]], rows: Sequence[DraftRows]
) -> list[DraftedToken | None]:
    """Ids and flags are [rows]; `best` may hold the drawn token, and ends with -1 where there are no more."""
    drafted: list[DraftedToken | None] = []
    for token, bad, ranked, row in zip(ids.tolist(), invalid.tolist(), best, rows, strict=True):
        others = [other for other in ranked if other not in (token, -1)]
        valid = not bad and token >= 0
        drafted.append(DraftedToken(token, top_tokens=tuple(others[: row.num_top_tokens])) if valid else None)
    return drafted


def _advance(row: DraftRows, drafted: DraftedToken | None) -> None:
    sequence = row.sequence
    computed = sequence.num_computed_tokens + row.num_rows
    if drafted is not None:
        sequence.tokens.append(drafted.token_id)
    sequence.num_computed_tokens = min(computed, len(sequence) - 1)
