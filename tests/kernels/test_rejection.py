"""Edges of rejection acceptance, its ragged layout, and its law on a narrow vocabulary."""

from collections.abc import Iterator

import pytest
import torch
from packed import Vector, packed
from scipy.stats import chi2
from torch import Tensor

from outrider.kernels.random.reference import Purpose, words
from outrider.kernels.sampling.reference import draft_sample
from outrider.kernels.types import DraftWeights, Windows
from outrider.kernels.verify.reference import accept, accept_uniforms, cut_at_vocabulary, draw

LAST_COIN = 1 - 2.0**-24


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Small tensors gain nothing from threads, and lose much when the processor is shared."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def accept_one(
    rows: list[list[float]], drafted: list[int], vectors: list[Vector], coins: list[float]
) -> tuple[int, list[float]]:
    num_accepted, weights = accept(
        torch.tensor(rows),
        Windows.of([len(drafted)], [len(rows)]),
        torch.tensor(drafted, dtype=torch.int64),
        DraftWeights.of(packed(vectors)),
        torch.tensor(coins, dtype=torch.float64),
    )
    return int(num_accepted), weights[0].tolist()


def test_a_zero_probability_token_is_refused_even_by_the_least_coin() -> None:
    assert accept_one([[0.0, 1.0], [1.0, 0.0]], [0], [((0, 1), (1, 1))], [0.0]) == (0, [0.0, 1.0])  # 1 x 2 - 1
    assert accept_one([[0.0, 1.0], [1.0, 0.0]], [0], [None], [0.0]) == (0, [0.0, 1.0])


def test_a_draft_equal_to_the_target_is_accepted_by_the_greatest_coin() -> None:
    vector = ((0, 1, 2), (2, 1, 1))
    assert accept_one([[0.5, 0.25, 0.25], [1.0, 0.0, 0.0]], [1], [vector], [LAST_COIN]) == (1, [1.0, 0.0, 0.0])


def test_acceptance_is_strict_at_the_threshold() -> None:
    rows = [[0.5, 0.5], [1.0, 0.0]]
    vector = ((0, 1), (3, 1))  # accepted below 0.5 x 4 / 3
    assert accept_one(rows, [0], [((0,), (1,))], [0.5])[0] == 0
    assert accept_one(rows, [0], [((0,), (1,))], [0.5 - 2.0**-24])[0] == 1
    assert accept_one(rows, [0], [vector], [11184810 * 2.0**-24])[0] == 1  # the last coin below 2/3
    assert accept_one(rows, [0], [vector], [11184811 * 2.0**-24])[0] == 0


def test_the_residual_is_what_the_draft_left() -> None:
    rows = [[0.5, 0.25, 0.25], [1.0, 0.0, 0.0]]
    assert accept_one(rows, [1], [((1, 2), (3, 1))], [LAST_COIN]) == (0, [2.0, 0.0, 0.0])
    assert accept_one(rows, [1], [None], [0.5]) == (0, [0.5, 0.0, 0.25])


def test_a_zero_residual_falls_back_to_the_target() -> None:
    row = [0.5, 0.25]  # sums to less than 1, as rounding may have it
    assert accept_one([row, row], [0], [((0, 1), (3, 1))], [LAST_COIN]) == (0, [0.5, 0.25])


def test_all_mass_on_one_token() -> None:
    rows = [[0.0, 1.0], [0.0, 1.0], [1.0, 0.0]]
    assert accept_one(rows, [1, 1], [None, ((1,), (32767,))], [LAST_COIN, LAST_COIN]) == (2, [1.0, 0.0])
    assert accept_one(rows, [1, 0], [None, None], [LAST_COIN, 0.0]) == (1, [0.0, 1.0])


BAD_VECTORS: dict[str, Vector] = {
    "missing": None,
    "empty": ((), ()),
    "ids and weights of unequal number": ((0, 1), (1,)),
    "duplicate id": ((1, 0, 1), (1, 1, 1)),
    "zero weight": ((0, 1, 2), (0, 1, 1)),
    "negative weight": ((0, 1), (-1, 3)),
    "total of 2^24": ((0, 1), (1 << 23, 1 << 23)),
    "one huge weight": ((0, 1), (1, 2**62)),
    "id outside the vocabulary": ((1, 3), (1, 1)),
    "negative id": ((1, -1), (1, 1)),
    "lacks the drafted id": ((0, 2), (1, 1)),
}


