"""The protocol's message sequences at the target: which pieces are held, which chains die, when a wait ends."""

from __future__ import annotations

from typing import Any

import pytest
from support.engines import COUPLED, REJECTION, VOCAB, TargetHarness, opened, tiny_model

from outrider.engine.loader import LoadedModel
from outrider.rpc.messages import Close, Closed, Credit, DraftTokens, TokenWeights
from outrider.target_service.draft_buffer import ChainBuffer


def piece(chain: int, position: int, *ids: int, **options: Any) -> DraftTokens:
    return DraftTokens(1, chain, position, ids, **options)


class Committed:
    """A buffer over committed tokens 10 11 12 ... and what it would verify."""

    def __init__(self, length: int = 4) -> None:
        self.tokens = list(range(10, 10 + length))
        self.buffer = ChainBuffer(self.tokens, vocab_size=1000, max_held=16)

    def commit(self, *ids: int) -> None:
        self.tokens.extend(ids)
        self.buffer.advance()

    def window(self, limit: int = 8) -> tuple[int, ...]:
        return self.buffer.window(limit).ids


def test_full_window_then_bonus_off_the_chain() -> None:
    c = Committed()
    c.buffer.add(piece(0, 4, 1, 2, 3))
    assert c.window() == (1, 2, 3)
    c.commit(1, 2, 3, 9)
    assert c.window() == ()
    c.buffer.add(piece(0, 7, 9, 5))  # goes on where it ended; its 9 agrees with the bonus
    assert c.window() == (5,)


def test_refused_token_kills_the_chain_and_its_later_pieces() -> None:
    c = Committed()
    c.buffer.add(piece(0, 4, 1, 2, 3))
    c.commit(1, 8)
    assert c.window() == ()
    c.buffer.add(piece(0, 7, 4, 5))
    assert c.window() == () and not c.buffer.has_dropped
    c.buffer.add(piece(1, 6, 6, 7))
    assert c.window() == (6, 7) and c.buffer.window(8).chain == 1


def test_plain_token_that_agrees_keeps_the_chain() -> None:
    c = Committed()
    c.buffer.add(piece(0, 4, 1, 2, 3))
    c.commit(1)
    assert c.window() == (2, 3)
    d = Committed()
    d.buffer.add(piece(0, 4, 1, 2, 3))
    d.commit(7)
    assert d.window() == ()


def test_doubled_and_late_pieces() -> None:
    c = Committed()
    c.buffer.add(piece(0, 4, 1, 2))
    c.buffer.add(piece(0, 4, 1, 2))
    c.buffer.add(piece(0, 5, 2, 3))
    assert c.window() == (1, 2, 3)
    c.commit(1, 2)
    c.buffer.add(piece(1, 4, 1, 2, 3, 4))  # late: starts below the committed length, and agrees
    c.commit(3)
    assert c.window() == (4,)
    c.buffer.add(piece(2, 4, 1, 9))  # late, and differs
    assert c.buffer.window(8).chain == 1


def test_a_lost_piece_drops_what_follows_it() -> None:
    c = Committed()
    c.buffer.add(piece(0, 4, 1, 2))
    c.buffer.add(piece(0, 8, 5, 6))
    assert c.window() == (1, 2) and c.buffer.take_dropped() == (0,) and c.buffer.take_dropped() == ()
    c.buffer.add(piece(3, 6, 1))  # an unknown chain past the committed length
    assert c.buffer.take_dropped() == (3,)


def test_a_chain_with_a_gap_takes_no_more() -> None:
    """Not even where the committed tokens have come as far as its next piece: what was lost may differ from them."""
    c = Committed()
    c.buffer.add(piece(0, 4, 1))
    c.buffer.add(piece(0, 6, 3))
    assert c.buffer.take_dropped() == (0,) and c.window() == (1,)
    c.commit(1, 2, 9)
    c.buffer.add(piece(0, 7, 4))
    assert c.window() == () and not c.buffer.take_dropped()
    c.buffer.add(piece(1, 7, *range(50, 70)))  # more than is held
    assert len(c.window(20)) == 16 and c.buffer.take_dropped() == (1,)
    c.commit(*range(50, 66), 0)
    c.buffer.add(piece(1, 24, 5))
    assert c.window() == ()


def test_a_chain_whose_first_piece_was_dropped_is_not_held_later() -> None:
    c = Committed()
    c.buffer.add(piece(3, 6, 1, 2))
    c.tokens += [21, 22, 23, 24]  # not what chain 3 began with
    c.buffer.advance()
    c.buffer.add(piece(3, 8, 3, 4))  # at the committed length, but it rests on 1, 2
    assert c.window() == () and c.buffer.take_dropped() == (3,)
    c.buffer.add(piece(4, 8, 7))
    assert c.window() == (7,)


