"""The state machine of one sequence, as a table: commits against a chain, credit, and when pieces leave."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from support.engines import commit, credit

from outrider.draft_service.chains import Chain
from outrider.draft_service.sequence import DraftLimits, DraftSequence, ModelState
from outrider.engine.kv_cache_manager import BlockPool, CachedSequence, KVCacheManager
from outrider.engine.random import RandomKey
from outrider.proposers.draft_rows import DraftRule, DraftSampling
from outrider.proposers.draft_text import DraftText
from outrider.rpc.errors import FailedPrecondition
from outrider.rpc.messages import Commit, DraftTokens
from outrider.rpc.words.sampling_params import FinishReason

PROMPT = [1, 2, 3, 4, 5]
CHAIN = [10, 11, 12, 13]


class FakeSampler:
    """Of a model's state: what it counts is of no account here."""

    def append(self, ids: list[int]) -> None:
        pass


def drafted(
    ids: list[int], until: int = 100, max_window: int = 100, number: int = 3, capacity: int = 1000
) -> tuple[DraftSequence, KVCacheManager]:
    """A sequence after PROMPT that has drafted `ids`; all but the last token are computed."""
    cache = KVCacheManager(BlockPool(8), 4)
    chain = Chain(number, DraftText(CachedSequence(list(PROMPT))), sent=len(PROMPT))
    model = ModelState(FakeSampler(), DraftSampling(DraftRule.ARGMAX, RandomKey(0, 0)))  # type: ignore[arg-type]
    limits, methods = DraftLimits(capacity), ("draft_model",)
    draft = DraftSequence((1, 7), len(PROMPT), chain, limits, methods, sink=lambda _: None, model=model)
    draft.limits.grant(credit(7, until, max_window))
    extend(draft, cache, ids)
    return draft, cache


def extend(draft: DraftSequence, cache: KVCacheManager, ids: list[int]) -> None:
    cache.extend(draft.sequence)
    draft.sequence.tokens.extend(ids)
    draft.chain.weights += [None] * len(ids)
    cache.extend(draft.sequence)
    draft.sequence.num_computed_tokens = len(draft.sequence) - 1


@dataclass(frozen=True)
class Case:
    """A commit met by a draft that had drafted CHAIN; what is left."""

    name: str
    commit: Commit
    tokens: list[int]  # after the prompt
    committed: int  # past the prompt
    chain: int
    computed: int  # of all tokens; 8 were computed before


