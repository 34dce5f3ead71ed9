"""The exponential race and the walks in Triton, and the walk down a tree of the reference."""

import pytest
import torch
from poisoned import poisoned, poisoned_allocations
from torch import Tensor

from outrider.kernels.random.reference import Purpose
from outrider.kernels.types import Windows
from outrider.kernels.verify.reference import coupled_accept, coupled_accept_tree, coupled_choice, coupled_draw

coupled_triton = pytest.importorskip("outrider.kernels.verify.triton")
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # the interpreter's, as intended

VOCAB_SIZES = [(1, 16), (16, 16), (70, 8), (4097, 256)]  # with the counters in a tile
NAN = float("nan")


def laws(num_rows: int, vocab_size: int, generator: torch.Generator) -> Tensor:
    """Softmax rows, a third of whose ids have probability zero."""
    probs = torch.randn(num_rows, vocab_size, generator=generator).mul(3).softmax(dim=-1)
    hidden = torch.rand(num_rows, vocab_size, generator=generator) < 1 / 3
    hidden[:, vocab_size // 2] = False
    return probs.masked_fill(hidden, 0.0)


def to(windows: Windows, device: torch.device) -> Windows:
    return Windows(*(getattr(windows, name).to(device) for name in Windows.__slots__))


@pytest.mark.parametrize(("vocab_size", "groups"), VOCAB_SIZES)
def test_the_race_over_given_noise(triton_device: torch.device, vocab_size: int, groups: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    probs = laws(3, vocab_size, generator)
    noise = torch.rand(3, vocab_size, generator=generator) + 1e-6
    with poisoned_allocations():
        got = coupled_triton.coupled_choice(poisoned(probs, triton_device), poisoned(noise, triton_device), groups)
    assert got.tolist() == coupled_choice(probs, noise).tolist()


@pytest.mark.parametrize(("vocab_size", "groups"), VOCAB_SIZES)
def test_the_race_draws_its_noise_from_the_counters(triton_device: torch.device, vocab_size: int, groups: int) -> None:
    num_rows = 4
    probs = laws(num_rows, vocab_size, torch.Generator().manual_seed(vocab_size))
    table = torch.tensor([[-(7**row), 90 + row, row % 3] for row in range(num_rows)])
    with poisoned_allocations():
        got = coupled_triton.coupled_draw(
            poisoned(probs, triton_device), *table.to(triton_device).unbind(1), Purpose.DRAFT, groups
        )
    assert got.tolist() == coupled_draw(probs, *table.unbind(1), Purpose.DRAFT).tolist()
    if vocab_size > 16:
        assert got.tolist() != coupled_draw(probs, *table.unbind(1), Purpose.BONUS).tolist()


@pytest.mark.slow
def test_the_race_over_a_large_vocabulary(triton_device: torch.device) -> None:
    probs = laws(3, 151_936, torch.Generator().manual_seed(9))
    columns = torch.tensor([3, 4, 5]), torch.tensor([7, 7, 8]), torch.tensor([0, 1, 0])
    got = coupled_triton.coupled_draw(probs.to(triton_device), *(c.to(triton_device) for c in columns), Purpose.BONUS)
    assert got.tolist() == coupled_draw(probs, *columns).tolist()


def test_edges_of_the_race(triton_device: torch.device) -> None:
    """Ties within a tile and across tiles, no probability at all, NaN, and least values that overflow the ratio."""
    probs, noise = torch.full((6, 200), 0.25), torch.ones(6, 200)
    noise[0, 70:] = 0.5
    probs[1] = 0.0
    probs[2, 150] = NAN
    probs[3], probs[3, 130] = 0.0, 1e-45
    noise[3] = 1e-10
    probs[4], probs[4, 199] = 1e-45, 1.0
    noise[4] = 22.0
    probs[5] = 1e-45
    noise[5] = 22.0  # every ratio is infinite
    got = coupled_triton.coupled_choice(poisoned(probs, triton_device), poisoned(noise, triton_device), groups=16)
    assert got.tolist() == [70, -1, -1, 130, 199, -1] == coupled_choice(probs, noise).tolist()


def test_chains_are_ragged(triton_device: torch.device) -> None:
    """0 to 8 drafted tokens, windows without a last row, and ids outside of the vocabulary."""
    generator = torch.Generator().manual_seed(2)
    for _ in range(20):
        num_drafted = torch.randint(9, (7,), generator=generator).tolist()
        short = torch.randint(2, (7,), generator=generator).tolist()
        num_rows = [count + (1 if count == 0 else 1 - cut) for count, cut in zip(num_drafted, short, strict=True)]
        windows = Windows.of(num_drafted, num_rows)
        choices = torch.randint(2, (sum(num_rows),), generator=generator)
        draft_ids = torch.randint(2, (sum(num_drafted),), generator=generator)
        draft_ids[torch.rand(len(draft_ids), generator=generator) < 0.1] = 2**40
        expected = coupled_accept(choices, windows, draft_ids)
        with poisoned_allocations():
            got = coupled_triton.coupled_accept(
                poisoned(choices, triton_device), to(windows, triton_device), poisoned(draft_ids, triton_device)
            )
        assert [part.tolist() for part in got[:2]] == [part.tolist() for part in expected]
        chain = coupled_accept_tree(choices, windows, draft_ids, windows.offset_of_draft)
        assert [part.tolist() for part in chain] == [part.tolist() for part in got]


# Drafted ids and their parents (0 is the root), the target's own token at the root and at every drafted token, and what
# is accepted: drafted tokens, and the token after them.
TREES: dict[str, tuple[list[int], list[int], list[int], list[int], int]] = {
    "no child is the choice": ([5, 6], [0, 0], [7, 1, 2], [], 7),
    "the second child, then its child": ([5, 6, 8, 8], [0, 0, 1, 2], [6, 1, 8, 3, 9], [1, 3], 9),
    "a child of another branch does not count": ([5, 6, 8], [0, 0, 1], [6, 1, 8, 3], [1], 8),
    "of equal children the first": ([5, 5, 8, 8], [0, 0, 2, 1], [5, 8, 8, 4, 3], [0, 3], 3),
    "a parent that comes later is none": ([8, 5], [2, 0], [5, 1, 8], [1], 8),
    "its own parent": ([5], [1], [5, 1], [], 5),
    "no drafted token": ([], [], [4], [], 4),
}


@pytest.mark.parametrize("name", TREES)
def test_a_walk_down_a_tree(triton_device: torch.device, name: str) -> None:
    ids, parents, choices, path, next_id = TREES[name]
    # Between two chains, so that offsets matter.
    windows = Windows.of([1, len(ids), 1])
    arguments = (
        torch.tensor([1, 2, *choices, 3, 4]),
        windows,
        torch.tensor([1, *ids, 9]),
        torch.tensor([0, *parents, 0]),
    )
    expected = ([1, len(path), 0], [2, next_id, 3], [True, *(i in path for i in range(len(ids))), False])
    assert tuple(part.tolist() for part in coupled_accept_tree(*arguments)) == expected
    on_device = [poisoned(argument, triton_device) for argument in (arguments[0], arguments[2], arguments[3])]
    with poisoned_allocations():
        got = coupled_triton.coupled_accept(on_device[0], to(windows, triton_device), *on_device[1:])
    assert tuple(part.tolist() for part in got) == expected


def test_a_token_without_a_row_of_its_own_has_no_children(triton_device: torch.device) -> None:
    """Three drafted tokens and two rows: the second token may be accepted, what follows it is not judged."""
    windows, choices, draft_ids = Windows.of([3], [2]), torch.tensor([5, 6, 6]), torch.tensor([5, 6, 6])
    parents = torch.tensor([0, 1, 2])
    expected = ([2], [-1], [True, True, False])
    assert tuple(part.tolist() for part in coupled_accept_tree(choices, windows, draft_ids, parents)) == expected
    got = coupled_triton.coupled_accept(
        *(choices.to(triton_device), to(windows, triton_device), draft_ids.to(triton_device)), parents.to(triton_device)
    )
    assert tuple(part.tolist() for part in got) == expected


def test_random_trees(triton_device: torch.device) -> None:
    generator = torch.Generator().manual_seed(4)
    for _ in range(20):
        num_drafted = torch.randint(9, (5,), generator=generator).tolist()
        num_rows = [max(1, count + int(torch.randint(2, (1,), generator=generator))) for count in num_drafted]
        windows = Windows.of(num_drafted, num_rows)
        parents = [int(torch.randint(i + 1, (1,), generator=generator)) for n in num_drafted for i in range(n)]
        choices = torch.randint(3, (sum(num_rows),), generator=generator)
        draft_ids = torch.randint(3, (len(parents),), generator=generator)
        expected = coupled_accept_tree(choices, windows, draft_ids, torch.tensor(parents, dtype=torch.int64))
        got = coupled_triton.coupled_accept(
            poisoned(choices, triton_device),
            to(windows, triton_device),
            poisoned(draft_ids, triton_device),
            poisoned(torch.tensor(parents, dtype=torch.int64), triton_device),
        )
        assert [part.tolist() for part in got] == [part.tolist() for part in expected]
