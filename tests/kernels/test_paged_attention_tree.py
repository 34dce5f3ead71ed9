"""Tree masks: the ancestor bits, and attention along each path as if the path were a sequence of its own."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from outrider.kernels.attention.reference import paged_attention
from outrider.kernels.attention.tree_mask import CHAIN, tree_mask, tree_mask_reference

TREE = (-1, 0, 0, 1, 1, 2, 4, -1, 7)
BLOCK, HEADS, KV_HEADS, DIM = 4, 4, 2, 8


def path(parents: tuple[int, ...], row: int) -> list[int]:
    """From the root to the row."""
    return [] if row < 0 else [*path(parents, parents[row]), row]


def test_bits_and_depths(triton_device: torch.device) -> None:
    """A tree of 64 rows, a prompt, a window of one, a sequence without rows, and rows of padding with any parents."""
    generator = torch.Generator().manual_seed(5)
    wide = tuple(int(torch.randint(-1, row, (1,), generator=generator)) if row else -1 for row in range(64))
    deep = tuple(range(-1, 63))
    windows = [TREE, wide, (CHAIN,) * 80, (), deep, (-1,)]
    starts = torch.tensor([0, *itertools.accumulate(len(window) for window in windows)], dtype=torch.int32)
    parents = torch.tensor([*itertools.chain(*windows), 3, -1, 10**6], dtype=torch.int32)
    if triton_device.type == "cpu":
        from outrider.kernels.attention.tree_mask_triton import launch_tree_mask

        mask = launch_tree_mask(parents, starts)
    else:
        mask = tree_mask(parents.to(triton_device), starts.to(triton_device))
    reference = tree_mask_reference(parents, starts)
    assert torch.equal(mask.bits.cpu(), reference.bits) and torch.equal(mask.depths.cpu(), reference.depths)
    bits, depths = reference.bits.tolist(), reference.depths.tolist()
    row = 0
    for window in windows:
        for index, parent in enumerate(window):
            rows = path(window, index) if parent != CHAIN else []
            assert bits[row] % 2**64 == sum(1 << place for place in rows)
            assert depths[row] == (len(rows) - 1 if rows else index)
            row += 1
    assert bits[row:] == [0, 0, 0]


def test_the_climb_ends_whatever_the_parents_hold(triton_device: torch.device) -> None:
    from outrider.kernels.attention.tree_mask_triton import launch_tree_mask

    parents = torch.tensor([0, 2, 1, 70, -2], dtype=torch.int32)
    starts = torch.tensor([0, 5], dtype=torch.int32)
    mask = launch_tree_mask(parents.to(triton_device), starts.to(triton_device))
    reference = tree_mask_reference(parents, starts)
    assert mask.bits.tolist() == reference.bits.tolist() == [1, 2, 6, 8, 0]
    assert mask.depths.tolist() == reference.depths.tolist() == [0, 0, 1, 0, 4]


def cache_of(tokens: Tensor, table: Tensor) -> Tensor:
    """tokens: [context, kv_heads, dim] -> [blocks, BLOCK, kv_heads, dim], NaN where nothing is stored."""
    cache = torch.full((int(table.max()) + 1, BLOCK, KV_HEADS, DIM), torch.nan)
    positions = torch.arange(tokens.shape[0])
    cache.flatten(0, 1)[table[positions // BLOCK] * BLOCK + positions % BLOCK] = tokens
    return cache


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("window", [None, 1, 2, 3, 8, 150])
@pytest.mark.parametrize("context", [9, 12, 140])
def test_a_path_attends_as_a_sequence_of_its_own(context: int, window: int | None, batch_invariant: bool) -> None:
    """Beside a chain and a prompt, which keep their causal masks."""
    start = context - len(TREE)
    table = torch.randperm(-(-context // BLOCK))
    keys, values = torch.randn(context, KV_HEADS, DIM), torch.randn(context, KV_HEADS, DIM)
    query = torch.randn(len(TREE) + 3, HEADS, DIM)
    caches = cache_of(keys, table), cache_of(values, table)
    tables = torch.stack([table, table])
    parents = torch.tensor([*TREE, CHAIN, CHAIN, CHAIN], dtype=torch.int32)
    out = paged_attention(
        query, *caches, tables, (0, len(TREE), len(TREE) + 3), (context, 5), scale=0.3,
        sliding_window=window, batch_invariant=batch_invariant, parents=parents,
    )  # fmt: skip
    chain = paged_attention(query[-3:], *caches, tables[:1], (0, 3), (5,), scale=0.3, sliding_window=window)
    torch.testing.assert_close(out[-3:], chain, atol=2e-6, rtol=1e-5)
    for row in range(len(TREE)):
        seen = [*range(start), *(start + place for place in path(TREE, row))]
        blocks = torch.arange(-(-len(seen) // BLOCK))
        alone = paged_attention(
            query[row : row + 1], cache_of(keys[seen], blocks), cache_of(values[seen], blocks), blocks[None],
            (0, 1), (len(seen),), scale=0.3, sliding_window=window,
        )  # fmt: skip
        torch.testing.assert_close(out[row : row + 1], alone, atol=2e-6, rtol=1e-5)


def test_a_tree_too_large_for_its_bits_is_refused() -> None:
    caches = torch.randn(20, BLOCK, KV_HEADS, DIM), torch.randn(20, BLOCK, KV_HEADS, DIM)
    parents = torch.tensor([CHAIN] * 64 + [63], dtype=torch.int32)
    with pytest.raises(ValueError, match="65 rows"):
        paged_attention(
            torch.randn(65, HEADS, DIM), *caches, torch.arange(20)[None], (0, 65), (70,), scale=1.0, parents=parents
        )
