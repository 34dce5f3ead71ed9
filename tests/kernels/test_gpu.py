"""On a GPU: the public functions take the kernels, a row's bits do not depend on its batch, and a whole round of either
acceptance can be captured as a CUDA graph, so no launch reads a device value on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from outrider.kernels.layers.reference import Linear
from outrider.kernels.random.reference import Purpose, exponential_noise, vocabulary_words, words
from outrider.kernels.sampling.reference import draft_sample, greedy_choice, logits_to_probs
from outrider.kernels.types import DraftWeights, RowSampling, Truncation, Windows
from outrider.kernels.verify.reference import (
    accept,
    accept_uniforms,
    coupled_accept,
    coupled_accept_tree,
    coupled_choice,
    coupled_draw,
    draw,
)

pytestmark = pytest.mark.gpu

VOCAB_SIZE = 4097
NUM_DRAFTED = [3, 0, 8, 1]
NUM_ROWS = sum(NUM_DRAFTED) + len(NUM_DRAFTED)


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    from triton import knobs

    if not torch.cuda.is_available() or knobs.runtime.interpret:
        pytest.skip("needs a GPU and TRITON_INTERPRET=0")
    yield torch.device(request.param)


def sampling_on(device: torch.device) -> RowSampling:
    rows = torch.arange(0, NUM_ROWS, 2, device=device)
    top_k = torch.full_like(rows, 50)
    cut = Truncation(rows, top_k, torch.full((len(rows),), 0.9217, dtype=torch.float64, device=device))
    return RowSampling(temperature=torch.full((NUM_ROWS,), 0.75, device=device), truncation=cut)


def coupled_round(logits: Tensor, seeds: Tensor, draft_ids: Tensor) -> tuple[Tensor, ...]:
    device = logits.device
    probs, invalid = logits_to_probs(logits, SAMPLING[device.type])
    choices = coupled_draw(probs, seeds, torch.arange(NUM_ROWS, device=device), torch.zeros_like(seeds))
    parents = WINDOWS[device.type].offset_of_draft
    tree = coupled_accept_tree(choices, WINDOWS[device.type], draft_ids, parents)
    return (invalid, choices, *coupled_accept(choices, WINDOWS[device.type], draft_ids), *tree)


def rejection_round(
    logits: Tensor, seeds: Tensor, draft_ids: Tensor, by_block: Tensor | None = None
) -> tuple[Tensor, ...]:
    device = logits.device
    probs, invalid = logits_to_probs(logits, SAMPLING[device.type])
    zeros = torch.zeros_like(seeds)
    positions = torch.arange(len(draft_ids), device=device)
    uniforms = accept_uniforms(words(seeds[: len(draft_ids)], positions, Purpose.ACCEPT, zeros[: len(draft_ids)]))
    windows = WINDOWS[device.type]
    accepted, weights = accept(probs, windows, draft_ids, WEIGHTS[device.type], uniforms, by_block)
    purposes = torch.where(accepted == windows.num_drafted, int(Purpose.BONUS), int(Purpose.RECOVERED))
    count = len(accepted)
    return invalid, accepted, draw(weights, words(seeds[:count], accepted, purposes, zeros[:count]))


def block_round(logits: Tensor, seeds: Tensor, draft_ids: Tensor) -> tuple[Tensor, ...]:
    return rejection_round(logits, seeds, draft_ids, WINDOWS[logits.device.type].num_drafted != 1)


SAMPLING: dict[str, RowSampling] = {}
WINDOWS: dict[str, Windows] = {}
WEIGHTS: dict[str, DraftWeights] = {}
ROUNDS = [coupled_round, rejection_round, block_round]


def inputs(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits in steps of a quarter, so that no sum of probabilities lies next to a cut; likely drafted ids."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(-20, 21, (NUM_ROWS, VOCAB_SIZE), generator=generator) / 4
    logits[:, :3] += 7.0
    draft_ids = torch.randint(3, (sum(NUM_DRAFTED),), generator=generator)
    return logits, torch.randint(-(2**63), 2**63 - 1, (NUM_ROWS,), generator=generator), draft_ids


@pytest.fixture
def prepared(device: torch.device) -> torch.device:
    """Fills what a round takes beside its inputs, on the host and on the device."""
    entries = torch.arange(3).repeat(6), torch.full((18,), 9), torch.arange(0, 12, 2).repeat_interleave(3)
    for place in (torch.device("cpu"), device):
        SAMPLING[place.type] = sampling_on(place)
        WINDOWS[place.type] = Windows.of(NUM_DRAFTED, device=place)
        WEIGHTS[place.type] = DraftWeights(*(column.to(place) for column in entries))
    return device


@pytest.mark.parametrize("one_round", ROUNDS)
def test_a_captured_round_replays(one_round: Callable[..., tuple[Tensor, ...]], prepared: torch.device) -> None:
    held = [part.to(prepared) for part in inputs(0)]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        one_round(*held)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outcome = one_round(*held)
    for seed in range(1, 6):
        fresh = inputs(seed)
        for tensor, values in zip(held, fresh, strict=True):
            tensor.copy_(values)
        graph.replay()
        expected = one_round(*fresh)
        assert [part.tolist() for part in outcome] == [part.tolist() for part in expected]


def test_public_functions_equal_the_reference(prepared: torch.device) -> None:
    logits, seeds, _ = inputs(9)
    rows = torch.arange(NUM_ROWS)
    on_device = seeds.to(prepared), rows.to(prepared), rows.to(prepared)
    noise = exponential_noise(seeds, rows, rows, VOCAB_SIZE)
    assert torch.equal(exponential_noise(*on_device, VOCAB_SIZE).cpu(), noise)
    assert torch.equal(
        vocabulary_words(*on_device[:2], Purpose.DRAFT, on_device[2], VOCAB_SIZE).cpu(),
        vocabulary_words(seeds, rows, Purpose.DRAFT, rows, VOCAB_SIZE),
    )
    probs = logits.softmax(-1)
    assert torch.equal(coupled_choice(probs.to(prepared), noise.to(prepared)).cpu(), coupled_choice(probs, noise))
    greedy = greedy_choice(logits.to(prepared), RowSampling())
    assert [part.tolist() for part in greedy] == [part.tolist() for part in greedy_choice(logits, RowSampling())]
    table = words(seeds, rows, Purpose.DRAFT, rows)
    got, expected = draft_sample(probs.to(prepared), table.to(prepared)), draft_sample(probs, table)
    for name in type(expected).__slots__:
        assert getattr(got, name).tolist() == getattr(expected, name).tolist()


def test_a_row_alone_has_the_bits_that_it_has_among_others(prepared: torch.device) -> None:
    logits = torch.randn(70, 300, generator=torch.Generator().manual_seed(1)).to(prepared)
    whole, _ = logits_to_probs(logits, RowSampling())
    linear = Linear(torch.randn(96, 300, device=prepared), batch_invariant=True)
    products = linear(logits)
    for start, count in ((0, 1), (5, 1), (64, 6), (3, 66)):
        rows = slice(start, start + count)
        assert torch.equal(logits_to_probs(logits[rows], RowSampling())[0], whole[rows])
        assert torch.equal(linear(logits[rows]), products[rows])
