"""Calls in a growing text: every format's, however it is split; what is no call is text, and nothing is lost."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.counting import CountedText

from outrider.gateway.text.tools.calls import join_calls
from outrider.gateway.text.tools.formats import FORMATS, Layout, detect
from outrider.gateway.text.tools.parser import MAX_CALLS, MAX_HEAD_CHARS, ToolParser
from outrider.rpc.words.answer import ToolCallDelta

NAMES = frozenset({"get_weather", "add"})
NUMBERS = {"properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
FUNCTIONS = {"get_weather": {}, "add": NUMBERS}
Calls = list[tuple[str, str]]


def parser(name: str) -> ToolParser:
    return FORMATS[name].parser(lambda index: f"call_{index}", FUNCTIONS)


def parse(name: str, *pieces: str) -> tuple[str, Calls]:
    """The text and the calls of some pieces of an output."""
    reading, text, deltas = parser(name), "", list[ToolCallDelta]()
    for part in [*map(reading.push, pieces), reading.finish()]:
        text += part.text
        deltas += part.calls
    assert all(bool(delta.id) == bool(delta.name) for delta in deltas)
    calls = join_calls(deltas)
    assert [(call.index, call.id) for call in calls] == [(index, f"call_{index}") for index in range(len(calls))]
    return text, [(call.name, call.arguments) for call in calls]


def places(name: str, *pieces: str) -> list[int]:
    """How much of the text comes before each call."""
    reading = parser(name)
    parts = [*map(reading.push, pieces), reading.finish()]
    return [call.num_before for call in join_calls(call for part in parts for call in part.calls)]


def write(layout: Layout, calls: Calls) -> str:
    """Calls as a model that was trained on a format writes them."""
    written = [layout.before.replace("NAME", name) + arguments + layout.after for name, arguments in calls]
    return layout.opening + layout.between.join(written) + layout.closing


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)
ARGUMENTS = st.dictionaries(st.text(), VALUES, max_size=4)
CALLS = st.lists(st.tuples(st.sampled_from(sorted(NAMES)), ARGUMENTS), min_size=1, max_size=3)
CUTS = st.lists(st.integers(0, 400), max_size=12)


def split(text: str, cuts: list[int]) -> list[str]:
    places = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    return [text[start:end] for start, end in pairwise(places)]


@pytest.mark.parametrize("name", [name for name, one in FORMATS.items() if not one.in_xml])
@given(calls=CALLS, cuts=CUTS, plain=st.booleans())
def test_what_is_written_comes_out_however_it_is_split(
    name: str, calls: list[tuple[str, dict[str, Any]]], cuts: list[int], plain: bool
) -> None:
    texts = [(function, json.dumps(arguments, ensure_ascii=plain)) for function, arguments in calls]
    one = FORMATS[name]
    layout = one.layout if len(texts) == 1 else one.several or one.layout
    assert parse(name, *split(write(layout, texts), cuts)) == ("", texts)


FRAGMENTS = [
    *{marker for one in FORMATS.values() for marker in (*one.parser.markers, *one.parser.inner)},
    '{"name": "add", "arguments": {"a": 1}}', '{"name": "add", "parameters": {', "[", "]", "{", "}", ";", ",", '"', " ",
    "<function=add>", "<parameter=a>", "</parameter>", "</function>", "\n", "function",
    "```json", "```", "add", "text", "<", "<tool", "[TOOL", "\\", "1", "null", '{"name": "no"}',
]  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
@given(text=st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join), cuts=CUTS)
def test_any_split_gives_the_same_and_without_calls_the_text_is_whole(name: str, text: str, cuts: list[int]) -> None:
    whole = parse(name, text)
    assert parse(name, *split(text, cuts)) == whole == parse(name, *text)
    assert places(name, *split(text, cuts)) == places(name, text)
    if not whole[1]:
        assert whole[0] == text


BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"  # noqa: RUF001
CALL, SEP, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"  # noqa: RUF001
OUTPUTS: list[tuple[str, str, str, Calls]] = [
    (
        "hermes",
        'Let me look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
        '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>\n',
        "Let me look.\n",
        [("get_weather", '{"city": "Oslo"}'), ("add", '{"a": 1}')],
    ),
    ("hermes", '\n\n<tool_call>\n{"name": "add"}\n</tool_call>', "", [("add", "{}")]),
    ("hermes", '<tool_call>{"name": "other", "arguments": {}}', "", [("other", "{}")]),
    ("hermes", "a <tool_call> b </tool_call> c", "a <tool_call> b </tool_call> c", []),
    ("hermes", '<tool_call> no <tool_call>{"name": "add"}</tool_call>', "<tool_call> no ", [("add", "{}")]),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1, oops', "oops", [("add", '{"a": 1, ')]),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": "1', "", [("add", '{"a": "1')]),
    (
        "hermes",
        '<tool_call>{"name": 7, "arguments": {}}</tool_call>',
        '<tool_call>{"name": 7, "arguments": {}}</tool_call>',
        [],
    ),
    ("hermes", "  only space follows \n", "  only space follows \n", []),
    ("hermes", " \n ", " \n ", []),
    ("hermes", "1 <tool_cal", "1 <tool_cal", []),
    (
        "llama3_json",
        '{"name": "get_weather", "parameters": {"city": "Oslo"}}; '
        '{"type": "function", "name": "add", "parameters": {}}',
        "",
        [("get_weather", '{"city": "Oslo"}'), ("add", "{}")],
    ),
    ("llama3_json", '<|python_tag|>{"name": "other", "parameters": {}}', "", [("other", "{}")]),
    (
        "qwen3_coder",
        "Ok.<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nnone\n</parameter>\n"
        "<parameter=c>\ntwo\n lines < 3\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call><function=get_weather></function></tool_call>",
        "Ok.",
        [("add", '{"a": 1, "b": "none", "c": "two\\n lines < 3"}'), ("get_weather", "{}")],
    ),
    ("qwen3_coder", "<tool_call>\n<function=a b>", "<tool_call>\n<function=a b>", []),
    ("qwen3_coder", "<tool_call><function=add><parameter=a>1", "<tool_call><function=add><parameter=a>1", []),
    ("llama3_json", '<|python_tag|>search.call(query="x")', '<|python_tag|>search.call(query="x")', []),
    ("llama3_json", '{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}', []),
    ("llama3_json", 'no {"name": "add", "parameters": {}}', 'no {"name": "add", "parameters": {}}', []),
    ("llama3_json", '{"function": "add", "parameters": {"b": 2}} more', " more", [("add", '{"b": 2}')]),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}, "id": "abcdefghi"}, {"name": "add", "arguments": {}}]',
        "",
        [("add", '{"a": 1}'), ("add", "{}")],
    ),
    (
        "mistral",
        'Yes.[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{}[TOOL_CALLS]add{"b": 2}',
        "Yes.",
        [("add", '{"a": 1}'), ("get_weather", "{}"), ("add", '{"b": 2}')],
    ),
    ("mistral", "[TOOL_CALLS] none of them", "[TOOL_CALLS] none of them", []),
    (
        "deepseek_v3",
        f'{BEGIN}{CALL}function{SEP}add\n```json\n{{"a": 1}}\n```{CALL_END}\n{CALL}function{SEP}add\n```json\n{{}}\n```'
        f"{CALL_END}{END}",
        "",
        [("add", '{"a": 1}'), ("add", "{}")],
    ),
    ("deepseek_v31", f"Ok.{BEGIN}{CALL}add{SEP}{{}}{CALL_END}{END}", "Ok.", [("add", "{}")]),
    ("deepseek_v31", f"{CALL}add{SEP}{{}}", "", [("add", "{}")]),
    ("deepseek_v31", f"{BEGIN}what", f"{BEGIN}what", []),
    ("json", '{"name": "add", "arguments": "{\\"a\\": 1}"}', "", [("add", '{"a": 1}')]),
    ("json", '[{"type": "function", "function": {"name": "add", "arguments": null}}]', "", [("add", "{}")]),
    ("json", '{"answer": 42}', '{"answer": 42}', []),
    ("json", "[1, 2]", "[1, 2]", []),
]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("several", [False, True])
def test_what_the_end_cuts_behind_a_call_is_no_text(name: str, several: bool) -> None:
    """The mark that closes it, what stands between two, or the beginning of the next one."""
    one = FORMATS[name]
    layout = (one.several or one.layout) if several else one.layout
    arguments = "<parameter=a>\n1\n</parameter>\n" if one.in_xml else '{"a": 1}'
    output = write(layout, [("add", arguments)] * (1 + several))
    told = output.index(arguments) + len(arguments)
    for end in range(told, len(output) + 1):
        text, calls = parse(name, output[:end])
        assert text == "" and calls[0][0] == "add" and calls[0][1] in ('{"a": 1}', '{"a": 1'), output[:end]
        if one.in_xml and "<parameter" in output[told:end]:
            break  # a value that is cut
        assert parse(name, *output[:end]) == (text, calls)


@pytest.mark.parametrize(("name", "output", "text", "calls"), OUTPUTS)
def test_outputs(name: str, output: str, text: str, calls: Calls) -> None:
    assert parse(name, output) == parse(name, *output) == (text, calls)


def test_arguments_come_as_they_are_written_and_text_is_not_kept() -> None:
    reading = parser("hermes")
    assert reading.push("Look: <").text == "Look: "
    assert reading.push("b>").text == "<b>"
    assert reading.push('<tool_call>{"name": "add", "arg').calls == []
    assert reading.push('uments": {"a').calls == [ToolCallDelta(0, "call_0", "add", '{"a', num_before=9)]
    assert reading.push('": 1').calls == [ToolCallDelta(0, arguments='": 1', num_before=9)]
    assert reading.push("}} </tool_call>").calls == [ToolCallDelta(0, arguments="}", num_before=9)]
    assert reading.finish().text == ""


def test_bounds() -> None:
    """What a hostile model writes is text; nothing is kept without bound, and no depth ends the process."""
    deep = '<tool_call>{"name": "add", "arguments": {"a": ' + "[" * 5000
    text, calls = parse("hermes", deep)
    assert len(calls) == 1 and len(text) + len(calls[0][1]) + len('<tool_call>{"name": "add", "arguments": ') == len(
        deep
    )
    long = '<tool_call>{"arguments": {"a": "' + "x" * MAX_HEAD_CHARS
    assert parse("hermes", long) == (long, [])
    many = '<tool_call>{"name": "add"}</tool_call>' * (MAX_CALLS + 2)
    text, calls = parse("hermes", many)
    assert len(calls) == MAX_CALLS and text == '<tool_call>{"name": "add"}</tool_call>' * 2


UNITS: list[tuple[str, str]] = [
    ("hermes", "<tool_call>"),
    ("hermes", '<tool_call>{"'),
    ("hermes", " "),
    ("hermes", '<tool_call>{"name": "add"}</tool_call>'),
    ("qwen3_coder", "<tool_call>"),
    ("qwen3_coder", "<tool_call><function=add><parameter=a>"),
    ("qwen3_coder", "<tool_call><function=add></function>\n"),
    ("mistral", "[TOOL_CALLS]"),
    ("mistral", '[TOOL_CALLS] [{"'),
    ("mistral_args", "[TOOL_CALLS]add[CALL_ID]"),
    ("llama3_json", "<|python_tag|>"),
    ("deepseek_v3", BEGIN),
    ("deepseek_v3", CALL),
    ("deepseek_v3", BEGIN + CALL),
    ("deepseek_v31", CALL + SEP),
    ("json", "["),
    ("json", '[{"name": "add", "arguments": {"a": ['),
]


@pytest.mark.parametrize(("name", "unit"), UNITS)
@pytest.mark.parametrize("in_pieces", [False, True])
def test_ten_times_the_text_is_ten_times_the_work(name: str, unit: str, in_pieces: bool) -> None:
    """Whatever a model writes, or a client says that it has written, at once or piece by piece."""

    def work(count: int) -> int:
        reading, pieces = parser(name), [unit] * count
        reading._buffer, CountedText.work = CountedText(), 0
        for piece in pieces if in_pieces else ["".join(pieces)]:
            reading.push(piece)
        reading.finish()
        return CountedText.work

    few = MAX_CALLS + 2
    assert work(10 * few) < 15 * work(few)


def test_white_space_before_anything_is_text_however_long() -> None:
    """More of it than a call's head may have, where a call may begin without a marker."""
    for name in FORMATS:
        assert parse(name, " " * (MAX_HEAD_CHARS + 2) + "x") == (" " * (MAX_HEAD_CHARS + 2) + "x", [])


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{% if tools %}<tool_call>{% endif %}", "hermes"),
        ("<tool_call>\n<function=", "qwen3_coder"),
        ("<|python_tag|>", "llama3_json"),
        ("{{ tools }} [TOOL_CALLS] [", "mistral"),
        ("[TOOL_CALLS]{{ name }}[ARGS]", "mistral_args"),
        (f"{BEGIN}{{{{ name }}}}\n```json", "deepseek_v3"),
        (BEGIN, "deepseek_v31"),
        ("{% for tool in tools %}", "json"),
        ("{% for message in messages %}", None),
    ],
)
def test_the_template_says_the_format(template: str, name: str | None) -> None:
    found = detect(template)
    assert (found and found.name) == name
