"""What /v1/responses is asked for, as the chat endpoint's body: items become messages, and fields their names there.

Nothing is stored between requests: what names an earlier response or item is refused, and a conversation is sent whole,
as clients do that set `store` to false."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import AfterValidator, Field
from starlette.requests import Request

from outrider.gateway.engine import GenerationEngine
from outrider.gateway.field_names import renamed
from outrider.gateway.http.errors import invalid
from outrider.gateway.http.protocol import (
    NAMES,
    VERBOSITIES,
    Body,
    OpenAIRequest,
    Unsupported,
    one_of,
    read_chat,
    refusal,
    validated,
    whole,
)
from outrider.rpc.errors import InvalidArgument, kind, quoted, shown
from outrider.rpc.messages import MAX_INT32

MAX_METADATA = 16
LOGPROBS = "message.output_text.logprobs"
INCLUDABLE = (
    "code_interpreter_call.outputs", "computer_call_output.output.image_url", "file_search_call.results",
    "message.input_image.image_url", LOGPROBS, "reasoning.encrypted_content", "web_search_call.action.sources",
    "web_search_call.results",
)  # fmt: skip
# The chat endpoint's names and this one's.
_OWN_NAMES = {
    "messages": "input", "max_completion_tokens": "max_output_tokens", "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort", "response_format": "text.format",
    "response_format.json_schema": "text.format",
}  # fmt: skip
_IMAGE = "input_image"
_TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_TEXT_PARTS |= {"reasoning_text": "text", "summary_text": "text"}


def _metadata(value: dict[str, Any]) -> dict[str, Any]:
    if len(value) > MAX_METADATA or not all(isinstance(text, str) for text in value.values()):
        raise refusal(f"is no object of at most {MAX_METADATA} texts; allowed: such, or leave it out")
    return value


class TextFormat(Body):
    """A constraint on the text, flat."""

    type: Annotated[str, one_of(["text", "json_object", "json_schema"])] = "text"
    name: str | None = None
    description: str | None = None
    json_schema: Any = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(Body):
    """How the text is to be."""

    format: TextFormat | None = None
    verbosity: Annotated[str | None, one_of(VERBOSITIES)] = None


class ReasoningBody(Body):
    """How much the model is to reason; summaries are none that anybody makes here."""

    effort: str = ""


class ResponsesBody(Body):
    """POST /v1/responses. Further fields are the chat endpoint's."""

    input: Any = None
    instructions: str | None = None
    max_output_tokens: Any = None
    text: TextOptions | None = None
    tools: list[Any] = Field(default_factory=list)
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    reasoning: ReasoningBody | None = None
    metadata: Annotated[dict[str, Any], AfterValidator(_metadata)] = Field(default_factory=dict)
    store: bool = False  # nothing is, whatever is asked; the answer says so
    stream: bool = False
    truncation: Annotated[str, one_of(["disabled"])] = "disabled"
    include: list[Annotated[str, one_of(INCLUDABLE)]] = Field(default_factory=list)
    top_logprobs: Any = None
    max_tool_calls: Annotated[int | None, whole(0, MAX_INT32)] = None  # of tools that a server runs: there are none

    previous_response_id: Unsupported = None
    conversation: Unsupported = None
    background: Unsupported = None
    prompt: Unsupported = None
    previous_response: Unsupported = None
    previous_input_messages: Unsupported = None
    enable_response_messages: Unsupported = None
    n: Unsupported = None
    messages: Unsupported = None
    max_tokens: Unsupported = None
    max_completion_tokens: Unsupported = None
    response_format: Unsupported = None
    logprobs: Unsupported = None
    prompt_logprobs: Unsupported = None
    output_ids: Unsupported = None
    return_token_ids: Unsupported = None
    echo: Unsupported = None

    @property
    def logprobs_wanted(self) -> bool:
        """Either field asks for them."""
        return LOGPROBS in self.include or self.top_logprobs is not None


@dataclass(frozen=True, slots=True)
class ResponsesRequest:
    """What was asked for, and the same as the chat endpoint has it."""

    body: ResponsesBody
    chat: OpenAIRequest


def read_responses(values: Mapping[str, Any], request: Request | None, engine: GenerationEngine) -> ResponsesRequest:
    """What was asked for; InvalidArgument has this endpoint's names."""
    body = validated(ResponsesBody, values)
    own = ResponsesBody.model_fields
    chat: dict[str, Any] = {name: value for name, value in values.items() if name not in own}
    chat |= {"messages": messages_of(body.input, body.instructions), "stream": body.stream}
    chat |= {"tools": _tools(body.tools), "tool_choice": _tool_choice(body.tool_choice)}
    chat |= {"parallel_tool_calls": body.parallel_tool_calls, "max_completion_tokens": body.max_output_tokens}
    if body.reasoning is not None:
        chat["reasoning_effort"] = body.reasoning.effort
    if body.logprobs_wanted:
        chat |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    if body.text is not None:
        chat["verbosity"] = body.text.verbosity
        chat["response_format"] = None if body.text.format is None else _response_format(body.text.format)
    chat.pop("stream_options", None)  # what there is concerns OpenAI's servers
    try:
        read = read_chat(chat, request, engine)
    except InvalidArgument as error:
        raise with_own_names(error, engine) from error
    return ResponsesRequest(body, replace(read, names=({**NAMES, **read.names[0]},)))


def with_own_names(error: InvalidArgument, engine: GenerationEngine) -> InvalidArgument:
    """A refusal in this endpoint's names."""
    told = renamed(error, _OWN_NAMES, engine.verifier.info.model.max_model_len)
    if not isinstance(told, InvalidArgument):
        return error
    places = [replace(item, field=item.field.replace("].function.", "].")) for item in told.violations]
    return InvalidArgument(told.message.replace("].function.", "]."), reason=told.reason, violations=places)


