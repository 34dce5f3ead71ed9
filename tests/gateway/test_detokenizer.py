"""Text, stops and cuts: windows against one token at a time, and both against a search of the whole text."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.counting import CountedText
from support.models import train_byte_fallback, train_byte_level
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from outrider.gateway.text import tokenizer as text_module
from outrider.gateway.text.tokenizer import (
    MAX_WAITING_IDS,
    TextDelta,
    TextStream,
    Tokenizer,
    earliest_stop,
    held_back,
    make_detokenizer,
)
from outrider.rpc.words.sampling_params import FinishReason, SamplingParams

KINDS = ("byte_level", "byte_fallback")
ALPHABET = "ab你🙂 "


@cache
def tokenizer(kind: str) -> Tokenizer:
    backend = train_byte_level() if kind == "byte_level" else train_byte_fallback()
    return Tokenizer(backend, kind, {}, None)


@cache
def letter_ids(kind: str) -> list[int]:
    """Ids that make matches and split characters likely: tokens of the stop strings' own characters, and specials."""
    ours = tokenizer(kind)
    ids = {i for text in (*ALPHABET, ALPHABET, "ab ab", "a" * 4) for i in ours.encode(text, add_special_tokens=False)}
    return sorted(ids | {0, 1})


@dataclasses.dataclass(frozen=True)
class Case:
    kind: str
    sampling: SamplingParams
    prompt: tuple[int, ...]
    ids: tuple[int, ...]
    finish: FinishReason | None
    stop_token_id: int | None


@st.composite
def cases(draw: st.DrawFn) -> Case:
    kind = draw(st.sampled_from(KINDS))
    any_id = st.one_of(st.sampled_from(letter_ids(kind)), st.integers(0, tokenizer(kind).num_tokens + 1))
    ids = tuple(draw(st.lists(any_id, min_size=1, max_size=24)))
    text = tokenizer(kind).decode(ids)
    starts = st.integers(0, max(0, len(text) - 1))
    part = st.builds(lambda start, length: text[start : start + length] or "a", starts, st.integers(1, 6))
    stop = part | st.text(ALPHABET, min_size=1, max_size=5)
    sampling = SamplingParams(
        stop=tuple(draw(st.lists(stop, max_size=4))),
        min_tokens=draw(st.sampled_from([0, 0, 1, 3, 9])),
        include_stop_str_in_output=draw(st.booleans()),
        skip_special_tokens=draw(st.booleans()),
        spaces_between_special_tokens=draw(st.booleans()),
    )
    finish = draw(st.sampled_from([None, FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT]))
    named = finish is FinishReason.STOP and draw(st.booleans())
    prompt = tuple(draw(st.lists(any_id, max_size=4)))
    return Case(kind, sampling, prompt, ids, finish, ids[-1] if named else None)


def run(case: Case, cuts: Sequence[int], num_resumed: int = 0) -> tuple[list[str], TextDelta, int]:
    """Pushes the ids in windows that end at `cuts`: the deltas' texts, the last delta, and the ids that count."""
    stream = TextStream(tokenizer(case.kind), case.sampling, case.prompt, case.ids[:num_resumed])
    texts, last, num_ids = [stream.resumed.text], stream.resumed, stream.resumed.num_ids
    bounds = sorted({num_resumed, *(cut for cut in cuts if cut > num_resumed), len(case.ids)})
    for start, end in itertools.pairwise(bounds):
        if stream.finished:
            break
        whole = end == len(case.ids)
        finish = (case.finish, case.stop_token_id) if whole else (None, None)
        last = stream.push(case.ids[start:end], *finish)
        texts.append(last.text)
        num_ids += last.num_ids
    return texts, dataclasses.replace(last, text="", num_ids=0), num_ids


def expected(case: Case) -> tuple[str, int, str | None]:
    """The text, the number of ids and the stop string, by a search of the whole text after every token."""
    plain = dataclasses.replace(case.sampling, stop=())
    stream = TextStream(tokenizer(case.kind), plain, case.prompt)
    text = ""
    for count, token_id in enumerate(case.ids, start=1):
        before, text = text, text + stream.push([token_id]).text
        ends = [
            (end, index, stop)
            for index, stop in enumerate(case.sampling.stop)
            for end in range(len(before) + 1, len(text) + 1)
            if text[:end].endswith(stop)
        ]
        if ends and count > case.sampling.min_tokens:
            end, _, stop = min(ends)
            return text[: end if case.sampling.include_stop_str_in_output else end - len(stop)], count, stop
        hidden = not plain.include_stop_str_in_output or (case.stop_token_id is None and plain.skip_special_tokens)
        if case.finish is FinishReason.STOP and hidden and count == len(case.ids):
            text = before
    return text, len(case.ids), None


