"""The pieces under way, as a target that takes the place of another has to be told of them."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.rpc.messages import DraftTokens

MAX_PARTED = 1024  # chains that are remembered, for pieces of theirs still on the way
ID_BYTES = 32  # of a number in a tuple


def pruned(pieces: Sequence[DraftTokens], committed: Sequence[int], parted: dict[int, int]) -> list[DraftTokens]:
    """Those that reach past the committed length on chains that agree with it, and what these fork from."""
    length = len(committed)
    pieces = [piece for piece in pieces if agrees(piece, committed, parted)]
    kept = [piece for piece in pieces if piece.position + len(piece.ids) > length]
    if all(piece.parent is None for piece in kept):
        return kept
    needed, kept = set[int](), []
    for piece in reversed(pieces):  # a branch comes after its parent
        if piece.position + len(piece.ids) > length or piece.chain in needed:
            kept.append(piece)
            if piece.parent is not None:
                needed.add(piece.parent)
    return kept[::-1]


def agrees(piece: DraftTokens, committed: Sequence[int], parted: dict[int, int]) -> bool:
    """Whether its chain is what was committed, as far as that goes. `parted` remembers of others the position at which
    they are not: a target that never saw a chain's beginning could not tell from its later pieces, and would verify
    what was drafted behind other tokens."""
    where = parted.get(piece.chain)
    if where is None and piece.parent is not None and parted.get(piece.parent, piece.position) < piece.position:
        where = parted[piece.parent]
    if where is None and not piece.parents:  # a tree has several tokens for a place
        tokens = committed[piece.position : piece.position + len(piece.ids)]
        if tokens != [*piece.ids[: len(tokens)]]:  # most agree, and are compared at once
            pairs = enumerate(zip(piece.ids, tokens, strict=False), piece.position)
            where = next(place for place, (drafted, token) in pairs if drafted != token)
    if where is None:
        return True
    parted.setdefault(piece.chain, where)
    if len(parted) > MAX_PARTED:
        del parted[next(iter(parted))]
    return False


def size_of(piece: DraftTokens) -> int:
    """Bytes that it takes as it came; about, where it was not left as it came."""
    return ID_BYTES * len(piece.ids) if piece.encoded is None else int(piece.encoded.ByteSize())
