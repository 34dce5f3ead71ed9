"""A checkpoint's chat template: sandboxed Jinja with the names and settings of transformers, which the templates are
written for."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Container, Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from outrider.rpc.json_values import parse_json

_CONTENT = "content"
_NO_TEXT = {_CONTENT: ""}
_FILTERS_BY_TESTS = ("selectattr", "rejectattr")
MAX_REFUSAL_CHARS = 1000  # of a template's own words, which may be the conversation's
MAX_WRITTEN = 1 << 26  # characters of a prompt: more than the longest context has
MAX_BITS = 1 << 16  # of a whole number: larger ones are multiplied slowly, and nothing else runs meanwhile
_WIDTHS = re.compile(r"%(?:\([^()]*\))?[-#0 +]*(\*|[0-9]*)\.?(\*|[0-9]*)")  # and precisions, of a format


class TemplateRefusal(Exception):
    """The template cannot be read, or it refused a conversation."""


class ChatTemplate:
    """One template; compiled at its first use."""

    def __init__(self, source: str, source_for_tools: str | None = None) -> None:
        self.source = source
        self.source_for_tools = source_for_tools or source

    def render(self, messages: Iterable[Mapping[str, Any]], /, **variables: Any) -> str:
        """The text of a conversation; keys that are None count as absent, as in transformers. Where a template fails
        without the content of a message of calls, it has an empty one."""
        plain = [self._plain(message) for message in messages]
        if not plain:
            raise TemplateRefusal("it has no message")
        variables = {"tools": None, "documents": None, **variables}  # as transformers has them
        try:
            return self._written(plain, variables)
        except TemplateRefusal as refusal:
            filled = [{**message, **_NO_TEXT} if _is_of_calls_alone(message) else message for message in plain]
            if filled == plain or isinstance(refusal.__cause__, TimeoutError):  # it has run for as long as it may
                raise
            return self._written(filled, variables)

    def _written(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        try:
            template = self._compiled_for_tools if variables["tools"] else self._compiled
            return template.render({**variables, "messages": messages})
        except Exception as error:  # a template may raise anything by what it does to odd content, or by what it is
            raise TemplateRefusal(str(error)[:MAX_REFUSAL_CHARS] or type(error).__name__) from error

    @cached_property
    def variables(self) -> frozenset[str]:
        """What it may be told, by name."""
        try:
            parsed = [_environment().parse(source) for source in {self.source, self.source_for_tools}]
            return frozenset[str]().union(*map(meta.find_undeclared_variables, parsed))
        except (jinja2.TemplateError, RecursionError):
            return frozenset()  # rendering says what is wrong with it

    @cached_property
    def words(self) -> frozenset[str]:
        """The texts in its expressions and the names of fields: what it compares others with, and looks for in them."""
        parsed = list(map(_parse, {self.source, self.source_for_tools}))
        texts = (text.value for template in parsed for text in template.find_all(nodes.Const))
        names = {field.attr for template in parsed for field in template.find_all(nodes.Getattr)}
        return frozenset(names.union(text for text in texts if isinstance(text, str)))

    @cached_property
    def walks_parts(self) -> bool:
        """Whether it goes through a content's parts, as those do that write pictures' placeholders."""
        names = _names_of_content(self._parsed)
        return any(_is_content(loop.iter, names) for loop in self._parsed.find_all(nodes.For))

    @cached_property
    def _wants_parts(self) -> bool:
        """Whether texts have to come as parts, too: it goes through them, and asks nowhere whether there are any."""
        names = _names_of_content(self._parsed)
        asked = (test.node for test in self._parsed.find_all(nodes.Test) if test.name == "string")
        return self.walks_parts and not any(_is_content(node, names) for node in asked)

    @cached_property
    def _looks_for_none(self) -> bool:
        """Whether it tells a message of calls alone by a content that is None."""
        return any(map(_compares_content_with_none, {self._parsed, _parse(self.source_for_tools)}))

    @cached_property
    def _parsed(self) -> nodes.Template:
        return _parse(self.source)

    @cached_property
    def _compiled(self) -> jinja2.Template:
        return _environment().from_string(self.source)

    @cached_property
    def _compiled_for_tools(self) -> jinja2.Template:
        return _environment().from_string(self.source_for_tools)

    def _plain(self, message: Mapping[str, Any]) -> dict[str, Any]:
        plain = {key: value for key, value in message.items() if value is not None}
        content = plain.get("content")
        if isinstance(content, str) and content and self._wants_parts:
            plain["content"] = [{"type": "text", "text": content}]
        elif isinstance(content, list) and not self.walks_parts:
            raise TemplateRefusal("it takes no pictures")
        calls = plain.get("tool_calls")
        if not isinstance(calls, Sequence) or isinstance(calls, str) or not calls:
            return plain
        if not content and self._looks_for_none:
            plain["content"] = None
        return with_read_calls(plain)


class ContinuedTemplate(ChatTemplate):
    """A template whose text ends where the last message's does: the answer goes on with it."""

    def __init__(self, template: ChatTemplate) -> None:
        super().__init__(template.source, template.source_for_tools)
        self._template = template

    def render(self, messages: Iterable[Mapping[str, Any]], /, **variables: Any) -> str:
        """Renders as the template itself does, without what it writes behind the last text."""
        *before, last = list(messages) or [{}]
        content, mark = last.get("content"), f"CONTINUED{secrets.token_hex(8)}"
        parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
        places = [place for place, part in enumerate(parts) if isinstance(part.get("text"), str)]
        if not places:
            raise TemplateRefusal("the last message has no text to go on with")
        said = str(parts[places[-1]]["text"])
        marked = [*parts[: places[-1]], {"type": "text", "text": f"{said}{mark}\t"}, *parts[places[-1] + 1 :]]
        ends: Any = marked if isinstance(content, list) else marked[0]["text"]
        text = self._template.render([*before, {**last, "content": ends}], **variables)
        written, found, behind = text.rpartition(mark)
        if not found or mark in written:
            raise TemplateRefusal("it does not write the last message as it is, once: no answer can go on with it")
        keeps_spaces = behind.startswith("\t")  # at a text's end
        return written if keeps_spaces else written.removesuffix(said[len(said.rstrip()) :])


