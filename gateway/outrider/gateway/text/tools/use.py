"""What a request's tools come to: which calls the model may make, how they are read, and what constrains them."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from outrider.gateway.text.tokenizer import TextDelta, Tokenizer
from outrider.gateway.text.tools.calls import Tool, call_ids, join_calls
from outrider.gateway.text.tools.constraint import ANSWERS, calls_grammar
from outrider.gateway.text.tools.formats import AUTO, FORMATS, ToolFormat, detect
from outrider.gateway.text.tools.parser import NAME, ToolParser
from outrider.rpc.errors import InvalidArgument, Violation, Violations, quoted, shown
from outrider.rpc.words.request import GenerationRequest
from outrider.rpc.words.sampling_params import FinishReason, SamplingParams
from outrider.rpc.words.structured import StructuredOutput

MAX_TOOLS = 128
MAX_CHARS = 256 * 1024  # of all tools, as JSON
MAX_CONSTRAINT_CHARS = 64 * 1024  # of the grammar that they come to
CHOICES = ("auto", "none", "required")
STRUCTURED_OUTPUT = "sampling.structured_output"  # the capability
_NAMED = '{"type": "function", "function": {"name": ...}}'
_ALLOWED = f'{{"type": "allowed_tools", "allowed_tools": {{"mode": "auto" or "required", "tools": [{_NAMED}]}}}}'
_OF_CONSTRAINT = re.compile(r"(?:open\.)?sampling\.structured_output[\w.]*: ")


class AnswerText(Protocol):
    """The text of one completion, as it grows: TextStream, or what stands on one."""

    resumed: TextDelta

    @property
    def finished(self) -> bool:
        """Whether the completion has ended."""
        ...

    @property
    def num_held(self) -> int:
        """Characters that a push may have to look through beside its own."""
        ...

    def push(
        self, ids: Sequence[int], finish_reason: FinishReason | None = None, stop_token_id: int | None = None
    ) -> TextDelta:
        """Takes the next committed ids."""
        ...


class ToolStream:
    """The text of a completion without its calls, and these."""

    def __init__(self, text: AnswerText, parser: ToolParser, parallel: bool = True, required: bool = False) -> None:
        self._text, self._parser, self._parallel, self._required = text, parser, parallel, required
        self.resumed = self._parsed(text.resumed)

    @property
    def finished(self) -> bool:
        return self._text.finished

    @property
    def num_held(self) -> int:
        return self._parser.num_held

    def push(
        self, ids: Sequence[int], finish_reason: FinishReason | None = None, stop_token_id: int | None = None
    ) -> TextDelta:
        return self._parsed(self._text.push(ids, finish_reason, stop_token_id))

    def _parsed(self, delta: TextDelta) -> TextDelta:
        parts = [self._parser.push(delta.text)]
        if delta.finish_reason is not None:
            parts.append(self._parser.finish())
            if delta.finish_reason is FinishReason.STOP and self._parser.num_calls:
                delta.finish_reason = FinishReason.TOOL_CALLS
        told = () if self._required else parts  # of nothing but calls any text is what the end has cut
        delta.text = "".join(part.text for part in told)
        calls = join_calls(call for part in parts for call in part.calls)
        delta.tool_calls = tuple(call for call in calls if self._parallel or call.index == 0)
        return delta


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Tools that may be called."""

    format: ToolFormat
    functions: Mapping[str, Mapping[str, Any]]  # the schemas of their parameters, by name
    tokenizer: Tokenizer  # gives the text of the markers of calls, though they are special tokens
    parallel: bool  # else the first call counts
    constraint: StructuredOutput | None
    required: bool = False  # the constraint has nothing but calls

    def stream(self, text: AnswerText, request_id: str, seed: int, prompt_ids: Sequence[int], index: int) -> AnswerText:
        """The text of a completion, which `text` gives with its calls, without them, and these. Their ids are drawn
        from what the request is known by."""
        ids = call_ids(request_id, seed, prompt_ids, index, short=self.format.parser.short_ids)
        return ToolStream(text, self.format.parser(ids, self.functions), self.parallel, self.required)

    def named(self, error: InvalidArgument) -> InvalidArgument:
        """A refusal of the constraint, which nobody asked for by that name."""
        if self.constraint is None or not (found := _OF_CONSTRAINT.match(error.message)):
            return error
        return InvalidArgument.of([Violation("tools", error.message[found.end() :])])