def test_branches_fork_from_held_tokens_and_the_lowest_live_chain_is_used() -> None:
    c = Committed()
    c.buffer.add(piece(0, 4, 1, 2, 3))
    c.buffer.add(piece(1, 5, 7, 8, parent=0, weights=(TokenWeights.of((7,), (1,)), TokenWeights.of((8,), (1,)))))
    c.buffer.add(piece(2, 7, 5, parent=0))
    assert c.buffer.window(8).chain == 0
    c.commit(1, 7)
    window = c.buffer.window(8)
    assert (window.chain, window.ids) == (1, (8,)) and window.weights[0] is not None
    c.buffer.add(piece(2, 8, 6))  # forked past the difference
    assert c.buffer.window(8).chain == 1


def test_a_branchs_first_id_is_one_hot_whatever_its_weights() -> None:
    c = Committed()
    c.buffer.add(piece(0, 4, 1, 2))
    c.buffer.add(piece(1, 4, 3, 4, parent=0, weights=(TokenWeights.of((3,), (1,)), TokenWeights.of((4,), (1,)))))
    c.buffer.add(piece(0, 4, 1, 2))
    c.buffer._mark_dead(0, 4)
    assert c.buffer.window(8).ids == (3, 4) and c.buffer.window(8).weights[0] is None


def test_a_branch_of_a_dead_or_unknown_parent() -> None:
    c = Committed()
    c.buffer.add(piece(0, 4, 1, 2, 3))
    c.commit(9)
    c.buffer.add(piece(1, 6, 4, parent=0))
    assert c.window() == () and c.buffer.take_dropped() == ()  # dead with its parent, and the draft knows
    c.buffer.add(piece(2, 5, 4, parent=0))  # it starts at the committed length, but after tokens that were refused
    assert c.window() == ()
    c.buffer.add(piece(3, 5, 4, parent=77))  # of a parent never heard of: nothing speaks against it
    assert c.window() == (4,)


def test_bounds_vocabulary_and_trees() -> None:
    c = Committed()
    c.buffer.add(piece(0, 4, *range(1, 31)))
    assert len(c.window(100)) == 16 and c.buffer.take_dropped() == (0,)
    d = Committed()
    d.buffer.add(piece(0, 4, 1, 5000, 2))
    d.buffer.add(piece(0, 7, 3))
    assert d.window() == (1,)
    d.buffer.add(piece(1, 4, 1, 2, parents=(0, 0)))
    assert d.buffer.take_dropped() == (1,)


def test_where_an_unknown_id_is_proposed_nothing_is_waited_for() -> None:
    c = Committed()
    c.buffer.add(piece(0, 4, 1, 5000, 2))
    assert not c.buffer.draft_is_idle
    c.commit(1)
    assert c.window() == () and c.buffer.draft_is_idle
    c.commit(7)
    assert not c.buffer.draft_is_idle
    c.buffer.add(piece(1, 6, 5000))
    assert c.buffer.draft_is_idle


def test_trees() -> None:
    """What is committed leads to a subtree; ids that the target does not know are left out with what follows them."""
    c = Committed()
    c.buffer.takes_trees = True
    c.buffer.add(piece(0, 3, 13, 13, 5000, 1, 2, 3, 4, parents=(0, 0, 1, 1, 1, 3, 5)))
    window = c.buffer.window(8)
    assert (window.chain, window.ids, window.parents) == (0, (1, 2, 4), (0, 0, 2))
    assert c.buffer.window(2).parents == (0, 0) and c.buffer.window(8, depth=1).ids == (1, 2)
    assert c.buffer.window(8, most_rows=1).ids == (1,) and c.buffer.window(8, depth=0).ids == ()
    c.commit(2)
    assert c.window() == (4,)
    c.buffer.add(piece(0, 6, 7))
    assert c.buffer.take_dropped() == (0,) and c.window() == (4,)  # nothing goes on with a tree
    c.commit(4)
    assert c.buffer.live() is None and c.buffer.take_dropped() == ()
    c.buffer.add(piece(1, 5, 4, 8, 9, parents=(0, 1, 0)))  # late
    assert c.window() == (8,)
    c.commit(9)
    assert c.buffer.live() is None
    c.buffer.add(piece(2, 8, 4, 8, parents=(0, 0)))  # after what is not known yet
    assert c.buffer.take_dropped() == (2,)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return tiny_model()[1]


PROMPT = [5, 6, 7, 8]


def lock_step(loaded: LoadedModel, patience_ms: int = 400) -> TargetHarness:
    """A sequence whose first token is out, with credit for six more and patience for a chain."""
    harness = TargetHarness.of(loaded)
    harness.send(opened(1, PROMPT, max_tokens=50), Credit(1, 11, 4, patience_ms))
    assert harness.run() == pytest.approx(patience_ms / 1000)
    assert len(harness.output(1)) == 1  # the first token waited for no draft
    return harness


def test_a_wait_that_ran_out_is_not_repeated_until_a_piece_arrives(loaded: LoadedModel) -> None:
    harness = lock_step(loaded)
    harness.now += 0.5
    harness.run()
    assert len(harness.output(1)) == 7  # all the credit, without further waits
    harness.send(Credit(1, 30, 4, 400))
    harness.run()
    count = len(harness.output(1))
    assert count == 26
    wrong = (harness.output(1)[-1] + 1) % VOCAB
    harness.send(DraftTokens(1, 3, 4 + count, (wrong,)), Credit(1, 34, 4, 400))
    harness.run()
    assert len(harness.output(1)) == count + 1  # verified, refused; and now it waits again
    assert harness.run() == pytest.approx(0.4)