def messages_of(given: Any, instructions: str | None) -> list[dict[str, Any]]:
    """The conversation: a text of the user, or items."""
    messages = [] if instructions is None else [{"role": "system", "content": instructions}]
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        problem = "missing" if given is None else "empty" if given == [] else kind(given)
        raise invalid("input", f"is {problem}; allowed: a text, or a list of items")
    history = _History(messages)
    for place, item in enumerate(given):
        where = f"input[{place}]"
        if not isinstance(item, dict):
            raise invalid(where, f"is {kind(item)}; allowed: an object")
        name = "message" if item.get("type") is None else item["type"]
        take = _ITEMS.get(name) if isinstance(name, str) else None
        if take is None:
            raise invalid(f"{where}.type", f"is {quoted(name)}; allowed: {', '.join(_ITEMS)}")
        take(history, where, item)
    return history.messages


class _History:
    """Messages as items make them: what an assistant reasoned, said and called in one turn is one message."""

    def __init__(self, messages: list[dict[str, Any]]) -> None:
        self.messages = messages
        self._turn: dict[str, Any] | None = None  # of the assistant, to which items may be added

    def message(self, where: str, item: dict[str, Any]) -> None:
        role = item.get("role")
        read = _text_of if role == "assistant" else _content_of
        text = read(f"{where}.content", item.get("content"))
        if role != "assistant":
            self._turn = None
            self.messages.append({"role": "system" if role == "developer" else role, "content": text})
        elif self._turn is None or "content" in self._turn or "tool_calls" in self._turn:
            self._begin()["content"] = text
        else:
            self._turn["content"] = text

    def reasoning(self, where: str, item: dict[str, Any]) -> None:
        text = _text_of(f"{where}.content", item.get("content") or item.get("summary") or [])
        if text:
            self._begin()["reasoning_content"] = text

    def call(self, where: str, item: dict[str, Any]) -> None:
        turn = self._begin() if self._turn is None else self._turn
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        for name, value in {"call_id": item.get("call_id"), **function}.items():
            if not isinstance(value, str):
                problem = "missing" if value is None else shown(value)
                raise invalid(f"{where}.{name}", f"is {problem}; allowed: a text")
        calls = turn.setdefault("tool_calls", [])
        calls.append({"id": item["call_id"], "type": "function", "function": function})

    def output(self, where: str, item: dict[str, Any]) -> None:
        self._turn = None
        if not isinstance(item.get("call_id"), str):
            raise invalid(f"{where}.call_id", "is no text; allowed: a function_call's")
        text = _text_of(f"{where}.output", item.get("output"))
        self.messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": text})

    def _begin(self) -> dict[str, Any]:
        self._turn = {"role": "assistant"}
        self.messages.append(self._turn)
        return self._turn


_ITEMS: dict[str, Callable[[_History, str, dict[str, Any]], None]] = {
    "message": _History.message,
    "reasoning": _History.reasoning,
    "function_call": _History.call,
    "function_call_output": _History.output,
}


def _content_of(where: str, content: Any) -> str | list[dict[str, Any]]:
    """A text, or the chat endpoint's parts where there are pictures among them."""
    if not isinstance(content, list) or not any(isinstance(one, dict) and one.get("type") == _IMAGE for one in content):
        return _text_of(where, content)
    return [
        one if isinstance(one, dict) and one.get("type") == _IMAGE else {"type": "text", "text": _text_of(where, [one])}
        for one in content
    ]


def _text_of(where: str, content: Any) -> str:
    """A text, or parts that are texts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        problem = "missing" if content is None else kind(content)
        raise invalid(where, f"is {problem}; allowed: a text or a list of parts")
    texts = []
    for place, part in enumerate(content):
        name = part.get("type") if isinstance(part, dict) else None
        text = part.get(_TEXT_PARTS.get(name, "")) if isinstance(name, str) else None
        if not isinstance(text, str):
            raise invalid(f"{where}[{place}]", f"is no text; allowed: {', '.join(_TEXT_PARTS)}")
        texts.append(text)
    return "\n".join(texts)


def _tools(given: list[Any]) -> list[Any]:
    """Tools as the chat endpoint has them: the function is an object of its own."""
    tools = []
    for place, tool in enumerate(given):
        if not isinstance(tool, dict) or tool.get("type") != "function":
            name = quoted(tool.get("type")) if isinstance(tool, dict) else kind(tool)
            raise invalid(f"tools[{place}].type", f"is {name}; allowed: function")
        told = {key: value for key, value in tool.items() if key != "type" and value is not None}
        tools.append({"type": "function", "function": told})
    return tools


def _tool_choice(given: Any) -> Any:
    if not isinstance(given, dict):
        return given
    if given.get("type") == "allowed_tools":
        listed = given.get("tools")
        tools = [_tool_choice(one) for one in listed] if isinstance(listed, list) else listed
        return {"type": "allowed_tools", "allowed_tools": {"mode": given.get("mode"), "tools": tools}}
    if given.get("type") != "function":
        raise invalid("tool_choice.type", f"is {quoted(given.get('type'))}; allowed: function, allowed_tools")
    return {"type": "function", "function": {"name": given.get("name")}}


def _response_format(given: TextFormat) -> dict[str, Any]:
    if given.type != "json_schema":
        return {"type": given.type}
    return {"type": "json_schema", "json_schema": {"name": given.name, "schema": given.json_schema}}
