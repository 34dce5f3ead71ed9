"""Edges of rejection acceptance, its ragged layout, and its law on a narrow vocabulary.

Coupled acceptance: the tokens are those of plain coupled decoding, whatever is drafted."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from lossless.law import Tokens, target_law
from scipy.stats import chi2
from support.kernels import BAD_VECTORS, Vector, packed, poisoned, poisoned_allocations
from torch import Tensor

from outrider.kernels.random.reference import Purpose, exponential_noise, words
from outrider.kernels.sampling.reference import draft_sample
from outrider.kernels.types import DraftWeights, Windows
from outrider.kernels.verify.reference import (
    accept,
    accept_uniforms,
    coupled_accept,
    coupled_choice,
    draw,
    first_argmax,
)

LAST_COIN = 1 - 2.0**-24


pytestmark = pytest.mark.usefixtures("one_thread")


AcceptOne = Callable[[list[list[float]], list[int], list[Vector], list[float]], tuple[int, list[float]]]


@pytest.fixture
def accept_one(form: torch.device) -> AcceptOne:
    """Judges one window whose tensors lie between poison: how many tokens are accepted, and the weights after them."""

    def run(
        rows: list[list[float]], drafted: list[int], vectors: list[Vector], uniforms: list[float]
    ) -> tuple[int, list[float]]:
        sent = DraftWeights.of(packed(vectors))
        with poisoned_allocations():
            num_accepted, weights = accept(
                poisoned(torch.tensor(rows), form),
                Windows.of([len(drafted)], [len(rows)], form),
                poisoned(torch.tensor(drafted, dtype=torch.int64), form),
                DraftWeights(*(poisoned(getattr(sent, name), form) for name in DraftWeights.__slots__)),
                poisoned(torch.tensor(uniforms, dtype=torch.float64), form),
            )
        return int(num_accepted), weights[0].tolist()

    return run


def test_a_zero_probability_token_is_refused_even_by_the_least_coin(accept_one: AcceptOne) -> None:
    assert accept_one([[0.0, 1.0], [1.0, 0.0]], [0], [((0, 1), (1, 1))], [0.0]) == (0, [0.0, 1.0])  # 1 x 2 - 1
    assert accept_one([[0.0, 1.0], [1.0, 0.0]], [0], [None], [0.0]) == (0, [0.0, 1.0])


def test_a_draft_equal_to_the_target_is_accepted_by_the_greatest_coin(accept_one: AcceptOne) -> None:
    vector: Vector = ((0, 1, 2), (2, 1, 1))
    assert accept_one([[0.5, 0.25, 0.25], [1.0, 0.0, 0.0]], [1], [vector], [LAST_COIN]) == (1, [1.0, 0.0, 0.0])


def test_acceptance_is_strict_at_the_threshold(accept_one: AcceptOne) -> None:
    rows = [[0.5, 0.5], [1.0, 0.0]]
    vector: Vector = ((0, 1), (3, 1))  # accepted below 0.5 x 4 / 3
    assert accept_one(rows, [0], [((0,), (1,))], [0.5])[0] == 0
    assert accept_one(rows, [0], [((0,), (1,))], [0.5 - 2.0**-24])[0] == 1
    assert accept_one(rows, [0], [vector], [11184810 * 2.0**-24])[0] == 1  # the last coin below 2/3
    assert accept_one(rows, [0], [vector], [11184811 * 2.0**-24])[0] == 0


def test_the_residual_is_what_the_draft_left(accept_one: AcceptOne) -> None:
    rows = [[0.5, 0.25, 0.25], [1.0, 0.0, 0.0]]
    assert accept_one(rows, [1], [((1, 2), (3, 1))], [LAST_COIN]) == (0, [2.0, 0.0, 0.0])
    assert accept_one(rows, [1], [None], [0.5]) == (0, [0.5, 0.0, 0.25])


def test_a_zero_residual_falls_back_to_the_target(accept_one: AcceptOne) -> None:
    row = [0.5, 0.25]  # sums to less than 1, as rounding may have it
    assert accept_one([row, row], [0], [((0, 1), (3, 1))], [LAST_COIN]) == (0, [0.5, 0.25])


def test_all_mass_on_one_token(accept_one: AcceptOne) -> None:
    rows = [[0.0, 1.0], [0.0, 1.0], [1.0, 0.0]]
    assert accept_one(rows, [1, 1], [None, ((1,), (32767,))], [LAST_COIN, LAST_COIN]) == (2, [1.0, 0.0])
    assert accept_one(rows, [1, 0], [None, None], [LAST_COIN, 0.0]) == (1, [0.0, 1.0])


@pytest.mark.parametrize("bad", BAD_VECTORS)
def test_an_unusable_vector_is_one_hot(bad: str, accept_one: AcceptOne) -> None:
    rows = [[0.25, 0.5, 0.25], [1.0, 0.0, 0.0]]
    good: Vector = ((0, 1), (1, 1))
    for vectors in ([BAD_VECTORS[bad]], [BAD_VECTORS[bad], good], [good, BAD_VECTORS[bad]]):
        drafted, place = [1] * len(vectors), vectors.index(BAD_VECTORS[bad])
        window_rows = [rows[0]] * len(vectors) + [rows[1]]
        uniforms = [0.0] * len(vectors)
        uniforms[place] = 0.5
        assert accept_one(window_rows, drafted, vectors, uniforms) == (place, [0.25, 0.0, 0.25])
        uniforms[place] = 0.5 - 2.0**-24
        assert accept_one(window_rows, drafted, vectors, uniforms) == (len(vectors), rows[1])


def test_the_greatest_usable_total_is_exact(accept_one: AcceptOne) -> None:
    vector: Vector = ((0, 1), (2**24 - 2, 1))
    assert accept_one([[1.0, 0.0], [1.0, 0.0]], [0], [vector], [LAST_COIN])[0] == 1
    assert accept_one([[0.0, 1.0], [1.0, 0.0]], [0], [vector], [0.0]) == (0, [0.0, 2**24 - 2.0])


@pytest.mark.parametrize("token_id", [-1, 2, 2**40])
def test_a_drafted_id_outside_the_vocabulary_is_never_accepted(token_id: int, accept_one: AcceptOne) -> None:
    vector: Vector = ((0, token_id), (1, 1))
    for one in (None, vector):
        assert accept_one([[0.5, 0.5], [1.0, 0.0]], [token_id], [one], [0.0]) == (0, [0.5, 0.5])


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
    uniforms = torch.rand(sum(num_drafted), generator=generator, dtype=torch.float64)
    vectors: list[Vector] = [
        None if draft % 3 == 2 else (torch.arange(vocab_size).tolist(), torch.randint(1, 9, (vocab_size,)).tolist())
        for draft in range(len(drafted))
    ]
    windows = Windows.of(num_drafted)
    sent = DraftWeights.of(packed(vectors))
    num_accepted, weights = accept(probs, windows, drafted, sent, uniforms)
    by_starts = accept(probs, windows, drafted, sent.packed(len(drafted)), uniforms)
    assert torch.equal(by_starts[0], num_accepted) and torch.equal(by_starts[1], weights)
    for window, count in enumerate(num_drafted):
        row, start = int(windows.row_starts[window]), int(windows.draft_starts[window])
        alone = accept(
            probs[row : row + count + 1],
            Windows.of([count]),
            drafted[start : start + count],
            DraftWeights.of(packed(vectors[start : start + count])),
            uniforms[start : start + count],
        )
        assert alone[0].tolist() == num_accepted[window : window + 1].tolist()
        assert torch.equal(alone[1][0], weights[window])


def test_a_nan_row_gives_no_token(form: torch.device) -> None:
    """Nor does a refused token's."""
    nan = float("nan")
    rows = torch.tensor([[nan, 0.5], [0.5, 0.5], [nan, 0.25], [0.5, 0.5]], device=form)
    windows = Windows.of([0, 0, 1], [1, 1, 2], form)
    drafted, uniforms = torch.tensor([1], device=form), torch.tensor([0.25], dtype=torch.float64, device=form)
    _, weights = accept(rows, windows, drafted, DraftWeights.of([None], form), uniforms)
    assert draw(weights, torch.zeros(3, 4, dtype=torch.int64, device=form)).tolist() == [-1, 0, -1]


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
    uniforms = [accept_uniforms(words(seeds, position + step, Purpose.ACCEPT, completion)) for step in range(2)]
    windows = Windows.of([2] * num)
    packed = DraftWeights(*(torch.cat(column) for column in zip(*vectors, strict=True)))
    target_probs = logits[contexts.flatten()].softmax(dim=-1)
    num_accepted, weights = accept(
        target_probs, windows, draft_ids.flatten(), packed, torch.stack(uniforms, 1).flatten()
    )
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


