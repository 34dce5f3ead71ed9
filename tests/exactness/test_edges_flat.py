"""Vocabularies of 128k ids that are all equally probable: ties everywhere, and sums over many small numbers."""

from __future__ import annotations

import pytest
import torch
from packed import packed
from torch import Tensor

from outrider.kernels.random.reference import exponential_noise
from outrider.kernels.sampling.reference import MAX_ENTRIES, draft_sample, greedy_choice, logits_to_probs
from outrider.kernels.types import DraftWeights, RowSampling, Truncation, Windows
from outrider.kernels.verify.reference import (
    accept,
    accept_uniforms,
    coupled_accept,
    coupled_choice,
    draw,
    first_argmax,
)

SIZES = [1 << 17, 128_256]  # a power of two, whose shares are exact, and Llama 3's
LEAST, GREATEST = [0, 0, 0, 0], [0xFFFFFFFF] * 4


def flat_probs(vocab_size: int, rows: int = 1) -> Tensor:
    """From equal logits, [rows, vocab]."""
    probs, invalid = logits_to_probs(torch.full((rows, vocab_size), 3.25), RowSampling())
    assert not bool(invalid.any())
    return probs


def judge(vocab_size: int, token: int, vector: tuple[list[int], list[int]] | None, word: int) -> tuple[int, Tensor]:
    """One drafted token and the row after it; the coin is taken from `word`."""
    coins = accept_uniforms(torch.tensor([[word, 0, 0, 0]]))
    windows, sent = Windows.of([1]), DraftWeights.of(packed([vector]))
    num_accepted, weights = accept(flat_probs(vocab_size, 2), windows, torch.tensor([token]), sent, coins)
    return int(num_accepted), weights


def at_both_ends(weights: Tensor) -> list[int]:
    return draw(weights.repeat(2, 1), torch.tensor([LEAST, GREATEST])).tolist()


