"""Logit processing in Triton: the same kept ids as the reference, and its probabilities up to rounding.

Logits are multiples of a quarter, so that there are many ties and no near-ties; shares of top_p are met by no sum.

Draft draws in Triton: the reference's tokens, ids and integer weights, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernels.test_sampling import Row, pack
from support.kernels import poisoned, poisoned_allocations
from torch import Tensor

from outrider.kernels.random.reference import Purpose, words
from outrider.kernels.sampling.reference import (
    DEFAULT_MASS,
    adjust_logits,
    draft_sample,
    greedy_choice,
    logits_to_probs,
    most_probable,
)
from outrider.kernels.types import Entries, RowSampling, Truncation

adjust_triton = pytest.importorskip("outrider.kernels.sampling.triton")
probs_triton = pytest.importorskip("outrider.kernels.sampling.triton")
cut_triton = pytest.importorskip("outrider.kernels.sampling.cut_triton")
# Of the interpreter, in rows that cannot be sampled and at temperatures next to zero.
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero) encountered:RuntimeWarning")

NAN, INF = float("nan"), float("inf")
SIZES = [(1, 16), (16, 16), (70, 32), (4097, 2048)]  # ids, and those in a tile
ROWS = [
    Row(),
    Row(temperature=0.0, min_p=0.5, top_k=3),
    Row(temperature=0.3, min_p=0.07),
    Row(temperature=1.7, top_k=5),
    Row(top_p=0.9217),
    Row(temperature=0.6, top_k=40, top_p=0.3719, min_p=0.0137),
    Row(top_k=1, top_p=0.5),
    Row(top_p=0.0137),
    Row(temperature=1e-38),
    Row(min_p=1.0),
]


def on_device(sampling: RowSampling, device: torch.device) -> RowSampling:
    def moved(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(device)
        if value is None:
            return None
        return type(value)(*(getattr(value, name).to(device) for name in value.__slots__))

    return RowSampling(**{name: moved(getattr(sampling, name)) for name in RowSampling.__slots__})


def quarters(num_rows: int, vocab_size: int) -> Tensor:
    generator = torch.Generator().manual_seed(vocab_size)
    return torch.randint(-16, 17, (num_rows, vocab_size), generator=generator) / 4


def restricted(rows: list[Row], vocab_size: int) -> RowSampling:
    """Every row with its own allowed ids, banned ones, biases, penalties, and bits of a mask."""
    some = torch.Generator().manual_seed(3)

    def ids(count: int) -> list[int]:
        return torch.randperm(vocab_size, generator=some)[:count].tolist()

    last = vocab_size - 1  # always stays
    packed = pack(
        [
            Row(
                **{name: getattr(row, name) for name in ("temperature", "min_p", "top_k", "top_p")},
                repetition=1.3,
                presence=0.5,
                frequency=-0.25,
                counts=tuple((token, token % 3) for token in ids(9)),
                allowed=tuple({*ids(40), last}) if index % 2 else (),
                banned=tuple({*ids(20)} - {last}),
                bias=tuple((token, 1.5) for token in ids(7)),
            )
            for index, row in enumerate(rows)
        ],
        vocab_size,
    )
    mask = torch.randint(-(2**31), 2**31, (len(rows), -(-vocab_size // 32)), generator=some).int() | (1 << last % 32)
    return RowSampling(**{**{name: getattr(packed, name) for name in RowSampling.__slots__}, "token_mask": mask})


def check(logits: Tensor, sampling: RowSampling, device: torch.device, tile: int) -> None:
    expected, expected_invalid = logits_to_probs(logits, sampling)
    with poisoned_allocations():
        got, invalid = probs_triton.logits_to_probs(
            poisoned(logits, device), on_device(sampling, device), tile=tile, cut_tile=max(16, tile // 2)
        )
    assert torch.equal(invalid.cpu(), expected_invalid)
    valid = ~expected_invalid
    assert torch.equal(got.cpu()[valid] > 0, expected[valid] > 0)
    torch.testing.assert_close(got.cpu()[valid], expected[valid], rtol=3e-5, atol=1e-12)
    assert not got.cpu()[~valid].any()


@pytest.mark.parametrize(("vocab_size", "tile"), SIZES)
def test_equals_the_reference(triton_device: torch.device, vocab_size: int, tile: int) -> None:
    check(quarters(len(ROWS), vocab_size), pack(ROWS), triton_device, tile)


def test_a_maximum_that_rises_from_tile_to_tile(triton_device: torch.device) -> None:
    rising = torch.arange(70) / 8
    logits = torch.stack([rising, rising.flip(0)])
    for sampling in (RowSampling(), RowSampling(temperature=torch.tensor([1.7, 0.3])), pack([Row(min_p=0.1)] * 2)):
        check(logits, sampling, triton_device, 16)


@pytest.mark.parametrize(("vocab_size", "tile"), SIZES)
def test_with_every_processor(triton_device: torch.device, vocab_size: int, tile: int) -> None:
    sampling = restricted(ROWS, vocab_size)
    logits = quarters(len(ROWS), vocab_size)
    with poisoned_allocations():
        adjusted = adjust_triton.adjust_logits(poisoned(logits, triton_device), on_device(sampling, triton_device))
    torch.testing.assert_close(adjusted.cpu(), adjust_logits(logits, sampling), rtol=2e-7, atol=0)
    check(logits, sampling, triton_device, tile)


@pytest.mark.parametrize(("vocab_size", "tile"), [(100, 16), (128_256, probs_triton.TILE)])
def test_equal_logits_have_equal_probabilities(triton_device: torch.device, vocab_size: int, tile: int) -> None:
    """Wherever in a row they stand: a tie at a cut keeps the lowest ids."""
    logits = torch.randn(6, vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 2
    logits[:, ::3] = logits.amax(dim=1, keepdim=True)
    probs, _ = probs_triton.logits_to_probs(poisoned(logits, triton_device), RowSampling(), tile=tile)
    assert (probs[:, ::3] == probs[:, :1]).all()


@pytest.mark.slow
def test_a_large_vocabulary(triton_device: torch.device) -> None:
    check(quarters(len(ROWS), 151_936), restricted(ROWS, 151_936), triton_device, probs_triton.TILE)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits(triton_device: torch.device, dtype: torch.dtype) -> None:
    check(quarters(len(ROWS), 70).to(dtype), pack(ROWS), triton_device, 32)


def test_no_rows(triton_device: torch.device) -> None:
    probs, invalid = probs_triton.logits_to_probs(torch.empty(0, 5, device=triton_device), RowSampling())
    assert (probs.shape, invalid.shape) == ((0, 5), (0,))


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_rows_that_cannot_be_sampled(triton_device: torch.device, temperature: float) -> None:
    """What is wrong lies in the first tile or a later one, and a mask does not hide it."""
    logits = torch.zeros(7, 40)
    logits[0, 35], logits[1, 2], logits[2], logits[3, 1:] = NAN, INF, -INF, -INF
    logits[4, 0], logits[5, 39] = NAN, INF
    rows = [Row(temperature=temperature)] * 4 + [Row(temperature=temperature, banned=(0, 39))] * 3
    sampling = pack(rows)
    check(logits, sampling, triton_device, 16)
    _, invalid = probs_triton.greedy_choice(poisoned(logits, triton_device), on_device(sampling, triton_device), 16)
    assert invalid.tolist() == [True, True, True, False, True, True, False]


@pytest.mark.parametrize(("vocab_size", "tile"), SIZES)
def test_greedy_choice(triton_device: torch.device, vocab_size: int, tile: int) -> None:
    logits = quarters(6, vocab_size)
    logits[5] = 0.25
    for sampling in (RowSampling(), restricted(ROWS[:6], vocab_size)):
        expected = greedy_choice(logits, sampling)
        with poisoned_allocations():
            got = probs_triton.greedy_choice(poisoned(logits, triton_device), on_device(sampling, triton_device), tile)
        assert [part.tolist() for part in got] == [part.tolist() for part in expected]


CUTS = [
    (0, 0.9), (0, 0.37), (0, 1 - 1e-7), (0, 1e-30), (7, 1.0), (1, 0.5), (50, 0.8), (10**6, 0.99), (10**6, 1.0), (0, 1.0)
]  # fmt: skip


def laws(vocab_size: int) -> dict[str, Tensor]:
    """Shapes of a row of probabilities that a search could stumble over."""
    generator = torch.Generator().manual_seed(vocab_size)
    normal = torch.randn(vocab_size, generator=generator)
    single = torch.zeros(vocab_size)
    single[vocab_size // 2] = 1.0
    return {
        "flat": normal.mul(0.1).softmax(-1),
        "usual": normal.mul(3).softmax(-1),
        "steep": normal.mul(30).softmax(-1),  # subnormal values and zeros
        "equal": torch.full((vocab_size,), 1 / vocab_size),
        "single": single,
        "two levels": torch.where(normal > 0.5, 3.0, 1.0).div_(3 * vocab_size),
    }


def check_cut(probs: Tensor, top_k: Tensor, top_p: Tensor, device: torch.device, tile: int) -> None:
    """The kept set is the reference's for the very same probabilities; a row without a cut keeps its bits, whatever
    its sum."""
    rows = torch.arange(len(probs))
    kept = most_probable(probs, torch.where(top_k > 0, top_k, probs.shape[1]), top_p)
    cut = Truncation(rows.to(device), top_k.to(device), top_p.to(device))
    got = poisoned(probs, device)
    with poisoned_allocations():
        probs_triton.truncate(got, cut, tile=tile)
    result, wanted = got.cpu(), kept.double() / kept.double().sum(-1, keepdim=True)
    assert torch.equal(result > 0, kept > 0)
    has_cut = (top_k > 0) | (top_p < 1)
    torch.testing.assert_close(result[has_cut].double(), wanted[has_cut], rtol=2e-7, atol=0)
    assert torch.equal(result[~has_cut], probs[~has_cut])


@pytest.mark.parametrize(("vocab_size", "tile"), [(1, 16), (16, 16), (40, 16), (4097, 2048)])
def test_the_kept_set_is_the_sorted_one(triton_device: torch.device, prove: bool, vocab_size: int, tile: int) -> None:
    cases = [(law, *cut) for law in laws(vocab_size).values() for cut in CUTS]
    if not prove:
        cases = [*cases[:: 4 if vocab_size > 16 else 7], cases[-1]]  # the last is not normalised and has no cut
    probs, top_k, top_p = zip(*cases, strict=True)
    check_cut(torch.stack(probs), torch.tensor(top_k), torch.tensor(top_p, dtype=torch.float64), triton_device, tile)


def test_rows_whose_lists_would_be_long_are_searched_whole(
    triton_device: torch.device, prove: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some rows have a list, some none; ids are in tiles of 64."""
    monkeypatch.setattr(cut_triton, "MOST_GATHERED", 20)
    cases = [(law, *cut) for law in laws(100).values() for cut in (CUTS if prove else CUTS[2::3])]
    probs, top_k, top_p = zip(*cases, strict=True)
    check_cut(torch.stack(probs), torch.tensor(top_k), torch.tensor(top_p, dtype=torch.float64), triton_device, 16)
    check_draft(draft_laws(100), triton_device, DEFAULT_MASS, 40, 16)