COUPLED_SAMPLES, COUPLED_IDS, COUPLED_LENGTH = 20_000, 16, 5


def choose(logits: Tensor, context: Tensor, seeds: Tensor, position: Tensor) -> Tensor:
    noise = exponential_noise(seeds, position, torch.zeros_like(seeds), logits.shape[1])
    return coupled_choice(logits[context].softmax(dim=-1), noise)


def plain_decoding(logits: Tensor, seeds: Tensor, start: int, length: int) -> Tensor:
    tokens = torch.full((len(seeds), 1 + length), start)
    for place in range(1, 1 + length):
        tokens[:, place] = choose(logits, tokens[:, place - 1], seeds, torch.full_like(seeds, place))
    return tokens


@pytest.mark.parametrize("draft", ["the target's negation", "a near copy", "the target", "constant ids"])
@pytest.mark.parametrize("num_drafted", [1, 3])
def test_tokens_are_those_of_plain_decoding_for_any_draft(draft: str, num_drafted: int) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(COUPLED_IDS, COUPLED_IDS, generator=generator)
    near_copy = logits + 0.3 * torch.randn(COUPLED_IDS, COUPLED_IDS, generator=generator)
    draft_logits = {"the target's negation": -logits, "a near copy": near_copy, "the target": logits}.get(draft)
    seeds = torch.arange(200)
    plain = plain_decoding(logits, seeds, start=3, length=COUPLED_LENGTH + num_drafted + 1)
    tokens, lengths, accepted = plain.clone().fill_(3), torch.ones_like(seeds), 0
    while int(lengths.min()) <= COUPLED_LENGTH:
        length = int(lengths.min())
        group = (lengths == length).nonzero().squeeze(1)
        drafted, context, position = [], tokens[group, length - 1], torch.full_like(group, length)
        for step in range(num_drafted):
            constant = torch.full_like(group, 5)
            context = constant if draft_logits is None else choose(draft_logits, context, seeds[group], position + step)
            drafted.append(context)
        draft_ids = torch.stack(drafted, dim=1)
        contexts = torch.cat((tokens[group, length - 1 : length], draft_ids), dim=1)  # [n, k + 1]
        positions = (position[:, None] + torch.arange(num_drafted + 1)).flatten()
        choices = choose(logits, contexts.flatten(), seeds[group].repeat_interleave(num_drafted + 1), positions)
        num_accepted, next_ids = coupled_accept(choices, Windows.of([num_drafted] * len(group)), draft_ids.flatten())
        for row, count in enumerate(num_accepted.tolist()):
            tokens[group[row], length : length + count] = draft_ids[row, :count]
        tokens[group, length + num_accepted] = next_ids
        lengths[group] += num_accepted + 1
        accepted += int(num_accepted.sum())
    assert torch.equal(tokens[:, : COUPLED_LENGTH + 1], plain[:, : COUPLED_LENGTH + 1])
    if draft == "the target":
        assert accepted == int((lengths - 1).sum()) * num_drafted // (num_drafted + 1)


