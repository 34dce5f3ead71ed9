"""Drafting with a model: one batched forward per drafted token, for many sequences at once.

A sequence brings the rows it has not computed yet: one in the middle of a chain, two after a bonus token, a chunk of a
prompt at the start. Drafts are drawn from the logits after the same processors as the target's: under rejection from
integer weights that travel with the token, under coupling by the noise that both sides share, else by the arg max.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import groupby

import torch
from torch import Tensor

from outrider.engine.batch import BatchEntry
from outrider.engine.random_ahead import RandomAhead, RandomKey, Span, noise_source, word_source
from outrider.engine.runner import ModelRunner
from outrider.engine.sampling import SamplingRows, SequenceSampler, assemble
from outrider.engine.sequence import Sequence
from outrider.kernels.best_ids import best_ids
from outrider.kernels.coupled import coupled_choice
from outrider.kernels.draft_sample import DEFAULT_MASS, draft_sample
from outrider.kernels.logits_to_probs import adjust_logits, greedy_choice, logits_to_probs


class DraftRule(IntEnum):
    """How a token is drawn from the draft's probabilities."""

    ARGMAX = 0  # greedy requests, and one-hot drafts of sampled ones: the likeliest to be accepted
    REJECTION = 1
    COUPLED = 2


@dataclass(frozen=True, slots=True)
class DraftLaw:
    """How one sequence draws, and its random numbers."""

    rule: DraftRule
    key: RandomKey
    ahead: RandomAhead = field(default_factory=RandomAhead)


@dataclass(frozen=True, slots=True)
class DraftRows:
    """What one sequence computes in a step: its next `num_rows` tokens. If these are all, it draws the next one."""

    sequence: Sequence
    num_rows: int
    num_committed: int  # tokens past these are drafted
    sampler: SequenceSampler  # counts the committed tokens
    law: DraftLaw
    limit: int  # positions below it will be drawn without another message
    num_alternatives: int = 0  # how many other tokens for the same position are wanted

    @property
    def draws(self) -> bool:
        """Whether the last token is computed, so that the next one can be drawn."""
        return self.sequence.num_computed_tokens + self.num_rows == len(self.sequence)

    @property
    def position(self) -> int:
        """Where the next token will stand."""
        return len(self.sequence)

    def span(self) -> Span:
        """Where its random numbers are."""
        return Span(self.law.key, self.law.ahead, self.position, 1, self.limit)

    def batch_entry(self) -> BatchEntry:
        """The rows as the runner takes them."""
        sequence, start = self.sequence, self.sequence.num_computed_tokens
        ids = sequence.tokens[start : start + self.num_rows]
        return BatchEntry(ids, start, sequence.block_table, num_logits=int(self.draws))

    def sampling_rows(self) -> SamplingRows:
        """The row after the chain, processed as if the chain were committed."""
        chain = self.sequence.tokens[self.num_committed :]
        return SamplingRows(self.sampler, chain, first=len(chain))


@dataclass(frozen=True, slots=True)
class Drafted:
    """A drafted token and, under rejection, the integer weights that it was drawn from, as packed little-endian
    uint32."""

    token_id: int
    ids: bytes = b""
    weights: bytes = b""
    alternatives: tuple[int, ...] = ()  # what may stand there instead, most likely first


class DraftModelProposer:
    """Steps the chains of many sequences. Their blocks must hold the rows of the step."""

    name = "draft_model"

    def __init__(self, runner: ModelRunner, mass: float = DEFAULT_MASS) -> None:
        self.runner = runner
        self._mass = mass
        self._words = word_source(runner.model.device)
        self._noise = noise_source(runner.model.vocab_size, runner.model.device)

    @torch.inference_mode()
    def step(self, rows: Many[DraftRows]) -> list[Drafted | None]:
        """One forward. Returns what each sequence drew, in the order of `rows`: None for a chunk of a prompt, and where
        the logits are not finite. Tokens drawn are appended to their sequences."""
        order = sorted(range(len(rows)), key=lambda index: _group(rows[index]))
        logits = self.runner.forward([rows[index].batch_entry() for index in order])  # [rows that draw, vocab]
        drafted: list[Drafted | None] = [None] * len(rows)
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
    def prepare(self, law: DraftLaw, first: int, end: int) -> bool:
        """Draws a sequence's random numbers of positions `first` to `end` - 1 while there is time; whether any were
        missing."""
        if law.rule is DraftRule.ARGMAX:
            return False
        source = self._noise if law.rule is DraftRule.COUPLED else self._words
        return source.prepare(Span(law.key, law.ahead, first, end - first, end))

    def _draw(self, rule: DraftRule, logits: Tensor, rows: list[DraftRows]) -> list[Drafted | None]:
        """`logits` are [rows, vocab]."""
        sampling = assemble([row.sampling_rows() for row in rows], logits.device)
        if rule is DraftRule.ARGMAX:
            ids, invalid = greedy_choice(logits, sampling)  # [rows] each
            return _without_weights(ids, invalid, _alternatives(lambda: adjust_logits(logits, sampling), rows), rows)
        probs, invalid = logits_to_probs(logits, sampling)  # [rows, vocab], [rows]
        if rule is DraftRule.COUPLED:
            noise = self._noise.rows([row.span() for row in rows])  # [rows, vocab]
            ids = coupled_choice(probs, noise)
            return _without_weights(ids, invalid, _alternatives(lambda: -noise / probs, rows), rows)
        return self._draw_weighted(probs, invalid, rows)

    def _draw_weighted(self, probs: Tensor, invalid: Tensor, rows: list[DraftRows]) -> list[Drafted | None]:
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
            else Drafted(token, ids[starts[row] : starts[row + 1]], weights[starts[row] : starts[row + 1]])
            for row, token in enumerate(tokens)
        ]


_NO_DRAW = len(DraftRule)  # a group of its own, after the rules: these rows have no logits


def _group(row: DraftRows) -> int:
    return int(row.law.rule) if row.draws else _NO_DRAW


def _packed(values: Tensor) -> bytes:
    """Values are [entries] int64 below 2^32."""
    return values.cpu().numpy().astype("<u4").tobytes()


def _alternatives(score: Callable[[], Tensor], rows: Many[DraftRows]) -> list[list[int]]:
    """The tokens of the best finite scores, one more than wanted: the drawn one may be among them; [rows, vocab]. Under
    coupling the scores hold the noise that the target will meet, so that they rank what it will take instead."""
    wanted = max(row.num_alternatives for row in rows)
    return best_ids(score(), wanted + 1).tolist() if wanted else [[]] * len(rows)


def _without_weights(
    ids: Tensor, invalid: Tensor, best: Many[Many[int]], rows: Many[DraftRows]
) -> list[Drafted | None]:
    """Ids and flags are [rows]; `best` may hold the drawn token, and ends with -1 where there are no more."""
    drafted: list[Drafted | None] = []
    for token, bad, ranked, row in zip(ids.tolist(), invalid.tolist(), best, rows, strict=True):
        others = [other for other in ranked if other not in (token, -1)]
        valid = not bad and token >= 0
        drafted.append(Drafted(token, alternatives=tuple(others[: row.num_alternatives])) if valid else None)
    return drafted


def _advance(row: DraftRows, drafted: Drafted | None) -> None:
    sequence = row.sequence
    computed = sequence.num_computed_tokens + row.num_rows
    if drafted is not None:
        sequence.tokens.append(drafted.token_id)
    sequence.num_computed_tokens = min(computed, len(sequence) - 1)
