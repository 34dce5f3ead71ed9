"""Draft draws in Triton: the reference's tokens, ids and integer weights, bit for bit."""

import pytest
import torch
from poisoned import poisoned, poisoned_allocations
from torch import Tensor

from outrider.kernels.random.reference import Purpose, words
from outrider.kernels.sampling.reference import DEFAULT_MASS, draft_sample

draft_triton = pytest.importorskip("outrider.kernels.sampling.triton")
# The reference divides by the greatest probability of a row that has none.
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|divide by zero) encountered:RuntimeWarning")


def laws(vocab_size: int) -> Tensor:
    """[rows, vocab]: a usual row, a flat one, a steep one with zeros, equal ids, one id alone, and one below 1."""
    normal = torch.randn(vocab_size, generator=torch.Generator().manual_seed(vocab_size))
    single = torch.zeros(vocab_size)
    single[vocab_size // 2] = 1.0
    equal = torch.full((vocab_size,), 1 / vocab_size)
    rows = [normal.mul(3).softmax(-1), normal.mul(0.1).softmax(-1), normal.mul(40).softmax(-1), equal, single]
    return torch.stack([*rows, rows[0] * 0.75])


def check(probs: Tensor, device: torch.device, mass: float, max_entries: int, tile: int) -> None:
    rows = torch.arange(len(probs))
    table = words(rows, rows, Purpose.DRAFT, rows)
    table[0, :2], table[-1, :2] = 0, 0xFFFFFFFF  # the first and the last point of all
    expected = draft_sample(probs, table, mass, max_entries)
    with poisoned_allocations():
        token_ids, ids, weights, starts = draft_triton.draft_sample(
            poisoned(probs, device), poisoned(table, device), mass, max_entries, tile=tile
        )
    count = int(starts[-1])
    assert starts.tolist() == expected.entry_starts.tolist()
    assert ids[:count].tolist() == expected.entry_ids.tolist()
    assert weights[:count].tolist() == expected.entry_weights.tolist()
    assert token_ids.tolist() == expected.token_ids.tolist()


@pytest.mark.parametrize(("vocab_size", "tile"), [(1, 16), (16, 16), (40, 16), (4097, 2048)])
def test_equals_the_reference(triton_device: torch.device, vocab_size: int, tile: int) -> None:
    check(laws(vocab_size), triton_device, DEFAULT_MASS, 512, tile)


@pytest.mark.parametrize(("mass", "max_entries"), [(0.5, 512), (1.0, 7), (0.9, 1), (0.9999999, 3)])
def test_mass_and_number_of_entries(triton_device: torch.device, mass: float, max_entries: int) -> None:
    check(laws(40), triton_device, mass, max_entries, 16)


def test_the_mass_is_not_rounded_to_float32(triton_device: torch.device) -> None:
    for mass in (0.75, 0.75 + 1e-12):
        check(torch.full((1, 4), 0.25), triton_device, mass, 512, 16)


@pytest.mark.slow
def test_a_large_vocabulary(triton_device: torch.device) -> None:
    check(laws(151_936)[:3], triton_device, DEFAULT_MASS, 512, 2048)


def test_rounding_breaks_ties_to_even(triton_device: torch.device) -> None:
    """Weights of exactly a half, three halves, and so on, of which the least is dropped."""
    halves = torch.tensor([[32767.0, 0.5, 1.5, 2.5, 3.5, 0.49, 0.51]]) / 65536
    check(halves, triton_device, 1.0, 512, 16)


def test_rows_without_probability_give_no_token(triton_device: torch.device) -> None:
    nan = float("nan")
    probs = torch.tensor([[0.0, 0.0, 0.0], [0.0, 1.0, 0.0], [nan, 0.5, 0.5], [0.5, 0.25, nan]])
    check(probs, triton_device, DEFAULT_MASS, 512, 16)


def test_more_rows_than_a_pack_takes(triton_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_triton, "PACK_ROWS", 4)
    check(torch.eye(7) * 0.5 + 0.05, triton_device, DEFAULT_MASS, 512, 16)


def test_no_rows(triton_device: torch.device) -> None:
    none = torch.empty(0, 4, dtype=torch.int64, device=triton_device)
    parts = draft_triton.draft_sample(torch.empty(0, 9, device=triton_device), none, DEFAULT_MASS, 512)
    assert [part.tolist() for part in parts] == [[], [], [], [0]]
