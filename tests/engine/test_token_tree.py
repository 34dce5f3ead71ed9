"""Shapes of drafted trees: vLLM's paths, and what is refused of them."""

from __future__ import annotations

import pytest
import torch

from outrider.engine.batch import BatchEntry, build_batch
from outrider.engine.token_tree import CHAIN, MOST_NODES, TokenTree, depths_of, path_to
from outrider.kernels.attention import tree_mask
from outrider.kernels.types import TREE_ROWS


def test_paths_in_any_order_become_levels() -> None:
    tree = TokenTree.parse("[(0, 0, 1), (1,), (0,), (0, 1), (1, 2), (0, 0)]")
    assert tree.parents == (0, 0, 1, 1, 2, 3)
    assert tree.ranks == (0, 1, 0, 1, 2, 1)
    assert [tree.children(node) for node in (-1, 0, 1, 2, 5)] == [[0, 1], [2, 3], [4], [5], []]
    assert depths_of(tree.parents) == [1, 1, 2, 2, 2, 3]
    assert [path_to(tree.parents, node) for node in (-1, 1, 5)] == [[], [1], [0, 2, 5]]
    assert not tree.is_chain and TokenTree.parse("[(0,), (0, 0)]").is_chain


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("(0,)", "allowed: a list of tuples"),
        ("[0]", "allowed: a list of tuples"),
        ("[()]", "allowed: a list of tuples"),
        ("[(-1,)]", "allowed: a list of tuples"),
        ("[(True,)]", "allowed: a list of tuples"),
        ("import os", "allowed: a list of tuples"),
        ("[]", "has 0 paths"),
        ("[(0,), (0,)]", r"has \(0,\) twice"),
        ("[(0,), (1, 0, 0)]", r"has \(1, 0, 0\) without \(1, 0\)"),
        (str([(rank,) for rank in range(MOST_NODES + 1)]), "has 64 paths; allowed: 1 to 63"),
    ],
)
def test_what_is_no_tree_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TokenTree.parse(text)


def test_rows_of_a_batch() -> None:
    """Rows of the tree stand at their depths, and lie in the cache one after the other."""
    batch = build_batch([BatchEntry([7, 8, 1, 2, 3], 3, [5, 2], 1, (0, 0, 2)), BatchEntry([9, 9], 0, [4], 1)], 4)
    assert batch.positions.tolist() == [3, 4, 5, 5, 6, 0, 1]
    assert batch.slot_mapping.tolist() == [23, 8, 9, 10, 11, 16, 17]
    assert batch.context_lens == (8, 2)
    assert batch.parents is not None and batch.parents.tolist() == [-1, 0, 1, 1, 3, CHAIN, CHAIN]
    assert build_batch([BatchEntry([9, 9], 0, [4], 1)], 4).parents is None
    assert MOST_NODES + 1 == TREE_ROWS and tree_mask.CHAIN == CHAIN
    with pytest.raises(ValueError, match="65 rows; the most is 64"):
        build_batch([BatchEntry([1] * 65, 0, [0], 1, [0])], 100)
    assert torch.equal(torch.tensor(depths_of(range(5))), torch.arange(1, 6))
