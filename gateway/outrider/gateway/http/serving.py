"""POST /v1/chat/completions.

POST /v1/completions.

From an OpenAIRequest to its response: one gateway request a prompt, their deltas merged, whole or as a stream."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from outrider.gateway.admission import AdmissionGroup
from outrider.gateway.engine import GenerationEngine, merge
from outrider.gateway.http import sse
from outrider.gateway.http.errors import error_body, invalid, renamed
from outrider.gateway.http.protocol import (
    FINGERPRINT,
    Body,
    OpenAIRequest,
    TextPlace,
    TokenTexts,
    UsageSum,
    extension_shape,
    finish_shape,
    join,
    names_in,
    options_of,
    read_body,
    read_common,
    read_sampling,
    reads_stream,
)
from outrider.gateway.request import GenerationDelta, GenerationRequest, written
from outrider.rpc.errors import OutriderError
from outrider.rpc.validate import kind


class ResponseBuilder(Protocol):
    """What an endpoint's answers look like."""

    prefix: str  # of ids
    whole_object: str
    chunk_object: str

    def opening(self, index: int) -> dict[str, Any] | None:
        """The choice that a completion's stream begins with."""

    def choice(self, delta: GenerationDelta) -> dict[str, Any]:
        """A whole completion."""

    def piece(self, delta: GenerationDelta) -> dict[str, Any] | None:
        """What a stream says of a delta; None: nothing."""


async def respond(
    request: Request, engine: GenerationEngine, openai_request: OpenAIRequest, builder: ResponseBuilder
) -> Response:
    """The response. An error before the first token has a status of its own, unless the stream was kept alive before
    it; one after that is an event."""
    deltas = generate(engine, openai_request)
    if not openai_request.stream:
        return await sse.unless_gone(request.receive, _whole(engine, openai_request, builder, deltas))
    keep_alive_s = options_of(request).sse_keep_alive_s
    first = asyncio.ensure_future(anext(deltas))
    try:
        await sse.unless_gone(request.receive, asyncio.wait((first,), timeout=keep_alive_s or None))
    except BaseException:
        await sse.end(first)
        raise
    if first.done():
        first.result()
    return sse.EventStream(_events(engine, openai_request, builder, first, deltas), keep_alive_s)


async def generate(engine: GenerationEngine, openai_request: OpenAIRequest) -> AsyncGenerator[GenerationDelta, None]:
    """The deltas of all prompts, admitted or refused as one; completion j of prompt i has the index i * n + j."""
    group = AdmissionGroup(engine.admission, len(openai_request.requests))
    async with aclosing(
        merge([_one(engine, openai_request, place, group) for place in range(len(openai_request.requests))])
    ) as deltas:
        async for delta in deltas:
            yield delta


async def _one(
    engine: GenerationEngine, openai_request: OpenAIRequest, place: int, group: AdmissionGroup
) -> AsyncGenerator[GenerationDelta, None]:
    try:
        async with aclosing(engine.generate(openai_request.requests[place], group)) as deltas:
            async for delta in deltas:
                yield replace(delta, index=place * openai_request.n + delta.index) if place else delta
    except OutriderError as error:
        raise renamed(error, openai_request.names[place]) from error


async def _whole(
    engine: GenerationEngine,
    openai_request: OpenAIRequest,
    builder: ResponseBuilder,
    deltas: AsyncGenerator[GenerationDelta, None],
) -> Response:
    completions: dict[int, list[GenerationDelta]] = {}
    usage, num_logprobs = UsageSum(), 0
    async with aclosing(deltas):
        async for delta in deltas:
            completions.setdefault(delta.index, []).append(delta)
            usage.add(delta, openai_request.n)
            num_logprobs += delta.num_logprobs

    def body() -> Response:
        envelope = _envelope(openai_request, builder.prefix, completions[0][0], builder.whole_object)
        choices = [builder.choice(join(completions[index])) for index in sorted(completions)]
        return JSONResponse({**envelope, "choices": choices, "usage": usage.shape()})

    return await written(num_logprobs, body)


