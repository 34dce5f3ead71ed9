"""Every tree of few nodes over a toy's three tokens, judged at once: what is committed is the beginning of what the
target alone would say, and as much of it as the tree holds. Greedy and coupled targets are functions of the tokens
before; under coupling their law is the noise's, which no tree changes."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import product

import pytest
import torch

from outrider.engine.token_tree import depths_of, path_to, subtree
from outrider.kernels.types import Windows
from outrider.kernels.verify.reference import coupled_accept_tree

VOCAB_SIZE, NODES = 3, 4
Ids = tuple[int, ...]
SHAPES: list[Ids] = [
    shape for count in range(NODES + 1) for shape in product(*(range(node + 1) for node in range(count)))
]


def target(seed: int) -> Callable[[Ids], int]:
    """What it says after every beginning."""
    rng = random.Random(seed)
    said = {
        ids: rng.randrange(VOCAB_SIZE) for count in range(NODES + 1) for ids in product(range(VOCAB_SIZE), repeat=count)
    }
    return said.__getitem__


@pytest.mark.parametrize("seed", range(3))
def test_every_tree_commits_the_targets_own_tokens(seed: int) -> None:
    says = target(seed)
    trees = [(ids, shape) for shape in SHAPES for ids in product(range(VOCAB_SIZE), repeat=len(shape))]
    paths = [[tuple(ids[node] for node in path_to(shape, row)) for row in range(-1, len(ids))] for ids, shape in trees]
    accepted, next_ids, held = coupled_accept_tree(
        torch.tensor([says(path) for rows in paths for path in rows]),
        Windows.of([len(ids) for ids, _ in trees]),
        torch.tensor([token for ids, _ in trees for token in ids]),
        torch.tensor([parent for _, shape in trees for parent in shape]),
    )
    plain: list[int] = []
    for _ in range(NODES + 1):
        plain.append(says(tuple(plain)))
    first = 0
    for (ids, shape), rows, count, own in zip(trees, paths, accepted.tolist(), next_ids.tolist(), strict=True):
        path = [node for node in range(len(ids)) if held[first + node]]
        assert path == (path_to(shape, path[-1]) if path else []) and len(path) == count
        assert [*(ids[node] for node in path), own] == plain[: count + 1]
        siblings_differ = len(set(zip(shape, ids, strict=True))) == len(ids)  # else the first of them is walked
        assert not siblings_differ or count == max(len(row) for row in rows if list(row) == plain[: len(row)])
        first += len(ids)


def test_subtrees() -> None:
    """Below every node of every tree, with one node more left out: what has all its ancestors, under new numbers."""
    for shape in SHAPES:
        for root, missing in product(range(-1, len(shape)), range(len(shape))):
            kept = [node != missing for node in range(len(shape))]
            nodes, parents = subtree(shape, root, kept)
            paths = {node: path_to(shape, node) for node in range(len(shape))}
            below = {
                node: path[path.index(root) + 1 if root >= 0 else 0 :]
                for node, path in paths.items()
                if root < 0 or root in path
            }
            assert nodes == [node for node, path in below.items() if path and missing not in path]
            assert [path_to(parents, place) for place in range(len(nodes))] == [
                [nodes.index(node) for node in below[place]] for place in nodes
            ]
            assert depths_of(parents) == [len(below[node]) for node in nodes]
