"""The sorted contexts against a slow search, with blocks so small that every text has many."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.proposers.suffix import index as module
from outrider.proposers.suffix.index import SEPARATOR, TOKEN_BYTES, ContextIndex

DEPTH = 3
TOKENS = st.lists(st.sampled_from([0, 1, 255, 256, 2**32 - 2]), max_size=40)
STEPS = st.lists(st.tuples(st.booleans(), TOKENS, st.integers(0, 50)), max_size=6)


@pytest.fixture(autouse=True, scope="module")
def small_blocks() -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK", 4)
        yield


def backwards(tokens: list[int]) -> bytes:
    return array("I", tokens[::-1]).tobytes()


def shared(left: list[int], right: list[int]) -> int:
    """Tokens at the end that are equal, up to the depth."""
    length = 0
    while length < min(len(left), len(right), DEPTH) and left[-1 - length] == right[-1 - length]:
        length += 1
    return length


def check(index: ContextIndex, text: list[int], context: list[int]) -> None:
    lengths = [shared(text[:at], context) for at in range(len(text))]
    longest = max(lengths, default=0)
    looked_up = backwards(context[-DEPTH:])
    place = index.locate(looked_up)
    assert index.longest_match(looked_up, 1, place) == longest
    if longest < min(DEPTH, len(context)):
        assert index.longest_match(looked_up, longest + 1, place) == 0
    places = [at for at in range(len(text) - 1, -1, -1) if lengths[at] == longest]
    found = [position // TOKEN_BYTES for position in index.occurrences(looked_up, longest, 100, place)]
    assert found == places
    assert len(index.occurrences(looked_up, longest, 2, place)) == min(2, len(places))
    assert set(index.occurrences(looked_up, longest, 2, place)) <= {TOKEN_BYTES * at for at in places}


@settings(max_examples=60)
@given(steps=STEPS, context=TOKENS)
def test_finds_what_a_slow_search_finds_however_the_text_came_about(
    steps: list[tuple[bool, list[int], int]], context: list[int]
) -> None:
    index, text = ContextIndex(DEPTH), list[int]()
    for grow, ids, count in steps:
        if grow:
            index.append(ids)
            text += ids
        else:
            text = text[: max(0, len(text) - count)]
            index.truncate(len(text))
        assert len(index) == len(text)
        assert index.context() == backwards(text[-DEPTH:])
        check(index, text, text)
        check(index, text, context)
    restored = ContextIndex.load(DEPTH, *index.dump())
    check(restored, text, context)
    restored.append(context)
    check(restored, text + context, context)


@settings(max_examples=100)
@given(text=TOKENS.filter(bool), count=st.integers(0, 20), data=st.data())
def test_what_follows_goes_on_into_itself(text: list[int], count: int, data: st.DataObject) -> None:
    index = ContextIndex(DEPTH)
    index.append(text)
    at = data.draw(st.integers(0, len(text) - 1))
    expected = (text[at:] * (count + 1))[:count]
    assert index.following([TOKEN_BYTES * at] * 2, count) == [backwards(expected)] * 2


def test_what_shall_not_be_found_is_context() -> None:
    index = ContextIndex(DEPTH)
    index.append([SEPARATOR, 1, 2], found=False)
    index.append([3, 4])
    index.append([SEPARATOR], found=False)
    contexts = [backwards(context) for context in ([1], [1, 2], [9, 2, 3], [3, 4])]
    place = index.locate(contexts[1])
    assert [index.longest_match(context, 1, index.locate(context)) for context in contexts] == [0, 2, 2, 0]
    assert index.following(index.occurrences(contexts[1], 2, 9, place), 3) == [backwards([3, 4, SEPARATOR])]


@pytest.mark.parametrize("length", [-1, 4])
def test_truncating_beyond_the_text(length: int) -> None:
    index = ContextIndex(DEPTH)
    index.append([1, 2, 3])
    with pytest.raises(ValueError, match=f"cannot truncate 3 tokens to {length}"):
        index.truncate(length)