@pytest.mark.slow
@pytest.mark.parametrize("law", ["flat", "usual", "steep"])
def test_the_kept_set_of_a_large_vocabulary(triton_device: torch.device, law: str) -> None:
    top_k, top_p = torch.tensor([0, 50, 0]), torch.tensor([0.95, 0.9, 1 - 1e-7], dtype=torch.float64)
    check_cut(laws(151_936)[law].repeat(3, 1), top_k, top_p, triton_device, probs_triton.CUT_TILE)


def test_a_value_that_the_search_stops_at_counts_once(triton_device: torch.device) -> None:
    """Of 40 values, more than a tile, one is the very bits where the first pass leaves the range's upper end."""
    pivot = torch.tensor([0x2F400000], dtype=torch.int32).view(torch.float32)
    probs = torch.zeros(1, 40)
    probs[0, 30], probs[0, 20], probs[0, 3:15] = 0.5, pivot, torch.arange(1, 13) * 1e-12
    for top_k in (1, 2, 3, 8):
        check_cut(probs, torch.tensor([top_k]), torch.ones(1, dtype=torch.float64), triton_device, 16)


def test_rows_without_a_cut_are_left_alone(triton_device: torch.device) -> None:
    probs = laws(70)["usual"].repeat(4, 1)
    got = poisoned(probs, triton_device)
    cut = Truncation(
        torch.tensor([1, 3], device=triton_device),
        torch.tensor([2, 2], device=triton_device),
        torch.ones(2, dtype=torch.float64, device=triton_device),
    )
    probs_triton.truncate(got, cut, torch.tensor([False, False, False, True], device=triton_device), tile=16)
    assert (got.cpu() > 0).sum(-1).tolist() == [70, 2, 70, 70]
    assert torch.equal(got.cpu()[[0, 2, 3]], probs[[0, 2, 3]])