def test_an_empty_piece_ends_the_wait_only_at_the_committed_length(loaded: LoadedModel) -> None:
    harness = lock_step(loaded)
    harness.send(DraftTokens(1, 0, 4, ()))
    assert harness.run() == pytest.approx(0.4) and len(harness.output(1)) == 1
    harness.send(DraftTokens(1, 0, 5, ()))
    assert harness.run() == pytest.approx(0.4) and len(harness.output(1)) == 2


def test_credit_applies_to_a_wait_under_way_and_never_falls(loaded: LoadedModel) -> None:
    harness = lock_step(loaded)
    harness.send(Credit(1, 6, 4, 0))
    harness.run()
    assert len(harness.output(1)) == 7  # until stayed at 11


def test_credit_is_never_exceeded(loaded: LoadedModel) -> None:
    harness = TargetHarness.of(loaded)
    harness.send(opened(1, PROMPT, max_tokens=50), Credit(1, 6, 8, 0), DraftTokens(1, 0, 4, tuple(range(20, 28))))
    harness.run()
    assert len(harness.output(1)) == 2


def test_close_is_answered_and_later_messages_are_ignored(loaded: LoadedModel) -> None:
    harness = lock_step(loaded)
    harness.send(Close(1), Credit(1, 40, 4, 0), DraftTokens(1, 0, 5, (1, 2)))
    harness.run()
    assert harness.events[1][-1] == Closed(1) and len(harness.output(1)) == 1
    assert harness.engine.cache.pool.num_free == harness.engine.limits.num_blocks


def test_a_dropped_piece_is_named_without_ids(loaded: LoadedModel) -> None:
    harness = lock_step(loaded)
    harness.send(DraftTokens(1, 4, 9, (1,)))
    assert harness.commits(1)[-1].ids == () and harness.commits(1)[-1].dropped == (4,)


@pytest.mark.parametrize("acceptance", [REJECTION, COUPLED])
def test_tokens_without_credit_are_stored(loaded: LoadedModel, acceptance: Any) -> None:
    harness = TargetHarness.of(loaded)
    request = opened(1, PROMPT, max_tokens=4, acceptance=acceptance)
    harness.send(request, DraftTokens(1, 0, 4, (1, 2, 3)))
    assert harness.run() is None and not harness.commits(1)
    harness.send(Credit(1, 8, 3, 0))
    harness.run()
    assert harness.commits(1)[0].num_drafted == 3


def test_a_late_branch_past_the_difference_is_dead_with_its_parent() -> None:
    """It starts at the committed length, but goes on from a token that was refused."""
    c = Committed()
    c.buffer.add(piece(0, 4, 1, 2, 3))
    c.commit(1, 8)
    c.buffer.add(piece(1, 6, 5, 5, parent=0))
    c.buffer.add(piece(2, 7, 5, 5, parent=1))  # a branch of that branch
    assert c.window() == () and not c.buffer.has_dropped


def test_a_late_branch_at_the_difference_is_the_one_that_is_wanted() -> None:
    c = Committed()
    c.buffer.add(piece(0, 4, 1, 2, 3))
    c.commit(1, 8)
    c.buffer.add(piece(1, 5, 7, 6, 6, parent=0))  # another guess: dead
    c.buffer.add(piece(2, 5, 8, 6, 7, parent=0))
    assert c.window() == (6, 7) and c.buffer.window(8).chain == 2


def test_only_so_many_dead_chains_are_remembered() -> None:
    c = Committed()
    for number in range(3000):
        c.buffer.add(piece(number, 4, 1, 2))
        c.buffer.add(piece(number, 6, 9))
        c.commit() if number else c.commit(5)
    assert len(c.buffer._dead) <= 1024


def test_chains_that_were_committed_whole_are_not_kept() -> None:
    """Or every round of a long answer would look at those of all rounds before."""
    c = Committed()
    for chain in range(300):
        c.buffer.add(piece(chain, len(c.tokens), 1, 2, 3))
        assert c.window() == (1, 2, 3)
        c.commit(1, 2, 3, 9)
    assert len(c.buffer._chains) == 0
    c.buffer.add(piece(299, len(c.tokens) - 1, 9, 4))  # the last one goes on all the same: its 9 agrees
    assert c.window() == (4,)


def test_a_chain_that_ended_at_an_unknown_id_takes_no_more_though_it_was_committed_whole() -> None:
    for then in ((1,), (1, 2)):  # the id is the next one, or another was committed in its place
        c = Committed()
        c.buffer.add(piece(0, 4, 1, 1000, 2))
        assert c.window() == (1,)
        c.commit(*then)
        c.buffer.add(piece(0, len(c.tokens), 5))
        assert c.window() == ()
