"""Edges of a verdict, from logits to committed ids: with every random number forced to either end.

Of each row one knows what the target may commit at all, and at an end of the words which of it.

Vocabularies of 128k ids that are all equally probable: ties everywhere, and sums over many small numbers."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import inf, nan
from typing import Any, cast

import pytest
import torch
from support.engines import opened
from support.kernels import Vector, packed
from torch import Tensor

from outrider.engine.random import RandomSource
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
from outrider.rpc.messages import TokenWeights
from outrider.rpc.words.sampling_params import AcceptanceRule
from outrider.target_service.draft_buffer import Window
from outrider.target_service.outputs import VerifiedWindow
from outrider.target_service.scheduler import ScheduledSequence
from outrider.target_service.sequence import TargetLimits, admit
from outrider.target_service.verifier import HostVerifier

LEAST, GREATEST = 0, 0xFFFFFFFF
VOCAB_SIZE = 4
FLAT = [0.0, 0.0, 0.0, 0.0]
ONLY_3 = [-inf, -inf, -inf, 0.0]


Words = tuple[int, int, int]  # of a position: for the coin, the recovered token and the bonus one


@dataclass(frozen=True)
class Forced:
    """A source of random numbers whose rows are given, by position from the window's first on."""

    table: Tensor  # [positions, ...]

    def rows(self, spans: Any) -> Tensor:
        (span,) = spans
        return self.table[: span.count]


def verdict_of(
    logits: list[list[float]],
    drafted: list[int],
    vectors: list[Vector],
    word: int | list[Words],
    rule: str = "rejection",
    **sampling: Any,
) -> VerifiedWindow:
    """Of one window, whose rows are one more than its drafted tokens; one word may stand for all."""
    sampling = {"temperature": 0.0 if rule == "greedy" else 1.0, "max_tokens": 8} | sampling
    acceptance = AcceptanceRule.REJECTION if rule == "greedy" else AcceptanceRule[rule.upper()]
    limits = TargetLimits(VOCAB_SIZE, 64, (), 8)
    target = admit(opened(1, [0, 1], acceptance=acceptance, **sampling), None, (1, 1), print, limits, 0, 0.0)
    weights = tuple(TokenWeights(*entry) if entry is not None else None for entry in packed(vectors))
    window = Window(0, tuple(drafted), weights, False)
    scheduled = ScheduledSequence(target, 2, 1, len(logits), window, True, len(logits))
    verifier = HostVerifier(VOCAB_SIZE)
    table = torch.tensor([(word,) * 3] * len(logits) if isinstance(word, int) else word)  # [positions, 3]
    verifier._words = cast(RandomSource, Forced(table[:, :, None].repeat(1, 1, 4)))
    verifier._noise = cast(RandomSource, Forced(torch.ones(len(logits), VOCAB_SIZE)))
    (verified,) = verifier.launch(torch.tensor(logits), [scheduled]).read()
    return verified


EVEN: Vector = ((0, 1), (1, 1))  # the weights of a draft that is sure of two tokens
# The row that judges the token, the token and its weights; then what is committed for the least words and the greatest.
CASES: dict[str, tuple[list[float], int, Vector, tuple[int, ...], tuple[int, ...]]] = {
    "target probability 0": ([0.0, -inf, 0.0, -inf], 1, EVEN, (2,), (2,)),
    "target probability 0, one-hot": ([0.0, -inf, 0.0, -inf], 1, None, (0,), (2,)),
    "draft equal to the target": ([0.0, 0.0, -inf, -inf], 0, EVEN, (0, 3), (0, 3)),
    "a draft of no weight is one-hot": (FLAT, 0, ((0, 1), (0, 1)), (0, 3), (3,)),
    "another id of no weight makes it one-hot": ([0.0, 0.0, -inf, -inf], 1, ((0, 1, 2), (0, 1, 1)), (1, 3), (0,)),
    "draft below the target": ([0.0, 0.0, -inf, -inf], 0, ((0, 1), (1, 3)), (0, 3), (0, 3)),
    "draft above the target": ([0.0, 0.0, -inf, -inf], 0, ((0, 1), (3, 1)), (0, 3), (1,)),
    "all mass on the drafted token": (ONLY_3, 3, None, (3, 3), (3, 3)),
    "all mass on the drafted token, sure draft": (ONLY_3, 3, ((3,), (32767,)), (3, 3), (3, 3)),
    "all mass on another token": (ONLY_3, 0, None, (3,), (3,)),
    "all mass on another token, sure draft": (ONLY_3, 0, ((0,), (32767,)), (3,), (3,)),
    "disjoint": ([-inf, -inf, 0.0, 0.0], 1, EVEN, (2,), (3,)),
    "a logit of minus infinity": ([0.0, 0.0, -inf, -inf], 2, ((0, 1, 2, 3), (1, 1, 1, 1)), (0,), (1,)),
    "a huge logit": ([3e38, 0.0, -3e38, 0.0], 0, None, (0, 3), (0, 3)),
    "a duplicate id": (FLAT, 1, ((1, 0, 1), (1, 1, 1)), (1, 3), (3,)),
    "ids without weights": (FLAT, 1, ((0, 1), ()), (1, 3), (3,)),
    "a total of 2^24": (FLAT, 1, ((0, 1), (1 << 23, 1 << 23)), (1, 3), (3,)),
    "an id outside the vocabulary": (FLAT, 1, ((1, 4), (1, 1)), (1, 3), (3,)),
    "an id of 2^32 - 1": (FLAT, 1, ((1, -1), (1, 1)), (1, 3), (3,)),
    "without the drafted id": (FLAT, 1, ((0, 2), (1, 1)), (1, 3), (3,)),
    "a weight of 2^32 - 1": (FLAT, 1, ((0, 1), (-1, 1)), (1, 3), (3,)),
}


