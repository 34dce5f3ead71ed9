"""A conversation's prompt: its messages and tools by the chat template, whose control tokens nobody else can write."""

from __future__ import annotations

import asyncio
import ctypes
import json
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from outrider.gateway.text.chat_template import ChatTemplate, ContinuedTemplate, TemplateRefusal, with_read_calls
from outrider.gateway.text.control_tokens import control_tokens, escaped, mark_for, texts_in
from outrider.gateway.text.reasoning import template_variables
from outrider.gateway.text.tokenizer import Tokenizer, encode_bounded, require_fit
from outrider.gateway.text.tools.use import template_tools
from outrider.rpc.errors import TOO_LONG, InvalidArgument, ResourceExhausted, Violation, Violations, kind
from outrider.rpc.words.request import PICTURE, GenerationRequest

MAX_VARIABLES_CHARS = 64 * 1024  # of chat_template_kwargs, as JSON
RENDER_S = 10.0  # that a conversation's template may take
MAX_RENDERED = 8  # conversations at once; others wait
WAIT_S = 15.0  # for one of these, at most: longer than any has it
TEMPLATE_REFUSED = "TEMPLATE_REFUSED"  # the reason where the template itself has said what is wrong
BACK_MS = 1000  # when who waited in vain may come back
MAX_VALUES_PER_TOKEN = 4  # of messages and variables: a message, which has some more, takes several tokens
# Fields of the request, or of the checkpoint.
RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"})
_RENDERERS = ThreadPoolExecutor(MAX_RENDERED, "chat-template")


@dataclass(frozen=True, slots=True)
class ChatText:
    """A conversation as its template writes it. Only what the template itself writes is a control token: where a text
    looks like one, or would make one with its neighbours, stands a mark."""

    text: str
    mark: str = ""  # empty: there is none

    def encode(self, tokenizer: Tokenizer, add_special_tokens: bool = False) -> list[int]:
        """The ids. A text with marks is tokenised in parts, none of which holds what must not be a control token."""
        if not self.mark:
            return tokenizer.encode(self.text, add_special_tokens)
        first, *others = self.text.split(self.mark)
        ids = tokenizer.encode(first, add_special_tokens)
        for part in others:
            ids += tokenizer.encode(part, add_special_tokens=False)
        return ids


async def chat_ids(request: GenerationRequest, tokenizer: Tokenizer, max_model_len: int) -> tuple[int, ...]:
    """The prompt's ids. InvalidArgument as for `chat_text`, and for what is more than the context anyhow."""
    chat = await chat_text(request, tokenizer, max_model_len)
    adds = request.add_special_tokens is True
    return await encode_bounded("chat", chat.text, max_model_len, lambda _: chat.encode(tokenizer, adds))


async def chat_text(request: GenerationRequest, tokenizer: Tokenizer, max_model_len: int) -> ChatText:
    """The prompt's text, made beside the event loop and in a bounded time: the template is the checkpoint's. Nothing is
    rendered of a conversation that is more than the context anyhow. InvalidArgument says what is wrong with the
    conversation or the template's variables; ResourceExhausted, that others' conversations take all threads."""
    found = Violations()
    variables = _variables(found, request.chat_template_kwargs)
    if not request.messages:
        found.add("chat", "is empty", "at least one message")
    else:
        check_num_messages(found, len(request.messages), max_model_len)
    found.raise_if_any()
    if request.tools and request.tool_choice != "none":
        variables["tools"] = template_tools(request.tools)
    if request.documents:
        variables["documents"] = list(request.documents)
    try:
        return await _in_bounded_time(partial(_rendered, request, tokenizer, variables, max_model_len))
    except TimeoutError:
        raise InvalidArgument.of([Violation("chat", f"takes its template more than {RENDER_S:g} s")]) from None
    except (ValueError, RecursionError) as error:
        problem = "is nested too deeply" if isinstance(error, RecursionError) else str(error)
        reason = TEMPLATE_REFUSED if isinstance(error.__cause__, TemplateRefusal) else ""
        raise InvalidArgument.of([Violation("chat", problem, reason)]) from error


def check_num_messages(found: Violations, num_messages: int, max_model_len: int) -> None:
    """More than tokens of the context are refused; of a message as it came, before each becomes an object."""
    if num_messages > max_model_len:
        allowed = f"at most {max_model_len}, the tokens of a context"
        found.add("chat", f"has {num_messages} messages", allowed, TOO_LONG)


class _Rendering:
    """One template that runs on a thread, and can be ended there: left alone, one that loops would keep the thread, and
    its share of the interpreter, for ever."""

    def __init__(self, render: Callable[[], ChatText], on_begin: Callable[[], object]) -> None:
        self._render, self._on_begin = render, on_begin
        self._lock, self._thread, self._ended = threading.Lock(), 0, False

    def run(self) -> ChatText:
        """Renders, on the thread."""
        with self._lock:
            if self._ended:
                raise TimeoutError
            self._thread = threading.get_ident()
        try:
            self._on_begin()
            return self._render()
        finally:
            self._leave()

    def end(self) -> None:
        """Ends the rendering from another thread: by a TimeoutError, where the template runs Python; what it has called
        in C ends first."""
        with self._lock:
            self._ended = True
            if self._thread:
                _raise_in(self._thread, TimeoutError)

    def _leave(self) -> None:
        """What comes later would meet the thread's next rendering; what came is raised here at the latest."""
        with self._lock:
            self._thread = 0
        for _ in range(2):  # the interpreter looks for it where it jumps back
            pass