def toy_choices(drafted: Tokens, committed: Tensor, noise: Tensor) -> Tensor:
    """The target's own token after each prefix of `drafted`, which all sequences have drafted, [n, k + 1]."""
    columns = []
    for place in range(len(drafted) + 1):
        contexts = [(*tokens, *drafted[:place]) for tokens in committed.tolist()]
        probs = torch.tensor([[float(part) for part in target_law(context)] for context in contexts])
        columns.append(coupled_choice(probs, noise[:, committed.shape[1] + place]))
    return torch.stack(columns, dim=1)


def toy_commits(drafted: Tokens, choices: Tensor) -> list[Tokens]:
    """What every sequence commits in a round, [n]."""
    num, ids = len(choices), torch.tensor(drafted * len(choices), dtype=torch.int64)
    num_accepted, next_ids = coupled_accept(choices.flatten(), Windows.of([len(drafted)] * num), ids)
    return [(*drafted[:count], last) for count, last in zip(num_accepted.tolist(), next_ids.tolist(), strict=True)]


EVERY_DRAFT = [drafted for length in range(4) for drafted in product(range(4), repeat=length)]


def toy_noise(num: int) -> Tensor:
    """Of positions 0 to 5 under one seed per sequence, [n, 6, 4]."""
    seeds = torch.arange(num).repeat_interleave(6)
    return exponential_noise(seeds, torch.arange(6).repeat(num), 0 * seeds, 4).view(num, 6, 4)


