"""The formats in which checkpoints write calls: how they are read, and, for grammars, how they are written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from outrider.gateway.text.tools.parser import NAME, NoCall, Reading, ToolParser

_OBJECT = '{"name": "NAME", "arguments": '
_BEGIN, _END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"  # noqa: RUF001 (theirs)
_CALL, _SEP, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"  # noqa: RUF001
AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Layout:
    """How calls are written: NAME stands for a function's name, and its arguments between `before` and `after`."""

    opening: str = ""
    before: str = _OBJECT
    after: str = "}"
    between: str = ""
    closing: str = ""


class Hermes(ToolParser):
    """Hermes, Qwen 2.5 and Qwen 3: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, once for each."""

    markers: ClassVar[tuple[str, ...]] = ("<tool_call>",)
    inner: ClassVar[tuple[str, ...]] = ("</tool_call>",)

    def calls(self, marker: str) -> Reading:
        """Reads one call."""
        yield from self.skip_spaces()
        yield from self.call_object()
        if (yield from self.follows("</tool_call>")):
            self.end_call()


class QwenXml(ToolParser):
    """Qwen 3 Coder: <tool_call><function=name><parameter=key>value</parameter></function></tool_call>, once for each.
    Values are texts where the schema says so, or nothing, else JSON."""

    markers: ClassVar[tuple[str, ...]] = ("<tool_call>",)
    inner: ClassVar[tuple[str, ...]] = ("</tool_call>",)

    def calls(self, marker: str) -> Reading:
        """Reads one call."""
        yield from self.skip_spaces()
        yield from self.literal("<function=")
        name, _ = yield from self.until((">",))
        if not NAME.fullmatch(name):
            raise NoCall
        opening, known = "{", self.functions.get(name, {}).get("properties", {})
        while not (yield from self.follows("</function>")):
            yield from self.skip_spaces()
            yield from self.literal("<parameter=")
            key, _ = yield from self.until((">",))
            value = yield from self.through("</parameter>")
            value = value.removeprefix("\n").removesuffix("\n")
            if opening == "{":
                self.tell_call(name)
            self.tell_more(f"{opening}{json.dumps(key, ensure_ascii=False)}: {_as_json(value, known.get(key))}")
            opening = ", "
        if opening == "{":
            self.tell_call(name, "{")
        self.tell_more("}")
        if (yield from self.follows("</tool_call>")):
            self.end_call()


def is_text(schema: Any) -> bool:
    """Whether a parameter in XML is written as it is, and not as JSON. A text of which its schema says more is JSON
    where a grammar writes it."""
    if not isinstance(schema, Mapping):
        return True
    if schema.get("type") == "string":
        return not {"pattern", "format", "minLength", "maxLength"}.intersection(schema)
    return not {"type", "$ref", "anyOf", "oneOf", "allOf"}.intersection(schema)


def _as_json(value: str, schema: Any) -> str:
    if not is_text(schema):
        try:
            if isinstance(json.loads(value), str) or schema.get("type") != "string":
                return value.strip()
        except (ValueError, RecursionError):
            pass  # told as it was written
    return json.dumps(value, ensure_ascii=False)


class Llama(ToolParser):
    """Llama 3.x: {"name": ..., "parameters": {...}} in place of an answer, or after <|python_tag|>; several with
    semicolons between them."""

    markers: ClassVar[tuple[str, ...]] = ("<|python_tag|>",)
    bare: ClassVar[str] = "{"

    def calls(self, marker: str) -> Reading:
        """Reads all calls of an answer."""
        while True:
            yield from self.skip_spaces()
            yield from self.call_object(known=not marker)
            if not (yield from self.follows(";")):
                return


class Mistral(ToolParser):
    """Mistral: [TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]; since the 11th version of its tokenizer
    [TOOL_CALLS]name[ARGS]{...}, once for each, some with [CALL_ID]id before [ARGS]."""

    markers: ClassVar[tuple[str, ...]] = ("[TOOL_CALLS]",)
    inner: ClassVar[tuple[str, ...]] = ("[ARGS]", "[CALL_ID]")
    short_ids: ClassVar[bool] = True

    def calls(self, marker: str) -> Reading:
        """Reads what follows one marker."""
        yield from self.skip_spaces()
        match (yield from self.peek()):
            case "[":
                yield from self.call_list()
            case "{":
                yield from self.call_object()
            case _:
                name, end = yield from self.until(("[ARGS]", "[CALL_ID]", "{"))
                if end == "[CALL_ID]":
                    yield from self.until(("[ARGS]",))
                elif end == "{":
                    self.step_back()
                yield from self.call_arguments(name.strip())
        self.end_call()