@settings(max_examples=400)
@given(case=cases(), cuts=st.lists(st.integers(1, 23)))
def test_windows_give_what_single_tokens_give(case: Case, cuts: list[int]) -> None:
    texts, last, num_ids = run(case, cuts)
    single = run(case, range(1, len(case.ids)))
    assert ("".join(texts), last, num_ids) == ("".join(single[0]), single[1], single[2])
    text, count, stop = expected(case)
    if case.finish is None and stop is None:  # not ended: the rest is held back
        assert text.startswith("".join(texts))
        assert len(text) - len("".join(texts)) < max(map(len, case.sampling.stop), default=1)
    else:
        assert ("".join(texts), num_ids, last.stop_string) == (text, count, stop)
        assert last.finish_reason is (FinishReason.STOP if stop else case.finish)
        assert last.stop_token_id == (None if stop else case.stop_token_id)


@settings(max_examples=200)
@given(case=cases(), num_resumed=st.integers(0, 24), cuts=st.lists(st.integers(1, 23)))
def test_resuming_gives_the_rest(case: Case, num_resumed: int, cuts: list[int]) -> None:
    num_resumed = min(num_resumed, len(case.ids) - 1)
    delivered, _, _ = run(case, [num_resumed])
    texts, last, num_ids = run(case, cuts, num_resumed)
    whole, whole_last, whole_ids = run(case, [])
    assert ("".join(texts), last, num_ids) == ("".join(whole), whole_last, whole_ids)
    if num_resumed:
        assert texts[0] == "".join(delivered[:2])


@settings(max_examples=300)
@given(kind=st.sampled_from(KINDS), data=st.data(), skip=st.booleans())
def test_text_is_the_decoded_text(kind: str, data: st.DataObject, skip: bool) -> None:
    ours = tokenizer(kind)
    ids = data.draw(st.lists(st.sampled_from(letter_ids(kind)) | st.integers(0, ours.num_tokens - 1), max_size=30))
    stream = TextStream(ours, SamplingParams(skip_special_tokens=skip), ())
    text = "".join(stream.push([token_id]).text for token_id in ids)
    whole = ours.decode(ids, skip)
    if kind == "byte_level":
        assert whole in (text, text + "\ufffd")  # half a character at the end waits
    elif "\ufffd" not in whole:
        assert whole == text


class WholeDetokenizer:
    """What a detokenizer is to give, from all ids since the last text, none left out."""

    def __init__(self, tokenizer: Tokenizer, skip: bool) -> None:
        self._tokenizer, self._skip = tokenizer, skip
        self._ids: list[int] = []
        self._num_before = 0

    def step(self, token_id: int) -> str:
        self._ids.append(token_id)
        before, text = self._decode(self._num_before), self._decode(len(self._ids))
        if text.endswith("\ufffd") or text == before:
            return ""
        del self._ids[: self._num_before]
        self._num_before = len(self._ids)
        return text[len(before) :]

    def _decode(self, count: int) -> str:
        return self._tokenizer.decode(self._ids[:count], self._skip)


@cache
def with_silent_tokens(kind: str) -> tuple[Tokenizer, list[int]]:
    """A tokenizer, and ids of it that often give no text: special, unknown, repeated and half ones."""
    if kind == "byte_fallback":
        ours = tokenizer(kind)
        return ours, [*letter_ids(kind), 1, 2, ours.num_tokens, 10**6]
    if kind == "empty":  # a token that has no text anywhere, and the bytes of a character
        backend = Backend(models.WordLevel({"<>": 0, "<0xC3>": 1, "<0xA9>": 2, "a": 3}, unk_token="<>"))
        backend.decoder = decoders.Sequence([decoders.Replace("<>", ""), decoders.ByteFallback(), decoders.Fuse()])
        return Tokenizer(backend, kind, {}, None), [0, 1, 2, 3]
    backend = Backend(models.WordLevel({"<pad>": 0, "a": 1, "b": 2, "|": 3, "": 4}, unk_token="<pad>"))
    backend.decoder = decoders.CTC() if kind == "ctc" else decoders.WordPiece()
    backend.add_special_tokens(["<s>"])
    return Tokenizer(backend, kind, {}, None), [0, 1, 2, 3, 4, 5, 6, 10**6]


