"""Philox 4x32-10 against Random123's known answers, and what the counters promise."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from outrider.kernels.cpu.library import cpu_library
from outrider.kernels.random.reference import (
    PURPOSE_SHIFT,
    Purpose,
    as_int64,
    exponential_noise,
    philox_rounds,
    vocabulary_words,
    words,
)

KNOWN_ANSWERS = [  # Random123's kat_vectors for philox4x32 with 10 rounds: counter, key, result
    ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


def column(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_known_answers_in_torch_and_numpy(counter: list[int], key: list[int], expected: list[int]) -> None:
    c0, c1, c2, c3, k0, k1 = map(column, (*counter, *key))
    assert torch.cat(philox_rounds((c0, c1, c2, c3), (k0, k1))).tolist() == expected
    d0, d1, d2, d3, l0, l1 = (np.array([value], dtype=np.int64) for value in (*counter, *key))
    assert np.concatenate(philox_rounds((d0, d1, d2, d3), (l0, l1))).tolist() == expected


def test_counter_packing_is_the_documented_one() -> None:
    seed, position, completion, draw = 0xA4093822_12345678, 77, 3, 9
    got = words(column(as_int64(seed)), column(position), Purpose.RECOVERED, column(completion), draw)
    counter = (column(0), column(position), column((2 << PURPOSE_SHIFT) + draw), column(completion))
    expected = philox_rounds(counter, (column(0x12345678), column(0xA4093822)))
    assert got.tolist() == [torch.cat(expected).tolist()]


def test_vocabulary_words_pick_counter_and_lane_by_token_id() -> None:
    seeds, positions, completions = column(5, as_int64(2**64 - 1)), column(11, 12), column(0, 1)
    got = vocabulary_words(seeds, positions, Purpose.BONUS, completions, vocab_size=11)
    assert got.shape == (2, 11)
    for row, token in [(0, 0), (0, 7), (1, 10)]:
        key = (seeds[row : row + 1] & 0xFFFFFFFF, (seeds[row : row + 1] >> 32) & 0xFFFFFFFF)
        counter = (column(token >> 2), positions[row : row + 1], column(3 << PURPOSE_SHIFT), completions[row : row + 1])
        assert got[row, token] == philox_rounds(counter, key)[token & 3]


def test_purposes_draws_and_completions_share_no_word() -> None:
    seeds = torch.full((64,), 42)
    positions = torch.arange(64)
    seen = [
        words(seeds, positions, purpose, torch.full_like(seeds, completion), draw).flatten()
        for purpose in Purpose
        for completion in (0, 1)
        for draw in (0, 1)
    ]
    together = torch.cat(seen)
    assert len(together.unique()) == len(together)


def test_purpose_may_differ_by_row() -> None:
    seeds, positions, completions = column(1, 1), column(4, 4), column(0, 0)
    mixed = words(seeds, positions, torch.tensor([Purpose.RECOVERED, Purpose.BONUS]), completions)
    assert torch.equal(mixed[0], words(seeds, positions, Purpose.RECOVERED, completions)[0])
    assert torch.equal(mixed[1], words(seeds, positions, Purpose.BONUS, completions)[1])


def test_a_draw_index_fills_its_bits_and_then_the_token_ids() -> None:
    low, high = (1 << PURPOSE_SHIFT) - 1, 0x89ABCDEF
    counter = (column(high), column(4), column((1 << PURPOSE_SHIFT) + low), column(3))
    expected = torch.cat(philox_rounds(counter, (column(7), column(0)))).tolist()
    draw = high << PURPOSE_SHIFT | low
    assert words(column(7), column(4), Purpose.ACCEPT, column(3), draw).tolist() == [expected]
    by_row = words(column(7, 7), column(4, 4), Purpose.ACCEPT, column(3, 3), column(low, draw))
    assert by_row.tolist() == [words(column(7), column(4), Purpose.ACCEPT, column(3), low)[0].tolist(), expected]


def test_a_draw_index_must_fit_into_the_counter() -> None:
    with pytest.raises(ValueError, match="draw index"):
        words(column(1), column(1), Purpose.DRAFT, column(0), 1 << 60)
    with pytest.raises(ValueError, match="draw index"):
        vocabulary_words(column(1), column(1), Purpose.DRAFT, column(0), 8, draw=1 << PURPOSE_SHIFT)


@pytest.mark.parametrize("vocab_size", [1, 5, 4096, 50_001])
def test_noise_is_the_logarithm_of_its_words(vocab_size: int) -> None:
    seeds, positions, completions = column(1, 2), column(3, 4), column(0, 0)
    noise = exponential_noise(seeds, positions, completions, vocab_size)
    table = vocabulary_words(seeds, positions, Purpose.BONUS, completions, vocab_size)
    assert noise.dtype == torch.float32 and noise.shape == (2, vocab_size)
    assert bool(noise.isfinite().all()) and bool((noise > 0).all())
    for token in {0, vocab_size // 2, vocab_size - 1}:
        expected = -math.log1p(-(int(table[0, token]) + 0.5) * 2.0**-32)
        assert float(noise[0, token]) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("vocab_size", [1, 255, 257, 4096, 151_936])
def test_noise_of_the_c_kernel_is_pytorchs(vocab_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, but where a double lies at the edge between two floats."""
    if cpu_library() is None:
        pytest.skip("no C compiler")
    rows = 24
    seeds = torch.tensor([as_int64((1 << 64) - 1 - 77 * row) for row in range(rows)])
    positions, completions = torch.arange(rows) * 1001, torch.arange(rows) % 3
    ours = exponential_noise(seeds, positions, completions, vocab_size)
    monkeypatch.setattr("outrider.kernels.random.reference.cpu_library", lambda: None)
    theirs = exponential_noise(seeds, positions, completions, vocab_size)
    assert int((ours != theirs).sum()) <= 1 + (ours.numel() >> 24)
    torch.testing.assert_close(ours, theirs, rtol=2e-7, atol=0)


