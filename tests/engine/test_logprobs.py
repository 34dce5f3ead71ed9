"""Reported log probabilities: order, ranks, ties, modes."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.engine.sampler import ALL, reported_values, top_logprobs
from outrider.kernels.sampling.reference import logits_to_probs
from outrider.kernels.types import RowSampling

ROW = [0.0, 3.0, 1.0, 3.0, 2.0]


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=9), st.data())
@settings(max_examples=100, deadline=None)
def test_equals_sorting(row: list[int], data: st.DataObject) -> None:
    chosen = data.draw(st.integers(0, len(row) - 1))
    count = data.draw(st.integers(ALL, len(row) + 2))
    [got] = top_logprobs(torch.tensor([row], dtype=torch.float32), [chosen], [count])
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))[: len(row) if count == ALL else count]
    assert got.ids == [chosen] + [i for i in order if i != chosen]
    assert got.values == [row[i] for i in got.ids]
    assert got.ranks == [1 + sum(value > row[i] for value in row) for i in got.ids]


def test_the_chosen_token_comes_first_and_once() -> None:
    outside, inside, alone = top_logprobs(torch.tensor([ROW] * 3), [0, 3, 2], [2, 2, 0])
    assert (outside.ids, outside.ranks) == ([0, 1, 3], [5, 1, 1])
    assert (inside.ids, inside.ranks) == ([3, 1], [1, 1])
    assert (alone.ids, alone.values, alone.ranks) == ([2], [1.0], [4])


def test_modes() -> None:
    logits = torch.tensor([ROW])
    sampling = RowSampling(temperature=torch.tensor([0.5]))
    probs, _ = logits_to_probs(logits, sampling)
    values = {
        mode: reported_values(mode, logits, sampling, probs)[0]
        for mode in ("raw_logits", "raw_logprobs", "processed_logits", "processed_logprobs")
    }
    assert values["raw_logits"].tolist() == ROW
    assert values["processed_logits"].tolist() == [2 * value for value in ROW]
    assert torch.allclose(values["raw_logprobs"].exp(), logits.softmax(dim=-1)[0])
    assert torch.allclose(values["processed_logprobs"].exp(), probs[0])
    with pytest.raises(ValueError, match="unknown logprobs mode"):
        reported_values("raw_odds", logits, sampling, probs)


def test_cut_ids_rank_last_at_minus_infinity() -> None:
    logits = torch.tensor([ROW])
    sampling = RowSampling(min_p=torch.tensor([0.2]))
    probs, _ = logits_to_probs(logits, sampling)
    [got] = top_logprobs(reported_values("processed_logprobs", logits, sampling, probs), [1], [ALL])
    assert got.ids == [1, 3, 4, 0, 2]
    assert got.ranks == [1, 1, 3, 4, 4]
    assert got.values[3:] == [-math.inf, -math.inf]


@pytest.mark.parametrize("vocab_size", [3, 97, 5_000])
def test_a_batch_equals_its_rows(vocab_size: int) -> None:
    """Rows that want none, some, more than there are, and all; half of them full of ties."""
    values = torch.randn(8, vocab_size, generator=torch.Generator().manual_seed(vocab_size))
    values[::2] = values[::2].round()
    chosen, counts = [0, 1, 2] * 2 + [0, 1], [0, 2, 20, ALL, 20, 1, 2, 0]
    together = top_logprobs(values, chosen, counts)
    for row, (token, count) in enumerate(zip(chosen, counts, strict=True)):
        assert top_logprobs(values[row : row + 1], [token], [count]) == [together[row]]
        order = sorted(range(vocab_size), key=lambda i, row=row: (-values[row, i], i))  # type: ignore[misc]
        wanted = order if count == ALL else order[:count]
        assert together[row].ids == [token, *(i for i in wanted if i != token)]
        assert together[row].values == [float(values[row, i]) for i in together[row].ids]