@pytest.mark.parametrize("bad", BAD_VECTORS)
def test_an_unusable_vector_is_one_hot(bad: str) -> None:
    rows = [[0.25, 0.5, 0.25], [1.0, 0.0, 0.0]]
    good: Vector = ((0, 1), (1, 1))
    for vectors in ([BAD_VECTORS[bad]], [BAD_VECTORS[bad], good], [good, BAD_VECTORS[bad]]):
        drafted, place = [1] * len(vectors), vectors.index(BAD_VECTORS[bad])
        window_rows = [rows[0]] * len(vectors) + [rows[1]]
        coins = [0.0] * len(vectors)
        coins[place] = 0.5
        assert accept_one(window_rows, drafted, vectors, coins) == (place, [0.25, 0.0, 0.25])
        coins[place] = 0.5 - 2.0**-24
        assert accept_one(window_rows, drafted, vectors, coins) == (len(vectors), rows[1])


def test_the_greatest_usable_total_is_exact() -> None:
    vector = ((0, 1), (2**24 - 2, 1))
    assert accept_one([[1.0, 0.0], [1.0, 0.0]], [0], [vector], [LAST_COIN])[0] == 1
    assert accept_one([[0.0, 1.0], [1.0, 0.0]], [0], [vector], [0.0]) == (0, [0.0, 2**24 - 2.0])


@pytest.mark.parametrize("token_id", [-1, 2, 2**40])
def test_a_drafted_id_outside_the_vocabulary_is_never_accepted(token_id: int) -> None:
    vector = ((0, token_id), (1, 1))
    for vectors in ([None], [vector]):
        assert accept_one([[0.5, 0.5], [1.0, 0.0]], [token_id], vectors, [0.0]) == (0, [0.5, 0.5])


def test_a_chain_is_cut_before_an_id_outside_the_vocabulary() -> None:
    assert cut_at_vocabulary([3, 0, 4, 1], 4) == 2
    assert cut_at_vocabulary([-1], 4) == 0
    assert cut_at_vocabulary([3, 3], 4) == 2


def test_windows_are_ragged() -> None:
    """Windows of 0 to 3 tokens, one without a row for the next token, accepted to different lengths."""
    windows = Windows.of([2, 0, 3, 1, 2], [3, 1, 4, 2, 2])
    rows = torch.eye(5)[[0, 1, 2, 3, 0, 1, 2, 3, 4, 4, 2, 3]]
    drafted = torch.tensor([0, 1, 0, 2, 2, 4, 2, 3])
    num_accepted, weights = accept(rows, windows, drafted, DraftWeights.of([]), torch.full((8,), 0.5).double())
    assert num_accepted.tolist() == [2, 0, 1, 1, 2]
    assert weights.sum(dim=1).tolist() == [1, 1, 1, 1, 0]
    assert weights.argmax(dim=1)[:4].tolist() == [2, 3, 1, 4]
    assert draw(weights, torch.zeros(5, 4, dtype=torch.int64)).tolist() == [2, 3, 1, 4, -1]


def test_a_batch_of_windows_equals_each_alone() -> None:
    generator = torch.Generator().manual_seed(1)
    num_drafted, vocab_size = [3, 1, 0, 4, 2], 7
    probs = torch.rand(sum(num_drafted) + 5, vocab_size, generator=generator).softmax(dim=-1)
    drafted = torch.randint(vocab_size, (sum(num_drafted),), generator=generator)
    coins = torch.rand(sum(num_drafted), generator=generator, dtype=torch.float64)
    vectors: list[Vector] = [
        None if draft % 3 == 2 else (torch.arange(vocab_size).tolist(), torch.randint(1, 9, (vocab_size,)).tolist())
        for draft in range(len(drafted))
    ]
    windows = Windows.of(num_drafted)
    num_accepted, weights = accept(probs, windows, drafted, DraftWeights.of(packed(vectors)), coins)
    for window, count in enumerate(num_drafted):
        row, start = int(windows.row_starts[window]), int(windows.draft_starts[window])
        alone = accept(
            probs[row : row + count + 1],
            Windows.of([count]),
            drafted[start : start + count],
            DraftWeights.of(packed(vectors[start : start + count])),
            coins[start : start + count],
        )
        assert alone[0].tolist() == num_accepted[window : window + 1].tolist()
        assert torch.equal(alone[1][0], weights[window])


