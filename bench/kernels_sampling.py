"""The rows over the vocabulary: from logits to probabilities, random numbers, draws."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from kernels_case import ROWS, Case, Place, Work, random_ids, zipf_logits
from torch import Tensor

from outrider.kernels.best_ids import best_ids
from outrider.kernels.coupled import coupled_choice, coupled_draw
from outrider.kernels.draft_sample import DEFAULT_MASS, MAX_ENTRIES, draft_sample
from outrider.kernels.logits_to_probs import (
    Penalties,
    RowSampling,
    Truncation,
    adjust_logits,
    greedy_choice,
    logits_to_probs,
    unpack_mask,
)
from outrider.kernels.philox import Purpose, exponential_noise, vocabulary_words, words

TEMPERATURE, TOP_K, TOP_P = 0.8, 50, 0.9
REPETITION, PRESENCE, FREQUENCY = 1.1, 0.2, 0.1
BEST = 5  # a drafted token and four alternatives
SEEN = 512  # ids of each row that penalties concern
WORD = 1 << 32


def sampling_cases(place: Place) -> Iterator[Case]:
    """Every function over the vocabulary; a draft draws one row of each sequence, a target all rows of its window."""
    for vocab_size in place.vocab_sizes:
        for batch in place.batches:
            for function, form, against, make in VOCABULARY:
                shape = f"vocabulary {vocab_size}, batch {batch}{form}"
                yield Case(function, shape, against, partial(make, place, batch, vocab_size))
    for batch in place.batches:
        yield Case("philox.words", f"batch {batch}", "torch.randint", partial(_words, place, batch))


def _temperature(place: Place, batch: int, vocab_size: int) -> Work:
    logits, temperature = _target_rows(place, batch, vocab_size)
    sampling = RowSampling(temperature=temperature)

    def against() -> Tensor:
        return torch.softmax(logits / temperature[:, None], -1)

    return Work(lambda: logits_to_probs(logits, sampling), against, 2 * logits.nbytes)


def _truncated(place: Place, batch: int, vocab_size: int) -> Work:
    """Against what transformers' warpers do."""
    logits, temperature = _target_rows(place, batch, vocab_size)
    rows = torch.arange(len(logits), device=place.device)
    cut = Truncation(rows, torch.full_like(rows, TOP_K), torch.full_like(rows, TOP_P, dtype=torch.float64))
    sampling = RowSampling(temperature=temperature, truncation=cut)

    def against() -> Tensor:
        scores = logits / temperature[:, None]
        scores = scores.masked_fill(scores < scores.topk(TOP_K).values[:, -1:], -torch.inf)
        ascending, order = scores.sort(dim=-1)
        removed = ascending.softmax(-1).cumsum(-1) <= 1 - TOP_P
        removed[:, -1] = False
        return scores.masked_fill(removed.scatter(1, order, removed), -torch.inf).softmax(-1)

    return Work(lambda: logits_to_probs(logits, sampling), against, 2 * logits.nbytes)