@settings(max_examples=150)
@given(kind=st.sampled_from(["byte_fallback", "empty", "ctc", "wordpiece"]), data=st.data(), skip=st.booleans())
def test_ids_without_text_change_no_text(kind: str, data: st.DataObject, skip: bool) -> None:
    ours, ids = with_silent_tokens(kind)
    drawn = data.draw(st.lists(st.sampled_from(ids), max_size=MAX_WAITING_IDS - 1))
    step, whole = make_detokenizer(ours, SamplingParams(skip_special_tokens=skip), ()), WholeDetokenizer(ours, skip)
    assert list(map(step.step, drawn)) == list(map(whole.step, drawn))


@pytest.mark.parametrize(
    ("kind", "silent"), [("byte_fallback", 2), ("byte_fallback", 10**6), ("empty", 0), ("ctc", 0), ("ctc", 1)]
)
def test_many_ids_without_text_are_decoded_once(kind: str, silent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, _ = with_silent_tokens(kind)
    ends = ours.encode("🙂", add_special_tokens=False) if kind == "byte_fallback" else [1, 2]  # of two tokens or more
    ids, decoded = [*ends, *[silent] * 2000, *ends], list[int]()
    text = ours.decode(ids, True)
    decode = ours.decode

    def noted(ids: list[int], skip: bool) -> str:
        decoded.append(len(ids))
        return decode(ids, skip)

    monkeypatch.setattr(ours, "decode", noted)
    detokenizer = make_detokenizer(ours, SamplingParams(), ())
    assert "".join(map(detokenizer.step, ids)) == text
    assert sum(decoded) < 100 * len(ids), "ids are decoded again and again"


@given(text=st.text("ab", max_size=8), stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
@example(text="aab", stops=["abb", "b"])
def test_held_back_is_the_longest_possible_beginning(text: str, stops: list[str]) -> None:
    lengths = [n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])]
    assert held_back(text, stops) == max(lengths, default=0)


def test_stop_that_completes_first_wins() -> None:
    assert earliest_stop("xxabcd", 6, ["abcd", "bc"]) == (5, "bc")
    assert earliest_stop("xxabcd", 6, ["cd", "abcd"]) == (6, "cd")  # together: the first listed
    assert earliest_stop("xxabcd", 6, ["abcd", "cd"]) == (6, "abcd")
    assert earliest_stop("abab", 1, ["ab"]) == (4, "ab")  # the first one was complete before
    assert earliest_stop("ab", 2, []) is None


@pytest.mark.parametrize(("include", "text"), [(False, "one "), (True, "one END")])
def test_stop_inside_a_window(include: bool, text: str) -> None:
    ours = tokenizer("byte_level")
    ids = ours.encode("one END two")
    sampling = SamplingParams(stop=("zzz", "END"), include_stop_str_in_output=include)
    completed = next(n for n in range(len(ids)) if "END" in ours.decode(ids[:n]))
    delta = TextStream(ours, sampling, ()).push(ids, FinishReason.LENGTH)
    assert delta == TextDelta(text, completed, FinishReason.STOP, "END")


def test_stop_string_beats_stop_token_at_the_same_token() -> None:
    ours = tokenizer("byte_level")
    ids = ours.encode("abc")
    delta = TextStream(ours, SamplingParams(stop=("c",)), ()).push(ids, FinishReason.STOP, ids[-1])
    assert delta == TextDelta("ab", len(ids), FinishReason.STOP, "c")


@pytest.mark.parametrize(
    ("include", "skip", "stop_token_id", "text"),
    [
        (False, True, None, "ab"),
        (False, False, None, "ab"),
        (True, True, None, "ab"),
        (True, False, None, "ab<|endoftext|>"),
        (False, False, 0, "ab"),
        (True, True, 0, "ab"),  # a special token has no text then
        (True, False, 0, "ab<|endoftext|>"),
    ],
)
def test_text_of_the_last_token(include: bool, skip: bool, stop_token_id: int | None, text: str) -> None:
    ours = tokenizer("byte_level")
    sampling = SamplingParams(include_stop_str_in_output=include, skip_special_tokens=skip)
    ids = [*ours.encode("ab"), 0]
    delta = TextStream(ours, sampling, ()).push(ids, FinishReason.STOP, stop_token_id)
    assert delta == TextDelta(text, len(ids), FinishReason.STOP, None, stop_token_id)


