"""A conversation's prompt: its messages and tools by the chat template."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from outrider.gateway.text.tokenizer import Tokenizer
from outrider.gateway.text.tools.use import decode_json, template_tools
from outrider.rpc.errors import InvalidArgument, Violation, Violations, kind

if TYPE_CHECKING:
    from outrider.gateway.request import GenerationRequest

MAX_VARIABLES_CHARS = 64 * 1024  # of chat_template_kwargs, as JSON
# Fields of the request, or of the checkpoint.
RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"})


def chat_text(request: GenerationRequest, tokenizer: Tokenizer) -> str:
    """The prompt's text. InvalidArgument says what is wrong with the conversation or the template's variables."""
    found = Violations()
    variables = _variables(found, request.chat_template_kwargs)
    if not request.messages:
        found.add("chat", "is empty", "at least one message")
    found.raise_if_any()
    if request.tools and request.tool_choice != "none":
        variables["tools"] = template_tools(request.tools)
    if request.reasoning is not None and tokenizer.chat_template is not None:
        variables = request.reasoning.variables(tokenizer.chat_template.variables) | variables
    try:
        return tokenizer.render_chat(request.messages or (), request.add_generation_prompt, **variables)
    except ValueError as error:
        raise InvalidArgument.of([Violation("chat", str(error))]) from error


def decode_messages(chat: Any) -> tuple[dict[str, Any], ...]:
    """The protocol's Chat as templates take it."""
    return tuple(map(_decode_message, chat.messages))


def _decode_message(message: Any) -> dict[str, Any]:
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in message.tool_calls
    ]
    further = {"tool_calls": calls, "tool_call_id": message.tool_call_id, "name": message.name}
    further |= {"reasoning_content": message.reasoning}  # as templates call it
    content = message.content or (None if calls else "")
    return {"role": message.role, "content": content, **{name: value for name, value in further.items() if value}}


def decode_variables(chat: Any) -> Any:
    """The template's variables. InvalidArgument for what is no JSON."""
    return decode_json("chat_template_kwargs", chat.chat_template_kwargs)


def _variables(found: Violations, given: Any) -> dict[str, Any]:
    if not isinstance(given, dict) or not all(isinstance(name, str) for name in given):
        found.add("chat_template_kwargs", f"is {kind(given)}", "an object")
        return {}
    for name in sorted(RESERVED.intersection(given)):
        found.add(f"chat_template_kwargs.{name}", "is not the template's alone", "further variables of the template")
    try:
        size = len(json.dumps(given))
    except (TypeError, ValueError, RecursionError):
        found.add("chat_template_kwargs", "is no JSON", "an object")
        return {}
    if size > MAX_VARIABLES_CHARS:
        found.add("chat_template_kwargs", f"has {size} characters", f"at most {MAX_VARIABLES_CHARS}")
    return dict(given)
