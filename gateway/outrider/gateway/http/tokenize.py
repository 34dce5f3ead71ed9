"""POST /tokenize and /detokenize, as vLLM has them: what a prompt or a conversation is to the model, and back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from outrider.gateway.engine import GenerationEngine
from outrider.gateway.field_names import renamed
from outrider.gateway.http.errors import invalid
from outrider.gateway.http.json_text import answer
from outrider.gateway.http.protocol import NAMES, Body, read_body, read_chat, validated
from outrider.gateway.http.shares import account_of, client_of
from outrider.gateway.http.tokenize_apart import MEGABYTES, Work, apart
from outrider.gateway.models import Models, require_allowed
from outrider.gateway.text.chat import ChatText, chat_text
from outrider.gateway.text.tokenizer import LONG_TEXT, Tokenizer, in_thread, require_fit
from outrider.rpc.errors import OutriderError, Violations
from outrider.rpc.words.request import GenerationRequest


class TokenizeBody(Body):
    """A body of POST /tokenize: a text, or a conversation, of which what belongs to it is read as the chat endpoint
    reads it."""

    model: str | None = None
    prompt: str | None = None
    messages: Any = None
    add_special_tokens: bool | None = None
    return_token_strs: bool = False


class DetokenizeBody(Body):
    """A body of POST /detokenize: token ids."""

    model: str | None = None
    tokens: list[Any] | None = None


class TokenizeEndpoints:
    """Answers with what the served model's tokenizer makes of texts and ids."""

    def __init__(self, models: Models) -> None:
        self._models = models

    async def tokenize(self, request: Request) -> Response:
        """Ids, their number, and how many the model takes. A conversation's template has its special tokens in it."""
        engine, body, asked = await read_body(request, self._read)
        if body.prompt is not None:
            require_fit("prompt", len(body.prompt), engine.verifier.info.model.max_model_len)
        text = ChatText(body.prompt or "") if asked is None else await self._rendered(engine, asked, request)
        adds = body.add_special_tokens if body.add_special_tokens is not None else body.messages is None
        tokenizer, info = engine.tokenizer, engine.verifier.info
        work = Work(
            text.mark, adds, body.return_token_strs, info.model.max_model_len, tokenizer.fingerprint, tokenizer.name
        )
        async with self._turn(engine, request, len(text.text)):
            told = await apart(work, text.text) if len(text.text) > MEGABYTES else None
            if told is not None:
                return Response(told, media_type="application/json")
            return await in_thread(len(text.text) > LONG_TEXT, _tokenized, engine.tokenizer, work, text.text)

    async def detokenize(self, request: Request) -> Response:
        """The text of ids, special tokens included."""
        body = await read_body(request, partial(validated, DetokenizeBody))
        engine = require_allowed(self._models.called(body.model))
        engine.adapter_called(body.model)
        if body.tokens is None:
            raise invalid("tokens", "is missing; allowed: a list of token ids")
        async with self._turn(engine, request, len(body.tokens)):
            return await in_thread(len(body.tokens) > LONG_TEXT, _detokenized, engine.tokenizer, body.tokens)

    @asynccontextmanager
    async def _turn(self, engine: GenerationEngine, request: Request, size: int) -> AsyncIterator[None]:
        """A turn at so many characters or tokens, which count as a body that is under way while they wait for it."""
        num_long = size if size > LONG_TEXT else 0
        with request.app.state.bodies.holding(client_of(request)) as take:
            take(num_long)
            async with engine.text_turn(account_of(request), num_long):
                yield

    def _read(self, values: dict[str, Any]) -> tuple[GenerationEngine, TokenizeBody, GenerationRequest | None]:
        """The model's engine, the body, and its conversation, if it has one."""
        body = validated(TokenizeBody, values)
        engine = require_allowed(self._models.called(body.model))
        engine.adapter_called(body.model)  # of the model's vocabulary, all of them
        if (body.prompt is None) == (body.messages is None):
            given = "neither" if body.prompt is None else "both"
            raise invalid("prompt", f"{given} of prompt and messages are given; allowed: exactly one of them")
        if body.messages is None:
            return engine, body, None
        chat = {name: values[name] for name in values.keys() - {"prompt", "add_special_tokens", "return_token_strs"}}
        (asked,) = read_chat(chat, None, engine).requests
        return engine, body, asked

    async def _rendered(self, engine: GenerationEngine, asked: GenerationRequest, request: Request) -> ChatText:
        most = engine.verifier.info.model.max_model_len
        try:
            async with engine.template_turn(account_of(request), len(asked.messages or ())):
                return await chat_text(asked, engine.tokenizer, most)
        except OutriderError as error:
            raise renamed(error, NAMES, most) from error


def _tokenized(tokenizer: Tokenizer, work: Work, text: str) -> Response:
    """Written where it is made."""
    return answer(work.done(text, tokenizer), is_long=len(text) > LONG_TEXT)


def _detokenized(tokenizer: Tokenizer, tokens: list[Any]) -> Response:
    found = Violations()
    found.ids("tokens", tokens, tokenizer.num_tokens)
    found.raise_if_any()
    return JSONResponse({"prompt": tokenizer.decode(tokens)})