def test_hold_back_and_flush() -> None:
    ours = tokenizer("byte_level")
    stream = TextStream(ours, SamplingParams(stop=("<end>",)), ())
    assert stream.push(ours.encode("x<e")).text == "x"
    assert stream.push(ours.encode("n")).text == ""
    assert stream.push(ours.encode("o")).text == "<eno"
    assert stream.push(ours.encode("<")).text == ""
    assert stream.push([], FinishReason.ABORT) == TextDelta("<", 0, FinishReason.ABORT)
    assert stream.finished
    assert stream.push(ours.encode("late")) == TextDelta("", 0)


def test_min_tokens_counts_resumed_ids_and_starts_after_them() -> None:
    ours = tokenizer("byte_level")
    a = ours.encode("q")
    sampling = SamplingParams(stop=("qq",), min_tokens=3)
    stream = TextStream(ours, sampling, (), a * 2)
    assert stream.resumed == TextDelta("q", 2)
    assert stream.push(a * 3) == TextDelta("q", 2, FinishReason.STOP, "qq")


def test_output_that_holds_a_stop_is_finished_at_once() -> None:
    ours = tokenizer("byte_level")
    stream = TextStream(ours, SamplingParams(stop=("b",)), (), ours.encode("ab"))
    assert stream.finished
    assert stream.resumed.stop_string == "b"


def test_character_that_begins_in_the_prompt() -> None:
    ours = tokenizer("byte_level")
    ids = ours.encode("a🙃")
    assert ours.decode(ids[:-1]) == "a\ufffd"
    assert TextStream(ours, SamplingParams(), ids[:-1]).push(ids[-1:]).text == "🙃"


def test_space_after_the_prompt_is_kept() -> None:
    ours = tokenizer("byte_fallback")
    text = "the lazy dog jumps over  it"
    ids = ours.encode(text, add_special_tokens=False)
    for split in range(1, len(ids)):
        given_text = ours.decode(ids[:split])
        assert given_text + TextStream(ours, SamplingParams(), ids[:split]).push(ids[split:]).text == text


def test_replacement_characters_are_not_held_for_ever() -> None:
    ours = tokenizer("byte_fallback")
    invalid = ours.backend.token_to_id("<0xFF>")
    assert invalid is not None
    text = TextStream(ours, SamplingParams(), ()).push([invalid] * 100).text
    assert 64 <= len(text) <= 100
    assert set(text) == {"\ufffd"}


@pytest.mark.parametrize(("spaces", "text"), [(True, "<a> <b> c <a>"), (False, "<a><b> c <a>")])
def test_spaces_between_special_tokens(spaces: bool, text: str) -> None:
    backend = Backend(models.WordLevel({"c": 0}, unk_token="c"))  # no decoder: tokens are joined by spaces
    backend.add_special_tokens(["<a>", "<b>"])
    sampling = SamplingParams(skip_special_tokens=False, spaces_between_special_tokens=spaces)
    assert TextStream(Tokenizer(backend, "words", {}, None), sampling, ()).push([1, 2, 0, 1]).text == text


def test_without_detokenisation_there_are_only_ids() -> None:
    stream = TextStream(tokenizer("byte_level"), SamplingParams(detokenize=False), (1, 2))
    assert stream.push([300, 301]) == TextDelta("", 2)
    assert stream.push([5], FinishReason.STOP, 5) == TextDelta("", 1, FinishReason.STOP, None, 5)


@given(case=cases(), cuts=st.lists(st.integers(0, 24), max_size=3))
def test_a_long_push_is_delivered_on_the_way(case: Case, cuts: list[int]) -> None:
    whole = run(case, cuts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_module, "MAX_TEXT_CHARS", 0)
        assert run(case, cuts) == whole


def test_ten_times_the_ids_are_ten_times_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """With stop strings that nearly match, too."""
    monkeypatch.setattr(text_module, "MAX_TEXT_CHARS", 256)
    ids = tokenizer("byte_level").encode("a b " * 3, add_special_tokens=False)
    for stop in ((), ("a b " * 60 + "c",)):
        work = []
        for count in (200, 2000):
            stream = TextStream(tokenizer("byte_level"), SamplingParams(stop=stop), ())
            stream._text, CountedText.work = CountedText(), 0
            stream.push(ids * count)
            work.append(CountedText.work)
        assert work[1] < 15 * work[0]