def test_a_nan_row_gives_no_token() -> None:
    rows = torch.tensor([[float("nan"), 0.5], [0.5, 0.5]])
    none = torch.empty(0, dtype=torch.int64)
    _, weights = accept(rows, Windows.of([0, 0]), none, DraftWeights.of([]), none.double())
    assert draw(weights, torch.zeros(2, 4, dtype=torch.int64)).tolist() == [-1, 0]


def test_draw_takes_no_weight_of_zero_at_either_end() -> None:
    weights = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0], [0.0, 1e-30, 0.0, 3e-30, 0.0]], dtype=torch.float64)
    lowest = torch.zeros(2, 4, dtype=torch.int64)
    highest = torch.full((2, 4), 0xFFFFFFFF)
    assert draw(weights, lowest).tolist() == [1, 1]
    assert draw(weights, highest).tolist() == [3, 3]
    quarter = torch.tensor([[1 << 30, 0, 0, 0]])  # exactly the edge between the two
    assert draw(weights[:1], quarter).tolist() == [3]
    assert draw(weights[:1], quarter + torch.tensor([[-1, 0xFFFFFFFF, 0, 0]])).tolist() == [1]


DRAW_WEIGHTS = [
    (1.0, 3.0, 0.0, 4.0),
    (0.0, 0.5, 0.25, 0.0, 0.125, 0.125),  # a target's law
    (0.0, 2.5, 0.0, 0.75, 1.0),  # a residual: not normalised
    (7.0, 11.0, 0.0, 13.0),  # a total that is no power of two
    (0.0, 256.0),
]


