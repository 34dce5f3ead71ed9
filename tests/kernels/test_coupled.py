"""Coupled acceptance: the tokens are those of plain coupled decoding, whatever is drafted."""

from itertools import product
from typing import Any

import pytest
import torch
from exactness.law import Tokens, target_law
from scipy.stats import chi2
from torch import Tensor

from outrider.kernels.random.reference import Purpose, exponential_noise
from outrider.kernels.types import Windows
from outrider.kernels.verify.reference import coupled_accept, coupled_choice, first_argmax

NUM_SAMPLES, NUM_IDS, LENGTH = 20_000, 16, 5


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
    logits = torch.randn(NUM_IDS, NUM_IDS, generator=generator)
    near_copy = logits + 0.3 * torch.randn(NUM_IDS, NUM_IDS, generator=generator)
    draft_logits = {"the target's negation": -logits, "a near copy": near_copy, "the target": logits}.get(draft)
    seeds = torch.arange(200)
    plain = plain_decoding(logits, seeds, start=3, length=LENGTH + num_drafted + 1)
    tokens, lengths, accepted = plain.clone().fill_(3), torch.ones_like(seeds), 0
    while int(lengths.min()) <= LENGTH:
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
    assert torch.equal(tokens[:, : LENGTH + 1], plain[:, : LENGTH + 1])
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


def toy_commits(drafted: Tokens, choices: Tensor, next_place: int = 0) -> list[Tokens]:
    """What every sequence commits in a round, [n]; with `next_place` the token after it is that of another row."""
    num, ids = len(choices), torch.tensor(drafted * len(choices), dtype=torch.int64)
    num_accepted, next_ids = coupled_accept(choices.flatten(), Windows.of([len(drafted)] * num), ids)
    if next_place:
        rows = (num_accepted + next_place).clamp(0, len(drafted))
        next_ids = choices.gather(1, rows[:, None]).squeeze(1)
    return [(*drafted[:count], last) for count, last in zip(num_accepted.tolist(), next_ids.tolist(), strict=True)]


EVERY_DRAFT = [drafted for length in range(4) for drafted in product(range(4), repeat=length)]


def toy_noise(num: int, purpose: Purpose = Purpose.BONUS, shift: int = 0) -> Tensor:
    """Of positions 0 to 5 under one seed per sequence, [n, 6, 4]."""
    seeds = torch.arange(num).repeat_interleave(6)
    return exponential_noise(seeds, torch.arange(6).repeat(num) + shift, 0 * seeds, 4, purpose).view(num, 6, 4)


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


COUPLED_MUTANTS: dict[str, dict[str, Any]] = {
    "noise of another purpose": {"purpose": Purpose.RECOVERED},
    "noise of the position before": {"shift": -1},
    "the next token from the row before": {"next_place": -1},
    "the next token from the row after": {"next_place": 1},
}


@pytest.mark.parametrize("mutant", COUPLED_MUTANTS)
def test_a_wrong_coupling_is_seen(mutant: str) -> None:
    options = dict(COUPLED_MUTANTS[mutant])
    next_place = options.pop("next_place", 0)
    plain, noise, different = toy_plain(toy_noise(64)), toy_noise(64, **options), 0
    for drafted in EVERY_DRAFT:
        choices = toy_choices(drafted, plain[:, :2], noise)
        commits = toy_commits(drafted, choices, next_place)
        different += sum(ids != tuple(e[2 : 2 + len(ids)]) for ids, e in zip(commits, plain.tolist(), strict=True))
    assert different > 0


def test_the_law_is_the_targets() -> None:
    """Chi-square by position and over the joint of two, each at p > 1e-4; the seeds are fixed."""
    generator = torch.Generator().manual_seed(11)
    logits = torch.randn(NUM_IDS, NUM_IDS, generator=generator)
    tokens = plain_decoding(logits, torch.arange(NUM_SAMPLES), start=0, length=2)
    law = logits.double().softmax(dim=-1)
    joint = law[0][:, None] * law
    tables = [(tokens[:, 1], law[0]), (tokens[:, 2], joint.sum(dim=0)), (tokens[:, 1] * NUM_IDS + tokens[:, 2], joint)]
    for cells, expected in tables:
        expected = expected.flatten() * NUM_SAMPLES
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


def test_windows_are_ragged() -> None:
    choices = torch.tensor([4, 5, 6, 7, 4, 5, 1, 2, 3])
    windows = Windows.of([2, 0, 2, 2], [3, 1, 3, 2])
    num_accepted, next_ids = coupled_accept(choices, windows, torch.tensor([4, 5, 4, 9, 2, 3]))
    assert num_accepted.tolist() == [2, 0, 1, 2]
    assert next_ids.tolist() == [6, 7, 5, -1]


def test_an_id_outside_the_vocabulary_is_never_accepted() -> None:
    num_accepted, next_ids = coupled_accept(torch.tensor([4, 5]), Windows.of([1]), torch.tensor([2**40]))
    assert (num_accepted.tolist(), next_ids.tolist()) == ([0], [4])
