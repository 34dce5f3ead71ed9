"""A drafted tree, level by level: each pass gives what may follow the nodes of the last level, the likeliest first, and
the shape says which of these become nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outrider.engine.random import RandomRange
from outrider.engine.sampler import SamplingRows, SequenceSampler
from outrider.engine.token_tree import TokenTree, path_to
from outrider.proposers.draft_rows import DraftedToken, DraftSampling


class GrowingTree:
    """The nodes so far. -1 is the root."""

    def __init__(self, shape: TokenTree) -> None:
        self.ids: list[int] = []
        self.parents: list[int] = []
        self.level = [-1]  # the nodes of the last level
        self._shape = shape
        self._in_shape: list[int] = []  # by node

    @property
    def depth(self) -> int:
        """Levels that it may have."""
        return self._shape.depth

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


@dataclass(frozen=True, slots=True)
class Fork:
    """What may follow a node of a tree: a `Drawing`."""

    tree: GrowingTree
    node: int
    sampler: SequenceSampler  # counts the committed tokens
    draft_sampling: DraftSampling
    position: int  # behind the root
    limit: int  # positions below it will be drafted or verified
    wants_confidence: bool = False

    @property
    def num_top_tokens(self) -> int:
        """Beside the one that is drawn."""
        return self.tree.num_wanted(self.node) - 1

    def span(self) -> RandomRange:
        """Nodes in one place have the same random numbers."""
        at, draft_sampling = self.position + len(self.tree.path(self.node)), self.draft_sampling
        return RandomRange(draft_sampling.key, draft_sampling.ahead, at, 1, max(self.limit, at + 1))

    def sampling_rows(self) -> SamplingRows:
        """The row after the node, processed as if its path were committed."""
        path = self.tree.path(self.node)
        return SamplingRows(self.sampler, path, first=len(path))

    def at(self, node: int) -> Fork:
        """Another node of the tree."""
        return Fork(self.tree, node, self.sampler, self.draft_sampling, self.position, self.limit)


@dataclass(frozen=True, slots=True)
class GrownTree:
    """A tree that branches on at its last level."""

    tree: GrowingTree
    fork: Fork  # one of those that the level has grown from
    rows: list[int]  # of each node of the level the row that it follows

    def forks(self, first_row: int) -> dict[int, Fork]:
        """The next ones, by row, where the rows of the level follow one another from `first_row` on."""
        level = self.tree.level
        return {first_row + level.index(node): self.fork.at(node) for node in self.tree.branching()}


def grow(forks: Mapping[int, Fork], drawn: Sequence[DraftedToken | None]) -> list[GrownTree]:
    """Adds a level to every tree of the forks, which are given by row; returns those that branch on."""
    found: dict[int, dict[int, Sequence[int]]] = {}
    row_of: dict[tuple[int, int], int] = {}
    for (row, fork), token in zip(forks.items(), drawn, strict=True):
        candidates = found.setdefault(id(fork.tree), {})
        if token is not None:
            candidates[fork.node] = (token.token_id, *token.top_tokens)
        row_of[id(fork.tree), fork.node] = row
    grown: list[GrownTree] = []
    for fork in {id(fork.tree): fork for fork in forks.values()}.values():
        tree = fork.tree
        tree.grow(found[id(tree)])
        if tree.branching():
            grown.append(GrownTree(tree, fork, [row_of[id(tree), tree.parents[node] - 1] for node in tree.level]))
    return grown