def _parse(source: str) -> nodes.Template:
    try:
        return _environment().parse(source)
    except (jinja2.TemplateError, RecursionError):
        return nodes.Template([])  # rendering says what is wrong with it


def _is_of_calls_alone(message: Mapping[str, Any]) -> bool:
    return message.get("content") is None and bool(message.get("tool_calls"))


def _compares_content_with_none(parsed: nodes.Template) -> bool:
    """Whether a node compares the content with none, in any spelling: `is none`, `== none`, `in [none, '']`, or as a
    filter's test."""
    names = _names_of_content(parsed)
    for asked in parsed.find_all((nodes.Test, nodes.Compare)):
        for_none = isinstance(asked, nodes.Test) and asked.name == "none"
        for_none = for_none or any(one.value is None for one in asked.find_all(nodes.Const))
        if for_none and any(_is_content(one, names) for one in asked.find_all(nodes.Expr)):
            return True
    filters = (one for one in parsed.find_all(nodes.Filter) if one.name in _FILTERS_BY_TESTS)
    given = ([one.value for one in asked.args if isinstance(one, nodes.Const)] for asked in filters)
    return any(values[:1] == [_CONTENT] and ("none" in values or None in values) for values in given)


def _names_of_content(parsed: nodes.Template) -> frozenset[str]:
    """Names that stand for a message's content, given to them or to a macro; of other names no further."""
    found, macros = {_CONTENT}, {macro.name: macro for macro in parsed.find_all(nodes.Macro)}
    for given in parsed.find_all(nodes.Assign):
        if isinstance(given.target, nodes.Name) and _is_content(given.node, frozenset()):
            found.add(given.target.name)
    for call in parsed.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name) and call.node.name in macros:
            given_to = zip(macros[call.node.name].args, call.args, strict=False)
            found.update(name.name for name, value in given_to if _is_content(value, frozenset()))
    return frozenset(found)