def tool_use(
    found: Violations,
    request: GenerationRequest,
    sampling: SamplingParams,
    tokenizer: Tokenizer,
    capabilities: Collection[str],
) -> ToolUse | None:
    """None where no call can be made. What is wrong with the request is added to `found`."""
    if not request.tools and request.tool_choice in ("auto", "none"):
        return None
    before = found.count
    tools = _read_tools(found, request.tools)
    choice, answer = _read_choice(found, request.tool_choice, tools), sampling.structured_output
    if not isinstance(request.parallel_tool_calls, bool):
        found.add("parallel_tool_calls", f"is {shown(request.parallel_tool_calls)}", "true or false")
    tool_format = _format(tokenizer)
    if choice.mode == "none":
        return None
    if tool_format is None:
        allowed = 'no tools, tool_choice "none", or a gateway that is told by --tool-parser how the model calls'
        found.add("tools", "are none that the chat template shows to the model", allowed)
    if choice.mode == "required":
        answer = None  # it is of a text, and none comes
    elif answer is not None and answer.kind not in ANSWERS:
        found.add("tools", f"are given beside a {answer.kind}", f'{", ".join(ANSWERS)}, or tool_choice "none"')
    if not sampling.detokenize:
        found.add("tools", "need text, and detokenize is false", "tools with detokenize true")
    if found.count > before or tool_format is None:
        return None
    callable_tools = [tool for tool in tools if choice.names is None or tool.name in choice.names]
    constraint = _constraint(found, request, tool_format, callable_tools, choice, tokenizer, answer)
    if constraint is not None and STRUCTURED_OUTPUT not in capabilities:
        is_strict = choice.mode == "auto" and choice.names is None
        where, what = ("tools", "are strict") if is_strict else ("tool_choice", "is not auto or none")
        found.add(where, f"{what}, which needs a target with structured output", "tools that are not strict, and auto")
    functions = {tool.name: tool.parameters for tool in callable_tools}
    showing = _showing(tokenizer, tool_format)
    required = choice.mode == "required"
    return ToolUse(tool_format, functions, showing, request.parallel_tool_calls, constraint, required)


def _constraint(
    found: Violations,
    request: GenerationRequest,
    tool_format: ToolFormat,
    tools: Sequence[Tool],
    choice: _Choice,
    tokenizer: Tokenizer,
    answer: StructuredOutput | None,
) -> StructuredOutput | None:
    """None where the model writes what it wants."""
    is_free = choice.mode == "auto" and choice.names is None and answer is None
    if is_free and not any(tool.strict for tool in tools):
        return None
    texts = {text: token_id for token_id, text in tokenizer.added_tokens.items()}
    markers = {text: texts[text] for text in _markers(tool_format) if text in texts}
    parallel, required = request.parallel_tool_calls and not choice.single, choice.mode == "required"
    constraint = calls_grammar(tool_format, tools, markers, required=required, parallel=parallel, answer=answer)
    size = len(constraint.grammar or "")
    if size > MAX_CONSTRAINT_CHARS:
        found.add("tools", f"have schemas of {size} characters as a grammar", f"at most {MAX_CONSTRAINT_CHARS}")
    return constraint


def _markers(tool_format: ToolFormat) -> tuple[str, ...]:
    return (*tool_format.parser.markers, *tool_format.parser.inner)


def template_tools(tools: Sequence[Any]) -> list[Any]:
    """Tools as chat templates take them. What only concerns this side is left out."""
    return [_without_strict(tool) for tool in tools]


def _without_strict(tool: Any) -> Any:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping):
        return tool
    return {**tool, "function": {key: value for key, value in function.items() if key != "strict"}}


def _read_tools(found: Violations, given: Any) -> list[Tool]:
    if not isinstance(given, Sequence) or isinstance(given, str):
        found.add("tools", f"is {shown(given)}", "a list of tools")
        return []
    if not found.length("tools", given, MAX_TOOLS):
        return []
    try:
        size = len(json.dumps(given, ensure_ascii=False))
    except (TypeError, ValueError, RecursionError):
        found.add("tools", "are no JSON", "a list of JSON objects")
        return []
    if size > MAX_CHARS:
        found.add("tools", f"have {size} characters", f"at most {MAX_CHARS}")
        return []
    tools = [_read_tool(found, f"tools[{index}]", tool) for index, tool in enumerate(given)]
    names: set[str] = set()
    for index, tool in enumerate(tools):
        if tool.name and tool.name in names:
            found.add(f"tools[{index}].function.name", f"is {quoted(tool.name)} again", "each name once")
        names.add(tool.name)
    return tools


