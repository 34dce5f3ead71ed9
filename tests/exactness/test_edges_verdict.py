"""Edges of a verdict, from logits to committed ids: with every random number forced to either end.

Of each row one knows what the target may commit at all, and at an end of the words which of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, nan
from typing import Any

import pytest
import torch
from packed import Vector, packed
from target_harness import opened
from torch import Tensor

from outrider.rpc.messages import TokenWeights
from outrider.rpc.sampling_params import AcceptanceRule
from outrider.target_service.draft_buffer import Window
from outrider.target_service.scheduler import StepEntry
from outrider.target_service.sequence import TargetLimits, admit
from outrider.target_service.verifier import Judged, Verdict, Verifier

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
) -> Verdict:
    """Of one window, whose rows are one more than its drafted tokens; one word may stand for all."""
    sampling = {"temperature": 0.0 if rule == "greedy" else 1.0, "max_tokens": 8} | sampling
    acceptance = AcceptanceRule.COUPLED if rule == "coupled" else AcceptanceRule.REJECTION
    limits = TargetLimits(VOCAB_SIZE, 64, (), 8)
    target = admit(opened(1, [0, 1], acceptance=acceptance, **sampling), None, (1, 1), print, limits, 0, 0.0)
    weights = tuple(TokenWeights(*entry) if entry is not None else None for entry in packed(vectors))
    window = Window(0, tuple(drafted), weights, False)
    entry = StepEntry(target, 2, 1, len(logits), window, True, len(logits))
    verifier = Verifier(VOCAB_SIZE)
    table = torch.tensor([(word,) * 3] * len(logits) if isinstance(word, int) else word)  # [positions, 3]
    verifier._words = Forced(table[:, :, None].repeat(1, 1, 4))
    verifier._noise = Forced(torch.ones(len(logits), VOCAB_SIZE))
    (verdict,) = verifier.verify(torch.tensor(logits), [Judged(entry, range(len(logits)))])
    return verdict


EVEN = ((0, 1), (1, 1))  # the weights of a draft that is sure of two tokens
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


@pytest.mark.parametrize("rule", ["greedy", "coupled", "rejection"])
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
