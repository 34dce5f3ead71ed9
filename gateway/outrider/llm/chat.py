"""Conversations become prompts: the checkpoint's chat template, or the caller's."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from outrider.gateway.chat_template import ChatTemplate
from outrider.gateway.tokenizer import Tokenizer
from outrider.llm.errors import Unsupported
from outrider.llm.inputs import Prompt

Message = Mapping[str, Any]


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
        prompts.append(Prompt(text, tuple(tokenizer.encode(text, add_special_tokens=False))))
    return prompts


def conversations_of(messages: Any) -> list[list[Message]]:
    """One conversation or many, with text alone."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise TypeError("messages are a list of {'role': ..., 'content': ...}, or a list of such lists")
    many = [messages] if isinstance(messages[0], Mapping) else messages
    return [[_with_text(message) for message in conversation] for conversation in many]


def _until_end_of_last(text: str, conversation: Sequence[Message]) -> str:
    """The prompt, cut where the last message ends."""
    last = str(conversation[-1].get("content") or "").strip()
    start = text.rfind(last)
    if start < 0:
        raise ValueError("continue_final_message: the chat template changes the last message")
    return text[: start + len(last)]


def _with_text(message: Message) -> Message:
    """Parts of text are joined by newlines; any other part is refused."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return message
    texts = []
    for part in content:
        kind = "text" if isinstance(part, str) else part.get("type", "text")
        if kind not in ("text", "input_text"):
            raise Unsupported(f"a message's part of type {kind!r} is not supported: models take text alone")
        texts.append(part if isinstance(part, str) else part["text"])
    return {**message, "content": "\n".join(texts)}
