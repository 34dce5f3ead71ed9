"""Logit processing against a slow and obvious reference, its edges, and its order."""

import math
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.kernels.sampling.reference import (
    adjust_logits,
    greedy_choice,
    logits_to_probs,
    most_probable,
    processed_logits,
)
from outrider.kernels.types import Allowed, Entries, Penalties, RowSampling, Truncation

VOCAB_SIZE = 13


@dataclass(frozen=True)
class Row:
    """One row's parameters for the reference."""

    temperature: float = 1.0
    min_p: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    counts: tuple[tuple[int, int], ...] = ()  # id, times in the output; 0 is in the prompt alone
    allowed: tuple[int, ...] = ()
    banned: tuple[int, ...] = ()
    bias: tuple[tuple[int, float], ...] = ()


def reference(logits: list[float], row: Row) -> list[float]:
    ids = range(len(logits))
    values = [x if not row.allowed or i in row.allowed else -math.inf for i, x in enumerate(logits)]
    values = [-math.inf if i in row.banned else x for i, x in enumerate(values)]
    values = [x + dict(row.bias).get(i, 0.0) for i, x in enumerate(values)]
    for i, count in row.counts:
        values[i] = values[i] / row.repetition if values[i] > 0 else values[i] * row.repetition
        values[i] -= row.frequency * count + row.presence * (count > 0)
    highest = max(values)
    if row.temperature == 0:
        return [float(i == values.index(highest)) for i in ids]
    probs = [math.exp((x - highest) / row.temperature) for x in values]
    probs = [x if x >= row.min_p else 0.0 for x in probs]
    order = sorted(ids, key=lambda i: (-probs[i], i))[: row.top_k or None]
    total, reached, kept = sum(probs[i] for i in order), 0.0, set()
    for i in order:
        if row.top_p < 1 and reached >= row.top_p * total:
            break
        kept.add(i)
        reached += probs[i]
    return [probs[i] / reached if i in kept else 0.0 for i in ids]


def allowed(rows: list[Row], vocab_size: int) -> Allowed | None:
    """A mask each; the last row's comes first."""
    restricted = [r for r, row in enumerate(rows) if row.allowed]
    if not restricted:
        return None
    masks = torch.full((len(restricted), vocab_size), -math.inf)
    for mask, r in zip(reversed(masks.unbind()), restricted, strict=True):
        mask[list(rows[r].allowed)] = 0.0
    return Allowed(torch.tensor(restricted), torch.arange(len(restricted)).flip(0), masks)


def pack(rows: list[Row], vocab_size: int = VOCAB_SIZE) -> RowSampling:
    def entries(pairs: list[tuple[int, int]]) -> Entries | None:
        return Entries(*torch.tensor(pairs).unbind(1)) if pairs else None

    every = range(len(rows))
    greedy = [r for r in every if rows[r].temperature == 0]
    cut = [r for r in every if rows[r].top_k or rows[r].top_p < 1]
    counted = [(r, token, count) for r in every for token, count in rows[r].counts]
    owners = [rows[r] for r, _, _ in counted]
    penalties = (
        Penalties(
            *torch.tensor([(r, token) for r, token, _ in counted]).unbind(1),
            torch.tensor([float(count) for _, _, count in counted]),
            torch.tensor([row.repetition for row in owners]),
            torch.tensor([row.presence for row in owners]),
            torch.tensor([row.frequency for row in owners]),
        )
        if counted
        else None
    )
    truncation = (
        Truncation(
            torch.tensor(cut),
            torch.tensor([rows[r].top_k for r in cut]),
            torch.tensor([rows[r].top_p for r in cut], dtype=torch.float64),
        )
        if cut
        else None
    )
    return RowSampling(
        allowed=allowed(rows, vocab_size),
        banned=entries([(r, token) for r in every for token in rows[r].banned]),
        bias=entries([(r, token) for r in every for token, _ in rows[r].bias]),
        bias_values=torch.tensor([bias for r in every for _, bias in rows[r].bias]),
        penalties=penalties,
        temperature=torch.tensor([row.temperature or 1.0 for row in rows]),
        greedy_rows=torch.tensor(greedy) if greedy else None,
        min_p=torch.tensor([row.min_p for row in rows]),
        truncation=truncation,
    )


