"""Logit processing against a slow and obvious reference, its edges, and its order.

Draft draws: the law is the integers' own, and the integers are what the wire can carry.

The best ids of each row: in C as in the reference, whatever is in the rows.

Sequences that move on by one token on the device."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2

from outrider.kernels import dispatch
from outrider.kernels.cpu.library import cpu_library
from outrider.kernels.random.reference import Purpose, words
from outrider.kernels.sampling import reference as module
from outrider.kernels.sampling.reference import (
    MAX_ENTRIES,
    MOST,
    adjust_logits,
    advance,
    best_ids,
    draft_sample,
    draw_integer,
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
    places = torch.tensor([(r, token) for r, token, _ in counted])
    penalties = (
        Penalties(
            places[:, 0],
            places[:, 1],
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
@settings(max_examples=150)
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


def draft_words(count: int, position: int = 0) -> torch.Tensor:
    seeds = torch.arange(count)
    return words(seeds, torch.full_like(seeds, position), Purpose.DRAFT, torch.zeros_like(seeds))


@given(st.lists(st.integers(1, 32767), min_size=1, max_size=5), st.integers(0, 2**64 - 1))
@settings(max_examples=60)
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


BLOCK = 4
CONTEXTS = [0, 1, 4, 7, 8, 0]  # tokens with the next one; 0 is padding


def state(device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    tables = torch.arange(6 * 5, dtype=torch.int32).view(6, 5) + 100
    lens = torch.tensor(CONTEXTS, dtype=torch.int32)
    positions = (lens - 1).clamp(min=0)
    slots = tables.gather(1, (positions // BLOCK).long()[:, None]).squeeze(1) * BLOCK + positions % BLOCK
    columns = (positions, slots.masked_fill(lens == 0, -1), lens, tables)
    positions, slots, lens, tables = (column.to(device, torch.int32) for column in columns)
    return positions, slots, lens, tables


ENDS = [0, 9, 9, 7, 8, 0]  # the fourth and the fifth have no place for another token


def test_positions_slots_and_lengths(triton_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a sequence has no place left it stands still, as often as it is moved, and nothing is stored."""
    ends = torch.tensor(ENDS, dtype=torch.int32)
    expected = state("cpu")
    for moved in (1, 2):
        advance(*expected, ends, BLOCK)
        positions, slots, lens, tables = expected
        for index, (length, end) in enumerate(zip(CONTEXTS, ENDS, strict=True)):
            at = min(length - 1 + moved, end) if length else 0
            slot = int(tables[index, at // BLOCK]) * BLOCK + at % BLOCK if at < end else -1
            assert (int(positions[index]), int(slots[index])) == (at, slot)
            assert int(lens[index]) == (min(length + moved, end) if length else 0)
    monkeypatch.setattr(dispatch, "runs_triton", lambda x: True)
    found = state(triton_device)
    for _ in range(2):
        advance(*found, ends.to(triton_device), BLOCK)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours.cpu(), theirs)