def _raise_in(thread: int, error: type[BaseException]) -> None:
    """CPython's own way to interrupt a thread. It could take one back, but then Python 3.11 goes on looking for it at
    every call, and a thread that is traced does nothing else."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))


async def in_turn(turn: Awaitable[object]) -> None:
    """Waits for one of MAX_RENDERED places. ResourceExhausted where none comes free in time."""
    try:
        async with asyncio.timeout(WAIT_S):
            await turn
    except TimeoutError:
        message = f"chat: other conversations have kept all {MAX_RENDERED} threads of templates for {WAIT_S:g} s"
        raise ResourceExhausted(message, reason="TEMPLATES_BUSY", retry_after_ms=BACK_MS) from None


async def _in_bounded_time(render: Callable[[], ChatText]) -> ChatText:
    """TimeoutError where it takes longer than it may, from when it begins: how long others' take is none of its faults,
    and ResourceExhausted where they take too long."""
    loop, begun = asyncio.get_running_loop(), asyncio.Event()
    rendering = _Rendering(render, lambda: loop.call_soon_threadsafe(begun.set))
    rendered = loop.run_in_executor(_RENDERERS, rendering.run)
    try:
        await in_turn(begun.wait())
        async with asyncio.timeout(RENDER_S):
            return await rendered
    finally:
        rendered.cancel()
        rendering.end()  # nobody waits for it any more, if it still runs


def _num_values(value: Any) -> int:
    """The values in one of JSON, itself among them."""
    if isinstance(value, Mapping):
        return 1 + sum(map(_num_values, value.values()))
    return 1 + sum(map(_num_values, value)) if isinstance(value, list | tuple) else 1


def _rendered(
    request: GenerationRequest, tokenizer: Tokenizer, variables: dict[str, Any], max_model_len: int
) -> ChatText:
    """Of a conversation with no more values than a context may have: empty ones have no characters, and take memory."""
    num_values, most = _num_values([request.messages, variables]), MAX_VALUES_PER_TOKEN * max_model_len
    if num_values > most:
        raise InvalidArgument.of([Violation("chat", f"has {num_values} values; allowed: at most {most}", TOO_LONG)])
    messages, control = request.messages or (), control_tokens(tokenizer)
    writer = _with_template(tokenizer, request)
    read = list(map(with_read_calls, messages))  # their JSON may escape what its texts hold
    told = list(texts_in([read, variables]))
    require_fit("chat", sum(map(len, told)), max_model_len)

    def written(messages: Sequence[Mapping[str, Any]], variables: dict[str, Any], mark: str = "") -> str:
        if request.reasoning is not None and writer.chat_template is not None:
            known = writer.chat_template.variables
            variables = template_variables(request.reasoning, known) | variables
        text = writer.render_chat(messages, request.add_generation_prompt, **variables)
        return text.replace(escaped(mark), mark) if mark else text

    if control is None or not any(control.stands_in(text) or control.may_join(text) for text in told):
        return ChatText(written(messages, variables))
    mark = mark_for(told)

    def marked(apart: bool) -> str:
        broken = partial(control.broken, mark=mark, apart=apart)
        return written(broken(read), broken(variables), mark)

    text = marked(apart=False) if any(map(control.stands_in, told)) else written(messages, variables)
    apart = marked(apart=True)
    if control.in_written(text) == control.in_written(apart):
        return ChatText(text, mark)
    if apart.replace(mark, "") != text.replace(mark, ""):
        raise ValueError("holds texts that make control tokens with those beside them; allowed: texts that stay text")
    return ChatText(apart, mark)


def _with_template(tokenizer: Tokenizer, request: GenerationRequest) -> Tokenizer:
    """A tokenizer with the template that writes the request's conversation. InvalidArgument for documents that it knows
    nothing of."""
    template = tokenizer.chat_template if request.chat_template is None else ChatTemplate(request.chat_template)
    if template is None:
        return tokenizer
    if request.documents and "documents" not in template.variables:
        problem = "is given, and the chat template shows the model none; allowed: leave it out"
        raise InvalidArgument.of([Violation("documents", problem)])
    if request.continue_final_message:
        template = ContinuedTemplate(template)
    return tokenizer if template is tokenizer.chat_template else tokenizer.with_template(template)


def num_pictures(messages: Sequence[Mapping[str, Any]]) -> int:
    """How many places for pictures they have."""
    contents = (message.get("content") for message in messages)
    return sum(part == PICTURE for content in contents if isinstance(content, list) for part in content)


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