@pytest.mark.parametrize("vocab_size", SIZES)
def test_greedy_takes_the_first(vocab_size: int) -> None:
    logits = torch.full((3, vocab_size), -1.5)
    logits[1, vocab_size // 3 :] = 2.5
    logits[2, -1] = 0.0
    expected = [0, vocab_size // 3, vocab_size - 1]
    ids, invalid = greedy_choice(logits, RowSampling())
    assert ids.tolist() == expected and not bool(invalid.any())
    assert first_argmax(logits).tolist() == expected
    num_accepted, next_ids = coupled_accept(ids, Windows.of([2]), torch.tensor(expected[:2]))
    assert (num_accepted.tolist(), next_ids.tolist()) == ([2], expected[2:])


@pytest.mark.parametrize("top_k", [1, 1000, 65_536])
@pytest.mark.parametrize("vocab_size", SIZES)
def test_top_k_keeps_the_lowest_ids(vocab_size: int, top_k: int) -> None:
    cut = Truncation(torch.tensor([0]), torch.tensor([top_k]), torch.tensor([1.0], dtype=torch.float64))
    probs, _ = logits_to_probs(torch.zeros(1, vocab_size), RowSampling(truncation=cut))
    assert probs[0].nonzero().squeeze(1).tolist() == list(range(top_k))


@pytest.mark.parametrize("top_p", [2.0**-17, 0.25, 0.5, 1 - 2.0**-17])
def test_top_p_keeps_the_lowest_ids(top_p: float) -> None:
    cut = Truncation(torch.tensor([0]), torch.tensor([0]), torch.tensor([top_p], dtype=torch.float64))
    probs, _ = logits_to_probs(torch.zeros(1, 1 << 17), RowSampling(truncation=cut))
    assert probs[0].nonzero().squeeze(1).tolist() == list(range(int(top_p * (1 << 17))))


def test_a_one_hot_draft_is_accepted_by_its_share_of_the_coins() -> None:
    """2^-17 of 2^24 coins are 128."""
    vocab_size = 1 << 17
    for token in (0, 70_000, vocab_size - 1):
        last_accepted, first_refused = (127 << 8) | 0xFF, 128 << 8
        assert judge(vocab_size, token, None, last_accepted)[0] == 1
        num_accepted, weights = judge(vocab_size, token, None, first_refused)
        assert num_accepted == 0 and weights[0, token] == 0 and int((weights > 0).sum()) == vocab_size - 1


@pytest.mark.parametrize("vocab_size", SIZES)
def test_the_recovered_token_is_never_the_refused_one(vocab_size: int) -> None:
    ends = {0: [1, vocab_size - 1], vocab_size - 1: [0, vocab_size - 2], 777: [0, vocab_size - 1]}
    for token, expected in ends.items():
        num_accepted, weights = judge(vocab_size, token, None, 0xFFFFFFFF)
        assert num_accepted == 0 and at_both_ends(weights) == expected
    _, weights = judge(vocab_size, 777, None, 0xFFFFFFFF)
    for word in range(770, 785):  # around the gap that it left
        point = torch.tensor([[(word << 32) // vocab_size + (1 << 32) // (2 * vocab_size), 0, 0, 0]])
        assert int(draw(weights, point)) not in (777, -1)


@pytest.mark.parametrize("vocab_size", SIZES)
def test_the_residual_of_a_draft_cut_at_the_tie(vocab_size: int) -> None:
    """A draft with the same flat law keeps its lowest 512 ids: the rest is the target's to give."""
    sample = draft_sample(flat_probs(vocab_size), torch.tensor([LEAST]))
    ids, weights = sample.entry_ids.tolist(), sample.entry_weights.tolist()
    assert ids == list(range(MAX_ENTRIES)) and set(weights) == {32767} and sample.token_ids.tolist() == [0]
    assert draft_sample(flat_probs(vocab_size), torch.tensor([GREATEST])).token_ids.tolist() == [MAX_ENTRIES - 1]
    assert judge(vocab_size, 100, (ids, weights), 0)[0] == 1
    num_accepted, residual = judge(vocab_size, 100, (ids, weights), 0xFFFFFFFF)
    assert num_accepted == 0 and at_both_ends(residual) == [MAX_ENTRIES, vocab_size - 1]
    assert residual[0, :MAX_ENTRIES].sum() == 0 and len(residual[0, MAX_ENTRIES:].unique()) == 1


@pytest.mark.parametrize("vocab_size", SIZES)
def test_a_draw_gives_each_id_its_stretch_of_the_words(vocab_size: int, prove: bool) -> None:
    """The word in the middle of each id's stretch; where the shares are exact the first and the last one, too."""
    step = 127 if prove else 4099
    ids = torch.arange(0, vocab_size, step)
    weights = flat_probs(vocab_size).double()
    middles = ((2 * ids + 1) << 32) // (2 * vocab_size)
    places = [middles]
    if vocab_size & (vocab_size - 1) == 0:
        places += [(ids << 32) // vocab_size, ((ids + 1) << 32) // vocab_size - 1]
    for place in places:
        for chunk, expected in zip(place.split(32), ids.split(32), strict=True):
            words = torch.stack((chunk, torch.zeros_like(chunk), chunk, chunk), dim=1)
            assert draw(weights.expand(len(chunk), -1), words).tolist() == expected.tolist()


@pytest.mark.parametrize("vocab_size", SIZES)
def test_coupled_takes_the_least_noise_and_the_first_of_equal_noise(vocab_size: int) -> None:
    probs = flat_probs(vocab_size)
    assert coupled_choice(probs, torch.ones(1, vocab_size)).tolist() == [0]
    noise = torch.full((1, vocab_size), 22.0)
    noise[0, [90_000, vocab_size - 1]] = 1e-10
    assert coupled_choice(probs, noise).tolist() == [90_000]
    seeds = torch.arange(4)
    noise = exponential_noise(seeds, seeds, seeds, vocab_size)
    least = noise.min(dim=1).values
    expected = [int((noise[row] == least[row]).nonzero()[0]) for row in range(4)]
    assert coupled_choice(probs.repeat(4, 1), noise).tolist() == expected


def test_a_mask_of_all_but_the_last_of_the_vocabulary() -> None:
    vocab_size = SIZES[1]
    logits = torch.full((1, vocab_size), -torch.inf)
    logits[0, -1] = -80.0
    probs, invalid = logits_to_probs(logits, RowSampling())
    assert not bool(invalid) and at_both_ends(probs.double()) == [vocab_size - 1] * 2
    assert coupled_choice(probs, torch.full((1, vocab_size), 1e-10)).tolist() == [vocab_size - 1]
