"""Conversations become prompts: the checkpoint's chat template, or the caller's."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from outrider.gateway.chat_template import ChatTemplate
from outrider.gateway.tokenizer import Tokenizer
from outrider.llm.errors import Unsupported
from outrider.llm.inputs import Prompt, checked_text

Message = Mapping[str, Any]
SHAPE = "messages are a list of {'role': ..., 'content': ...}, or a list of such lists"


def chat_prompts(
    tokenizer: Tokenizer,
    messages: Any,
    *,
    chat_template: str | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    variables: Mapping[str, Any] | None = None,
) -> list[Prompt]:
    """The prompts of one conversation or many."""
    if add_generation_prompt and continue_final_message:
        raise ValueError("continue_final_message goes on with the last message: set add_generation_prompt=False")
    if chat_template is not None:
        tokenizer = copy.copy(tokenizer)
        tokenizer.chat_template = ChatTemplate(chat_template)
    prompts = []
    for conversation in conversations_of(messages):
        text = tokenizer.render_chat(conversation, add_generation_prompt, **(variables or {}))
        if continue_final_message:
            text = _until_end_of_last(text, conversation)
        checked_text(text)
        prompts.append(Prompt(text, tuple(tokenizer.encode(text, add_special_tokens=False))))
    return prompts


def conversations_of(messages: Any) -> list[list[Message]]:
    """One conversation or many, with text alone."""
    if not _is_list(messages) or not messages:
        raise TypeError(f"{SHAPE}, got {messages!r:.60}")
    many = [messages] if isinstance(messages[0], Mapping) else messages
    for conversation in many:
        if not _is_list(conversation) or not all(isinstance(message, Mapping) for message in conversation):
            raise TypeError(f"{SHAPE}, got {conversation!r:.60}")
    return [[_with_text(message) for message in conversation] for conversation in many]


def _until_end_of_last(text: str, conversation: Sequence[Message]) -> str:
    """The prompt, cut where the last message ends."""
    last = str(conversation[-1].get("content") or "").strip()
    start = text.rfind(last)
    if start < 0:
        raise ValueError("continue_final_message: the chat template changes the last message")
    return text[: start + len(last)]


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _with_text(message: Message) -> Message:
    """Parts of text are joined by newlines; any other part is refused."""
    if not isinstance(message.get("role"), str):
        raise ValueError(f"a message needs a 'role', such as 'user', got {dict(message)!r:.100}")
    content = message.get("content")
    if content is None or isinstance(content, str):
        return message
    if not _is_list(content):
        raise TypeError(f"a message's 'content' is a str or a list of parts, got {content!r:.60}")
    return {**message, "content": "\n".join(map(_text_of, content))}


def _text_of(part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
    if kind not in ("text", "input_text"):
        raise Unsupported(f"a message's part of type {kind!r} is not supported: models take text alone")
    text = part.get("text")
    if not isinstance(text, str):
        raise TypeError(f"a message's part needs a 'text', got {part!r:.60}")
    return text