async def _events(
    engine: GenerationEngine,
    openai_request: OpenAIRequest,
    builder: ResponseBuilder,
    first: asyncio.Future[GenerationDelta],
    rest: AsyncGenerator[GenerationDelta, None],
) -> AsyncGenerator[str, None]:
    """The chunks. Usage, where it is asked for, comes last, and is null before."""
    envelope: dict[str, Any] = {}
    usage, opened = UsageSum(), set[int]()
    async with aclosing(rest):
        try:
            async for delta in _chained(first, rest):
                if not envelope:
                    no_usage = {"usage": None} if openai_request.include_usage else {}
                    envelope = {**_envelope(openai_request, builder.prefix, delta, builder.chunk_object), **no_usage}
                usage.add(delta, openai_request.n)
                opens = delta.index not in opened
                opened.add(delta.index)
                for chunk in await written(delta.num_logprobs, _chunks, builder, delta, opens, envelope):
                    yield chunk
            if openai_request.include_usage:
                yield sse.data({**envelope, "choices": [], "usage": usage.shape()})
        except OutriderError as error:
            yield sse.data(error_body(error))
        yield sse.DONE


def _chunks(builder: ResponseBuilder, delta: GenerationDelta, opens: bool, envelope: dict[str, Any]) -> list[str]:
    """What a stream says of a delta; `opens`: the first of its completion."""
    choices = [*([builder.opening(delta.index)] if opens else []), builder.piece(delta)]
    return [sse.data({**envelope, "choices": [choice]}) for choice in choices if choice is not None]


async def _chained(
    first: asyncio.Future[GenerationDelta], rest: AsyncGenerator[GenerationDelta, None]
) -> AsyncGenerator[GenerationDelta, None]:
    yield await first
    async for delta in rest:
        yield delta


def _envelope(openai_request: OpenAIRequest, prefix: str, first: GenerationDelta, kind: str) -> dict[str, Any]:
    """The fingerprint names the model that a seed's answer depends on."""
    return {
        "id": f"{prefix}-{first.request_id}",
        "object": kind,
        "created": int(time.time()),
        "model": openai_request.model,
        "system_fingerprint": FINGERPRINT + first.model_digest,
    }


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
        openai_request = read_chat(await read_body(request), request, self._engine)
        return await respond(
            request,
            self._engine,
            openai_request,
            ChatResponseBuilder(openai_request, TokenTexts(self._engine.tokenizer)),
        )


def read_chat(body: Body, request: Request | None, engine: GenerationEngine) -> OpenAIRequest:
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
    return OpenAIRequest(
        requests=(chat,),
        model=engine.model_name,
        stream=stream,
        include_usage=include_usage,
        reports_speculation=body.get("speculation") is not None,
        returns_token_ids=body.flag("return_token_ids"),
        num_logprobs=num_logprobs,
        names=(names,),
    )


