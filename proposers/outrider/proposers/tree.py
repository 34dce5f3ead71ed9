"""A drafted tree, level by level: each pass gives what may follow the nodes of the last level, the likeliest first, and
the shape says which of these become nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from outrider.engine.token_tree import TokenTree, path_to


class GrowingTree:
    """The nodes so far. -1 is the root."""

    def __init__(self, shape: TokenTree) -> None:
        self.ids: list[int] = []
        self.parents: list[int] = []
        self.level = [-1]  # the nodes of the last level
        self._shape = shape
        self._in_shape: list[int] = []  # by node

    def branching(self) -> list[int]:
        """The nodes of the last level that something shall follow."""
        return [node for node in self.level if self._children(node)]

    def num_wanted(self, node: int) -> int:
        """How many of the tokens that may follow a node are looked at."""
        return 1 + max(self._shape.ranks[child] for child in self._children(node))

    def path(self, node: int) -> list[int]:
        """The tokens from the root to a node."""
        return [self.ids[at] for at in path_to(self.parents, node)]

    def grow(self, candidates: Mapping[int, Sequence[int]]) -> None:
        """Adds a level; by branching node what may follow it, the likeliest first. What is not there is no node."""
        level: list[int] = []
        for node, tokens in candidates.items():
            for child in self._children(node):
                if (rank := self._shape.ranks[child]) < len(tokens):
                    level.append(len(self.ids))
                    self.ids.append(tokens[rank])
                    self.parents.append(node + 1)
                    self._in_shape.append(child)
        self.level = level

    def _children(self, node: int) -> list[int]:
        return self._shape.children(self._in_shape[node] if node >= 0 else -1)
