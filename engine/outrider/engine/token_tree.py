"""Trees of drafted tokens, of which several may stand in one place.

Nodes are numbered so that a parent stands before its children. `parents` gives the index of each node's parent plus
one; 0 is the root, the token before the tree, which is no node. A chain is the tree of parents 0, 1, 2, ..."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

CHAIN = -2  # parent of a row that is of no tree, as the kernels' tree_mask takes it
MOST_NODES = 63  # with the row of the token before them one bit each of a row's mask


def depths_of(parents: Sequence[int]) -> list[int]:
    """How many tokens lie between the root and each node, itself counted: a child of the root has 1."""
    depths: list[int] = []
    for parent in parents:
        depths.append(depths[parent - 1] + 1 if parent else 1)
    return depths


def path_to(parents: Sequence[int], node: int) -> list[int]:
    """The nodes from the root's child to `node`; -1 is the root, which has none."""
    path: list[int] = []
    while node >= 0:
        path.append(node)
        node = parents[node] - 1
    return path[::-1]


def subtree(parents: Sequence[int], root: int, kept: Sequence[bool]) -> tuple[list[int], list[int]]:
    """The nodes below `root`, -1 for all, that are kept with all of their ancestors, in order, and their parents among
    themselves."""
    places = {root: 0}
    nodes: list[int] = []
    above: list[int] = []
    for node, parent in enumerate(parents):
        if parent - 1 in places and kept[node]:
            above.append(places[parent - 1])
            nodes.append(node)
            places[node] = len(nodes)
    return nodes, above


def positions_of(start: int, num_rows: int, parents: Sequence[int]) -> list[int]:
    """The positions of rows from `start` on, the last of which are a tree: nodes that stand in one place have the
    same."""
    before = start + num_rows - len(parents)
    return [*range(start, before), *(before - 1 + depth for depth in depths_of(parents))]


def window_parents(num_rows: int, parents: Sequence[int]) -> list[int]:
    """The row that each row follows, where the last of them are a tree, counted from the first, as the kernels take
    them (tree_mask.py); its root is the row before it. Raises ValueError."""
    if not parents:
        return [CHAIN] * num_rows
    if num_rows > MOST_NODES + 1:
        raise ValueError(f"a tree in a window of {num_rows} rows; the most is {MOST_NODES + 1}")
    before = num_rows - len(parents)
    return [*range(-1, before - 1), *(before - 1 + parent for parent in parents)]


@dataclass(frozen=True, slots=True)
class KeptPath:
    """Nodes of a tree that stay, from the root's child on, and where its rows are in the cache and in the pass."""

    block_table: Sequence[int]
    first_place: int
    first_row: int
    nodes: Sequence[int]

    def moves(self, block_size: int) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
        """The moves from slot to slot, and from row to row, so that the path lies as a chain does."""
        for offset, node in enumerate(self.nodes):
            if node != offset:
                first, table = self.first_place, self.block_table
                slots = [
                    table[at // block_size] * block_size + at % block_size for at in (first + node, first + offset)
                ]
                yield (slots[0], slots[1]), (self.first_row + node, self.first_row + offset)


@dataclass(frozen=True, slots=True)
class TokenTree:
    """The shape of a draft: which nodes there are, level by level, and which of its parent's likeliest tokens each
    takes."""

    parents: tuple[int, ...]
    ranks: tuple[int, ...]  # 0: the likeliest

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads vLLM's `speculative_token_tree`: a list of paths, each a tuple of ranks from the root on, such as
        "[(0,), (1,), (0, 0)]". Raises ValueError."""
        try:
            paths = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            paths = None
        if not isinstance(paths, list) or not all(map(_is_path, paths)):
            raise ValueError(
                f"speculative_token_tree: is {text!r:.100}; allowed: a list of tuples of integers from 0 on, such as "
                "[(0,), (1,), (0, 0)]"
            )
        return cls.of(paths)

    @staticmethod
    def checked(text: str) -> str:
        """Checks a tree's text, which stays as it is, for settings. Raises ValueError."""
        TokenTree.parse(text)
        return text

    @classmethod
    def of(cls, paths: Sequence[tuple[int, ...]]) -> Self:
        """A tree of paths in any order. Raises ValueError."""
        ordered = sorted(paths, key=lambda path: (len(path), path))
        node_of = {path: node for node, path in enumerate(ordered)}
        problem = None
        if not 0 < len(ordered) <= MOST_NODES:
            problem = f"has {len(ordered)} paths; allowed: 1 to {MOST_NODES}"
        elif len(node_of) < len(ordered):
            problem = f"has {next(a for a, b in pairwise(ordered) if a == b)} twice"
        elif orphans := [path for path in ordered if path[:-1] and path[:-1] not in node_of]:
            problem = f"has {orphans[0]} without {orphans[0][:-1]}; allowed: paths whose beginnings are paths, too"
        if problem is not None:
            raise ValueError(f"speculative_token_tree: {problem}")
        parents = tuple(node_of[path[:-1]] + 1 if len(path) > 1 else 0 for path in ordered)
        return cls(parents, tuple(path[-1] for path in ordered))

    def __len__(self) -> int:
        return len(self.parents)

    @property
    def is_chain(self) -> bool:
        """Whether no two nodes stand in one place."""
        return self.parents == tuple(range(len(self.parents)))

    @property
    def depth(self) -> int:
        """How many tokens its longest path has."""
        return max(depths_of(self.parents))

    def cut(self, count: int) -> TokenTree:
        """The likeliest nodes, at most `count`, at least 1: those on whose paths the ranks add up to least."""
        if count >= len(self):
            return self
        paths = [tuple(self.ranks[at] for at in path_to(self.parents, node)) for node in range(len(self))]
        return TokenTree.of(sorted(paths, key=lambda path: (sum(path), len(path)))[:count])

    def children(self, node: int) -> list[int]:
        """The children of a node, or of the root, -1."""
        return [child for child, parent in enumerate(self.parents) if parent == node + 1]


def _is_path(path: object) -> bool:
    return (
        isinstance(path, tuple)
        and bool(path)
        and all(isinstance(rank, int) and not isinstance(rank, bool) and rank >= 0 for rank in path)
    )
