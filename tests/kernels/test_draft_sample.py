"""Draft draws: the law is the integers' own, and the integers are what the wire can carry."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2

from outrider.kernels.random.reference import Purpose, words
from outrider.kernels.sampling.reference import MAX_ENTRIES, draft_sample, draw_integer


def draft_words(count: int, position: int = 0) -> torch.Tensor:
    seeds = torch.arange(count)
    return words(seeds, torch.full_like(seeds, position), Purpose.DRAFT, torch.zeros_like(seeds))


@given(st.lists(st.integers(1, 32767), min_size=1, max_size=5), st.integers(0, 2**64 - 1))
@settings(max_examples=60, deadline=None)
def test_a_draw_is_the_floor_of_an_exact_product(weights: list[int], number: int) -> None:
    point, expected = sum(weights) * number >> 64, 0
    while point >= sum(weights[: expected + 1]):
        expected += 1
    table = torch.tensor([[number >> 32, number & 0xFFFFFFFF, 0, 0]] * 2)
    starts = torch.tensor([0, len(weights), 2 * len(weights)])
    ids = torch.arange(100, 100 + len(weights)).repeat(2)
    assert draw_integer(ids, torch.tensor(weights * 2), starts, table).tolist() == [100 + expected] * 2


def test_tokens_follow_the_integers() -> None:
    """Chi-square against the weights that are sent, p > 1e-4 with fixed seeds."""
    probs = torch.randn(16, generator=torch.Generator().manual_seed(5)).mul(2).softmax(dim=-1)
    samples = draft_sample(probs.repeat(20_000, 1), draft_words(20_000))
    ids = samples.entry_ids[: samples.entry_starts[1]]
    weights = samples.entry_weights[: samples.entry_starts[1]].double()
    observed = torch.bincount(samples.token_ids, minlength=16).double()
    assert observed.sum() == observed[ids].sum()
    expected = weights / weights.sum() * 20_000
    assert chi2.sf(float(((observed[ids] - expected) ** 2 / expected).sum()), len(ids) - 1) > 1e-4


def words_of(numbers: list[int]) -> torch.Tensor:
    return torch.tensor([[number >> 32, number & 0xFFFFFFFF, 0, 0] for number in numbers])


@pytest.mark.parametrize(
    "probs", [(4, 2, 1, 1), (1, 0, 1, 0), (0, 7, 0, 0), (3, 5, 11, 13), (1, 1, 1, 1), (60000, 3, 2, 1)], ids=str
)
def test_each_id_has_exactly_its_weights_share_of_all_words(probs: tuple[int, ...]) -> None:
    """The 2^64 words fall into as many runs as the weights' total. The least word of each run gives each id as often as
    its weight says, and the word before a run belongs to the id before."""
    row = torch.tensor([probs], dtype=torch.float32) / sum(probs)
    alone = draft_sample(row, draft_words(1), mass=1.0)
    ids, weights = alone.entry_ids.tolist(), alone.entry_weights.tolist()
    owners = [token for token, weight in zip(ids, weights, strict=True) for _ in range(weight)]
    total = len(owners)
    firsts = [-(-(run << 64) // total) for run in range(total)]
    drawn = draft_sample(row.expand(total, -1), words_of(firsts), mass=1.0).token_ids
    assert drawn.tolist() == owners
    lasts = [first - 1 for first in [*firsts[1:], 1 << 64]]
    assert draft_sample(row.expand(total, -1), words_of(lasts), mass=1.0).token_ids.tolist() == owners


def test_a_flat_vector_of_the_greatest_total_is_drawn_exactly() -> None:
    """At the edges between its 512 ids."""
    firsts = [-(-(index << 64) // MAX_ENTRIES) for index in range(MAX_ENTRIES)]
    edges = [number for first in firsts for number in ((first - 1) % (1 << 64), first)]
    ids = draft_sample(torch.full((len(edges), 600), 1 / 600), words_of(edges)).token_ids.tolist()
    assert ids == [token for index in range(MAX_ENTRIES) for token in ((index - 1) % MAX_ENTRIES, index)]


@pytest.mark.parametrize("vocab_size", [1, 3, 512, 513, 5000])
@pytest.mark.parametrize("scale", [0.0, 1.0, 12.0])
def test_vectors_are_what_the_wire_can_carry(vocab_size: int, scale: float) -> None:
    probs = torch.randn(4, vocab_size, generator=torch.Generator().manual_seed(1)).mul(scale).softmax(dim=-1)
    samples = draft_sample(probs, draft_words(4))
    for row in range(4):
        entries = slice(int(samples.entry_starts[row]), int(samples.entry_starts[row + 1]))
        ids, weights = samples.entry_ids[entries], samples.entry_weights[entries]
        assert 1 <= len(ids) <= MAX_ENTRIES and bool((ids.diff() > 0).all())
        assert int(weights.min()) >= 1 and int(weights.max()) == 32767 and int(weights.sum()) < 1 << 24
        assert int(samples.token_ids[row]) in ids.tolist()
        expected = (32767 * probs[row, ids].double() / probs[row].max()).round()
        assert bool(((weights - expected).abs() <= 1).all())
        if len(ids) < MAX_ENTRIES and scale < 12:
            mass = float(probs[row, ids].double().sum())
            assert mass >= 0.995 - 1e-6 and mass - float(probs[row, ids].min()) < 0.995


def test_ties_at_the_cut_keep_the_lowest_ids() -> None:
    samples = draft_sample(torch.full((1, 1000), 1e-3), draft_words(1))
    assert samples.entry_ids.tolist() == list(range(512))


def test_a_row_without_probability_gives_no_token() -> None:
    probs = torch.tensor([[0.0, 0.0], [0.0, 1.0], [float("nan"), 0.5]])
    samples = draft_sample(probs, draft_words(3))
    assert samples.token_ids.tolist() == [-1, 1, -1]
    assert samples.entry_starts.tolist() == [0, 0, 1, 1]


def test_more_entries_than_the_total_allows_are_refused() -> None:
    with pytest.raises(ValueError, match="max_entries"):
        draft_sample(torch.ones(1, 4), draft_words(1), max_entries=513)