@pytest.mark.parametrize("word", [0, 1, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1])
def test_noise_is_finite_and_positive_at_the_extremes(word: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def every_word(groups: torch.Tensor, seeds: torch.Tensor, *_: object) -> torch.Tensor:
        return torch.full((len(seeds), len(groups), 4), word)

    monkeypatch.setattr("outrider.kernels.random.reference._grouped_words", every_word)
    monkeypatch.setattr("outrider.kernels.random.reference.cpu_library", lambda: None)
    noise = float(exponential_noise(column(0), column(0), column(0), 1))
    folded = (0xFFFFFFFF - word + 0.5) * 2.0**-32
    expected = -math.log(folded) if word >= 2**31 else -math.log1p(-(word + 0.5) * 2.0**-32)
    assert 0 < noise < 23 and noise == pytest.approx(expected, rel=1e-6)


def test_words_are_uniform() -> None:
    table = vocabulary_words(column(9), column(0), Purpose.DRAFT, column(0), 1 << 16)
    counts = torch.bincount((table >> 28).flatten(), minlength=16).double()
    expected = (1 << 16) / 16
    assert float(((counts - expected) ** 2 / expected).sum()) < 15 + 10 * math.sqrt(30)


def test_torch_and_numpy_agree_when_rows_broadcast_over_a_vocabulary() -> None:
    groups = torch.arange(9)[None]
    columns = torch.randint(1 << 32, (5, 3, 1), generator=torch.Generator().manual_seed(1))
    in_torch = philox_rounds((groups, *columns[:3]), (columns[3], columns[4]))
    arrays = columns.numpy()
    in_numpy = philox_rounds((groups.numpy(), *arrays[:3]), (arrays[3], arrays[4]))
    assert all(torch.equal(a, torch.from_numpy(b)) for a, b in zip(in_torch, in_numpy, strict=True))
