"""Losslessness by enumeration: production acceptance, summed over every draft and coin, is the target's law exactly.

A toy of four tokens and two drafted ones, whose probabilities are sixteenths and whose draft weights are powers of two
with total 8: every acceptance threshold then lies on a sixteenth, so 16 coins per position stand for all of them, and
fractions hold the rest. Half of the contexts have a token of probability zero. The joint law of three tokens must equal
plain decoding's with distance exactly 0, and must not for any of the mutants below.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import cache
from itertools import product

import pytest
import torch
from packed import packed
from torch import Tensor

from outrider.kernels.rejection import DraftWeights, Windows, accept

TARGET_SIXTEENTHS = [(8, 4, 2, 2), (4, 4, 8, 0), (1, 3, 5, 7), (0, 6, 4, 6), (2, 2, 2, 10), (9, 0, 7, 0)]
FULL_WEIGHTS = [(1, 1, 2, 4), (4, 2, 1, 1), (2, 2, 2, 2), (1, 4, 2, 1)]
TRUNCATED_WEIGHTS = [(4, 4, 0, 0), (0, 2, 2, 4), (4, 0, 2, 2), (0, 0, 0, 8)]
ONE_HOT_WEIGHTS = [(8, 0, 0, 0), (0, 0, 8, 0), (0, 8, 0, 0), (0, 0, 0, 8)]
COINS = [cell / 16 for cell in range(16)]
VOCAB_SIZE, NUM_DRAFTED, LENGTH = 4, 2, 3

Law = dict[tuple[int, ...], Fraction]
Vector = tuple[tuple[int, ...], tuple[int, ...]] | None
AcceptRule = Callable[[Tensor, Windows, Tensor, DraftWeights, Tensor], tuple[Tensor, Tensor]]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Small tensors gain nothing from threads, and lose much when the processor is shared."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def context_index(context: tuple[int, ...], count: int) -> int:
    return sum((token + 1) * 7**place for place, token in enumerate(context)) % count


@cache
def target_law(context: tuple[int, ...]) -> list[Fraction]:
    return [Fraction(part, 16) for part in TARGET_SIXTEENTHS[context_index(context, len(TARGET_SIXTEENTHS))]]


def plain_law() -> Law:
    law: Law = {}
    for tokens in product(range(VOCAB_SIZE), repeat=LENGTH):
        law[tokens] = Fraction(1)
        for place in range(LENGTH):
            law[tokens] *= target_law(tokens[:place])[tokens[place]]
    return law


def sparse(weights: tuple[int, ...]) -> Vector:
    return tuple(i for i, w in enumerate(weights) if w), tuple(w for w in weights if w)


def speculative_law(
    tables: list[tuple[int, ...]],
    send: Callable[[tuple[int, ...]], Vector],
    rule: AcceptRule = accept,
    bonus: bool = True,
) -> Law:
    """The joint law of the first tokens when a draft draws from `tables` and sends `send` of what it drew from."""
    cases, vectors = [], []
    for drafted in product(range(VOCAB_SIZE), repeat=NUM_DRAFTED):
        drawn_from = [tables[context_index(drafted[:place], len(tables))] for place in range(NUM_DRAFTED)]
        mass = Fraction(drawn_from[0][drafted[0]] * drawn_from[1][drafted[1]], 64)
        for coins in product(COINS, repeat=NUM_DRAFTED) if mass else ():
            cases.append((drafted, coins, mass / len(COINS) ** NUM_DRAFTED))
            vectors += [send(weights) for weights in drawn_from]
    num_rows = NUM_DRAFTED + bonus
    target_probs = torch.tensor(
        [[float(part) for part in target_law(drafted[:row])] for drafted, _, _ in cases for row in range(num_rows)]
    )
    num_accepted, weights = rule(
        target_probs,
        Windows.of([NUM_DRAFTED] * len(cases), [num_rows] * len(cases)),
        torch.tensor([drafted for drafted, _, _ in cases]).flatten(),
        DraftWeights.of(packed(vectors)),
        torch.tensor([coins for _, coins, _ in cases], dtype=torch.float64).flatten(),
    )
    outcomes: dict[tuple[tuple[int, ...], tuple[float, ...]], Fraction] = defaultdict(Fraction)
    for (drafted, _, mass), count, row in zip(cases, num_accepted.tolist(), weights.tolist(), strict=True):
        outcomes[drafted[:count], tuple(row)] += mass
    return continue_plainly(outcomes)


def continue_plainly(outcomes: dict[tuple[tuple[int, ...], tuple[float, ...]], Fraction]) -> Law:
    """Draws the next token from the returned weights, and what is then missing from the target."""
    law: Law = defaultdict(Fraction)
    for (accepted, row), mass in outcomes.items():
        exact = [Fraction(weight) for weight in row]
        total = sum(exact)
        next_law = [weight / total for weight in exact] if total else target_law(accepted)
        for tail in product(range(VOCAB_SIZE), repeat=LENGTH - len(accepted)):
            tokens, share = accepted + tail, mass * next_law[tail[0]]
            for place in range(len(accepted) + 1, LENGTH):
                share *= target_law(tokens[:place])[tokens[place]]
            law[tokens] += share
    return law


def distance(law: Law) -> Fraction:
    plain = plain_law()
    return sum((abs(law.get(tokens, Fraction(0)) - share) for tokens, share in plain.items()), Fraction(0)) / 2


HONEST_DRAFTS: dict[str, tuple[list[tuple[int, ...]], Callable[[tuple[int, ...]], Vector]]] = {
    "integer weights": (FULL_WEIGHTS, sparse),
    "truncated weights": (TRUNCATED_WEIGHTS, sparse),
    "one-hot": (ONE_HOT_WEIGHTS, lambda _: None),
    "one-hot with its weight": (ONE_HOT_WEIGHTS, sparse),
    "sends no weights of what it drew from": (FULL_WEIGHTS, lambda _: None),
    "sends a duplicate id": (FULL_WEIGHTS, lambda w: ((0, 0, 1, 2, 3), (1, *w))),
    "sends a zero weight": (TRUNCATED_WEIGHTS, lambda w: ((0, 1, 2, 3), w)),
    "sends an id outside the vocabulary": (FULL_WEIGHTS, lambda w: ((0, 1, 2, 3, 4), (*w, 1))),
    "sends too great a total": (FULL_WEIGHTS, lambda w: ((0, 1, 2, 3), tuple(part << 22 for part in w))),
}


@pytest.mark.parametrize("draft", HONEST_DRAFTS)
@pytest.mark.parametrize("bonus", [True, False], ids=["with bonus row", "chain goes on"])
def test_joint_law_is_plain_decodings(draft: str, bonus: bool) -> None:
    tables, send = HONEST_DRAFTS[draft]
    assert distance(speculative_law(tables, send, bonus=bonus)) == 0


def accept_or_equal(
    target_probs: Tensor, windows: Windows, draft_ids: Tensor, draft_weights: DraftWeights, uniforms: Tensor
) -> tuple[Tensor, Tensor]:
    return accept(target_probs, windows, draft_ids, draft_weights, uniforms - 2.0**-30)


def accept_by_threshold(
    target_probs: Tensor, windows: Windows, draft_ids: Tensor, draft_weights: DraftWeights, uniforms: Tensor
) -> tuple[Tensor, Tensor]:
    return accept(target_probs, windows, draft_ids, draft_weights, uniforms * 0.75)


def residual_is_target(
    target_probs: Tensor, windows: Windows, draft_ids: Tensor, draft_weights: DraftWeights, uniforms: Tensor
) -> tuple[Tensor, Tensor]:
    num_accepted, _ = accept(target_probs, windows, draft_ids, draft_weights, uniforms)
    return num_accepted, target_probs[windows.next_rows(num_accepted)].double()


def residual_is_one_hot(
    target_probs: Tensor, windows: Windows, draft_ids: Tensor, draft_weights: DraftWeights, uniforms: Tensor
) -> tuple[Tensor, Tensor]:
    num_accepted, weights = residual_is_target(target_probs, windows, draft_ids, draft_weights, uniforms)
    refused = (num_accepted < windows.num_drafted).nonzero().squeeze(1)
    weights[refused, draft_ids[(windows.draft_starts + num_accepted)[refused]]] = 0
    return num_accepted, weights


def residual_from_the_row_after(
    target_probs: Tensor, windows: Windows, draft_ids: Tensor, draft_weights: DraftWeights, uniforms: Tensor
) -> tuple[Tensor, Tensor]:
    num_accepted, correct = accept(target_probs, windows, draft_ids, draft_weights, uniforms)
    row_after = target_probs.roll(-1, 0)
    _, weights = accept(row_after, windows, draft_ids, draft_weights, torch.full_like(uniforms, 1e9))  # all refused
    return num_accepted, torch.where((num_accepted == 0)[:, None], weights, correct)


def bonus_from_the_row_before(
    target_probs: Tensor, windows: Windows, draft_ids: Tensor, draft_weights: DraftWeights, uniforms: Tensor
) -> tuple[Tensor, Tensor]:
    num_accepted, weights = accept(target_probs, windows, draft_ids, draft_weights, uniforms)
    full = num_accepted == windows.num_drafted
    weights[full] = target_probs[windows.row_starts + num_accepted - 1][full].double()
    return num_accepted, weights


RULE_MUTANTS = [
    accept_or_equal,
    accept_by_threshold,
    residual_is_target,
    residual_is_one_hot,
    residual_from_the_row_after,
    bonus_from_the_row_before,
]


@pytest.mark.parametrize("mutant", RULE_MUTANTS, ids=lambda rule: rule.__name__)
def test_a_wrong_rule_is_seen(mutant: AcceptRule) -> None:
    assert distance(speculative_law(FULL_WEIGHTS, sparse, mutant)) > 0


LYING_DRAFTS: dict[str, Callable[[tuple[int, ...]], Vector]] = {
    "reports another temperature": lambda weights: ((0, 1, 2, 3), tuple(weight**2 for weight in weights)),
    "rounds after the draw": lambda weights: ((0, 1, 2, 3), tuple(max(weight, 2) for weight in weights)),
    "reports another position": lambda weights: ((0, 1, 2, 3), weights[::-1]),
}


@pytest.mark.parametrize("lie", LYING_DRAFTS)
def test_weights_that_were_not_drawn_from_are_seen(lie: str) -> None:
    assert distance(speculative_law(FULL_WEIGHTS, LYING_DRAFTS[lie])) > 0