def _read_tool(found: Violations, where: str, given: Any) -> Tool:
    """What is wrong is added to `found`, and the tool of no use."""
    function = given.get("function") if isinstance(given, Mapping) else None
    if not isinstance(given, Mapping) or not isinstance(function, Mapping):
        found.add(where, "is no function", '{"type": "function", "function": {"name": ...}}')
        return Tool("", {}, False)
    if given.get("type", "function") != "function":
        found.add(f"{where}.type", f"is {quoted(given['type'])}", "function")
    name, parameters, strict = function.get("name"), function.get("parameters"), function.get("strict")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        problem = "is missing" if name is None else f"is {quoted(name)}"
        found.add(f"{where}.function.name", problem, "1 to 128 letters, digits and . _ - : /")
        name = ""
    if strict not in (None, True, False):
        found.add(f"{where}.function.strict", f"is {shown(strict)}", "true or false")
    description = function.get("description")
    if description is not None and not isinstance(description, str):
        found.add(f"{where}.function.description", f"is {shown(description)}", "a text")
    if parameters is None:  # it takes no arguments
        parameters = {"type": "object", "properties": {}}
    elif not isinstance(parameters, Mapping):
        found.add(f"{where}.function.parameters", f"is {shown(parameters)}", "a JSON schema, an object")
        parameters = {}
    elif parameters.get("type", "object") != "object":
        found.add(f"{where}.function.parameters.type", f"is {quoted(parameters['type'])}", "object")
    elif not isinstance(parameters.get("properties", {}), Mapping):
        found.add(f"{where}.function.parameters.properties", f"is {shown(parameters['properties'])}", "an object")
        parameters = {}
    return Tool(name, parameters, strict is True)


@dataclass(frozen=True, slots=True)
class _Choice:
    """What a tool_choice comes to."""

    mode: str  # of CHOICES
    names: tuple[str, ...] | None = None  # of the functions that may be called; None: all
    single: bool = False  # one call


def _read_choice(found: Violations, given: Any, tools: Sequence[Tool]) -> _Choice:
    """What is wrong is added to `found`."""
    if given is None or given == "":
        return _Choice("auto")
    if isinstance(given, str) and given in CHOICES:
        if given == "required" and not tools:
            found.add("tool_choice", "is 'required', and there are no tools", "auto or none without tools")
        return _Choice(given)
    where = "tool_choice"
    if isinstance(given, Mapping) and given.get("type") == "allowed_tools":
        allowed, where = given.get("allowed_tools"), f"{where}.allowed_tools"
        mode, listed = (allowed.get("mode"), allowed.get("tools")) if isinstance(allowed, Mapping) else (None, None)
        if mode in ("auto", "required") and isinstance(listed, list) and listed:
            places = enumerate(listed)
            return _Choice(mode, tuple(_read_named(found, f"{where}.tools[{at}]", one, tools) for at, one in places))
        found.add(where, "names no mode and tools", _ALLOWED)
        return _Choice("auto")
    if isinstance(given, Mapping) and given.get("type") == "function":
        return _Choice("required", (_read_named(found, where, given, tools),), single=True)
    found.add(where, f"is {quoted(given)}", f"{', '.join(CHOICES)}, {_NAMED} or {_ALLOWED}")
    return _Choice("auto")


def _read_named(found: Violations, where: str, given: Any, tools: Sequence[Tool]) -> str:
    """The name of a function of the request's; empty: it is none, which is added to `found`."""
    function = given.get("function") if isinstance(given, Mapping) and given.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        found.add(where, f"is {quoted(given)}", _NAMED)
        return ""
    if name not in [tool.name for tool in tools]:
        known = ", ".join(tool.name for tool in tools[:16]) or "none without tools"
        found.add(f"{where}.function.name", f"is {quoted(name)}, which is not in tools", known)
    return name


def _format(tokenizer: Tokenizer) -> ToolFormat | None:
    if tokenizer.tool_parser != AUTO:
        return FORMATS[tokenizer.tool_parser]
    template = tokenizer.chat_template
    return None if template is None else detect(template.source_for_tools)


class _ShowingTokenizer(Tokenizer):
    """Some special tokens have a text in it, though special tokens are left out."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The whole text of ids; the others have been left out already."""
        return super().decode([one for one in ids if one not in self.special_ids or not skip_special_tokens])


@lru_cache(maxsize=8)
def _showing(tokenizer: Tokenizer, tool_format: ToolFormat) -> Tokenizer:
    """A tokenizer that shows a format's markers."""
    markers = _markers(tool_format)
    hidden = frozenset(one for one in tokenizer.special_ids if tokenizer.added_tokens[one] not in markers)
    if hidden == tokenizer.special_ids:
        return tokenizer
    _ = tokenizer.token_bytes  # made once: the copy has it, too
    showing = copy.copy(tokenizer)
    showing.__class__ = _ShowingTokenizer
    showing.special_ids = hidden
    return showing