def toy_plain(noise: Tensor) -> Tensor:
    """One token after another, [n, 6]."""
    tokens = torch.empty(len(noise), 0, dtype=torch.int64)
    for _ in range(noise.shape[1]):
        tokens = torch.cat((tokens, toy_choices((), tokens, noise)), dim=1)
    return tokens


@pytest.mark.parametrize("num_committed", [0, 2])
def test_every_draft_commits_what_plain_decoding_does(num_committed: int, prove: bool) -> None:
    """All 85 drafts of up to three of four tokens, one of probability zero in half of the contexts."""
    noise = toy_noise(512 if prove else 64)
    plain = toy_plain(noise)
    lengths = set()
    for drafted in EVERY_DRAFT:
        choices = toy_choices(drafted, plain[:, :num_committed], noise)
        for ids, expected in zip(toy_commits(drafted, choices), plain.tolist(), strict=True):
            assert ids == tuple(expected[num_committed : num_committed + len(ids)])
            lengths.add(len(ids))
    assert lengths == {1, 2, 3, 4}


def test_the_law_is_the_targets() -> None:
    """Chi-square by position and over the joint of two, each at p > 1e-4; the seeds are fixed."""
    generator = torch.Generator().manual_seed(11)
    logits = torch.randn(COUPLED_IDS, COUPLED_IDS, generator=generator)
    tokens = plain_decoding(logits, torch.arange(COUPLED_SAMPLES), start=0, length=2)
    law = logits.double().softmax(dim=-1)
    joint = law[0][:, None] * law
    tables = [
        (tokens[:, 1], law[0]),
        (tokens[:, 2], joint.sum(dim=0)),
        (tokens[:, 1] * COUPLED_IDS + tokens[:, 2], joint),
    ]
    for cells, expected in tables:
        expected = expected.flatten() * COUPLED_SAMPLES
        observed = torch.bincount(cells, minlength=len(expected)).double()
        common = expected >= 5
        statistic = ((observed - expected)[common] ** 2 / expected[common]).sum()
        assert chi2.sf(float(statistic), int(common.sum()) - int(common.all())) > 1e-4


def test_ids_of_probability_zero_never_win() -> None:
    probs = torch.tensor([[0.0, 1e-35, 0.0], [0.0, 0.5, 0.5], [1e-45, 0.0, 1.0]])
    noise = torch.tensor([[1e-10, 22.0, 1e-10], [1e-10, 3.0, 2.0], [22.0, 1e-10, 1.0]])
    assert coupled_choice(probs, noise).tolist() == [1, 2, 2]


def test_ties_go_to_the_lowest_id() -> None:
    for vocab_size in (2, 33, 4099):
        values = torch.zeros(3, vocab_size)
        values[1, vocab_size // 2 :] = 1
        assert first_argmax(values).tolist() == [0, vocab_size // 2, 0]
        assert coupled_choice(torch.ones(1, vocab_size), torch.ones(1, vocab_size)).tolist() == [0]


def test_no_probability_and_nan_give_no_token() -> None:
    probs = torch.tensor([[0.0, 0.0], [float("nan"), 0.5], [0.5, float("nan")]])
    assert coupled_choice(probs, torch.ones(3, 2)).tolist() == [-1, -1, -1]


def test_coupled_windows_are_ragged() -> None:
    choices = torch.tensor([4, 5, 6, 7, 4, 5, 1, 2, 3])
    windows = Windows.of([2, 0, 2, 2], [3, 1, 3, 2])
    num_accepted, next_ids = coupled_accept(choices, windows, torch.tensor([4, 5, 4, 9, 2, 3]))
    assert num_accepted.tolist() == [2, 0, 1, 2]
    assert next_ids.tolist() == [6, 7, 5, -1]


def test_an_id_outside_the_vocabulary_is_never_accepted() -> None:
    num_accepted, next_ids = coupled_accept(torch.tensor([4, 5]), Windows.of([1]), torch.tensor([2**40]))
    assert (num_accepted.tolist(), next_ids.tolist()) == ([0], [4])