class DeepSeek(ToolParser):
    """DeepSeek: V3 and R1 with "function", the name, and the arguments in a block of Markdown; V3.1 with the name and
    the arguments alone."""

    markers: ClassVar[tuple[str, ...]] = (_BEGIN, _CALL)
    inner: ClassVar[tuple[str, ...]] = (_END, _SEP, _CALL_END)

    def calls(self, marker: str) -> Reading:
        """Reads all calls of an answer."""
        if marker == _BEGIN:
            yield from self.skip_spaces()
            yield from self.literal(_CALL)
        while True:
            yield from self._call()
            self.end_call()
            if not (yield from self.follows(_CALL)):
                break
        if (yield from self.follows(_END)):
            self.end_call()

    def _call(self) -> Reading:
        head, _ = yield from self.until((_SEP,))
        head = head.strip()
        in_markdown = head == "function"
        if in_markdown:
            head, _ = yield from self.until(("```json",))
        yield from self.call_arguments(head.strip())
        if in_markdown:
            yield from self.follows("```")
        yield from self.follows(_CALL_END)


class GenericJson(ToolParser):
    """The format of checkpoints without one of their own: in place of an answer one object with name and arguments, or
    a list of them."""

    bare: ClassVar[str] = "{["

    def calls(self, marker: str) -> Reading:
        """Reads all calls of an answer."""
        if (yield from self.peek()) == "[":
            yield from self.call_list(known=True)
        else:
            yield from self.call_object(known=True)
        self.end_call()


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A format by its name of the flag."""

    name: str
    parser: type[ToolParser]
    layout: Layout
    several: Layout | None = None  # where more than one may follow; None: the same
    in_xml: bool = False  # arguments are elements, else JSON


FORMATS = {
    one.name: one
    for one in (
        ToolFormat(
            "hermes",
            Hermes,
            Layout("<tool_call>\n", between="\n</tool_call>\n<tool_call>\n", closing="\n</tool_call>"),
        ),
        ToolFormat(
            "qwen3_coder",
            QwenXml,
            Layout(
                "<tool_call>\n", "<function=NAME>\n", "</function>", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>"
            ),
            in_xml=True,
        ),
        ToolFormat("llama3_json", Llama, Layout(before='{"name": "NAME", "parameters": ', between="; ")),
        ToolFormat("mistral", Mistral, Layout("[TOOL_CALLS] [", between=", ", closing="]")),
        ToolFormat("mistral_args", Mistral, Layout(before="[TOOL_CALLS]NAME[ARGS]", after="")),
        ToolFormat(
            "deepseek_v3",
            DeepSeek,
            Layout(_BEGIN, f"{_CALL}function{_SEP}NAME\n```json\n", f"\n```{_CALL_END}", "\n", _END),
        ),
        ToolFormat("deepseek_v31", DeepSeek, Layout(_BEGIN, f"{_CALL}NAME{_SEP}", _CALL_END, "", _END)),
        ToolFormat("json", GenericJson, Layout(), Layout("[", between=", ", closing="]")),
    )
}


def detect(chat_template: str) -> ToolFormat | None:
    """The format by what a chat template writes for calls in the history; None where it knows no tools."""
    if _BEGIN in chat_template:
        return FORMATS["deepseek_v3" if "```json" in chat_template else "deepseek_v31"]
    if "[TOOL_CALLS]" in chat_template:
        return FORMATS["mistral_args" if "[ARGS]" in chat_template else "mistral"]
    if "<tool_call>" in chat_template:
        return FORMATS["qwen3_coder" if "<function=" in chat_template else "hermes"]
    if "<|python_tag|>" in chat_template or ("tools" in chat_template and '"parameters": ' in chat_template):
        return FORMATS["llama3_json"]
    return FORMATS["json"] if "tools" in chat_template else None
