"""Conversations with calls by templates of every kind, against transformers; the template that is for tools."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from support.models import train_byte_level
from transformers import PreTrainedTokenizerFast

from outrider.gateway.text.chat_template import (
    MAX_BITS,
    MAX_WRITTEN,
    ChatTemplate,
    ContinuedTemplate,
    TemplateRefusal,
    find_chat_template,
)

TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
SHOWN = "{%- if tools is not none %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif -%}"
CALLS = "{%- for message in messages %}{% for call in message.tool_calls or [] %}CALL\n{% endfor %}{% endfor -%}"
# What checkpoints' templates do with the arguments of a call: write them as JSON, look into them, say them as text.
AS_OBJECTS = {
    "as JSON": "{{ call.function.arguments | tojson }}",
    "as JSON unless a text": "{% if call.function.arguments is string %}{{ call.function.arguments }}"
    "{% else %}{{ call.function.arguments | tojson }}{% endif %}",
    "one by one": "{% for key, value in call.function.arguments | items %}{{ key }}={{ value }};{% endfor %}",
    "if an object": "{% if call.function.arguments is mapping %}{{ call.function.arguments['a'] }}{% endif %}",
}
AS_TEXTS = {
    "joined": "{{ '<' + call.function.arguments + '>' }}",
    "said": "{{ call.function.arguments }}",
    "joined by a tilde": "{{ '<' ~ call.function.arguments ~ '>' }}",
}


def conversation(arguments: Any, content: Any = None) -> list[dict[str, Any]]:
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    return [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "2"},
    ]


def theirs(template: str, messages: list[dict[str, Any]], **variables: Any) -> str:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=train_byte_level(), chat_template=template)
    return str(tokenizer.apply_chat_template(messages, tokenize=False, **variables))


@pytest.mark.parametrize("kind", [*AS_OBJECTS, *AS_TEXTS])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_arguments_as_a_template_wants_them(kind: str, tools: list[dict[str, Any]] | None) -> None:
    template = SHOWN + CALLS.replace("CALL", {**AS_OBJECTS, **AS_TEXTS}[kind])
    text, values = '{"a":1, "b": "é"}', {"a": 1, "b": "é"}
    expected = theirs(template, conversation(values if kind in AS_OBJECTS else text), tools=tools)
    ours = ChatTemplate(template)
    assert ours.render(conversation(text), tools=tools) == expected
    if kind in AS_OBJECTS:
        assert ours.render(conversation(values), tools=tools) == expected


def test_arguments_that_are_no_object_stay_a_text() -> None:
    template = ChatTemplate(CALLS.replace("CALL", "{{ call.function.arguments }}"))
    assert template.render(conversation('{"a": 1, oops')) == '{"a": 1, oops\n'
    assert template.render(conversation("")) == template.render(conversation(None)) == "{}\n"


def test_a_message_of_calls_alone_has_no_content() -> None:
    """DeepSeek's template knows it by that; clients send an empty text, too."""
    template = ChatTemplate(
        "{% for message in messages %}{% if message['role'] == 'assistant' and message['content'] is none %}calls"
        "{% elif message['role'] == 'assistant' %}text{{ message['content'] }}{% endif %}{% endfor %}"
    )
    assert [template.render(conversation("{}", content)) for content in (None, "", "hm")] == [
        "calls",
        "calls",
        "texthm",
    ]


ONE = (
    "{% for m in messages %}<{{ m.role }}>PUT{% for call in m.tool_calls or [] %}{{ call.id }}{% endfor %}{% endfor %}"
)
WITHOUT_CONTENT = {
    "written": "{{ m.content }}",
    "by parts": "{% if m.tool_calls %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}",
    "if it is there": "{% if 'content' in m %}{{ m.content }}{% else %}nothing{% endif %}",
    "if it is defined": "{{ m['content'] if m.content is defined else 'nothing' }}",
    "trimmed": "{{ m.content | trim }}",
    "or else": "{{ m.content or 'nothing' }}",
}


@pytest.mark.parametrize("kind", WITHOUT_CONTENT)
def test_a_message_of_calls_alone_has_no_content_at_all_where_nobody_looks_for_none(kind: str) -> None:
    """Null, which servers answer with, is no text "None": the key is left out, as transformers leaves it out."""
    template = ONE.replace("PUT", WITHOUT_CONTENT[kind])
    read = theirs(template, conversation({}))
    assert ChatTemplate(template).render(conversation("{}")) == read and "None" not in read


IN_NEED = {
    "joined": "{{ '(' + m['content'] + ')' }}",
    "as JSON": "({{ m.content | tojson }})",
    "a method": "({{ m.content.strip() }})",
    "refused": "{% if m.content is not defined %}{{ raise_exception('no content') }}{% endif %}({{ m.content }})",
    "refused if none": "{{ raise_exception('no content') if m.content is none }}({{ m.content.strip() }})",
}