class ChatResponseBuilder:
    """The chat.completion objects."""

    prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, openai_request: OpenAIRequest, texts: TokenTexts) -> None:
        self._openai_request, self._texts = openai_request, texts

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
        asked = self._openai_request.num_logprobs is not None or self._openai_request.returns_token_ids
        if not delta.text and delta.finish_reason is None and not (asked and delta.token_ids):
            return None
        content = {"content": delta.text} if delta.text or delta.token_ids else {}
        return {"index": delta.index, "delta": content, **self._rest(delta)}

    def _rest(self, delta: GenerationDelta) -> dict[str, Any]:
        openai_request, count = self._openai_request, self._openai_request.num_logprobs
        return {
            "logprobs": None if count is None else self._texts.chat(delta.logprobs, count),
            **finish_shape(delta),
            **extension_shape(delta, openai_request.reports_speculation, openai_request.returns_token_ids),
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


MAX_PROMPTS = 256
_UNSUPPORTED_OF_COMPLETIONS = (
    "suffix",
    "echo",
    "prompt_logprobs",
    "use_beam_search",
    "logits_processors",
    "prompt_embeds",
)


class CompletionsEndpoint:
    """Completions of texts or token ids."""

    def __init__(self, engine: GenerationEngine) -> None:
        self._engine = engine

    async def create(self, request: Request) -> Response:
        """One answer to one or several prompts."""
        openai_request = read_completion(await read_body(request), request, self._engine)
        return await respond(
            request,
            self._engine,
            openai_request,
            CompletionResponseBuilder(openai_request, TokenTexts(self._engine.tokenizer)),
        )


def read_completion(body: Body, request: Request | None, engine: GenerationEngine) -> OpenAIRequest:
    """What was asked for; a field in its wrong shape is refused here, a value out of range by the engine."""
    body.refuse(*_UNSUPPORTED_OF_COMPLETIONS)
    if body.get("best_of", body.get("n", 1)) != body.get("n", 1):
        raise invalid("best_of", "is not n, and choosing among more is not supported; leave it out")
    stream, include_usage = reads_stream(body)
    common = read_common(body, request, engine.model_name)
    defaults = engine.verifier.info.model.default_sampling
    logprobs, max_tokens = body.get("logprobs"), body.get("max_tokens")
    sampling = replace(read_sampling(body, defaults), logprobs=_as_count(logprobs))
    if max_tokens is not None:
        sampling = replace(sampling, max_tokens=max_tokens)
    common = replace(common, sampling=sampling, max_tokens_given=max_tokens is not None)
    prompts = _prompts(body, common)
    places = [""] if len(prompts) == 1 else [f"[{place}]" for place in range(len(prompts))]
    return OpenAIRequest(
        requests=prompts,
        model=engine.model_name,
        stream=stream,
        include_usage=include_usage,
        reports_speculation=body.get("speculation") is not None,
        returns_token_ids=body.flag("return_token_ids"),
        num_logprobs=sampling.logprobs,
        names=tuple(_names(body, place) for place in places),
    )


class CompletionResponseBuilder:
    """The text_completion objects."""

    prefix = "cmpl"
    whole_object = chunk_object = "text_completion"

    def __init__(self, openai_request: OpenAIRequest, texts: TokenTexts) -> None:
        self._openai_request, self._texts = openai_request, texts
        self._places: dict[int, TextPlace] = {}

    def opening(self, index: int) -> None:
        """A stream of text begins with text."""

    def choice(self, delta: GenerationDelta) -> dict[str, Any]:
        """A whole completion, or a chunk of it: the two have one shape."""
        openai_request, logprobs = self._openai_request, None
        if openai_request.num_logprobs is not None:
            place = self._places.setdefault(delta.index, TextPlace())
            logprobs = self._texts.completion(delta.logprobs, place, openai_request.num_logprobs)
        return {
            "index": delta.index,
            "text": delta.text,
            "logprobs": logprobs,
            **finish_shape(delta),
            **extension_shape(delta, openai_request.reports_speculation, openai_request.returns_token_ids),
        }

    def piece(self, delta: GenerationDelta) -> dict[str, Any] | None:
        """Nothing for half a character."""
        asked = self._openai_request.num_logprobs is not None or self._openai_request.returns_token_ids
        silent = not delta.text and delta.finish_reason is None
        return None if silent and not (asked and delta.token_ids) else self.choice(delta)


def _as_count(logprobs: Any) -> Any:
    """vLLM's clients may send true for 1."""
    return int(logprobs) if isinstance(logprobs, bool) and logprobs else logprobs


def _prompts(body: Body, common: GenerationRequest) -> tuple[GenerationRequest, ...]:
    """A text, several, a list of token ids, or several."""
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return (replace(common, text=prompt),)
    if not isinstance(prompt, list) or not prompt:
        problem = "is missing" if prompt is None else "is empty" if prompt == [] else f"is {kind(prompt)}"
        raise invalid("prompt", f"{problem}; allowed: a text, token ids, or a list of either")
    if isinstance(prompt[0], int | float):
        return (replace(common, token_ids=tuple(prompt)),)
    if len(prompt) > MAX_PROMPTS:
        raise invalid("prompt", f"has {len(prompt)} entries; allowed: at most {MAX_PROMPTS} prompts")
    return tuple(_one_prompt(common, place, value) for place, value in enumerate(prompt))


def _one_prompt(common: GenerationRequest, place: int, value: Any) -> GenerationRequest:
    if common.request_id:
        common = replace(common, request_id=f"{common.request_id}-{place}")
    if isinstance(value, str):
        return replace(common, text=value)
    if isinstance(value, list):
        return replace(common, token_ids=tuple(value))
    raise invalid(f"prompt[{place}]", f"is {kind(value)}; allowed: a text or a list of token ids")


def _names(body: Body, place: str) -> dict[str, str]:
    return {name: here + place if here == "prompt" else here for name, here in names_in(body).items()}
