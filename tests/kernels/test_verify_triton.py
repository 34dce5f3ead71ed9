"""Rejection acceptance in Triton: the reference's decisions and weights, bit for bit, and its draws.

The exponential race and the walks in Triton, and the walk down a tree of the reference."""

from __future__ import annotations

import pytest
import torch
from support.kernels import Vector, packed, poisoned, poisoned_allocations
from torch import Tensor

from outrider.kernels.random.reference import Purpose
from outrider.kernels.types import DraftWeights, Windows
from outrider.kernels.verify.reference import (
    accept,
    coupled_accept,
    coupled_accept_tree,
    coupled_choice,
    coupled_draw,
    draw,
)

rejection_triton = pytest.importorskip("outrider.kernels.verify.triton")
LAST_COIN = 1 - 2.0**-24
NAN = float("nan")


def check(
    probs: Tensor,
    windows: Windows,
    draft_ids: Tensor,
    vectors: list[Vector],
    uniforms: Tensor,
    device: torch.device,
    by_block: Tensor | None = None,
    invalid: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Both give the same bits; returns them."""
    weights = DraftWeights.of(packed(vectors))
    expected = accept(probs, windows, draft_ids, weights, uniforms, by_block, invalid)
    blocks, flags = (None if given is None else poisoned(given, device) for given in (by_block, invalid))
    on_device = Windows(*(getattr(windows, name).to(device) for name in Windows.__slots__))
    entries = DraftWeights(*(poisoned(getattr(weights, name), device) for name in DraftWeights.__slots__))
    with poisoned_allocations():
        got: tuple[Tensor, Tensor] = rejection_triton.accept(
            *(poisoned(probs, device), on_device, poisoned(draft_ids, device), entries, poisoned(uniforms, device)),
            *(blocks, flags, 16, 16),
        )
    assert got[0].tolist() == expected[0].tolist()
    assert torch.equal(got[1].cpu().nan_to_num(nan=-1.0), expected[1].nan_to_num(nan=-1.0))
    return got


def random_vector(vocab_size: int, drafted: int, kind: int, generator: torch.Generator) -> Vector:
    """Dense, sparse in order, sparse in any order, with a duplicate, or none."""
    if kind == 4:
        return None
    if kind == 0:
        ids = torch.arange(vocab_size).tolist()
    else:
        count = min(vocab_size, 40)
        ids = torch.randperm(vocab_size, generator=generator)[:count].tolist()
        ids = [drafted, *(token for token in ids[1:] if token != drafted)]
        ids = sorted(ids) if kind == 1 else ids
        if kind == 3:
            ids.append(ids[0])
    return ids, torch.randint(1, 400, (len(ids),), generator=generator).tolist()


@pytest.mark.parametrize("by_block", [False, True], ids=["token by token", "some by blocks"])
@pytest.mark.parametrize("vocab_size", [1, 16, 41, 200])
def test_ragged_windows_equal_the_reference(
    triton_device: torch.device, vocab_size: int, by_block: bool, prove: bool
) -> None:
    """0 to 8 drafted tokens, some windows without a row for the next token, drafts of every kind."""
    generator = torch.Generator().manual_seed(vocab_size)
    seen = set()
    for _ in range(20 if prove else 3):
        num_drafted = torch.randint(9, (4,), generator=generator).tolist()
        short = torch.randint(2, (4,), generator=generator).tolist()
        num_rows = [count + (1 if count == 0 else 1 - cut) for count, cut in zip(num_drafted, short, strict=True)]
        windows = Windows.of(num_drafted, num_rows)
        probs = torch.randn(sum(num_rows), vocab_size, generator=generator).mul(2).softmax(dim=-1)
        # Likely ids, so that windows are accepted to every length.
        draft_ids = probs[windows.row_of_draft].argmax(dim=-1)
        astray = torch.rand(len(draft_ids), generator=generator) < 0.1
        draft_ids[astray] = torch.tensor([-1, vocab_size, 2**40])[torch.randint(3, (int(astray.sum()),))]
        kinds = torch.randint(5, (len(draft_ids),), generator=generator).tolist()
        vectors = [random_vector(vocab_size, t, k, generator) for t, k in zip(draft_ids.tolist(), kinds, strict=True)]
        uniforms = torch.rand(len(draft_ids), generator=generator, dtype=torch.float64) ** 3
        blocks = torch.tensor([True, True, False, True]) if by_block else None
        invalid = torch.rand(len(probs), generator=generator) < 0.2 if by_block else None
        num_accepted, weights = check(probs, windows, draft_ids, vectors, uniforms, triton_device, blocks, invalid)
        seen.update(num_accepted.tolist())
        table = torch.randint(1 << 32, (4, 4), generator=generator)
        got = rejection_triton.draw(weights, poisoned(table, triton_device), 16)
        assert got.tolist() == draw(weights.cpu(), table).tolist()
    assert len(seen) > 2


def test_no_windows_and_no_drafted_tokens(triton_device: torch.device) -> None:
    none = torch.empty(0, dtype=torch.int64)
    for blocks in (None, torch.ones(2, dtype=torch.bool)):
        no_blocks = None if blocks is None else blocks[:0]
        check(torch.empty(0, 3), Windows.of([]), none, [], none.double(), triton_device, no_blocks)
        check(torch.rand(2, 3).softmax(-1), Windows.of([0, 0]), none, [], none.double(), triton_device, blocks)


def test_duplicates_in_vectors_of_several_tiles(triton_device: torch.device) -> None:
    """40 entries in falling order, in tiles of 16: none twice, and two equal ones in one tile or in two."""
    rows = torch.full((2, 50), 1 / 50)
    falling = list(range(45, 5, -1))
    for first, second, is_usable in ((0, 0, True), (3, 4, False), (0, 39, False), (17, 20, False), (38, 39, False)):
        ids = list(falling)
        ids[second] = ids[first]
        vector: Vector = (ids, [2] * 40)
        drafted = torch.tensor([ids[25]])
        # Accepted below 80 / (2 x 50) by its weights, and below 1 / 50 as one-hot.
        uniforms = torch.tensor([0.5], dtype=torch.float64)
        num_accepted, _ = check(rows, Windows.of([1]), drafted, [vector], uniforms, triton_device)
        assert num_accepted.tolist() == [int(is_usable)]


@pytest.mark.parametrize("vocab_size", [1, 16, 70, 4097])
def test_draws_equal_the_references(triton_device: torch.device, vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    weights = torch.randn(6, vocab_size, generator=generator).mul(3).softmax(-1).double()
    weights[torch.rand(6, vocab_size, generator=generator) < 0.3] = 0
    weights[:, vocab_size // 3] = 0.01
    weights[2] = 0
    table = torch.randint(1 << 32, (6, 4), generator=generator)
    table[0], table[1] = 0, 0xFFFFFFFF
    with poisoned_allocations():
        got = rejection_triton.draw(
            poisoned(weights, triton_device), poisoned(table, triton_device), 2048 if vocab_size > 100 else 16
        )
    assert got.tolist() == draw(weights, table).tolist()


def test_no_weight_of_zero_is_drawn_at_either_end_or_at_an_edge(triton_device: torch.device) -> None:
    weights = torch.zeros(2, 40, dtype=torch.float64)
    weights[0, 3], weights[0, 9] = 0.25, 0.75  # in one tile; those below in two
    weights[1, 18], weights[1, 33] = 1e-30, 3e-30
    quarter, before = (1 << 30, 0), ((1 << 30) - 1, 0xFFFFFFFF)
    for pair, expected in (((0, 0), [3, 18]), ((0xFFFFFFFF, 0xFFFFFFFF), [9, 33]), (before, [3, 18])):
        table = torch.tensor([[*pair, 0, 0]] * 2)
        assert rejection_triton.draw(weights.to(triton_device), table.to(triton_device), 16).tolist() == expected
    table = torch.tensor([[*quarter, 0, 0]], device=triton_device)
    assert rejection_triton.draw(weights[:1].to(triton_device), table, 16).tolist() == [9]


@pytest.mark.slow
def test_a_large_vocabulary(triton_device: torch.device) -> None:
    generator = torch.Generator().manual_seed(1)
    probs = torch.randn(9, 151_936, generator=generator).mul(3).softmax(-1)
    windows = Windows.of([4, 3])
    draft_ids = probs[windows.row_of_draft].argmax(-1)
    vectors = [random_vector(151_936, int(token), 1 + kind % 4, generator) for kind, token in enumerate(draft_ids)]
    on_device = Windows(*(getattr(windows, name).to(triton_device) for name in Windows.__slots__))
    uniforms = torch.rand(7, generator=generator, dtype=torch.float64) / 4
    weights = DraftWeights.of(packed(vectors))
    expected = accept(probs, windows, draft_ids, weights, uniforms)
    entries = DraftWeights(*(getattr(weights, name).to(triton_device) for name in DraftWeights.__slots__))
    got = rejection_triton.accept(
        probs.to(triton_device), on_device, draft_ids.to(triton_device), entries, uniforms.to(triton_device)
    )
    assert got[0].tolist() == expected[0].tolist() and torch.equal(got[1].cpu(), expected[1])
    table = torch.randint(1 << 32, (2, 4), generator=generator)
    assert rejection_triton.draw(got[1], table.to(triton_device)).tolist() == draw(expected[1], table).tolist()


coupled_triton = pytest.importorskip("outrider.kernels.verify.triton")
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # the interpreter's, as intended

VOCAB_SIZES = [(1, 16), (16, 16), (70, 8), (4097, 256)]  # with the counters in a tile


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
    seeds, positions, completions = table.unbind(1)
    assert got.tolist() == coupled_draw(probs, seeds, positions, completions, Purpose.DRAFT).tolist()
    if vocab_size > 16:
        assert got.tolist() != coupled_draw(probs, seeds, positions, completions, Purpose.BONUS).tolist()


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