@pytest.mark.parametrize("case", CASES)
def test_rejection_at_both_ends(case: str) -> None:
    row, token, vector, at_least, at_greatest = CASES[case]
    for word, expected in ((LEAST, at_least), (GREATEST, at_greatest)):
        verdict = verdict_of([row, ONLY_3], [token], [vector], word)
        assert (verdict.ids, verdict.num_accepted, verdict.invalid) == (expected, len(expected) - 1, False), word


def test_every_decision_has_a_word_of_its_own() -> None:
    """Two flat rows and the one after them; the words of each position are given."""
    low, high = LEAST, GREATEST

    def ids(*table: Words) -> tuple[int, ...]:
        return verdict_of([FLAT, FLAT, FLAT], [1, 1], [None, None], list(table)).ids

    rest = (high, high, high)
    assert ids((low, high, high), (low, high, high), (high, high, low)) == (1, 1, 0)
    assert ids((low, low, low), (low, low, low), rest) == (1, 1, 3)
    assert ids((low, high, high), (high, low, high), rest) == (1, 0)
    assert ids((low, low, low), (high, high, low), (low, low, low)) == (1, 3)
    assert ids((high, low, high), rest, rest) == (0,)
    assert ids((high, high, low), (low, low, low), (low, low, low)) == (3,)


@pytest.mark.parametrize("word", [LEAST, GREATEST])
@pytest.mark.parametrize("vector", [None, EVEN], ids=["one-hot", "weights"])
@pytest.mark.parametrize("temperature", [1.0, 1e-5])
def test_what_cannot_be_sampled_is_an_error_where_it_counts(vector: Vector, word: int, temperature: float) -> None:
    for bad in ([nan, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, nan], [inf, 0.0, 0.0, 0.0], [-inf] * 4, [nan] * 4):
        judging = verdict_of([bad, FLAT], [0], [vector], word, temperature=temperature)
        assert judging.invalid
        accepted, refused = [0.0, -inf, -inf, -inf], [-inf, -inf, -inf, 0.0]
        assert verdict_of([accepted, bad], [0], [vector], word, temperature=temperature).invalid
        unused = verdict_of([refused, bad], [0], [vector], word, temperature=temperature)
        assert (unused.invalid, unused.ids) == (False, (3,))


@pytest.mark.parametrize("bad", [[nan, 0.0, 0.0, 0.0], [-inf] * 4], ids=["NaN", "nothing is allowed"])
def test_in_a_block_a_row_counts_that_is_reached(bad: list[float]) -> None:
    refused, kept = [-inf, -inf, -inf, 0.0], [0.0, -inf, -inf, -inf]
    for vectors in map(list[Vector], product((EVEN, None), repeat=2)):
        for behind in ([bad, FLAT], [FLAT, bad], [bad, bad]):
            judging = verdict_of([refused, *behind], [0, 0], vectors, LEAST, "block")
            assert (judging.invalid, judging.ids) == (False, (3,))
        assert verdict_of([kept, bad, FLAT], [0, 0], vectors, LEAST, "block").invalid
        assert verdict_of([kept, kept, bad], [0, 0], vectors, LEAST, "block").invalid
        assert verdict_of([bad, kept, FLAT], [0, 0], vectors, LEAST, "block").invalid