def run(logits: list[list[float]], rows: list[Row]) -> list[list[float]]:
    probs, invalid = logits_to_probs(torch.tensor(logits), pack(rows, len(logits[0])))
    assert not invalid.any()
    return probs.tolist()


TOKENS = st.integers(0, VOCAB_SIZE - 1)
ROWS = st.builds(
    Row,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    min_p=st.sampled_from([0.0, 0.0, 0.07]),
    top_k=st.sampled_from([0, 0, 1, 2, 5, VOCAB_SIZE, 50]),
    top_p=st.sampled_from([1.0, 1.0, 0.0137, 0.3719, 0.9217]),  # no sum of equal shares meets these
    repetition=st.sampled_from([1.0, 1.3, 0.7]),
    presence=st.sampled_from([0.0, 0.6, -0.4]),
    frequency=st.sampled_from([0.0, 0.35]),
    counts=st.dictionaries(TOKENS, st.integers(0, 3), max_size=5).map(lambda d: tuple(d.items())),
    allowed=st.sets(TOKENS, max_size=8).map(tuple),
    bias=st.dictionaries(TOKENS, st.sampled_from([-2.0, 0.5, 7.0]), max_size=3).map(lambda d: tuple(d.items())),
)
LOGITS = st.lists(st.integers(-8, 8).map(lambda x: x / 4), min_size=VOCAB_SIZE, max_size=VOCAB_SIZE)  # many ties


@given(st.lists(st.tuples(LOGITS, ROWS), min_size=1, max_size=4), st.sets(TOKENS, max_size=3))
@settings(max_examples=150, deadline=None)
def test_equals_the_reference(cases: list[tuple[list[float], Row]], banned: set[int]) -> None:
    rows = [
        replace(row, banned=tuple(banned) if set(row.allowed or range(VOCAB_SIZE)) - banned else ()) for _, row in cases
    ]
    got = run([logits for logits, _ in cases], rows)
    for (logits, _), row, probs in zip(cases, rows, got, strict=True):
        expected = reference(logits, row)
        assert probs == pytest.approx(expected, rel=2e-5, abs=1e-7)
        assert [x > 0 for x in probs] == [x > 0 for x in expected]


