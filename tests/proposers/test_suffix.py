"""Suffix decoding against a slow search, each of its settings, and what of a store a sequence sees."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.proposers.base import LearningProposer, SequenceContext
from outrider.proposers.suffix import index as index_module
from outrider.proposers.suffix import proposer as module
from outrider.proposers.suffix.proposer import SuffixProposer

TOKENS = st.lists(st.integers(0, 2), max_size=25)
Output = tuple[list[int], list[int]]  # prompt, output


@pytest.fixture(scope="module")
def exact() -> Iterator[None]:
    """Small blocks, and every place where a context occurred is counted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_module, "BLOCK", 4)
        patch.setattr(module, "MAX_SAMPLED", 10**6)
        yield


def slow_proposal(
    tokens: list[int], outputs: list[Output], max_tokens: int, depth: int, factor: float, probability: float
) -> list[int]:
    """The sequence's own text comes first, then the outputs, the latest first."""
    places = [(tokens, at) for at in range(len(tokens) - 1, -1, -1)]
    for prompt, output in reversed(outputs):
        text = [*prompt[-depth:], *output]
        places += [(text, at) for at in range(len(text) - 1, len(text) - len(output) - 1, -1)]
    lengths = [_shared(text[:at], tokens, depth) for text, at in places]
    longest = max(lengths, default=0)
    count = min(max_tokens, int(longest * factor), depth)
    followed = []
    for (text, at), length in zip(places, lengths, strict=True):
        if longest and length == longest:
            rest = text[at:]
            followed.append((rest * (count + 1) if text is tokens else rest)[:count])
    path: list[int] = []
    while len(path) < count:
        agreeing = [rest for rest in followed if rest[: len(path)] == path and len(rest) > len(path)]
        counts = Counter(rest[len(path)] for rest in agreeing)
        if not counts or max(counts.values()) < probability * len(followed):
            break
        path.append(max(counts, key=counts.__getitem__))
    return path


def _shared(left: list[int], right: list[int], depth: int) -> int:
    length = 0
    while length < min(len(left), len(right), depth) and left[-1 - length] == right[-1 - length]:
        length += 1
    return length


@pytest.mark.usefixtures("exact")
@settings(max_examples=200)
@given(
    tokens=TOKENS,
    outputs=st.lists(st.tuples(TOKENS, TOKENS), max_size=4),
    max_tokens=st.integers(0, 12),
    depth=st.integers(1, 6),
    factor=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    probability=st.sampled_from([0.0, 0.1, 0.5, 0.8, 1.0]),
)
def test_proposes_what_a_slow_search_proposes(
    tokens: list[int], outputs: list[Output], max_tokens: int, depth: int, factor: float, probability: float
) -> None:
    proposer = SuffixProposer(depth, 100, factor, probability)
    for prompt, output in outputs:
        proposer.learn([*prompt, *output], SequenceContext(len(prompt)))
    expected = slow_proposal(tokens, outputs, max_tokens, depth, factor, probability)
    assert proposer.open(tokens).propose(max_tokens) == expected


@pytest.mark.usefixtures("exact")
@settings(max_examples=60)
@given(steps=st.lists(st.tuples(st.booleans(), TOKENS, st.integers(0, 12)), max_size=8))
def test_appending_and_truncating_leave_no_trace(steps: list[tuple[bool, list[int], int]]) -> None:
    state, tokens = SuffixProposer().open(()), list[int]()
    for grow, ids, count in steps:
        if grow:
            state.append(ids)
            tokens += ids
        else:
            tokens = tokens[: max(0, len(tokens) - count)]
            state.truncate(len(tokens))
        assert state.num_tokens == len(tokens)
        assert state.propose(count) == slow_proposal(tokens, [], count, 24, 1.0, 0.1)


def drafted(text: list[int], *outputs: list[int], max_tokens: int = 16, **settings: float) -> list[int]:
    """What is proposed after a text, when these outputs were learned."""
    proposer = SuffixProposer(**settings)  # type: ignore[arg-type]
    for output in outputs:
        proposer.learn(output, SequenceContext())
    return proposer.open(text).propose(max_tokens)


LONG = list(range(100, 140))


def test_a_longer_match_makes_a_longer_draft() -> None:
    assert drafted([1, 100], LONG) == [101]
    assert drafted([1, *LONG[:5]], LONG) == LONG[5:10]
    assert drafted([1, *LONG[:5]], LONG, max_tokens=2) == LONG[5:7]


