"""How a token is drawn from the draft's logits, alike on the host and on a device.

There are three rules (DraftRule): the arg max; the race of coupling, over the noise that the target meets, too; integer
weights, from which the token is drawn and which travel with it. The first two may also rank what else could stand in
the token's place. The host draws rows of one rule together; a captured draw draws by every rule that some row has, and
takes of each row what is its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, Self

import torch
from torch import Tensor

from outrider.engine.grammar.masks import ALL_BITS, num_words
from outrider.engine.random import RandomRange, RandomSource, noise_source, word_source
from outrider.engine.sampler import SamplingRows, assemble
from outrider.kernels.sampling.reference import (
    DEFAULT_MASS,
    adjust_logits,
    best_ids,
    draft_sample,
    greedy_choice,
    logits_to_probs,
)
from outrider.kernels.verify.reference import coupled_choice
from outrider.proposers.draft_rows import DraftedToken, DraftRule, DraftSampling
from outrider.proposers.reencoding import PairMap
from outrider.proposers.vocabulary_map import VocabularyMap


class Drawing(Protocol):
    """One sequence whose next token is drawn."""

    @property
    def draft_sampling(self) -> DraftSampling:
        """How."""

    @property
    def num_top_tokens(self) -> int:
        """How many other tokens for the same position are wanted."""

    @property
    def wants_confidence(self) -> bool:
        """Whether the draft's own probability of what is drawn is wanted."""

    def span(self) -> RandomRange:
        """Where its random numbers are."""

    def sampling_rows(self) -> SamplingRows:
        """The row after the chain, processed as if the chain were committed."""


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


class Drawer:
    """Draws on the host, for many sequences at once."""

    def __init__(self, vocab_size: int, device: torch.device, mass: float = DEFAULT_MASS) -> None:
        self._vocab_size, self._device, self.mass = vocab_size, device, mass  # that a vector of weights holds
        self._words = word_source(device)
        self._vocabularies: dict[PairMap | None, DrawnVocabulary] = {}

    def draw(self, logits: Tensor, rows: Sequence[Drawing]) -> list[DraftedToken | None]:
        """The next token of each; `logits` are [rows, vocab], and None comes of those that are not finite. Rows of one
        rule and one vocabulary are drawn together."""
        groups: dict[tuple[int, int], list[int]] = {}
        for index, row in enumerate(rows):
            groups.setdefault((row.draft_sampling.rule, id(row.draft_sampling.mapping)), []).append(index)
        drafted: list[DraftedToken | None] = [None] * len(rows)
        for indices in groups.values():
            chosen = logits if len(groups) == 1 else logits[indices]  # [rows of the group, vocab]
            for index, token in zip(indices, self._draw_alike(chosen, [rows[i] for i in indices]), strict=True):
                drafted[index] = token
        return drafted

    def adjusted(self, logits: Tensor, rows: Sequence[Drawing]) -> Tensor:  # [rows, vocab] -> the same
        """What may not be drawn by the rows' masks and bans has minus infinity, and penalties and biases are there."""
        plans = [row.sampling_rows() for row in rows]
        return adjust_logits(logits, assemble(plans, logits.device, masks_of(plans, logits), for_argmax=True))

    def prepare(self, draft_sampling: DraftSampling, first: int, end: int) -> bool:
        """Draws a sequence's random numbers of positions `first` to `end` - 1 while there is time; whether any were
        missing."""
        if draft_sampling.rule is DraftRule.ARGMAX:
            return False
        noise = self._vocabulary(draft_sampling.mapping).noise
        source = noise if draft_sampling.rule is DraftRule.COUPLED else self._words
        return source.prepare(RandomRange(draft_sampling.key, draft_sampling.ahead, first, end - first, end))

    def _vocabulary(self, mapping: PairMap | None) -> DrawnVocabulary:
        if mapping not in self._vocabularies:
            self._vocabularies[mapping] = DrawnVocabulary.of(mapping, self._vocab_size, self._device)
        return self._vocabularies[mapping]

    def _draw_alike(self, logits: Tensor, rows: list[Drawing]) -> list[DraftedToken | None]:
        """`logits` are [rows, vocab]; the rows have one rule and one vocabulary."""
        rule, vocabulary = rows[0].draft_sampling.rule, self._vocabulary(rows[0].draft_sampling.mapping)
        logits = vocabulary.logits(logits)
        plans = [row.sampling_rows() for row in rows]
        sampling = assemble(plans, logits.device, masks_of(plans, logits), for_argmax=rule is DraftRule.ARGMAX)
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

    def _draw_weighted(self, probs: Tensor, invalid: Tensor, rows: list[Drawing]) -> list[DraftedToken | None]:
        """`probs` are [rows, vocab], `invalid` [rows]."""
        if bool(invalid.any()):
            probs[invalid] = 1.0 / probs.shape[1]  # drawn like the others, and not used
        words = self._words.rows([row.span() for row in rows])  # [rows, 4]
        samples = draft_sample(probs, words, self.mass)
        starts = (4 * samples.entry_starts).tolist()  # in bytes
        ids, weights = pack(samples.entry_ids), pack(samples.entry_weights)
        entries = [(ids[start:end], weights[start:end]) for start, end in pairwise(starts)]
        tokens = samples.token_ids.masked_fill(invalid, -1).tolist()
        confidence = confidence_of(lambda: probs, None, rows)
        return drafted_tokens(tokens, [()] * len(rows), entries, rows, confidence)


