"""POST /v1/responses, OpenAI's newer interface: an answer is a list of items (reasoning, message, function_call), whole
or as a stream of named and numbered events. Nothing is stored; responses_input.py reads the body."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from outrider.gateway.engine import GenerationEngine
from outrider.gateway.http import json_text, sse
from outrider.gateway.http.protocol import ChatBody, options_of, read_body
from outrider.gateway.http.responses_input import ResponsesRequest, read_responses, with_own_names
from outrider.gateway.http.serving import UsageSum, begun, engine_of, extension_shape, generate, recorder_of
from outrider.gateway.http.token_texts import TokenTexts
from outrider.gateway.models import Models
from outrider.gateway.off_loop import SLOW_LOGPROBS, written
from outrider.gateway.spec_decode_metrics import AnswerRecorder
from outrider.rpc.errors import InvalidArgument, OutriderError
from outrider.rpc.words.answer import GenerationDelta, ToolCallDelta
from outrider.rpc.words.sampling_params import FinishReason

Event = tuple[str, dict[str, Any]]  # its name, and what it says
MAX_HELD = 64  # tokens whose text may still come
_TEXTS = {"message": "output_text", "reasoning": "reasoning_text"}  # events' names of what an item holds
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


def responses_endpoint(models: Models) -> Callable[[Request], Awaitable[Response]]:
    """What answers a POST to /v1/responses."""

    async def create(request: Request) -> Response:
        engine, asked = await read_body(request, lambda values: _read(models, values, request))
        recorder = recorder_of(options_of(request), asked.chat)
        deltas, answer = _deltas(engine, asked, recorder), GrowingResponse(engine, asked, recorder)
        if not asked.body.stream:
            return await sse.unless_gone(request.receive, _whole(answer, deltas))
        keep_alive_s = options_of(request).sse_keep_alive_s
        return sse.EventStream(_stream(answer, await begun(request, deltas, keep_alive_s)), keep_alive_s)

    return create


def _read(models: Models, values: dict[str, Any], request: Request) -> tuple[GenerationEngine, ResponsesRequest]:
    engine = engine_of(models, values)
    return engine, read_responses(values, request, engine)


async def _deltas(
    engine: GenerationEngine, asked: ResponsesRequest, recorder: AnswerRecorder
) -> AsyncGenerator[GenerationDelta, None]:
    try:
        async with aclosing(generate(engine, asked.chat, recorder, whole=not asked.body.stream)) as deltas:
            async for delta in deltas:
                yield delta
    except InvalidArgument as error:
        raise with_own_names(error, engine) from error


async def _whole(answer: GrowingResponse, deltas: AsyncGenerator[GenerationDelta, None]) -> Response:
    async with aclosing(deltas):
        async for delta in deltas:
            answer.add(delta)
    is_long = answer.num_logprobs > SLOW_LOGPROBS
    return await written(answer.num_logprobs, lambda: json_text.answer(answer.shape(), is_long=is_long))


async def _stream(answer: GrowingResponse, deltas: AsyncGenerator[GenerationDelta, None]) -> AsyncGenerator[str, None]:
    """Events in OpenAI's order, each with its number."""
    number = 0

    def numbered(events: list[Event], is_long: bool = False) -> list[str]:
        nonlocal number
        texts = []
        for name, said in events:
            texts.append(sse.event(name, {"type": name, "sequence_number": number, **said}, is_long=is_long))
            number += 1
        return texts

    async with aclosing(deltas):
        try:
            for text in numbered(answer.begin()):
                yield text
            async for delta in deltas:
                events, num_logprobs = answer.add(delta), answer.num_logprobs if answer.ended else 0
                for text in await written(num_logprobs, numbered, events, is_long=num_logprobs > SLOW_LOGPROBS):
                    yield text
        except (Exception, asyncio.CancelledError) as error:
            for text in numbered(answer.fail(sse.told(error))):
                yield text