def _is_content(node: nodes.Node, names: Container[str]) -> bool:
    """Whether an expression is a message's content, through filters and these names that stand for it."""
    while isinstance(node, nodes.Filter) and node.node is not None:
        node = node.node
    if isinstance(node, nodes.Getattr):
        return node.attr == _CONTENT
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == _CONTENT
    if isinstance(node, nodes.Call):
        asked = node.node
        return isinstance(asked, nodes.Getattr) and asked.attr == "get" and node.args[:1] == [nodes.Const(_CONTENT)]
    return isinstance(node, nodes.Name) and node.name in names


def find_chat_template(folder: Path, config: Mapping[str, Any]) -> ChatTemplate | None:
    """The template of a checkpoint's folder: its own file, else the one in tokenizer_config.json. Raises ValueError."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        for_tools = folder / "additional_chat_templates/tool_use.jinja"
        return ChatTemplate(_read(file), _read(for_tools) if for_tools.is_file() else None)
    source = config.get("chat_template")
    if isinstance(source, list):  # several named ones
        try:
            named = {str(entry["name"]): str(entry["template"]) for entry in source}
        except (TypeError, KeyError):
            raise ValueError(
                "tokenizer_config.json: chat_template has an entry without a name and a template"
            ) from None
        return ChatTemplate(named["default"], named.get("tool_use")) if "default" in named else None
    return ChatTemplate(source) if isinstance(source, str) else None


def _read(file: Path) -> str:
    return file.read_text(encoding="utf-8")


class Arguments(dict[str, Any]):
    """A call's arguments: an object for templates that write it as JSON or look into it, and its own JSON text for
    those that put it between others."""

    def __init__(self, values: Mapping[str, Any], text: str) -> None:
        super().__init__(values)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __radd__(self, before: str) -> str:
        return before + self._text

    def __add__(self, after: str) -> str:
        return self._text + after


def with_read_calls(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message whose calls, if it has any, have arguments that templates can read."""
    calls = message.get("tool_calls")
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        return dict(message)
    return {**message, "tool_calls": [_with_arguments(call) for call in calls]}


def _with_arguments(call: Any) -> Any:
    """A call whose arguments can be read by every template; a text that is no JSON object stays one."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    given = function.get("arguments")
    text = given or "{}" if isinstance(given, str | None) else json.dumps(given, ensure_ascii=False)
    try:
        values = parse_json(text)
    except ValueError:
        return call
    return (
        {**call, "function": {**function, "arguments": Arguments(values, text)}} if isinstance(values, dict) else call
    )


class _GenerationTag(Extension):
    """{% generation %} marks the assistant's text for training; here its content is plain text."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Parses the content alone."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """Where templates run: what they write, in all and in a macro, is bounded, and so is what an operator makes of a
    small text or number. A filter or a method may still make a large text of it; time ends that."""

    intercepted_binops = frozenset({"*", "**", "%"})

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:
        """What a template or a macro has written."""
        held, size = [], 0
        for piece in pieces:
            size += len(piece)
            if size > MAX_WRITTEN:
                raise jinja2.TemplateRuntimeError(f"it writes more than {MAX_WRITTEN} characters")
            held.append(piece)
        return "".join(held)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """OverflowError for a result that is too large, before it is made."""
        if problem := _too_large(operator, left, right):
            raise OverflowError(f"{operator} would make more than {problem}")
        return super().call_binop(context, operator, left, right)


def _too_large(operator: str, left: Any, right: Any) -> str:
    """The bound that the result would exceed; empty: none."""
    items = bits = 0
    if operator == "%" and isinstance(left, str):
        items = sum(_width(width, right) for widths in _WIDTHS.findall(left) for width in widths)
    elif operator == "*" and isinstance(left, Sequence) and isinstance(right, int):
        items = len(left) * right
    elif operator == "*" and isinstance(left, int) and isinstance(right, Sequence):
        items = left * len(right)
    elif isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
    if items > MAX_WRITTEN:
        return f"{MAX_WRITTEN} characters or items"
    return f"{MAX_BITS} binary digits" if bits > MAX_BITS else ""


def _width(width: str, values: Any) -> int:
    """The width that a format names; `*`: the one that stands among its values."""
    if width != "*":
        return int(width or 0)
    return max((value for value in values if isinstance(value, int)), default=0) if isinstance(values, tuple) else 0


def _environment() -> ImmutableSandboxedEnvironment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Jinja's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(style: str) -> str:
    return datetime.now().strftime(style)
