"""A guess is followed through every edit, and what is taken back leaves nothing behind."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.bench.prompts import edited
from outrider.gateway.text.tokenizer import Tokenizer
from outrider.pairs import pair_path
from outrider.proposers.base import SequenceContext
from outrider.proposers.prediction import LOST, PredictionProposer, PredictionState

K = 8
TEXT = list(range(100, 200))
NEW = list(range(500, 600))
PROMPT = (1, 2, 3)
# What the answer has in place of the guess's tokens 40 to `end`; and tokens after them until the guess is found again.
EDITS = {
    "replaced": (41, NEW[:1], 0),
    "two replaced": (42, NEW[:2], 0),
    "replaced by more": (41, NEW[:5], 1),
    "left out": (41, [], 1),
    "several left out": (44, [], 2),
    "many left out": (60, [], 2),
    "more than is looked over": (90, [], 4),
    "joined": (40, NEW[:1], 1),
    "a passage joined": (40, NEW[:30], 4),
    "a passage replaced": (55, NEW[:20], 4),
}


def opened(guess: list[int], answer: list[int]) -> PredictionState:
    return PredictionProposer().open([*PROMPT, *answer], SequenceContext(len(PROMPT), prediction=tuple(guess)))


def test_a_guess_that_holds_is_drafted_to_its_end() -> None:
    state = opened(TEXT, [])
    assert state.num_tokens == 3 and state.propose(4) == TEXT[:4] and state.propose(0) == []
    state.append(TEXT[:97])
    assert state.num_tokens == 100 and state.propose(8) == TEXT[97:] and state.num_met == 97
    state.append(TEXT[97:])
    assert state.propose(8) == [] and state.num_met == 100
    assert opened([], [5, 6]).propose(8) == []


@pytest.mark.parametrize("name", EDITS)
def test_it_is_found_again_where_the_answer_differs(name: str) -> None:
    end, instead, until_found = EDITS[name]
    state = opened(TEXT, [*TEXT[:40], *instead, *TEXT[end : end + until_found]])
    first = end + until_found
    assert state.propose(8) == TEXT[first : first + 8]
    state.append(TEXT[first:])
    assert state.num_met == 100 - (end - 40) and state.propose(1) == []


def test_parts_in_another_order_are_found() -> None:
    state = opened(TEXT, TEXT[50:70])
    assert state.propose(3) == TEXT[70:73]
    state.append(TEXT[10:30])
    assert state.propose(3) == TEXT[30:33] and state.num_met == 40


def test_nothing_is_drafted_where_the_answer_has_left_the_guess() -> None:
    state = opened(TEXT, [*TEXT[:40], *NEW[:LOST]])
    assert state.propose(4)
    state.append(NEW[LOST:50])
    assert state.propose(4) == []
    state.append(TEXT[60:64])
    assert state.propose(4) == TEXT[64:68]


def test_of_two_readings_the_pairs_of_neighbours_decide() -> None:
    """After a token that is not the guess's: does it stand for one of the guess's, or before it?"""
    assert opened([*TEXT, 7, 121], [*TEXT[:20], 7]).propose(2) == TEXT[21:23]
    assert opened([*TEXT, 7, 120], [*TEXT[:20], 7]).propose(2) == TEXT[20:22]


TOKENS = st.lists(st.integers(0, 3), max_size=24)


@settings(max_examples=200)
@given(guess=TOKENS, steps=st.lists(st.tuples(st.integers(0, 8), TOKENS), max_size=8))
def test_what_is_taken_back_leaves_nothing_behind(guess: list[int], steps: list[tuple[int, list[int]]]) -> None:
    state, answer = opened(guess, []), list[int]()
    for taken, ids in steps:
        answer = answer[: max(0, len(answer) - taken)]
        state.truncate(len(PROMPT) + len(answer))
        state.append(ids)
        answer += ids
        fresh = opened(guess, answer)
        assert state.num_tokens == fresh.num_tokens == len(PROMPT) + len(answer)
        assert state.propose(6) == fresh.propose(6) and state.num_met == fresh.num_met <= len(guess)


@pytest.mark.parametrize("length", [2, 6])
def test_truncating_beyond_the_answer(length: int) -> None:
    with pytest.raises(ValueError, match=f"cannot truncate 5 tokens to {length}"):
        opened(TEXT, [100, 101]).truncate(length)


def test_a_common_token_costs_a_bounded_search() -> None:
    """A guess of one token over and over: every place looks right."""
    state = opened([5] * 20_000 + TEXT, [5] * 50)
    state.append([6, 5, 5, 6, *TEXT[:4]])
    assert len(state.propose(8)) == 8


def oracle_rounds(num_tokens: int, lacking: set[int]) -> int:
    """The first token, then rounds of at most K tokens that are right, each up to the next place that the guess lacks,
    and the target's own."""
    done = rounds = 1
    while done < num_tokens:
        drafted = next((n for n in range(K) if done + n in lacking or done + n >= num_tokens), K)
        done, rounds = done + drafted + 1, rounds + 1
    return rounds


def test_nearly_what_an_oracle_gets_of_a_guess_with_every_20th_token_wrong() -> None:
    """On this project's own source."""
    tokenizer = Tokenizer.load(pair_path().target)
    root = Path(__file__).parents[2]
    texts = [tokenizer.encode(path.read_text("utf-8"))[:600] for path in sorted(root.glob("rpc/outrider/rpc/*.py"))]
    oracle = ours = 0
    for number, text in enumerate(texts):
        guess, lacking = edited(text, tokenizer.num_tokens, random.Random(number))
        state, done = opened(guess, text[:1]), 1
        oracle, ours = oracle + oracle_rounds(len(text), lacking), ours + 1
        while done < len(text):
            drafted = state.propose(K)
            pairs = zip(drafted, text[done:], strict=False)
            accepted = next((place for place, (left, right) in enumerate(pairs) if left != right), len(drafted))
            state.append(text[done : done + accepted + 1])
            done, ours = done + accepted + 1, ours + 1
    assert len(texts) > 15 and oracle / ours >= 0.85, oracle / ours