@pytest.mark.parametrize("vocab_size", [1, 2, 31, 1000, 4099])
def test_awkward_sizes(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(4, vocab_size, generator=generator).mul(3).tolist()
    rows = [Row(top_k=40, top_p=0.9217, temperature=0.7), Row(top_p=0.9217), Row(top_k=1), Row(min_p=0.0137)]
    for probs, values, row in zip(run(logits, rows), logits, rows, strict=True):
        expected = reference(values, row)
        assert probs == pytest.approx(expected, rel=3e-5, abs=1e-7)
        assert [x > 0 for x in probs] == [x > 0 for x in expected]


def test_nothing_set_is_softmax_and_leaves_logits_alone() -> None:
    logits = torch.randn(3, 50)
    before = logits.clone()
    assert adjust_logits(logits, RowSampling()) is logits
    probs, invalid = logits_to_probs(logits, RowSampling())
    assert torch.equal(probs, logits.softmax(dim=-1)) and not invalid.any()
    logits_to_probs(logits, pack([Row(top_k=2, banned=(1,), bias=((2, 1.0),), counts=((3, 1),), presence=1.0)] * 3))
    assert torch.equal(logits, before)


def test_ties_at_a_cut_keep_the_lowest_ids() -> None:
    logits = [[1.0, 2.0, 1.0, 1.0, 2.0, 0.0]] * 2
    top_k, top_p = run(logits, [Row(top_k=3), Row(top_p=0.6)])
    assert [x > 0 for x in top_k] == [True, True, False, False, True, False]
    assert [x > 0 for x in top_p] == [False, True, False, False, True, False]
    assert run([[0.0] * 4], [Row(top_p=0.5)]) == [[0.5, 0.5, 0.0, 0.0]]  # exactly half: no third


def test_the_most_probable_token_survives_every_cut() -> None:
    for row in (Row(top_p=1e-9), Row(top_k=1), Row(min_p=1.0)):
        assert run([[0.0, 3.0, 1.0]], [row]) == [[0.0, 1.0, 0.0]]


def test_greedy_takes_the_lowest_of_equal_logits() -> None:
    logits = torch.tensor([[0.0, 5.0, 5.0], [5.0, 5.0, 5.0]])
    probs, _ = logits_to_probs(logits, pack([Row(temperature=0)] * 2))
    assert probs.tolist() == [[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]
    ids, invalid = greedy_choice(logits, RowSampling())
    assert ids.tolist() == [1, 0] and not invalid.any()


def test_a_tiny_temperature_does_not_overflow() -> None:
    assert run([[-3.0, 80.0, 79.0]], [Row(temperature=1e-38)]) == [[0.0, 1.0, 0.0]]


def test_rows_that_cannot_be_sampled_are_invalid() -> None:
    nan, inf = float("nan"), float("inf")
    logits = torch.tensor([[0.0, nan, 1.0], [inf, 0.0, 0.0], [-inf, -inf, -inf], [-inf, 0.0, -inf], [nan, 0.0, 1.0]])
    rows = [Row()] * 4 + [Row(banned=(0,))]  # a mask does not hide a NaN
    expected = [True, True, True, False, True]
    for temperature in (1.0, 0.0):
        packed = pack([replace(row, temperature=temperature) for row in rows])
        probs, invalid = logits_to_probs(logits, packed)
        assert invalid.tolist() == expected
        assert probs[3].tolist() == [0.0, 1.0, 0.0]
    assert greedy_choice(logits, pack(rows))[1].tolist() == expected
    _, invalid = logits_to_probs(torch.zeros(1, 2), pack([Row(banned=(0, 1))]))
    assert invalid.tolist() == [True]


@pytest.mark.parametrize("vocab_size", [31, 32, 70])
def test_a_packed_mask_allows_the_bits_that_are_set(vocab_size: int) -> None:
    allowed = [0, vocab_size - 1, 31 if vocab_size > 31 else 30]
    masks = torch.zeros(2, -(-vocab_size // 32), dtype=torch.int32)
    for token in allowed:
        masks[0, token // 32] |= torch.tensor(1 << (token % 32)).to(torch.int32)
    masks[1] = -1
    probs, _ = logits_to_probs(torch.zeros(2, vocab_size), RowSampling(token_mask=masks))
    assert probs[0].nonzero().squeeze(1).tolist() == sorted(set(allowed))
    assert bool((probs[1] > 0).all())


def test_processed_logits_are_scaled_and_cut() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]])
    sampling = pack([Row(temperature=0.5, top_k=2), Row(temperature=0, bias=((0, 9.0),))])
    probs, _ = logits_to_probs(logits, sampling)
    assert processed_logits(logits, sampling, probs).tolist() == [[-math.inf, 4.0, 6.0], [10.0, 2.0, 3.0]]


def test_shares_may_be_of_a_given_total() -> None:
    probs = torch.tensor([[0.5, 0.25, 0.125, 0.125]] * 2)
    limits, masses = torch.tensor([3, 3]), torch.tensor([0.8, 0.95], dtype=torch.float64)
    of_what_is_left = most_probable(probs, limits, masses)
    of_all = most_probable(probs, limits, masses, torch.ones(2, dtype=torch.float64))
    assert (of_what_is_left > 0).tolist() == [[True, True, False, False], [True, True, True, False]]
    assert (of_all > 0).tolist() == [[True, True, True, False]] * 2
