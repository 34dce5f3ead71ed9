"""POST /tokenize and /detokenize, as vLLM has them: what a prompt or a conversation is to the model, and back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from outrider.gateway.engine import GenerationEngine
from outrider.gateway.http.errors import invalid, renamed
from outrider.gateway.http.json_text import answer
from outrider.gateway.http.protocol import NAMES, Body, read_body, read_chat, validated
from outrider.gateway.http.shares import client_of
from outrider.gateway.request import GenerationRequest
from outrider.gateway.text.chat import ChatText, chat_text
from outrider.gateway.text.tokenizer import LONG_TEXT, in_thread
from outrider.rpc.errors import OutriderError, Violations


class TokenizeBody(Body):
    """Of a text; of a conversation what belongs to it is read as the chat endpoint reads it."""

    model: str | None = None
    prompt: str | None = None
    messages: Any = None
    add_special_tokens: bool | None = None
    return_token_strs: bool = False


class DetokenizeBody(Body):
    """Of token ids."""

    model: str | None = None
    tokens: list[Any] | None = None


class TokenizeEndpoints:
    """The served model's tokenizer."""

    def __init__(self, engine: GenerationEngine) -> None:
        self._engine = engine

    async def tokenize(self, request: Request) -> Response:
        """Ids, their number, and how many the model takes. A conversation's template has its special tokens in it."""
        body, asked = await read_body(request, self._read)
        text = ChatText(body.prompt or "") if asked is None else await self._rendered(asked, request)
        adds = body.add_special_tokens if body.add_special_tokens is not None else body.messages is None
        return await self._in_turn(request, len(text.text), self._tokenized, text, adds, body.return_token_strs)

    async def detokenize(self, request: Request) -> Response:
        """The text of ids, special tokens included."""
        body = await read_body(request, partial(validated, DetokenizeBody))
        self._engine.adapter_called(body.model)
        if body.tokens is None:
            raise invalid("tokens", "is missing; allowed: a list of token ids")
        return await self._in_turn(request, len(body.tokens), self._detokenized, body.tokens)

    async def _in_turn(self, request: Request, size: int, make: Callable[..., Response], *arguments: Any) -> Response:
        """Of so many characters or tokens, written where it is made."""
        is_long = size > LONG_TEXT
        async with self._engine.text_turn(client_of(request), size if is_long else 0):
            return await in_thread(is_long, make, *arguments)

    def _tokenized(self, text: ChatText, adds_special_tokens: bool, with_names: bool) -> Response:
        tokenizer, info = self._engine.tokenizer, self._engine.verifier.info
        ids = text.encode(tokenizer, adds_special_tokens)
        names = [tokenizer.backend.id_to_token(token) for token in ids] if with_names else None
        told = {"count": len(ids), "max_model_len": info.model.max_model_len, "tokens": ids, "token_strs": names}
        return answer(told, is_long=len(ids) > LONG_TEXT)

    def _detokenized(self, tokens: list[Any]) -> Response:
        found = Violations()
        found.ids("tokens", tokens, self._engine.tokenizer.num_tokens)
        found.raise_if_any()
        return JSONResponse({"prompt": self._engine.tokenizer.decode(tokens)})

    def _read(self, values: dict[str, Any]) -> tuple[TokenizeBody, GenerationRequest | None]:
        """The body, and its conversation, if it has one."""
        body = validated(TokenizeBody, values)
        self._engine.adapter_called(body.model)  # of the model's vocabulary, all of them
        if (body.prompt is None) == (body.messages is None):
            given = "neither" if body.prompt is None else "both"
            raise invalid("prompt", f"{given} of prompt and messages are given; allowed: exactly one of them")
        if body.messages is None:
            return body, None
        chat = {name: values[name] for name in values.keys() - {"prompt", "add_special_tokens", "return_token_strs"}}
        (asked,) = read_chat(chat, None, self._engine).requests
        return body, asked

    async def _rendered(self, asked: GenerationRequest, request: Request) -> ChatText:
        most = self._engine.verifier.info.model.max_model_len
        try:
            async with self._engine.template_turn(client_of(request), len(asked.messages or ())):
                return await chat_text(asked, self._engine.tokenizer, most)
        except OutriderError as error:
            raise renamed(error, NAMES, most) from error