def test_max_spec_factor() -> None:
    assert drafted([1, *LONG[:4]], LONG, suffix_decoding_max_spec_factor=2.5) == LONG[4:14]
    assert drafted([1, *LONG[:4]], LONG, suffix_decoding_max_spec_factor=0.5) == LONG[4:6]
    assert drafted([1, *LONG[:4]], LONG, suffix_decoding_max_spec_factor=0) == []


def test_max_tree_depth() -> None:
    texts = [8, 1, 2, 50], [9, 1, 2, 60], [1, 2, 60]
    assert drafted([8, 1, 2], *texts, suffix_decoding_max_tree_depth=3) == [50]  # it tells the three apart
    assert drafted([8, 1, 2], *texts, suffix_decoding_max_tree_depth=2) == [60]  # most of those after 1, 2
    assert drafted(LONG[:20], LONG, suffix_decoding_max_tree_depth=5) == LONG[20:25]


def test_min_token_prob() -> None:
    """Of four outputs three go on with 5, of these two with 6, of these one with 7."""
    texts = [1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6, 8], [1, 2, 3, 4, 5, 9], [1, 2, 3, 4, 0]
    for probability, path in ((0.0, 3), (0.25, 3), (0.3, 2), (0.5, 2), (0.6, 1), (0.75, 1), (0.8, 0)):
        found = drafted([1, 2, 3, 4], *texts, suffix_decoding_min_token_prob=probability)
        assert found == [5, 6, 8][:path]  # 7 and 8 are equal, and 8 is the later one


def test_max_cached_requests() -> None:
    outputs = [[number, number + 1000] for number in range(12)]
    for most in (0, 1, 2, 3, 7):
        found = [bool(drafted([number], *outputs, suffix_decoding_max_cached_requests=most)) for number in range(12)]
        kept = found.count(True)
        assert (2 * most + 2) // 3 <= kept <= most  # of three generations the newest may be empty but for one
        assert found == sorted(found)  # the latest


def test_an_output_begins_after_its_prompts_end() -> None:
    proposer = SuffixProposer()
    proposer.learn([7, 8, 9, 1, 2], SequenceContext(prompt_len=3))
    assert proposer.open([7, 8, 9]).propose(9) == [1, 2]
    assert proposer.open([7, 8]).propose(9) == []  # a prompt is learned as context alone


def test_a_path_ends_where_all_that_is_known_ends() -> None:
    same = [0, 0, 0]  # followed by nothing, and by nothing and then another output
    assert drafted([0, 0], same, same, suffix_decoding_max_tree_depth=3, suffix_decoding_max_spec_factor=2.0) == [0]


def test_another_salt_sees_nothing() -> None:
    proposer = SuffixProposer()
    assert isinstance(proposer, LearningProposer)
    proposer.learn(LONG, SequenceContext(salt="mine"))
    for salt, length in (("mine", 10), ("yours", 0), ("", 0), ("mine ", 0)):
        assert len(proposer.open(LONG[:10], SequenceContext(salt=salt)).propose(16)) == length


def test_a_sequences_own_text_counts_with_the_store() -> None:
    assert drafted([5, 6, 7, 8, 5, 6], [5, 6, 9], [5, 6, 9]) == [9]  # twice against once
    assert drafted([5, 6, 7, 8, 5, 6], [5, 6, 9]) == [7, 8]  # of equals its own


def test_a_store_outlives_its_process(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "store"
    first = SuffixProposer(suffix_store_file=file)
    first.learn(LONG, SequenceContext(salt="mine"))
    first.close()
    again = SuffixProposer(suffix_store_file=file)
    assert again.open(LONG[:10], SequenceContext(salt="mine")).propose(16) == LONG[10:20]
    file.write_bytes(file.read_bytes()[:-1])
    empty = SuffixProposer(suffix_store_file=file)
    assert empty.held()["sequences"] == 0 and "starts empty" in caplog.text and "damaged" in caplog.text
    empty.learn(LONG, SequenceContext())
    empty.close()
    assert SuffixProposer(suffix_store_file=file).held()["sequences"] == 1


def test_a_store_that_cannot_be_written_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    SuffixProposer(suffix_store_file=tmp_path / "nowhere" / "store").close()
    assert "was not written" in caplog.text