@pytest.mark.parametrize("rule", ["greedy", "coupled", "rejection", "block"])
@pytest.mark.parametrize("bad", [nan, inf])
def test_a_mask_hides_nothing_that_is_wrong_with_a_row(rule: str, bad: float) -> None:
    for rows in ([[0.0, 0.0, 0.0, bad], FLAT], [[0.0, -inf, -inf, 0.0], [0.0, 0.0, 0.0, bad]]):
        assert verdict_of(rows, [0], [None], LEAST, rule, allowed_token_ids=(0, 1)).invalid


@pytest.mark.parametrize("rule", ["greedy", "coupled"])
def test_the_other_rules_take_no_such_row_either(rule: str) -> None:
    for bad in ([nan, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, nan], [inf, 0.0, 0.0, 0.0], [-inf] * 4, [nan] * 4):
        for drafted in (0, 3):
            assert verdict_of([bad, FLAT], [drafted], [None], LEAST, rule).invalid
        assert verdict_of([[-inf, 0.0, 0.0, -inf], bad], [1], [None], LEAST, rule).invalid
        unused = verdict_of([[-inf, 0.0, 0.0, -inf], bad], [0], [None], LEAST, rule)
        assert (unused.invalid, unused.ids) == (False, (1,))


@pytest.mark.parametrize("rule", ["greedy", "coupled"])
def test_ties_go_to_the_lowest_id(rule: str) -> None:
    """Coupled: of equal noise."""
    assert verdict_of([FLAT, [-inf, -inf, 2.0, 2.0]], [0], [None], LEAST, rule).ids == (0, 2)
    assert verdict_of([FLAT, FLAT], [1], [None], LEAST, rule).ids == (0,)


@pytest.mark.parametrize("word", [LEAST, GREATEST])
@pytest.mark.parametrize("token", [VOCAB_SIZE, 2**31, 2**32 - 1])
def test_an_id_outside_the_vocabulary_is_not_committed(token: int, word: int) -> None:
    """The buffer of chains lets none through; the verdict needs no such help."""
    verdict = verdict_of([FLAT, FLAT], [token], [((0, token), (1, 1))], word)
    assert verdict.num_accepted == 0 and verdict.ids == ((0,) if word == LEAST else (3,))


def test_a_window_of_many_ends_is_cut_at_the_first_refused_token() -> None:
    rows = [ONLY_3, FLAT, ONLY_3, FLAT]
    assert verdict_of(rows, [3, 1, 3], [None, None, None], LEAST).ids == (3, 1, 3, 0)
    assert verdict_of(rows, [3, 1, 3], [None, None, None], GREATEST).ids == (3, 3)
    assert verdict_of(rows, [3, 3, 2], [None, ((3,), (5,)), None], GREATEST).ids == (3, 2)


SIZES = [1 << 17, 128_256]  # a power of two, whose shares are exact, and Llama 3's
LEAST_WORD, GREATEST_WORD = [0, 0, 0, 0], [0xFFFFFFFF] * 4


def flat_probs(vocab_size: int, rows: int = 1) -> Tensor:
    """From equal logits, [rows, vocab]."""
    probs, invalid = logits_to_probs(torch.full((rows, vocab_size), 3.25), RowSampling())
    assert not bool(invalid.any())
    return probs


def judge(vocab_size: int, token: int, vector: tuple[list[int], list[int]] | None, word: int) -> tuple[int, Tensor]:
    """One drafted token and the row after it; the coin is taken from `word`."""
    uniforms = accept_uniforms(torch.tensor([[word, 0, 0, 0]]))
    windows, sent = Windows.of([1]), DraftWeights.of(packed([vector]))
    num_accepted, weights = accept(flat_probs(vocab_size, 2), windows, torch.tensor([token]), sent, uniforms)
    return int(num_accepted), weights


def at_both_ends(weights: Tensor) -> list[int]:
    return draw(weights.repeat(2, 1), torch.tensor([LEAST_WORD, GREATEST_WORD])).tolist()


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
    sample = draft_sample(flat_probs(vocab_size), torch.tensor([LEAST_WORD]))
    ids, weights = sample.entry_ids.tolist(), sample.entry_weights.tolist()
    assert ids == list(range(MAX_ENTRIES)) and set(weights) == {32767} and sample.token_ids.tolist() == [0]
    assert draft_sample(flat_probs(vocab_size), torch.tensor([GREATEST_WORD])).token_ids.tolist() == [MAX_ENTRIES - 1]
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