def _adjusted(place: Place, batch: int, vocab_size: int) -> Work:
    """Penalties and a packed mask, against gather, scatter and a mask of booleans that is at hand."""
    logits, _ = _target_rows(place, batch, vocab_size)
    num_rows, device = len(logits), place.device
    spread = torch.arange(SEEN, device=device) * (vocab_size // SEEN)  # [SEEN] different ids
    ids = (spread + torch.arange(num_rows, device=device)[:, None]) % vocab_size  # [rows, SEEN]
    counts = random_ids(place, 3, num_rows, SEEN).float()
    flat = [torch.full((ids.numel(),), value, device=device) for value in (REPETITION, PRESENCE, FREQUENCY)]
    rows = torch.arange(num_rows, device=device).repeat_interleave(SEEN)
    mask = torch.randint(-WORD // 2, WORD // 2, (num_rows, -(-vocab_size // 32)), device=device).int()
    hidden = ~unpack_mask(mask, vocab_size)  # [rows, vocab]
    sampling = RowSampling(penalties=Penalties(rows, ids.flatten(), counts.flatten(), *flat), token_mask=mask)

    def against() -> Tensor:
        seen = logits.gather(1, ids)
        seen = torch.where(seen > 0, seen / REPETITION, seen * REPETITION)
        seen = seen - FREQUENCY * counts - PRESENCE * (counts > 0)
        return logits.scatter(1, ids, seen).masked_fill_(hidden, -torch.inf)

    return Work(lambda: adjust_logits(logits, sampling), against, 2 * logits.nbytes + mask.nbytes)


def _greedy(place: Place, batch: int, vocab_size: int) -> Work:
    logits, _ = _target_rows(place, batch, vocab_size)
    sampling = RowSampling()
    return Work(lambda: greedy_choice(logits, sampling), lambda: logits.argmax(-1), logits.nbytes)


def _best(place: Place, batch: int, vocab_size: int) -> Work:
    logits, _ = _target_rows(place, batch, vocab_size)
    return Work(lambda: best_ids(logits, BEST), lambda: logits.topk(BEST, dim=-1).indices, logits.nbytes)


def _choice(place: Place, batch: int, vocab_size: int) -> Work:
    probs = _target_rows(place, batch, vocab_size)[0].softmax(-1)
    noise = exponential_noise(*_counters(place, len(probs)), vocab_size)  # [rows, vocab]
    return Work(lambda: coupled_choice(probs, noise), lambda: (noise / probs).argmin(-1), 2 * probs.nbytes)


def _draw(place: Place, batch: int, vocab_size: int) -> Work:
    probs = _target_rows(place, batch, vocab_size)[0].softmax(-1)
    counters = _counters(place, len(probs))

    def against() -> Tensor:
        return (probs / torch.empty_like(probs).exponential_()).argmax(-1)

    return Work(lambda: coupled_draw(probs, *counters), against, probs.nbytes, compared=0)


def _noise(place: Place, batch: int, vocab_size: int) -> Work:
    rows = batch * ROWS
    counters = _counters(place, rows)

    def against() -> Tensor:
        return torch.empty(rows, vocab_size, device=place.device).exponential_()

    return Work(lambda: exponential_noise(*counters, vocab_size), against, rows * vocab_size * 4, compared=0)


def _vocabulary_words(place: Place, batch: int, vocab_size: int) -> Work:
    rows = batch * ROWS
    seeds, positions, completions = _counters(place, rows)
    return Work(
        lambda: vocabulary_words(seeds, positions, Purpose.BONUS, completions, vocab_size),
        lambda: random_ids(place, WORD, rows, vocab_size),
        rows * vocab_size * 8,
        compared=0,
    )


def _drafted(place: Place, batch: int, vocab_size: int) -> Work:
    """Against a draw from the same ids, without the integers that the wire needs."""
    probs = zipf_logits(place, batch, vocab_size).softmax(-1)
    seeds, positions, completions = _counters(place, batch)
    drawn = words(seeds, positions, Purpose.DRAFT, completions)
    count = min(MAX_ENTRIES, vocab_size)

    def against() -> Tensor:
        top, ids = probs.topk(count)
        kept = torch.where(top.cumsum(-1) - top < DEFAULT_MASS, top, 0)
        return ids.gather(1, torch.multinomial(kept, 1))

    return Work(lambda: draft_sample(probs, drawn), against, probs.nbytes, compared=0)


def _words(place: Place, batch: int) -> Work:
    seeds, positions, completions = _counters(place, batch * ROWS)
    return Work(
        lambda: words(seeds, positions, Purpose.ACCEPT, completions),
        lambda: random_ids(place, WORD, len(seeds), 4),
        len(seeds) * 7 * 8,
        compared=0,
    )


VOCABULARY = (
    ("logits_to_probs.logits_to_probs", ", temperature", "softmax(logits / temperature)", _temperature),
    ("logits_to_probs.logits_to_probs", ", top_k and top_p", "top-k, sort, cumsum, scatter, softmax", _truncated),
    ("logits_to_probs.adjust_logits", ", penalties and mask", "gather, scatter, masked_fill", _adjusted),
    ("logits_to_probs.greedy_choice", "", "argmax", _greedy),
    ("best_ids.best_ids", f", the best {BEST}", "topk", _best),
    ("coupled.coupled_choice", "", "(noise / probs).argmin", _choice),
    ("coupled.coupled_draw", "", "(probs / exponential_()).argmax", _draw),
    ("philox.exponential_noise", "", "exponential_()", _noise),
    ("philox.vocabulary_words", "", "torch.randint", _vocabulary_words),
    ("draft_sample.draft_sample", "", "top-k, cumsum, multinomial", _drafted),
)


def _target_rows(place: Place, batch: int, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Logits [rows, vocab] and temperatures [rows] of the batch's windows."""
    logits = zipf_logits(place, batch * ROWS, vocab_size)
    return logits, torch.full((len(logits),), TEMPERATURE, device=place.device)


def _counters(place: Place, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Seeds, positions, completions: [rows] int64 each."""
    return random_ids(place, WORD, rows), torch.arange(rows, device=place.device), random_ids(place, 4, rows)