@pytest.mark.parametrize("weights", DRAW_WEIGHTS, ids=str)
def test_each_id_has_exactly_its_weights_share_of_all_words(weights: tuple[float, ...]) -> None:
    """As many points as the total has sixteenths: the least word of each sixteenth's run gives each id in proportion,
    and so does the greatest where no rounding is in the way."""
    parts = [int(16 * weight) for weight in weights]
    owners = [token for token, count in enumerate(parts) for _ in range(count)]
    total = len(owners)
    firsts = [-(-(run << 53) // total) for run in range(total)]
    table = torch.tensor([weights] * total, dtype=torch.float64)
    assert draw(table, words_of(firsts)).tolist() == owners
    if total & (total - 1) == 0:
        assert draw(table, words_of([first - 1 for first in [*firsts[1:], 1 << 53]])).tolist() == owners


def words_of(numbers: list[int]) -> Tensor:
    """Words of which a draw takes these 53 bits, [n, 4]; those that it does not take are all set."""
    return torch.tensor(
        [[number >> 21, (number & 0x1FFFFF) << 11 | 0x7FF, 0xFFFFFFFF, 0xFFFFFFFF] for number in numbers]
    )


def test_coins_lie_on_their_grid() -> None:
    table = torch.tensor([[0, 0, 0, 0], [0xFF, 0, 0, 0], [0x100, 0, 0, 0], [0xFFFFFFFF, 0, 0, 0]])
    assert accept_uniforms(table).tolist() == [0.0, 0.0, 2.0**-24, LAST_COIN]


NUM_SAMPLES, NUM_IDS, LENGTH = 20_000, 16, 3
LEAST_P_VALUE = 1e-4  # of each test; the seeds are fixed, so that a pass stays one


def rejection_round(
    logits: Tensor, committed: Tensor, seeds: Tensor, recovered: Purpose
) -> tuple[Tensor, Tensor, Tensor]:
    """One round of two adversarially drafted tokens: the draft's logits are the target's, negated."""
    num, position = committed.shape[0], torch.full_like(seeds, committed.shape[1])
    completion = torch.zeros_like(seeds)
    drafted, vectors, context = [], [], committed[:, -1]
    for step in range(2):
        samples = draft_sample(
            (-logits[context]).softmax(dim=-1), words(seeds, position + step, Purpose.DRAFT, completion)
        )
        owners = torch.repeat_interleave(2 * torch.arange(num) + step, samples.entry_starts.diff())
        vectors.append((samples.entry_ids, samples.entry_weights, owners))
        drafted.append(samples.token_ids)
        context = samples.token_ids
    draft_ids = torch.stack(drafted, dim=1)  # [n, 2]
    contexts = torch.cat((committed[:, -1:], draft_ids), dim=1)  # [n, 3]
    coins = [accept_uniforms(words(seeds, position + step, Purpose.ACCEPT, completion)) for step in range(2)]
    windows = Windows.of([2] * num)
    packed = DraftWeights(*(torch.cat(column) for column in zip(*vectors, strict=True)))
    target_probs = logits[contexts.flatten()].softmax(dim=-1)
    num_accepted, weights = accept(target_probs, windows, draft_ids.flatten(), packed, torch.stack(coins, 1).flatten())
    purposes = torch.where(num_accepted < 2, int(recovered), int(Purpose.BONUS))
    next_ids = draw(weights, words(seeds, position + num_accepted, purposes, completion))
    return draft_ids, num_accepted, next_ids


def sample_by_rejection(logits: Tensor, start: int, recovered: Purpose = Purpose.RECOVERED) -> Tensor:
    """Rounds until every sequence has its tokens; sequences of equal length are one batch. [samples, LENGTH] int64"""
    seeds = torch.arange(NUM_SAMPLES)
    tokens = torch.full((NUM_SAMPLES, 1 + LENGTH + 3), start)
    lengths = torch.ones(NUM_SAMPLES, dtype=torch.int64)
    for length in range(1, LENGTH + 1):
        group = (lengths == length).nonzero().squeeze(1)
        draft_ids, num_accepted, next_ids = rejection_round(logits, tokens[group, :length], seeds[group], recovered)
        tokens[group, length : length + 2] = draft_ids
        tokens[group, length + num_accepted] = next_ids
        lengths[group] = length + num_accepted + 1
    return tokens[:, 1 : 1 + LENGTH]


def p_value(observed: Tensor, expected: Tensor) -> float:
    """Of a chi-square test; cells that expect fewer than 5 are one cell."""
    rare = expected < 5
    observed = torch.cat((observed[~rare], observed[rare].sum()[None])).double()
    expected = torch.cat((expected[~rare], expected[rare].sum()[None]))
    filled = expected > 0
    statistic = float(((observed - expected)[filled] ** 2 / expected[filled]).sum())
    return float(chi2.sf(statistic, int(filled.sum()) - 1))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_law_with_an_adversarial_draft_on_a_narrow_vocabulary(temperature: float) -> None:
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(NUM_IDS, NUM_IDS, generator=generator) / temperature
    tokens = sample_by_rejection(logits, start=3)
    law = logits.double().softmax(dim=-1)
    first = law[3]
    pair = first[:, None] * law
    second = pair.sum(dim=0)
    marginals = [first, second, second @ law]
    for place, marginal in enumerate(marginals):
        observed = torch.bincount(tokens[:, place], minlength=NUM_IDS)
        assert p_value(observed, marginal * NUM_SAMPLES) > LEAST_P_VALUE, place
    for place, joint in enumerate([pair, second[:, None] * law]):
        observed = torch.bincount(tokens[:, place] * NUM_IDS + tokens[:, place + 1], minlength=NUM_IDS**2)
        assert p_value(observed, joint.flatten() * NUM_SAMPLES) > LEAST_P_VALUE, place


def test_the_test_sees_noise_shared_between_accept_and_recovered() -> None:
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(NUM_IDS, NUM_IDS, generator=generator)
    tokens = sample_by_rejection(logits, start=3, recovered=Purpose.ACCEPT)
    expected = logits[3].double().softmax(dim=-1) * NUM_SAMPLES
    assert p_value(torch.bincount(tokens[:, 0], minlength=NUM_IDS), expected) < 1e-8
