"""Random numbers drawn ahead are those of each position, however they are asked for, and only so many are kept."""

from __future__ import annotations

import random

import torch
from conftest import SEED

from outrider.engine.random import MAX_WORD_ROWS, RandomAhead, RandomKey, RandomSource, Span, noise_source, word_source
from outrider.kernels.random.reference import Purpose, as_int64, exponential_noise, words

CPU = torch.device("cpu")
VOCAB_SIZE = 33


def held(ahead: RandomAhead) -> list[int]:
    return [position for position in range(200) if ahead.get(position) is not None]


def test_rows_are_those_of_each_position() -> None:
    keys = [RandomKey(2**64 - 1, 0), RandomKey(5, 3)]
    aheads = [RandomAhead(), RandomAhead()]
    steps = ((7, 1, 90, 12), (8, 3, 91, 12), (11, 5, 200, 12), (9, 2, 90, 12), (3, 70, 90, 500), (4, 9, 91, 0))
    for first, count, second, limit in steps:
        spans = [Span(keys[0], aheads[0], first, count, limit), Span(keys[1], aheads[1], second, 1, 95)]
        positions = [*range(first, first + count), second]
        seeds = torch.tensor([as_int64(keys[0].seed)] * count + [keys[1].seed])
        completions = torch.tensor([0] * count + [3])
        expected = words(seeds, torch.tensor(positions), Purpose.DRAFT, completions)
        assert torch.equal(word_source(CPU).rows(spans), expected)
        fresh = [Span(span.key, RandomAhead(), span.first, span.count, 0) for span in spans]
        noise = exponential_noise(seeds, torch.tensor(positions), completions, VOCAB_SIZE)
        assert torch.equal(noise_source(VOCAB_SIZE, CPU).rows(fresh), noise)


def test_more_rows_than_are_kept_are_still_all_there() -> None:
    wide = noise_source(100_000, CPU)
    assert wide.most == 1
    rows = wide.rows([Span(RandomKey(4, 0), RandomAhead(), 10, 3, 13)])
    expected = exponential_noise(torch.tensor([4] * 3), torch.arange(10, 13), torch.zeros(3).long(), 100_000)
    assert torch.equal(rows, expected)


def test_one_call_draws_the_window_and_a_pause_the_next_one() -> None:
    source, key, ahead = word_source(CPU), RandomKey(1, 0), RandomAhead()
    source.rows([Span(key, ahead, 10, 1, 14)])
    assert held(ahead) == list(range(10, 14))
    assert source.prepare(Span(key, ahead, 11, 7, 18)) and not source.prepare(Span(key, ahead, 12, 6, 18))
    assert held(ahead) == list(range(10, 18))
    assert not source.prepare(Span(key, ahead, 11, 1, 11 + MAX_WORD_ROWS + 1))  # more than are kept
    assert source.prepare(Span(key, ahead, 17, 1, 17 + MAX_WORD_ROWS))
    assert held(ahead) == list(range(17, 17 + MAX_WORD_ROWS))
    source.rows([Span(key, ahead, 5, 1, 6)])
    assert held(ahead) == [5]


def test_overlapping_spans_of_one_sequence_get_their_own_rows() -> None:
    """Branches of a sequence ask for positions before and behind each other, more than are kept."""
    rng, key = random.Random(SEED), RandomKey(5, 1)
    for most in (1, 2, 5):
        source, ahead = RandomSource(word_source(CPU).generate, most, CPU), RandomAhead()
        for _ in range(60):
            firsts = [rng.randrange(40) for _ in range(rng.randrange(1, 6))]
            spans = [Span(key, ahead, first, rng.randrange(1, 4), first + rng.randrange(8)) for first in firsts]
            positions = [position for span in spans for position in range(span.first, span.first + span.count)]
            columns = [torch.full((len(positions),), value) for value in (key.seed, key.completion)]
            expected = words(columns[0], torch.tensor(positions), Purpose.DRAFT, columns[1])
            assert torch.equal(source.rows(spans), expected)
