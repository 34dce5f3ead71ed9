"""Services made of costs: what they hold, commit and draft is what the production engines would, counted."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.planner.virtual_services import DraftQuality, DraftStream, SimulatedChain, TargetStream, Text
from outrider.rpc.messages import Commit, DraftTokens


def replies() -> tuple[list[Any], Any]:
    found: list[Any] = []
    return found, lambda event, after: found.append(event)


def target(committed: int = 5) -> TargetStream:
    stream = TargetStream(replies()[1], committed, last=100)
    stream.until, stream.max_window = 50, 4
    return stream


def piece(chain: int, position: int, ids: tuple[int, ...], parent: int | None = None) -> DraftTokens:
    return DraftTokens(0, chain, position, ids, parent=parent)


def test_a_text_is_the_same_for_every_reader_and_as_good_as_its_draft() -> None:
    quality = DraftQuality(0.7, (0.5, 0.2))
    text = Text(quality, 3)
    ranks = [text.rank(position) for position in range(20_000)]
    one = Text(quality, 3)
    assert [one.rank(position) for position in reversed(range(500))][::-1] == ranks[:500]
    shares = [ranks.count(rank) / len(ranks) for rank in range(4)]
    assert shares == pytest.approx([0.7, 0.15, 0.06, 0.09], abs=0.015)


def test_the_target_holds_what_the_protocol_lets_it_hold() -> None:
    stream = target()
    stream.hold(piece(0, 5, (0, 0, 1, 0)), now=1.0)
    assert stream.live is not None and (stream.live.right, stream.live.end, stream.window()) == (7, 9, 4)
    stream.hold(piece(1, 7, (0, 0, 0), parent=0), now=1.0)  # the branch for the refusal at 7
    stream.hold(piece(2, 8, (0,), parent=0), now=1.0)  # it goes on from the wrong token
    stream.hold(piece(3, 20, (0,)), now=1.0)
    assert stream.dropped == [3] and stream.live.number == 0
    stream.committed = 8  # two accepted, and the target's own
    stream.choose()
    assert stream.live is not None and (stream.live.number, stream.live.right, stream.window()) == (1, 10, 2)
    stream.hold(piece(0, 9, (0, 0)), now=2.0)  # of a chain that is dead
    assert stream.live.number == 1 and set(stream.chains) == {1}
    stream.hold(piece(4, 8, (0,), parent=0), now=2.0)  # leaves it behind its wrong token
    assert 4 not in stream.chains and stream.dropped == [3]


def test_patience_and_credit_say_when_a_round_is_due() -> None:
    stream = target()
    assert stream.due(2.0) == 2.0  # the first token waits for nobody
    stream.patience_spent, stream.patience, stream.last_commit = False, 0.5, 1.0
    assert stream.due(1.2) == 1.5
    stream.hold(piece(0, 5, ()), now=1.2)  # the draft has nothing to propose
    assert stream.due(1.2) == 1.2
    stream.until = 5
    assert stream.due(9.0) is None


def draft(ranks: str) -> DraftStream:
    """Of a text with these ranks, after five tokens, with credit for a window of four and the next."""
    text = Text(DraftQuality(0.5), 0)
    text._ranks[:] = [0] * 5 + [int(rank) for rank in ranks]
    stream = DraftStream(replies()[1], text, 5, SimulatedChain(0, 5, 5, 5))
    stream.until, stream.window, stream.max_branches = 14, 4, 2
    return stream


def grow(stream: DraftStream, chain: SimulatedChain, count: int) -> None:
    for _ in range(count):
        stream.draw(chain)


def test_a_chain_leaves_by_windows_and_goes_on_while_it_is_right() -> None:
    stream = draft("000001000")
    grow(stream, stream.chain, 3)
    assert not list(stream.pieces())
    grow(stream, stream.chain, 3)
    (sent,) = stream.pieces()
    assert (sent.position, sent.ids, sent.parent) == (5, (0, 0, 0, 0), None)
    stream.take(Commit(0, 5, (0,) * 5))
    assert (stream.chain.number, stream.committed) == (0, 10) and stream.survived
    (early,) = stream.pieces()  # the target may wait for what is there
    assert (early.position, early.ids) == (9, (0, 1))
    stream.take(Commit(0, 10, (0,)))
    assert (stream.chain.number, stream.chain.length, stream.survived) == (1, 11, False)


def test_a_branch_for_the_refusal_takes_the_chains_place() -> None:
    stream = draft("001000000")
    grow(stream, stream.chain, 4)
    stream.open_branches(2, DraftQuality(0.5, (0.6, 0.2)), DraftQuality(0.5, (0.6, 0.2)).outcomes(4))
    assert [(branch.position, branch.rank) for branch in stream.branches] == [(5, 1), (6, 1)]  # the likeliest
    stream.open_branches(3, DraftQuality(0.5, (0.6, 0.2)), DraftQuality(0.5, (0.6, 0.2)).outcomes(4))
    third = stream.branches[2]
    assert third.position == 5 and third.rank == 2 and third.right == 5  # its guess is wrong
    stream.open_branches(4, DraftQuality(0.5, (0.6, 0.2)), DraftQuality(0.5, (0.6, 0.2)).outcomes(4))
    right = stream.branches[3]
    assert (right.position, right.rank, right.right) == (7, 1, 8)
    grow(stream, right, 4)
    pieces = [sent for sent in stream.pieces() if sent.chain == right.number]
    assert [(sent.position, sent.ids, sent.parent) for sent in pieces] == [(7, (0, 0, 0, 0, 0), 0)]
    stream.take(Commit(0, 5, (0, 0, 0)))
    assert stream.chain is right and not stream.branches and stream.survived
