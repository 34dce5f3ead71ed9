"""The best ids of each row: in C as in the reference, whatever is in the rows."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.kernels.cpu.library import cpu_library
from outrider.kernels.sampling import reference as module
from outrider.kernels.sampling.reference import MOST, best_ids

NUMBERS = st.one_of(st.integers(-3, 3).map(float), st.sampled_from((math.nan, math.inf, -math.inf)))


def expected(row: list[float], count: int) -> list[int]:
    """By sorting: the greatest first, of equal ones the lowest id."""
    finite = sorted((-value, index) for index, value in enumerate(row) if math.isfinite(value))
    return [index for _, index in finite[:count]] + [-1] * max(0, count - len(finite))


MATRICES = st.integers(1, 70).flatmap(
    lambda width: st.lists(st.lists(NUMBERS, min_size=width, max_size=width), min_size=1, max_size=3)
)


@given(rows=MATRICES, count=st.integers(1, 20))
def test_in_c_the_greatest_come_first_and_ties_go_to_the_lowest_id(rows: list[list[float]], count: int) -> None:
    if cpu_library() is None:
        pytest.skip("no C compiler")
    assert best_ids(torch.tensor(rows), count).tolist() == [expected(row, count) for row in rows]


@pytest.mark.parametrize("vocab_size", [1, 5, 16, 31, 4096])
@pytest.mark.parametrize("count", [1, 5, MOST, MOST + 1])
@pytest.mark.parametrize("in_c", [True, False])
def test_both_give_the_same_of_different_scores(
    vocab_size: int, count: int, in_c: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not in_c:
        monkeypatch.setattr(module, "cpu_library", lambda: None)
    scores = torch.stack([torch.randperm(vocab_size) for _ in range(3)]).float()
    scores[1, : vocab_size // 2] = -math.inf  # cut away
    scores[2, vocab_size // 3] = math.nan
    wanted = [expected(row, count) for row in scores.tolist()]
    assert best_ids(scores, count).tolist() == wanted
    assert best_ids(scores.t().contiguous().t(), count).tolist() == wanted  # rows that do not lie together


def test_other_types_are_pytorch_s() -> None:
    assert best_ids(torch.tensor([[1.0, 3.0]]).double(), 3).tolist() == [[1, 0, -1]]
