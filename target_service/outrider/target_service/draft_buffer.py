"""The drafted tokens that a target holds for one sequence: which pieces are held, which chains are dead, which one
is verified next.

Plain Python over integers; the rules are those of the protocol: a piece is held if it starts at or below the committed
length, at or below the end of its chain's held tokens, or, for a branch, inside or at the end of its parent's; a chain
that differs from the committed tokens is dead; one of which a piece was dropped takes no more; the live chain of the
lowest number that reaches past the committed length is used. Dropping is always safe.

A tree comes as one piece, at or below the committed length. It is a chain whose next token may be one of several: what
is committed leads to a subtree, or off the tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.engine.token_tree import MOST_NODES, depths_of, subtree
from outrider.rpc.messages import DraftTokens, TokenWeights

MAX_DEAD = 1024  # dead and refused chains that are remembered, for pieces of theirs still on the way


@dataclass(slots=True)
class LiveChain:
    """A live chain: its tokens from `start` on. Tokens below the committed length are trimmed once they were
    compared."""

    number: int
    start: int  # absolute position of ids[0]
    ids: list[int]
    weights: list[TokenWeights | None]  # per id; None is one-hot
    more: bool = False  # the draft goes on without another message
    ended: bool = False  # an id outside the vocabulary was met: nothing follows
    parents: list[int] = field(default_factory=list)  # of a tree: see token_tree.py

    @property
    def end(self) -> int:
        """The position after the last held token."""
        return self.start + (max(depths_of(self.parents)) if self.parents else len(self.ids))

    def keep(self, root: int, kept: Sequence[bool]) -> None:
        """Keeps of a tree what is below a node, as far as it is kept."""
        nodes, self.parents = subtree(self.parents, root, kept)
        self.ids = [self.ids[node] for node in nodes]


@dataclass(frozen=True, slots=True)
class Window:
    """The drafted tokens of one verification."""

    chain: int | None
    ids: tuple[int, ...]
    weights: tuple[TokenWeights | None, ...]
    goes_on: bool  # a held token lies past the cut, or the draft has credit for more
    parents: tuple[int, ...] = ()  # of a tree: see token_tree.py
    num_forced: int = 0  # of `ids`, at their end: a grammar's, and no draft's


EMPTY_WINDOW = Window(None, (), (), False)


class ChainBuffer:
    """Holds the chains of one sequence. `tokens` is the sequence's own list of committed tokens, which only
    `advance` compares."""

    def __init__(self, tokens: Sequence[int], vocab_size: int, max_held: int = 512) -> None:
        self._tokens = tokens
        self._committed = len(tokens)
        self._vocab_size = vocab_size
        self._max_held = max_held
        self._chains: dict[int, LiveChain] = {}
        self._dead: dict[int, int] = {}  # number of a dead chain: the position at which it parts from what is committed
        self._refused: dict[int, None] = {}  # chains of which a piece was dropped: they take no more
        self._dropped: list[int] = []
        self._idle_at = -1  # where the draft said that it has nothing to propose
        self._live: LiveChain | None = None
        self._knows_live = True  # every step asks several times between two changes
        self.takes_trees = False  # else they are dropped

    def add(self, piece: DraftTokens) -> None:
        """Holds a piece, or drops it and remembers its chain for `take_dropped`."""
        self._knows_live = False
        if not piece.ids:
            self._idle_at = max(self._idle_at, piece.position)
            return
        chain = self._chains.get(piece.chain)
        if piece.chain in self._dead or piece.chain in self._refused or (chain is not None and chain.ended):
            return
        if piece.parents and chain is None and self.takes_trees and piece.position <= self._committed:
            self._plant(piece)
        elif piece.parents or (chain is not None and chain.parents):
            self._refuse(piece.chain)
        elif chain is None:
            self._start(piece)
        elif piece.position <= max(chain.end, self._committed):
            self._append(chain, piece)
        else:
            self._refuse(piece.chain)

    def advance(self) -> None:
        """Compares every chain with the tokens committed since the last call and buries those that differ. One that
        was committed to its end is forgotten: a piece with which it goes on starts it again."""
        self._knows_live, committed = False, len(self._tokens)
        for chain in list(self._chains.values()):
            if chain.parents:
                self._climb(chain, committed)
                continue
            difference = self._difference(chain.start, chain.ids, committed)
            if difference is not None:
                self._mark_dead(chain.number, difference)
            elif chain.end > committed or (chain.ended and chain.end == committed):
                self._trim(chain, committed)
            elif chain.ended:
                self._mark_dead(chain.number, chain.end)  # an id that the target does not know stood there
            else:
                del self._chains[chain.number]
        self._committed = committed

    def window(self, limit: int, most_rows: int = MOST_NODES, depth: int = MOST_NODES) -> Window:
        """The next window: at most `limit` tokens of the live chain of the lowest number that reaches past the
        committed length; of a tree at most `most_rows`, too, and none deeper than `depth`."""
        chain = self.live()
        if chain is None or limit <= 0:
            return EMPTY_WINDOW
        if chain.parents:
            nodes, parents = subtree(chain.parents, -1, [place <= depth for place in depths_of(chain.parents)])
            ids, count = [chain.ids[node] for node in nodes], max(0, min(limit, most_rows))
            return (
                Window(chain.number, tuple(ids[:count]), (), False, tuple(parents[:count])) if nodes else EMPTY_WINDOW
            )
        offset = self._committed - chain.start
        ids = chain.ids[offset : offset + limit]
        weights = chain.weights[offset : offset + limit]
        goes_on = len(chain.ids) > offset + len(ids) or (chain.more and not chain.ended)
        return Window(chain.number, tuple(ids), tuple(weights), goes_on)

    def live(self) -> LiveChain | None:
        """The chain that the next window is cut from."""
        if not self._knows_live:
            reaching = [chain for chain in self._chains.values() if chain.end > self._committed]
            self._live = min(reaching, key=lambda chain: chain.number, default=None)
            self._knows_live = True
        return self._live

    @property
    def committed(self) -> int:
        """The committed length, also while a window of it is verified."""
        return self._committed

    @property
    def draft_is_idle(self) -> bool:
        """Whether the draft said that it has nothing to propose at the committed length, or proposes an id there that
        the target does not know."""
        chains = self._chains.values()
        return self._idle_at == self._committed or any(one.ended and one.end == self._committed for one in chains)

    def take_dropped(self) -> tuple[int, ...]:
        """The chains of which a piece was dropped since the last call; the next Commit names them."""
        dropped, self._dropped = tuple(self._dropped), []
        return dropped

    @property
    def has_dropped(self) -> bool:
        """Whether a Commit is due to name dropped chains."""
        return bool(self._dropped)

    def _start(self, piece: DraftTokens) -> None:
        parent = self._chains.get(piece.parent) if piece.parent is not None else None
        parted = self._dead.get(piece.parent) if piece.parent is not None else None
        if parted is not None and piece.position > parted:
            self._mark_dead(piece.chain, parted)  # it goes on from tokens that were not committed
            return
        weights: list[TokenWeights | None] = []
        if piece.position <= self._committed:
            chain = LiveChain(piece.chain, piece.position, [], weights)
        elif parent is not None and piece.position <= parent.end:
            shared = piece.position - parent.start
            chain = LiveChain(piece.chain, parent.start, parent.ids[:shared], parent.weights[:shared])
        else:
            self._refuse(piece.chain)
            return
        self._chains[piece.chain] = chain
        self._append(chain, piece)
        if piece.parent is not None and piece.chain in self._chains:
            first = piece.position - chain.start
            if 0 <= first < len(chain.weights):
                chain.weights[first] = None  # a branch's first id is a guess, whatever its weights say

    def _plant(self, piece: DraftTokens) -> None:
        """Holds a tree, without ids that the target does not know and what follows them."""
        count = min(len(piece.ids), self._max_held)
        parents = list(piece.parents[:count])
        chain = LiveChain(piece.chain, piece.position, list(piece.ids[:count]), [], parents=parents)
        chain.keep(-1, [token < self._vocab_size for token in chain.ids])
        self._chains[piece.chain] = chain
        self._climb(chain, self._committed)

    def _climb(self, chain: LiveChain, committed: int) -> None:
        """Goes up a tree by what is committed. Of equal tokens the first is taken, as where trees are verified."""
        for position in range(chain.start, committed):
            nodes = (node for node, parent in enumerate(chain.parents) if not parent)
            node = next((node for node in nodes if chain.ids[node] == self._tokens[position]), None)
            if node is None:
                self._mark_dead(chain.number, position)
                return
            chain.keep(node, [True] * len(chain.ids))
            chain.start = position + 1
        if not chain.parents:  # committed to a leaf
            del self._chains[chain.number]

    def _append(self, chain: LiveChain, piece: DraftTokens) -> None:
        """Adds what the chain does not hold yet; compares what is already committed."""
        committed = self._committed
        difference = self._difference(piece.position, piece.ids, committed)
        if difference is not None:
            self._mark_dead(chain.number, difference)
            return
        if not chain.ids or chain.end < committed:  # all that was held lies below the committed length
            chain.start, chain.ids, chain.weights = committed, [], []
        for index in range(max(chain.end - piece.position, 0), len(piece.ids)):
            if piece.ids[index] >= self._vocab_size:
                chain.ended = True
                break
            if chain.end - committed >= self._max_held:
                self._refuse(chain.number)
                break
            chain.ids.append(piece.ids[index])
            chain.weights.append(piece.weights[index] if index < len(piece.weights) else None)
        chain.more = piece.more

    def _trim(self, chain: LiveChain, committed: int) -> None:
        surplus = min(committed - chain.start, len(chain.ids))
        if surplus > 0:
            del chain.ids[:surplus]
            del chain.weights[:surplus]
            chain.start += surplus

    def _difference(self, start: int, ids: Sequence[int], committed: int) -> int | None:
        """The first position below the committed length at which `ids`, from `start` on, are not what was committed."""
        overlap = max(0, min(committed - start, len(ids)))
        if list(self._tokens[start : start + overlap]) == list(ids[:overlap]):
            return None
        return next(start + index for index in range(overlap) if self._tokens[start + index] != ids[index])

    def _mark_dead(self, number: int, difference: int) -> None:
        self._chains.pop(number, None)
        self._dead[number] = difference
        if len(self._dead) > MAX_DEAD:
            del self._dead[next(iter(self._dead))]

    def _refuse(self, number: int) -> None:
        """Takes nothing more of a chain, whatever is held of it: later pieces rest on tokens that were not seen."""
        self._drop(number)
        self._refused[number] = None
        if len(self._refused) > MAX_DEAD:
            del self._refused[next(iter(self._refused))]

    def _drop(self, number: int) -> None:
        if number not in self._dropped:
            self._dropped.append(number)