@pytest.mark.parametrize("kind", IN_NEED)
def test_a_template_that_fails_without_a_content_gets_an_empty_one(kind: str) -> None:
    template = ONE.replace("PUT", IN_NEED[kind])
    with_text = ChatTemplate(template).render(conversation("{}", ""))
    assert ChatTemplate(template).render(conversation("{}")) == with_text
    assert with_text.startswith("<user>(") and "<assistant>(" in with_text
    with pytest.raises(TemplateRefusal):  # no other message may be without
        ChatTemplate(template).render([{"role": "user"}])


LOOKS_FOR_NONE = {
    "is none": "m.content is none",
    "by brackets": 'm["content"] is none',
    "is not none": "not (m.content is not none)",
    "no spaces": "not(m['content']is not none)",
    "is equal": "m.content == none",
    "equal to it": "None == m.content",
    "is not equal": "not m.content != None",
    "by a test": "m.content is sameas none",
    "among others": "m.content in [none]",
    "got": "m.get('content') is none",
    "got with none": "m.get('content', none) is none",
    "filtered": "(m.content | default(7)) is none",
    "in a filter": "[m] | selectattr('content', 'none') | list",
    "in a filter by a test": "[m] | rejectattr('content', 'ne', none) | list",
}


@pytest.mark.parametrize("kind", [*LOOKS_FOR_NONE, "a name", "a macro"])
@pytest.mark.parametrize("for_tools", [False, True])
def test_a_template_that_looks_for_none_sees_it_in_every_spelling(kind: str, for_tools: bool) -> None:
    asked = LOOKS_FOR_NONE.get(kind, "said is none")
    template = "{% for m in messages %}{% if " + asked + " %}none{% else %}-{% endif %}{% endfor %}"
    if kind == "a name":
        template = template.replace(
            "{% if", "{% set said = m.content %}{% set said = said | trim if said else said %}{% if"
        )
    elif kind == "a macro":
        asks = "{% macro asks(said) %}{{ 'none' if said is none else '-' }}{% endmacro %}"
        template = asks + "{% for m in messages %}{{ asks(m.content) }}{% endfor %}"
    ours = ChatTemplate("", template) if for_tools else ChatTemplate(template)
    tools = TOOLS if for_tools else None
    assert [ours.render(conversation("{}", content), tools=tools) for content in (None, "")] == ["-none-"] * 2


def test_the_template_for_tools(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "for tools"}]
    messages = conversation("{}")
    found = find_chat_template(tmp_path, {"chat_template": named})
    assert found is not None and (found.render(messages), found.render(messages, tools=TOOLS)) == ("plain", "for tools")
    (tmp_path / "chat_template.jinja").write_text("file")
    found = find_chat_template(tmp_path, {"chat_template": json.dumps(named)})
    assert found is not None and found.render(messages, tools=TOOLS) == "file"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates/tool_use.jinja").write_text("file for tools")
    found = find_chat_template(tmp_path, {})
    assert found is not None and found.render(messages, tools=TOOLS) == "file for tools"


