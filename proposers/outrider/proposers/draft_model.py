"""Drafting with a model: one batched forward per drafted token, for many sequences at once.

A sequence brings the rows it has not computed yet: one in the middle of a chain, two after a bonus token, a chunk of a
prompt at the start. Drafts are drawn from the logits after the same processors as the target's: under rejection from
integer weights that travel with the token, under coupling by the noise that both sides share, else by the arg max.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar, Self

import torch
from torch import Tensor

from outrider.engine.loader import LoadedModel
from outrider.engine.model_runner import ModelRunner
from outrider.engine.random import RandomRange, RandomSource, noise_source, word_source
from outrider.engine.sampler import assemble
from outrider.kernels.sampling.reference import (
    DEFAULT_MASS,
    adjust_logits,
    draft_sample,
    greedy_choice,
    logits_to_probs,
)
from outrider.proposers.device_draft import MOST_PASSES, DeviceChains
from outrider.proposers.draft_rows import DraftedToken, DraftRows, DraftRule, DraftSampling
from outrider.proposers.drawing import confidence_of, drafted_tokens, pack, race, ranked_ids
from outrider.proposers.reencoding import PairMap
from outrider.proposers.vocabulary_map import VocabularyMap


@dataclass(frozen=True, slots=True)
class DrawnVocabulary:
    """The ids that tokens are drawn from, which are the target's unless drafts are re-encoded, and the noise over
    them."""

    noise: RandomSource
    size: int
    own_ids: Tensor | None  # [shared]: of the draft's tokens that have a counterpart; None: ids are the same
    ids: Tensor | None  # [shared]: the counterparts

    @classmethod
    def of(cls, mapping: PairMap | None, vocab_size: int, device: torch.device) -> Self:
        """`vocab_size` is the draft's. What is re-encoded is drawn from the draft's own ids, as far as it can be."""
        if mapping is None:
            return cls(noise_source(vocab_size, device), vocab_size, None, None)
        if isinstance(mapping, VocabularyMap):
            pairs = [(own, token_id) for token_id, own in mapping.to_draft.items() if own < vocab_size]
            size = len(mapping.target.tokens)
        else:
            pairs, size = [(own, own) for own in mapping.drawable if own < vocab_size], vocab_size
        own_ids, ids = torch.tensor(pairs, dtype=torch.int64, device=device).view(-1, 2).unbind(1)
        return cls(noise_source(size, device), size, own_ids, ids)

    def logits(self, logits: Tensor) -> Tensor:  # [rows, draft's vocab] -> [rows, size]
        """Minus infinity where there is no counterpart, so that the others have all of the probability."""
        if self.own_ids is None or self.ids is None:
            return logits
        shared = logits.index_select(1, self.own_ids)  # [rows, shared]
        return logits.new_full((len(logits), self.size), -torch.inf).index_copy_(1, self.ids, shared)


class DraftModelProposer:
    """Steps the chains of many sequences. Their blocks must hold the rows of the step."""

    name = "draft_model"
    parallel: ClassVar[bool] = False  # one pass gives several tokens

    def __init__(self, runner: ModelRunner, mass: float = DEFAULT_MASS) -> None:
        self.runner = runner
        self._mass = mass
        self._words = word_source(runner.model.device)
        self._vocabularies: dict[PairMap | None, DrawnVocabulary] = {}
        self._chains = None if self.parallel else _chains(runner, mass)

    @classmethod
    def of(cls, runner: ModelRunner, loaded: LoadedModel) -> Self:
        """For the model that the runner runs. Raises ValueError for one that cannot draft so."""
        return cls(runner)

    def tokens_at_once(self, rows: Sequence[DraftRows], wanted: Sequence[int]) -> list[int]:
        """How many tokens of each sequence `run` draws, of those wanted: with captured passes several, one a pass."""
        several = self._chains is not None and self._chains.holds(rows)
        return [max(1, min(*wanted, MOST_PASSES)) if several else 1] * len(rows)

    def run(self, rows: Sequence[DraftRows], counts: Sequence[int]) -> list[list[DraftedToken]]:
        """The next tokens of each sequence, as many as `tokens_at_once` said; fewer where its logits are not finite,
        and none for a chunk of a prompt. For several, blocks hold as many tokens more."""
        if counts[0] > 1 and self._chains is not None:
            return self._chains.run(rows, counts[0])
        return self.step(rows)

    @torch.inference_mode()
    def step(self, rows: Sequence[DraftRows]) -> list[list[DraftedToken]]:
        """One forward. Returns the target's token that each sequence drew, in the order of `rows`: none for a chunk of
        a prompt, and where the logits are not finite; any number where it is re-encoded. Tokens drawn are appended to
        their sequences."""
        logits = self.runner.forward([row.batch_entry() for row in rows])  # [rows that draw, vocab]
        drawn = iter(self._draw(logits, [row for row in rows if row.draws]))
        drafted = [next(drawn) if row.draws else None for row in rows]
        return [_advance(row, token) for row, token in zip(rows, drafted, strict=True)]

    @torch.inference_mode()
    def prepare(self, draft_sampling: DraftSampling, first: int, end: int) -> bool:
        """Draws a sequence's random numbers of positions `first` to `end` - 1 while there is time; whether any were
        missing."""
        if draft_sampling.rule is DraftRule.ARGMAX or self._chains is not None:
            return False  # captured draws compute them where they use them
        noise = self._vocabulary(draft_sampling.mapping).noise
        source = noise if draft_sampling.rule is DraftRule.COUPLED else self._words
        return source.prepare(RandomRange(draft_sampling.key, draft_sampling.ahead, first, end - first, end))

    def _vocabulary(self, mapping: PairMap | None) -> DrawnVocabulary:
        if mapping not in self._vocabularies:
            model = self.runner.model
            self._vocabularies[mapping] = DrawnVocabulary.of(mapping, model.vocab_size, model.device)
        return self._vocabularies[mapping]

    def _draw(self, logits: Tensor, rows: Sequence[DraftRows]) -> list[DraftedToken | None]:
        """`logits` are [rows, vocab]. Rows of one rule and one vocabulary are drawn together."""
        groups: dict[tuple[int, int], list[int]] = {}
        for index, row in enumerate(rows):
            groups.setdefault((row.draft_sampling.rule, id(row.draft_sampling.mapping)), []).append(index)
        drafted: list[DraftedToken | None] = [None] * len(rows)
        for indices in groups.values():
            chosen = logits if len(groups) == 1 else logits[indices]  # [rows of the group, vocab]
            for index, token in zip(indices, self._draw_alike(chosen, [rows[i] for i in indices]), strict=True):
                drafted[index] = token
        return drafted

    def _draw_alike(self, logits: Tensor, rows: list[DraftRows]) -> list[DraftedToken | None]:
        """`logits` are [rows, vocab]; the rows have one rule and one vocabulary."""
        rule, vocabulary = rows[0].draft_sampling.rule, self._vocabulary(rows[0].draft_sampling.mapping)
        logits = vocabulary.logits(logits)
        plans = [row.sampling_rows() for row in rows]
        sampling = assemble(plans, logits.device, for_argmax=rule is DraftRule.ARGMAX)
        if rule is DraftRule.ARGMAX:
            ids, invalid = greedy_choice(logits, sampling)  # [rows] each
            ranked = ranked_ids(lambda: adjust_logits(logits, sampling), rows)
            confidence = confidence_of(lambda: adjust_logits(logits, sampling).softmax(-1), ids, rows)
        else:
            probs, invalid = logits_to_probs(logits, sampling)  # [rows, vocab], [rows]
            if rule is DraftRule.REJECTION:
                return self._draw_weighted(probs, invalid, rows)
            ids, scores = race(probs, vocabulary.noise.rows([row.span() for row in rows]))  # [rows]
            ranked = ranked_ids(scores, rows)
            confidence = confidence_of(lambda: probs, ids, rows)
        drawn = ids.masked_fill(invalid, -1).tolist()
        return drafted_tokens(drawn, ranked, [(b"", b"")] * len(rows), rows, confidence)

    def _draw_weighted(self, probs: Tensor, invalid: Tensor, rows: list[DraftRows]) -> list[DraftedToken | None]:
        """`probs` are [rows, vocab], `invalid` [rows]."""
        if bool(invalid.any()):
            probs[invalid] = 1.0 / probs.shape[1]  # drawn like the others, and not used
        words = self._words.rows([row.span() for row in rows])  # [rows, 4]
        samples = draft_sample(probs, words, self._mass)
        starts = (4 * samples.entry_starts).tolist()  # in bytes
        ids, weights = pack(samples.entry_ids), pack(samples.entry_weights)
        entries = [(ids[start:end], weights[start:end]) for start, end in pairwise(starts)]
        tokens = samples.token_ids.masked_fill(invalid, -1).tolist()
        confidence = confidence_of(lambda: probs, None, rows)
        return drafted_tokens(tokens, [()] * len(rows), entries, rows, confidence)


def _chains(runner: ModelRunner, mass: float) -> DeviceChains | None:
    """Where passes are captured."""
    if runner.captured is None:
        return None
    with torch.cuda.device(runner.model.device):
        return DeviceChains(runner.captured, runner.model.vocab_size, mass)


def append_drawn(row: DraftRows, drawn: DraftedToken) -> list[DraftedToken]:
    """Appends what was drawn to its text; what that adds for the target, one token unless it is re-encoded."""
    return [replace(drawn, token_id=token_id) for token_id in row.text.draw(drawn.token_id, row.limit)]


def _advance(row: DraftRows, drafted: DraftedToken | None) -> list[DraftedToken]:
    sequence = row.sequence
    computed = sequence.num_computed_tokens + row.num_rows
    tokens = [] if drafted is None else append_drawn(row, drafted)
    sequence.num_computed_tokens = min(computed, len(sequence) - 1)
    return tokens