class GrowingResponse:
    """One response as it grows: what a delta adds, as events, and what it has come to."""

    def __init__(
        self, engine: GenerationEngine, asked: ResponsesRequest, recorder: AnswerRecorder | None = None
    ) -> None:
        self._asked, self._model, self._engine = asked, asked.chat.model, engine
        self._recorder = recorder or AnswerRecorder()
        chat = asked.chat.body
        self._shows_reasoning = isinstance(chat, ChatBody) and chat.include_reasoning
        self._id = f"resp_{asked.chat.requests[0].request_id or uuid.uuid4().hex}"
        self._created_at, self._count = int(time.time()), asked.chat.num_shown
        self._texts = TokenTexts(engine.tokenizer, chat.return_tokens_as_token_ids)
        self._logprobs: list[dict[str, Any]] = []  # of tokens whose text has not come
        self.num_logprobs = 0
        self._status, self._error, self._incomplete = "in_progress", None, None  # type: str, Any, Any
        self._usage: dict[str, Any] | None = None
        self._extension: dict[str, Any] = {}
        self._output: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None  # the last item, while it grows
        self._space = ""  # before a text that may not come
        self._num_chars = 0  # of text that came

    @property
    def ended(self) -> bool:
        """Whether the response is whole."""
        return self._status != "in_progress"

    def begin(self) -> list[Event]:
        """The events before there is anything."""
        return [(f"response.{name}", {"response": self.shape()}) for name in ("created", "in_progress")]

    def add(self, delta: GenerationDelta) -> list[Event]:
        """The events of what a delta adds."""
        if self._count is not None:
            self.num_logprobs += delta.num_logprobs
            self._logprobs += self._texts.chat(delta.logprobs, self._count)["content"]
        calls = delta.tool_calls
        num_open = 1 if calls and not calls[0].id else 0  # the rest of the open call, which all else would close
        events = [event for call in calls[:num_open] for event in self._add_call(call)]
        if delta.reasoning and self._shows_reasoning:
            events += self._add_text("reasoning", delta.reasoning)
        begin = self._num_chars
        for call in calls[num_open:]:
            events += self._add_answer(delta.text[self._num_chars - begin : call.num_before - begin])
            events += self._add_call(call)
        events += self._add_answer(delta.text[self._num_chars - begin :])
        del self._logprobs[:-MAX_HELD]  # of reasoning and calls, and of marks around them
        return events if delta.finish_reason is None else [*events, *self._finish(delta)]

    def fail(self, error: OutriderError) -> list[Event]:
        """Ends the response by an error, and gives the events of that."""
        self._status, self._error = "failed", {"code": "server_error", "message": error.message}
        return [*self._close("incomplete"), ("response.failed", {"response": self.shape()})]

    def shape(self) -> dict[str, Any]:
        """The response object."""
        body, chat = self._asked.body, self._asked.chat.requests[0]
        sampling, text = chat.sampling, body.text
        shown = None if text is None or text.format is None else text.format.model_dump(by_alias=True)
        verbosity = {} if text is None or text.verbosity is None else {"verbosity": text.verbosity}
        told = {} if sampling is None else {"temperature": sampling.temperature, "top_p": sampling.top_p}
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created_at,
            "status": self._status,
            "error": self._error,
            "incomplete_details": self._incomplete,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "model": self._model,
            "output": [dict(item) for item in self._output],
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning.effort or None if body.reasoning else None, "summary": None},
            "store": False,
            **told,
            "text": {"format": shown or {"type": "text"}, **verbosity},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools,
            "top_logprobs": body.top_logprobs or 0,
            "truncation": body.truncation,
            "usage": self._usage,
            "metadata": body.metadata,
            **self._extension,
        }

    def _add_answer(self, text: str) -> list[Event]:
        """White space before the first item, or between items, is no message by itself."""
        self._num_chars += len(text)
        if not text:
            return []
        if self._open is None or self._open["type"] != "message":
            self._space += text
            if not self._space.strip():
                return []
            text, self._space = self._space, ""
        return self._add_text("message", text)

    def _add_text(self, kind: str, text: str) -> list[Event]:
        name, events = _TEXTS[kind], list[Event]()
        if self._open is None or self._open["type"] != kind:
            events += self._begin({**_item(kind), "content": []})
            events.append(self._event("content_part.added", content_index=0, part=_part(kind, "")))
            self._open = self._output[-1]
            self._open["content"] = [_part(kind, "")]
        part = self._open["content"][0]
        part["text"] += text
        said = {"logprobs": self._logprobs_of(text)} if kind == "message" else {}
        part.get("logprobs", []).extend(said.get("logprobs", []))
        return [*events, self._event(f"{name}.delta", content_index=0, delta=text, **said)]

    def _logprobs_of(self, text: str) -> list[dict[str, Any]]:
        """The log probabilities of the tokens that a text of a message is from: the first ones held whose bytes are the
        text's. All, where no bytes are."""
        held, raw = self._logprobs, text.encode()
        places = [0]  # in `rest`, where each begins
        for entry in held:
            places.append(places[-1] + len(entry["bytes"]))
        rest = b"".join(bytes(entry["bytes"]) for entry in held)
        agreeing = (place for place, at in enumerate(places[:-1]) if rest[at : at + len(raw)] == raw[: len(rest) - at])
        first = next(agreeing, 0)
        end = next((place for place, at in enumerate(places) if at >= places[first] + len(raw)), len(held))
        self._logprobs = held[end:]
        return held[first:end]

    def _add_call(self, call: ToolCallDelta) -> list[Event]:
        events: list[Event] = []
        if call.id:
            self._space = ""
            item = {**_item("function_call"), "call_id": call.id, "name": call.name, "arguments": ""}
            events += self._begin(item)
        if self._open is not None and call.arguments:
            self._open["arguments"] += call.arguments
            events.append(self._event("function_call_arguments.delta", delta=call.arguments))
        return events

    def _begin(self, item: dict[str, Any]) -> list[Event]:
        closed = self._close("completed")
        self._output.append(item)
        self._open = item
        return [*closed, ("response.output_item.added", {"output_index": len(self._output) - 1, "item": dict(item)})]

    def _close(self, status: str) -> list[Event]:
        """The last item has ended."""
        item = self._open
        if item is None:
            return []
        kind, events = item["type"], list[Event]()
        if kind == "function_call":
            done = {"name": item["name"], "arguments": item["arguments"]}
            events.append(self._event("function_call_arguments.done", **done))
        else:
            part = item["content"][0]
            told = {name: value for name, value in part.items() if name in ("text", "logprobs")}
            events.append(self._event(f"{_TEXTS[kind]}.done", content_index=0, **told))
            events.append(self._event("content_part.done", content_index=0, part=dict(part)))
        item["status"], self._open = status, None
        return [*events, ("response.output_item.done", {"output_index": len(self._output) - 1, "item": dict(item)})]

    def _event(self, event: str, /, **said: Any) -> Event:
        """An event of the last item."""
        return f"response.{event}", {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1, **said}

    def _finish(self, delta: GenerationDelta) -> list[Event]:
        cut = delta.finish_reason is FinishReason.LENGTH
        self._status = "incomplete" if cut else "completed"
        self._incomplete = {"reason": "max_output_tokens"} if cut else None
        events = self._add_text("message", self._space) if not self._output else []
        events += self._close(self._status)
        usage = UsageSum()
        usage.add(delta, 1)
        self._usage = {
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
            "output_tokens": usage.completion,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning},
            "total_tokens": usage.prompt + usage.completion,
        }
        self._extension = extension_shape(delta, self._asked.chat.body.speculation is not None, token_ids=False)
        self._extension |= self._recorder.shape(self._engine.num_draft_tokens)
        return [*events, (f"response.{self._status}", {"response": self.shape()})]


def _item(kind: str) -> dict[str, Any]:
    """An item that has nothing yet."""
    item = {"id": f"{_PREFIXES[kind]}_{uuid.uuid4().hex}", "type": kind, "status": "in_progress"}
    further: dict[str, dict[str, Any]] = {"message": {"role": "assistant"}, "reasoning": {"summary": []}}
    return {**item, **further.get(kind, {})}


def _part(kind: str, text: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
