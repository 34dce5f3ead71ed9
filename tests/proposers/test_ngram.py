"""Prompt lookup against a slow search, and its bookkeeping under rollback."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.proposers.base import SequenceContext, TokenProposer
from outrider.proposers.ngram import NgramProposer

TOKENS = st.lists(st.integers(0, 2), max_size=30)
BOUNDS = st.tuples(st.integers(1, 4), st.integers(1, 4)).map(lambda bounds: (min(bounds), max(bounds)))


def slow_proposal(tokens: list[int], least: int, most: int, max_tokens: int) -> list[int]:
    for n in range(most, least - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == tokens[-n:]:
                text = list(tokens)
                for offset in range(max_tokens):
                    text.append(text[end + offset])
                return text[len(tokens) :]
    return []


@settings(max_examples=300)
@given(tokens=TOKENS, bounds=BOUNDS, max_tokens=st.integers(0, 12))
def test_matches_slow_search(tokens: list[int], bounds: tuple[int, int], max_tokens: int) -> None:
    proposer: TokenProposer = NgramProposer(*bounds)
    assert proposer.open(tokens, SequenceContext()).propose(max_tokens) == slow_proposal(tokens, *bounds, max_tokens)


@settings(max_examples=200)
@given(
    bounds=BOUNDS,
    steps=st.lists(st.tuples(st.booleans(), TOKENS.map(tuple), st.integers(0, 12)), max_size=12),
)
def test_appending_and_truncating_leave_no_trace(
    bounds: tuple[int, int], steps: list[tuple[bool, tuple[int, ...], int]]
) -> None:
    state = NgramProposer(*bounds).open(())
    tokens: list[int] = []
    for grow, ids, count in steps:
        if grow:
            state.append(ids)
            tokens.extend(ids)
        else:
            tokens = tokens[: max(0, len(tokens) - count)]
            state.truncate(len(tokens))
        assert state.num_tokens == len(tokens)
        assert state.propose(count) == slow_proposal(tokens, *bounds, count)


def test_longest_then_most_recent() -> None:
    assert NgramProposer(1, 3).open([1, 2, 3, 7, 9, 2, 3, 8, 1, 2, 3]).propose(1) == [7]  # the longest n-gram
    assert NgramProposer(2, 2).open([1, 2, 3, 7, 9, 2, 3, 8, 1, 2, 3]).propose(1) == [8]  # the most recent of two


def test_copy_runs_on_into_itself() -> None:
    assert NgramProposer(2, 2).open([5, 1, 2, 1, 2]).propose(5) == [1, 2, 1, 2, 1]


def test_no_match_and_no_tokens() -> None:
    assert NgramProposer().open([]).propose(4) == []
    assert NgramProposer().open([1, 2, 3, 4, 1, 2, 3, 4]).propose(4) == []  # four tokens are no 5-gram
    assert NgramProposer(1).open([1, 1]).propose(0) == []


@pytest.mark.parametrize(
    ("given_min", "given_max", "bounds"),
    [(None, None, (5, 5)), (3, None, (3, 3)), (None, 4, (4, 4)), (2, 4, (2, 4))],
)
def test_absent_bounds(given_min: int | None, given_max: int | None, bounds: tuple[int, int]) -> None:
    proposer = NgramProposer(given_min, given_max)
    assert (proposer.prompt_lookup_min, proposer.prompt_lookup_max) == bounds


@pytest.mark.parametrize(
    ("bounds", "problem"),
    [
        ((4, 2), r"prompt_lookup_min \(4\) must be at most prompt_lookup_max \(2\)"),
        ((0, 2), "prompt_lookup_min must be at least 1, not 0"),
        ((None, 0), "prompt_lookup_min must be at least 1, not 0"),
    ],
)
def test_bad_bounds(bounds: tuple[int | None, int], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        NgramProposer(*bounds)


@pytest.mark.parametrize("length", [-1, 4])
def test_truncating_beyond_the_sequence(length: int) -> None:
    with pytest.raises(ValueError, match=f"cannot truncate 3 tokens to {length}"):
        NgramProposer().open([1, 2, 3]).truncate(length)