BROKEN = {
    "no template": "{% for %}",
    "an unknown tag": "{% made_up %}",
    "a range too far": "{% for i in range(10 ** 9) %}{% endfor %}",
    "a division by zero": "{{ 1 // 0 }}",
    "a macro that calls itself": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "nested too deep": "{{ " + "(" * 2000 + "1" + ")" * 2000 + " }}",
    "a key that is not there": "{{ {}.a.b.c }}",
    "the interpreter's own": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "a filter given what it does not take": "{{ messages | sum }}",
    "a filter that nobody has": "{{ messages | v }}",
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_template_that_fails_refuses_the_conversation(kind: str) -> None:
    template = ChatTemplate(BROKEN[kind])
    assert template.variables == frozenset() or kind == "a filter given what it does not take"
    with pytest.raises(TemplateRefusal) as refused:
        template.render([{"role": "user", "content": "hi"}])
    assert str(refused.value)


LARGE = {
    "what it writes": "{% for i in range(99999) %}{{ messages[0].content }}{% endfor %}",
    "what a macro writes": "{% macro m() %}{% for i in range(99999) %}{{ messages[0].content }}{% endfor %}"
    "{% endmacro %}{% set kept = m() %}",
    "what a block writes": "{% set kept %}{% for i in range(99999) %}{{ messages[0].content }}{% endfor %}{% endset %}",
    "a text times": "{% set kept = 'x' * times %}",
    "times a text": "{% set kept = times * 'x' %}",
    "a list times": "{% set kept = [1] * times %}",
    "a number times": "{% set n = namespace(x=7) %}{% for i in range(18) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "a power": "{% set kept = 7 ** 100000 %}",
    "a width": "{% set kept = '%100000000d' % 1 %}",
    "a width beside": "{% set kept = '%*d' % (times, 1) %}",
    "a precision": "{% set kept = '%.100000000f' % 1 %}",
}


@pytest.mark.parametrize("kind", LARGE)
def test_a_template_that_makes_too_much_of_little_is_refused(kind: str) -> None:
    """Before it is made: a gateway's memory is that of all its requests."""
    messages = [{"role": "user", "content": "x" * 1024}]
    tracemalloc.start()
    try:
        with pytest.raises(TemplateRefusal, match=f"more than ({MAX_WRITTEN}|{MAX_BITS}) "):
            ChatTemplate(LARGE[kind]).render(messages, times=10**8)
        assert tracemalloc.get_traced_memory()[1] < 40_000_000
    finally:
        tracemalloc.stop()


def test_what_templates_calculate_is_as_it_was() -> None:
    written = (
        "{{ 3 * 2 }} {{ 2 ** 10 }} {{ 2 ** -1 }} {{ 7 % 4 }} {{ 'a' * 3 }} {{ 2 * [1] }} {{ 1.5 * 2 }} "
        "{{ '* %02d of 1000000000%%' % 7 }} {{ '%*d' % (3, 1) }}"
    )
    expected = theirs(written, conversation("{}"))
    assert ChatTemplate(written).render(conversation("{}")) == expected


EACH, END = "{% for m in messages %}", "{% endfor %}"
WALKS = EACH + "{% for part in m['content'] %}{{ part.text or part.type }}{% endfor %}" + END
FILTERS = EACH + "{% for p in m.content | selectattr('type', 'equalto', 'text') %}{{ p.text }}{% endfor %}" + END
NAMES = EACH + "{% set said = m.content %}{% for part in said %}{{ part.type }}{% endfor %}" + END
ASKS = (
    EACH + "{% if m.content is string %}({{ m.content }}){% else %}"
    "{% for part in m.content %}{{ part.type }}{% endfor %}{% endif %}" + END
)
PLAIN = EACH + "{% for call in m.tool_calls or [] %}{{ call.id }}{% endfor %}{{ m.content }}" + END
PARTS = [{"type": "text", "text": "a"}, {"type": "image"}]


@pytest.mark.parametrize(
    ("source", "text", "parts"),
    [
        (WALKS, "hi", "aimage"),
        (FILTERS, "hi", "a"),
        (NAMES, "text", "textimage"),
        (ASKS, "(hi)", "textimage"),
        (PLAIN, "hi", None),
    ],
)
def test_texts_come_as_parts_where_the_template_goes_through_them(source: str, text: str, parts: str | None) -> None:
    """And asks nowhere whether they are texts."""
    template = ChatTemplate(source)
    assert template.render([{"role": "user", "content": "hi"}]) == text
    assert template.walks_parts == (parts is not None)
    if parts is None:
        with pytest.raises(TemplateRefusal, match="takes no pictures"):
            template.render([{"role": "user", "content": PARTS}])
    else:
        assert template.render([{"role": "user", "content": PARTS}]) == parts
    assert template.render([{"role": "user", "content": ""}]) == ("()" if source is ASKS else "")


CONTINUED = {
    "as it is": "{{ message.content }}<end>",
    "without the spaces around": "{{ message.content | trim }}</s>",
    "part by part": "{% for part in message.content %}{{ part.text }}{% endfor %}<end>",
}


@pytest.mark.parametrize("kind", CONTINUED)
@pytest.mark.parametrize("text", ["The capital is", "Two spaces  ", "end", "{", " "])
def test_a_text_that_is_gone_on_with_is_the_last(kind: str, text: str) -> None:
    """Also where what the template writes behind it looks like it."""
    source = "{% for message in messages %}<{{ message.role }}>\n" + CONTINUED[kind] + "\n{% endfor %}"
    content = [{"type": "text", "text": "One."}, {"type": "text", "text": text}] if kind == "part by part" else text
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": content}]
    ours = ContinuedTemplate(ChatTemplate(source)).render(messages)
    expected = theirs(source, messages, continue_final_message=True)
    cuts_template_too = kind == "without the spaces around" and text == " "  # transformers, which takes the line's end
    assert ours == expected + "\n" * cuts_template_too


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ({"role": "assistant", "content": None}, "has no text"),
        ({"role": "assistant", "content": [{"type": "image"}]}, "has no text"),
        ({"role": "assistant", "content": "changed"}, "does not write the last message as it is, once"),
        ({"role": "assistant", "content": "hi", "again": "hi"}, "does not write the last message as it is, once"),
    ],
)
def test_a_last_message_that_cannot_be_gone_on_with_is_refused(message: dict[str, Any], problem: str) -> None:
    source = "{% for m in messages %}{{ m.content * 2 if m.again else m.content | upper }}{% endfor %}"
    template = ContinuedTemplate(ChatTemplate(source))
    with pytest.raises(TemplateRefusal, match=problem):
        template.render([message])