CASES = [
    Case("agrees", commit(7, 5, 10, 11), CHAIN, 2, 3, 8),
    Case("agrees with all", commit(7, 5, 10, 11, 12, 13), CHAIN, 4, 3, 8),
    Case("parts inside", commit(7, 5, 10, 99), [10, 99], 2, 4, 6),
    Case("parts at the first", commit(7, 5, 99), [99], 1, 4, 5),
    Case("parts at the last, whose row was not computed", commit(7, 5, 10, 11, 12, 99), [10, 11, 12, 99], 4, 4, 8),
    Case("a bonus past the end", commit(7, 5, *CHAIN, 50), [*CHAIN, 50], 5, 4, 8),
    Case("a plain token that agrees", commit(7, 5, 10, chain=None), CHAIN, 1, 3, 8),
    Case("dropped", commit(7, 5, dropped=(3,)), [], 0, 4, 4),
    Case("dropped, with tokens that agree", commit(7, 5, 10, 11, dropped=(3,)), [10, 11], 2, 4, 6),
    Case("dropped, and it parts: one new chain", commit(7, 5, 99, dropped=(3,)), [99], 1, 4, 5),
    Case("another chain was dropped", commit(7, 5, 10, dropped=(2,)), CHAIN, 1, 3, 8),
    Case("a repeat of the prompt's end", commit(7, 3, 4, 5), CHAIN, 0, 3, 8),
    Case("partly known", commit(7, 3, 4, 5, 10, 99), [10, 99], 2, 4, 6),
    Case("nothing", commit(7, 5), CHAIN, 0, 3, 8),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("sent", [0, 3, 4], ids=lambda count: f"{count} sent")
def test_a_commit_meets_a_chain(case: Case, sent: int) -> None:
    draft, cache = drafted(CHAIN[:sent], max_window=max(sent, 1))
    assert [piece.ids for piece in draft.take_pieces()] == ([tuple(CHAIN[:sent])] if sent else [])
    draft.limits.grant(credit(7, 100, 100))
    extend(draft, cache, CHAIN[sent:])
    draft.on_commit(case.commit, cache)
    assert draft.sequence.tokens == [*PROMPT, *case.tokens]
    assert draft.committed == len(PROMPT) + case.committed
    assert draft.chain.number == case.chain
    assert draft.sequence.num_computed_tokens == case.computed
    # What is unsent starts where the last piece ended, or at the committed length of a new chain.
    draft.limits.grant(credit(7, 100, 1))
    start = draft.committed if case.chain == 4 else len(PROMPT) + sent
    pieces = [piece for piece in draft.take_pieces() if piece.ids]
    assert [(piece.chain, piece.position) for piece in pieces] == [
        (case.chain, position) for position in range(start, len(draft.sequence))
    ]


def test_a_gap_is_an_error() -> None:
    draft, cache = drafted(CHAIN)
    with pytest.raises(FailedPrecondition, match="commit at 6"):
        draft.on_commit(commit(7, 6, 11), cache)


def test_commits_before_credit_are_stored() -> None:
    draft, cache = drafted([], until=0)
    draft.on_commit(commit(7, 5, 20, 21), cache)
    draft.on_commit(commit(7, 7, 22), cache)
    assert draft.sequence.tokens == [*PROMPT, 20, 21, 22] and draft.committed == 8
    assert not draft.wants_tokens and not list(draft.take_pieces())


def test_chains_start_where_the_open_says() -> None:
    draft, _ = drafted([10], until=6, number=17)
    assert [piece.chain for piece in draft.take_pieces()] == [17]


def test_credit_never_falls() -> None:
    draft, _ = drafted([], until=0)
    for until, expected in ((8, 8), (6, 8), (9, 9), (0, 9)):
        draft.limits.grant(credit(7, until))
        assert draft.limits.until == expected
    draft.limits.grant(credit(7, 20, max_window=0))
    assert draft.limit == 0 and not draft.wants_tokens


@pytest.mark.parametrize(
    ("count", "until", "window", "expected"),
    [
        (3, 100, 4, []),
        (4, 100, 4, [(5, 4, True)]),
        (6, 100, 4, [(5, 4, True)]),
        (4, 9, 4, [(5, 4, False)]),
        (6, 11, 4, [(5, 4, True), (9, 2, False)]),
        (2, 7, 4, [(5, 2, False)]),
        (8, 13, 4, [(5, 4, True), (9, 4, False)]),
    ],
)
def test_pieces_leave_when_full_or_at_the_end_of_credit(
    count: int, until: int, window: int, expected: list[tuple[int, int, bool]]
) -> None:
    draft, _ = drafted(list(range(10, 10 + count)), until=until, max_window=window)
    pieces = list(draft.take_pieces())
    assert [(piece.position, len(piece.ids), piece.more) for piece in pieces] == expected
    assert not list(draft.take_pieces())


def test_the_end_of_the_context_is_told_once_per_commit() -> None:
    draft, cache = drafted([10, 11], capacity=7)
    assert list(draft.take_pieces()) == [DraftTokens(7, 3, 5, (10, 11))]
    draft.on_commit(commit(7, 5, 10, 11), cache)
    assert list(draft.take_pieces()) == [DraftTokens(7, 3, 7, ())]
    assert not list(draft.take_pieces())
    draft.on_commit(commit(7, 7, 30), cache)
    assert list(draft.take_pieces()) == [DraftTokens(7, 4, 8, ())]


def test_a_finished_sequence_drafts_nothing_more() -> None:
    draft, cache = drafted([10, 11])
    draft.on_commit(commit(7, 5, 10, finish_reason=FinishReason.STOP), cache)
    assert not draft.wants_tokens and not list(draft.take_pieces())


def test_device_time_is_summed_by_piece() -> None:
    draft, _ = drafted([10, 11, 12], until=100, max_window=2)
    draft.chain.draft_us = 300
    assert [piece.draft_us for piece in draft.take_pieces()] == [300]
    draft.chain.draft_us += 50
    draft.limits.grant(credit(7, 8, 2))
    draft.limits.until = 8
    assert [piece.draft_us for piece in draft.take_pieces()] == [50]
