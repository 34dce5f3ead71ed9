"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from outrider.gateway.generation import GenerationDelta
from outrider.gateway.http_answer import answer
from outrider.gateway.http_body import Body, read_body
from outrider.gateway.http_errors import invalid
from outrider.gateway.http_request import Ask, names_in, read_common, read_sampling, reads_stream
from outrider.gateway.http_shapes import TokenTexts, extension_shape, finish_shape
from outrider.gateway.service import GenerationEngine
from outrider.wire.checks import kind

TO_THE_CONTEXT_S_END = 2**31 - 1  # where max_tokens is not given; the gateway cuts it to what is left
_UNSUPPORTED = (
    "tools", "functions", "function_call", "audio", "web_search_options", "reasoning_effort", "verbosity",
    "continue_final_message", "chat_template", "chat_template_kwargs", "documents", "echo", "prompt_logprobs",
    "use_beam_search", "logits_processors",
)  # fmt: skip


class ChatEndpoint:
    """The next message of a conversation."""

    def __init__(self, engine: GenerationEngine) -> None:
        self._engine = engine

    async def create(self, request: Request) -> Response:
        """One answer to one conversation."""
        ask = read_chat(await read_body(request), request, self._engine)
        return await answer(request, self._engine, ask, ChatFace(ask, TokenTexts(self._engine.tokenizer)))


def read_chat(body: Body, request: Request | None, engine: GenerationEngine) -> Ask:
    """What was asked for; a field in its wrong shape is refused here, a value out of range by the engine."""
    body.refuse(*_UNSUPPORTED)
    body.refuse("tool_choice", unless=("none", "auto"))  # without tools both ask for nothing
    body.refuse("modalities", unless=(["text"],))
    stream, include_usage = reads_stream(body)
    limit_name = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    max_tokens = body.get(limit_name)
    num_logprobs = _num_logprobs(body)
    sampling = replace(
        read_sampling(body, engine.verifier.info.model.default_sampling),
        max_tokens=TO_THE_CONTEXT_S_END if max_tokens is None else max_tokens,
        logprobs=num_logprobs,
    )
    chat = replace(
        read_common(body, request, engine.model_name),
        messages=_messages(body),
        add_generation_prompt=body.flag("add_generation_prompt", True),
        sampling=sampling,
        max_tokens_given=max_tokens is not None,
    )
    names = {**names_in(body), "logprobs": "top_logprobs", "max_tokens": limit_name}
    return Ask(
        requests=(chat,),
        model=engine.model_name,
        stream=stream,
        include_usage=include_usage,
        reports_speculation=body.get("speculation") is not None,
        returns_token_ids=body.flag("return_token_ids"),
        num_logprobs=num_logprobs,
        names=(names,),
    )


class ChatFace:
    """The chat.completion objects."""

    prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, ask: Ask, texts: TokenTexts) -> None:
        self._ask, self._texts = ask, texts

    def opening(self, index: int) -> dict[str, Any]:
        """The first chunk says who speaks."""
        return {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }

    def choice(self, delta: GenerationDelta) -> dict[str, Any]:
        """A whole message."""
        message = {"role": "assistant", "content": delta.text, "refusal": None}
        return {"index": delta.index, "message": message, **self._rest(delta)}

    def piece(self, delta: GenerationDelta) -> dict[str, Any] | None:
        """Nothing for half a character."""
        asked = self._ask.num_logprobs is not None or self._ask.returns_token_ids
        if not delta.text and delta.finish_reason is None and not (asked and delta.token_ids):
            return None
        content = {"content": delta.text} if delta.text or delta.token_ids else {}
        return {"index": delta.index, "delta": content, **self._rest(delta)}

    def _rest(self, delta: GenerationDelta) -> dict[str, Any]:
        ask, count = self._ask, self._ask.num_logprobs
        return {
            "logprobs": None if count is None else self._texts.chat(delta.logprobs, count),
            **finish_shape(delta),
            **extension_shape(delta, ask.reports_speculation, ask.returns_token_ids),
        }


def _num_logprobs(body: Body) -> Any:
    """None without log probabilities; the number of alternatives is the validator's to judge."""
    if body.flag("logprobs"):
        return body.get("top_logprobs", 0)
    if body.get("top_logprobs"):
        raise invalid("top_logprobs", "is given without logprobs; allowed: only with logprobs true")
    return None


def _messages(body: Body) -> tuple[Mapping[str, Any], ...]:
    """The conversation with its contents as texts; what else a message holds is the chat template's."""
    if not body.items("messages"):
        raise invalid("messages", "is missing or empty; allowed: at least one message")
    messages = []
    for place, message in enumerate(body.items("messages")):
        where = f"messages[{place}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise invalid(where, "has no role; allowed: an object with role and content")
        if message.get("tool_calls") or message.get("function_call"):
            raise invalid(f"{where}.tool_calls", "is not supported; leave it out")
        messages.append({**message, "content": _content(message.get("content"), where)})
    return tuple(messages)


def _content(content: Any, where: str) -> str:
    """A text, or a list of text parts."""
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    if not isinstance(content, list):
        raise invalid(f"{where}.content", f"is {kind(content)}; allowed: a text or a list of parts")
    texts = []
    for place, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise invalid(f"{where}.content[{place}]", 'is no text; allowed: {"type": "text", "text": ...}')
        texts.append(part["text"])
    return "\n".join(texts)