def test_an_id_that_is_biased_twice_gets_both(triton_device: torch.device) -> None:
    entries = Entries(torch.tensor([0, 0], device=triton_device), torch.tensor([3, 3], device=triton_device))
    sampling = RowSampling(bias=entries, bias_values=torch.tensor([1.0, 0.5], device=triton_device))
    got = adjust_triton.adjust_logits(torch.zeros(1, 5, device=triton_device), sampling)
    assert got.tolist() == [[0.0, 0.0, 0.0, 1.5, 0.0]]


draft_triton = pytest.importorskip("outrider.kernels.sampling.triton")


def draft_laws(vocab_size: int) -> Tensor:
    """[rows, vocab]: a usual row, a flat one, a steep one with zeros, equal ids, one id alone, and one below 1."""
    normal = torch.randn(vocab_size, generator=torch.Generator().manual_seed(vocab_size))
    single = torch.zeros(vocab_size)
    single[vocab_size // 2] = 1.0
    equal = torch.full((vocab_size,), 1 / vocab_size)
    rows = [normal.mul(3).softmax(-1), normal.mul(0.1).softmax(-1), normal.mul(40).softmax(-1), equal, single]
    return torch.stack([*rows, rows[0] * 0.75])


def check_draft(probs: Tensor, device: torch.device, mass: float, max_entries: int, tile: int) -> None:
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
def test_draws_equal_the_references(triton_device: torch.device, vocab_size: int, tile: int) -> None:
    check_draft(draft_laws(vocab_size), triton_device, DEFAULT_MASS, 512, tile)


@pytest.mark.parametrize(("mass", "max_entries"), [(0.5, 512), (1.0, 7), (0.9, 1), (0.9999999, 3)])
def test_mass_and_number_of_entries(triton_device: torch.device, mass: float, max_entries: int) -> None:
    check_draft(draft_laws(40), triton_device, mass, max_entries, 16)


def test_the_mass_is_not_rounded_to_float32(triton_device: torch.device) -> None:
    for mass in (0.75, 0.75 + 1e-12):
        check_draft(torch.full((1, 4), 0.25), triton_device, mass, 512, 16)


@pytest.mark.slow
def test_draws_from_a_large_vocabulary(triton_device: torch.device) -> None:
    check_draft(draft_laws(151_936)[:3], triton_device, DEFAULT_MASS, 512, 2048)


def test_rounding_breaks_ties_to_even(triton_device: torch.device) -> None:
    """Weights of exactly a half, three halves, and so on, of which the least is dropped."""
    halves = torch.tensor([[32767.0, 0.5, 1.5, 2.5, 3.5, 0.49, 0.51]]) / 65536
    check_draft(halves, triton_device, 1.0, 512, 16)


def test_rows_without_probability_give_no_token(triton_device: torch.device) -> None:
    nan = float("nan")
    probs = torch.tensor([[0.0, 0.0, 0.0], [0.0, 1.0, 0.0], [nan, 0.5, 0.5], [0.5, 0.25, nan]])
    check_draft(probs, triton_device, DEFAULT_MASS, 512, 16)


def test_more_rows_than_a_pack_takes(triton_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_triton, "PACK_ROWS", 4)
    check_draft(torch.eye(7) * 0.5 + 0.05, triton_device, DEFAULT_MASS, 512, 16)


def test_draws_of_no_rows(triton_device: torch.device) -> None:
    none = torch.empty(0, 4, dtype=torch.int64, device=triton_device)
    parts = draft_triton.draft_sample(torch.empty(0, 9, device=triton_device), none, DEFAULT_MASS, 512)
    assert [part.tolist() for part in parts] == [[], [], [], [0]]