def masks_of(plans: Sequence[SamplingRows], logits: Tensor) -> Tensor | None:  # [rows, ceil(vocab / 32)] int32
    """What the grammars of rows, [rows, vocab], allow; None where none has one. A row is one plan's."""
    found = [_mask_of(one) for one in plans]
    if all(mask is None for mask in found):
        return None
    every_id = torch.full((1, num_words(logits.shape[1])), ALL_BITS, dtype=torch.int32)
    return torch.cat([every_id if mask is None else mask for mask in found]).to(logits.device)


def _mask_of(plan: SamplingRows) -> Tensor | None:  # [1, ceil(vocab / 32)] int32
    """By a draft's own grammar, or beside the target by the target's, but where that takes long: only acceptance hangs
    on it, and all that draft here would wait."""
    sampler = plan.sampler
    if sampler.draft_masks is not None:
        return sampler.draft_masks.masks(plan.drafted, plan.first)
    if sampler.constraint is None or sampler.constraint.matcher.has_slow_masks(plan.drafted):
        return None
    mask = torch.empty(1, num_words(sampler.vocab_size), dtype=torch.int32)
    try:
        sampler.constraint.write_masks(sampler.num_output, plan.drafted, plan.first, mask)
    except ValueError:  # too complex here, as the target will find itself
        return None
    return mask


def race(probs: Tensor, noise: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
    """Of [rows, vocab] each: the ids that win, [rows], and what scores them all, [rows, vocab]. The scores hold the
    noise that the target will meet, so that they rank what it will take instead."""
    return coupled_choice(probs, noise), lambda: -noise / probs


def ranked_ids(scores: Callable[[], Tensor], rows: Sequence[Drawing]) -> list[list[int]]:
    """Ids by falling score, [rows, any], one more than are wanted: the drawn one may be among them."""
    wanted = max(row.num_top_tokens for row in rows)
    return best_ids(scores(), wanted + 1).tolist() if wanted else [[]] * len(rows)


def confidence_of(probs: Callable[[], Tensor], ids: Tensor | None, rows: Sequence[Drawing]) -> list[float]:
    """The probabilities of the ids, [rows], among `probs`, [rows, vocab]; without ids those of the likeliest ones. None
    where no row wants them."""
    if not any(row.wants_confidence for row in rows):
        return []
    found = probs().amax(-1) if ids is None else probs().gather(1, ids[:, None]).squeeze(1)
    values: list[float] = found.tolist()
    return values


def pack(values: Tensor) -> bytes:
    """Of integers below 2^32, as they travel."""
    return values.cpu().numpy().astype("<u4").tobytes()


def drafted_tokens(
    ids: Sequence[int],  # [rows]; below 0: none, the logits were not finite
    ranked: Sequence[Sequence[int]],  # [rows, any]; may hold the drawn id, and ends with -1 where there are no more
    entries: Sequence[tuple[bytes, bytes]],  # [rows]: ids and weights, packed; empty where none were drawn from
    rows: Sequence[Drawing],
    confidence: Sequence[float] = (),  # [rows], or none was wanted
) -> list[DraftedToken | None]:
    """What was drawn, row by row."""
    drafted: list[DraftedToken | None] = []
    sure = confidence or [1.0] * len(rows)
    for token, best, (entry_ids, weights), row, held in zip(ids, ranked, entries, rows, sure, strict=True):
        others = [other for other in best if other not in (token, -1)]
        found = DraftedToken(token, entry_ids, weights, tuple(others[: row.num_top_tokens]), held)
        drafted.append(found if token >= 0 else None)
    return drafted
