"""Grammars of calls: what a format's parser reads, with arguments by the tools' schemas.

A Lark grammar of llguidance. A marker that is one token stands in it by its id: as a text it might never
match. Between markers every character but those of the arguments is fixed, and so are most tokens of a call."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from outrider.gateway.text.tools.calls import Tool
from outrider.gateway.text.tools.formats import Layout, ToolFormat, is_text
from outrider.rpc.words.structured import JSON_OPTIONS, StructuredOutput

MAX_CALLS = 32  # of a constrained completion
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
ANSWERS = ("json_schema", "json_object", "choice")  # kinds of a constraint that may stand beside calls
_OPEN = frozenset(
    {"additionalProperties", "unevaluatedProperties", "patternProperties", "$ref", "allOf", "anyOf", "oneOf"}
)
_DEFINITIONS = ("$defs", "definitions")
_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def calls_grammar(
    tool_format: ToolFormat,
    tools: Sequence[Tool],
    specials: Mapping[str, int],
    *,
    required: bool,
    parallel: bool,
    answer: StructuredOutput | None = None,
) -> StructuredOutput:
    """Calls of these tools, one if not `parallel`. `specials`: ids of the markers that are tokens. `required`: nothing
    but calls, else any text, in which what begins as a call is one of these; with `answer`, a kind of ANSWERS, such a
    text, or calls in place of it."""
    layout = (tool_format.several or tool_format.layout) if parallel else tool_format.layout
    rules = _Rules(specials)
    again = f" ({rules.names('next', tools)}){{0,{MAX_CALLS - 1}}}" if parallel else ""
    marker = "" if required or answer is not None else next(iter(tool_format.parser.markers), "")
    if not (layout.opening + layout.before).startswith(marker):
        marker = ""  # it may begin without
    rules.add("calls", f"({rules.names('first', tools)}){again} {rules.text(layout.closing)}")
    for index, tool in enumerate(tools):
        schema = _schema(tool, required)
        if answer is not None and tool_format.parser.bare:
            call = f"%json {_as_json(layout, tool, schema)}"
            rules.add(f"first_{index}", f"{rules.text(layout.opening)} {call}")
            rules.add(f"next_{index}", f"{rules.text(layout.between)} {call}")
            continue
        arguments = rules.elements(schema) if tool_format.in_xml else "%json " + _written(schema)
        opening = (layout.opening + _named(layout, tool)).removeprefix(marker)
        _add_call(rules, f"first_{index}", opening, arguments, layout)
        if again:
            _add_call(rules, f"next_{index}", layout.between + _named(layout, tool), arguments, layout)
    if required:
        start = "calls"
    elif answer is not None:
        start = "calls | answer"
        rules.add("answer", _answer(answer))
    elif not marker:
        start = "calls | other"
        rules.add("other", r"/([ \t\r\n]*[^{\[ \t\r\n](.|\n)*)?/")
    else:
        start = "(head calls)* TEXT" if parallel else "head calls | TEXT"
        rules.add_head(marker)
    return StructuredOutput(grammar=f"%llguidance {{}}\nstart: {start}\n{rules.lines}")


def _as_json(layout: Layout, tool: Tool, schema: Mapping[str, Any]) -> str:
    """A call that is JSON, as the answer in whose place it stands: where both begin alike, they are of one lexer."""
    key = "parameters" if '"parameters"' in layout.before else "arguments"
    call = {"properties": {"name": {"const": tool.name}, key: schema}, "required": ["name", key]}
    whole = {**ANY_OBJECT, **call, "additionalProperties": False, "x-guidance": JSON_OPTIONS}
    return json.dumps({**whole, **{name: schema[name] for name in _DEFINITIONS if name in schema}}, ensure_ascii=False)


def _answer(answer: StructuredOutput) -> str:
    if answer.choice is not None:
        return " | ".join(map(_quoted, answer.choice))
    schema = json.loads(answer.json_schema) if answer.json_schema is not None else ANY_OBJECT
    return "%json " + json.dumps({"x-guidance": JSON_OPTIONS, **(schema if isinstance(schema, dict) else {})})


def _named(layout: Layout, tool: Tool) -> str:
    return layout.before.replace("NAME", tool.name)


def _schema(tool: Tool, required: bool) -> Mapping[str, Any]:
    """The schema of the arguments, written as templates write them. Of parameters that are listed it takes no others: a
    function cannot be called with them."""
    schema = tool.parameters if required or tool.strict else ANY_OBJECT
    closed = {"additionalProperties": False} if "properties" in schema and not _OPEN.intersection(schema) else {}
    return {"type": "object", **closed, **schema}


def _written(schema: Mapping[str, Any]) -> str:
    return json.dumps({**schema, "x-guidance": _STYLE}, ensure_ascii=False)


def _add_call(rules: _Rules, name: str, before: str, arguments: str, layout: Layout) -> None:
    rules.add(name, f"{rules.text(before)} {arguments} {rules.text(layout.after)}")


class _Rules:
    """The rules of one grammar."""

    def __init__(self, specials: Mapping[str, int]) -> None:
        self._specials = specials
        self._split = re.compile("(" + "|".join(map(re.escape, specials)) + ")") if specials else None
        self.lines = ""

    def add(self, name: str, body: str) -> None:
        self.lines += f"{name}: {body}\n"

    def add_head(self, marker: str) -> None:
        """Any text, and then the first marker of calls."""
        self.lines += "TEXT: /(.|\\n)*/\n"
        if marker in self._specials:
            self.add("head", f"TEXT <[{self._specials[marker]}]>")
        else:
            self.add("head[lazy]", f"TEXT {_quoted(marker)}")

    def elements(self, schema: Mapping[str, Any]) -> str:
        """Arguments one by one, in the schema's order; a text ends where its element does."""
        parts, required = [], schema.get("required")
        required = required if isinstance(required, list) else []
        for key, given in schema.get("properties", {}).items():
            own: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
            end, opening = "\n</parameter>\n", _quoted(f"<parameter={key}>\n")
            whole = {**own, **{name: schema[name] for name in _DEFINITIONS if name in schema}}
            if not is_text(own):
                part = f"{opening} %json {_written(whole)} {_quoted(end)}"
            elif isinstance(own.get("enum"), list):
                part = f"{opening} ({' | '.join(_quoted(f'{one}{end}') for one in own['enum'])})"
            else:
                part = f"{opening} element_text"
            parts.append(part if key in required else f"({part})?")
        if "element_text[lazy]" not in self.lines:
            self.add("element_text[lazy]", '/(.|\\n)*/ "\\n</parameter>\\n"')
        anything = '("<parameter=" /[^>\\n]{1,64}/ ">\\n" element_text)*'
        return " ".join(parts) if "properties" in schema else anything

    def names(self, kind: str, tools: Sequence[Tool]) -> str:
        """The alternatives of a rule: any of the tools."""
        return " | ".join(f"{kind}_{index}" for index in range(len(tools)))

    def text(self, text: str) -> str:
        """A fixed text, its special tokens by their ids."""
        parts = [text] if self._split is None else self._split.split(text)
        return " ".join(
            f"<[{self._specials[part]}]>" if part in self._specials else _quoted(part) for part in parts if part
        )


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
