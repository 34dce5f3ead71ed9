"""An OpenAI-compatible server over HTTP, as the load sees it. Every request has a connection of its own, and its first
token's time holds the handshake, as a new client's does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

from outrider.commands.bench_serve_load import Ask, Delivery
from outrider.commands.bench_serve_settings import BenchServeSettings

LINE_BYTES = 16 * 2**20  # the longest line of a stream
MAX_BODY_BYTES = 2**20  # read of an answer that is no stream


class HttpServer:
    """A server below a URL. What goes beyond OpenAI's fields is sent only to those that know it."""

    def __init__(self, settings: BenchServeSettings) -> None:
        self._settings = settings
        url = urlsplit(settings.base_url)
        self._tls = url.scheme == "https"
        self._host = url.hostname or ""
        self._port = url.port or (443 if self._tls else 80)
        self._authority = url.netloc.rpartition("@")[2]
        self._root = url.path.rstrip("/").removesuffix("/v1") + "/v1"
        self._model = settings.model
        self._is_ours = False

    async def describe(self) -> str:
        """The model; raises OSError or ValueError where there is no such server."""
        async with self._exchange("GET", "/models") as answer:
            if answer.status != 200:
                raise ValueError(await answer.complaint())
            named = _cards(await answer.body())
        self._model = self._model or next(iter(named), "")
        if self._model not in named:
            raise ValueError(f"there is no model {self._model!r}; there are: {', '.join(named) or 'none'}")
        self._is_ours = "speculation" in named[self._model]
        if self._settings.asks_for_speculation and not self._is_ours:
            raise ValueError("this server says nothing of speculation: leave those settings out")
        return self._model

    async def send(self, ask: Ask) -> AsyncGenerator[Delivery, None]:
        """One completion, streamed."""
        path = "/chat/completions" if ask.chat else "/completions"
        async with self._exchange("POST", path, self._body(ask)) as answer:
            if answer.status != 200:
                raise ValueError(await answer.complaint())
            async with aclosing(answer.lines()) as lines:
                async for line in lines:
                    if not line.startswith(b"data:"):
                        continue
                    data = line[5:].strip()
                    if data == b"[DONE]":
                        return
                    yield _delivery(_parsed(data))

    async def close(self) -> None:
        """There is nothing to close."""

    def _body(self, ask: Ask) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": ask.max_tokens,
            "temperature": ask.temperature,
            "seed": ask.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        body |= {"messages": [{"role": "user", "content": ask.prompt}]} if ask.chat else {"prompt": ask.prompt}
        if ask.ignore_eos:
            body["ignore_eos"] = True
        if self._is_ours:
            settings = self._settings
            speculation: dict[str, Any] = {"enabled": settings.speculation, "acceptance": settings.acceptance}
            if settings.mode is not None:
                speculation["mode"] = settings.mode
            if settings.num_draft_tokens is not None:
                speculation["num_draft_tokens"] = settings.num_draft_tokens
            body |= {"return_token_ids": True, "speculation": speculation}
        return body

    @asynccontextmanager
    async def _exchange(self, method: str, path: str, body: Any = None) -> AsyncGenerator[Answer, None]:
        """A request on a new connection, and its answer up to the end of the headers."""
        reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls or None, limit=LINE_BYTES)
        try:
            payload = b"" if body is None else json.dumps(body).encode()
            writer.write(self._head(method, path, len(payload)) + payload)
            await writer.drain()
            yield await _read_head(reader)
        finally:
            writer.close()

    def _head(self, method: str, path: str, length: int) -> bytes:
        headers = {
            "Host": self._authority,
            "Accept": "text/event-stream, application/json",
            "Content-Type": "application/json",
            "Content-Length": str(length),
            "Connection": "close",
        }
        if self._settings.api_key:
            headers["Authorization"] = f"Bearer {self._settings.api_key}"
        lines = [f"{method} {self._root}{path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


class Answer:
    """An answer whose body is still to be read."""

    def __init__(self, status: int, chunked: bool, reader: asyncio.StreamReader) -> None:
        self.status = status
        self._chunked = chunked
        self._reader = reader

    async def lines(self) -> AsyncGenerator[bytes, None]:
        """The body's lines as they come."""
        rest = b""
        async for block in self._blocks():
            *lines, rest = (rest + block).split(b"\n")
            for line in lines:
                yield line
        if rest:
            yield rest

    async def body(self) -> bytes:
        """The whole body."""
        body = b""
        async for block in self._blocks():
            body += block
            if len(body) > MAX_BODY_BYTES:
                raise ValueError("the server's answer is too long")
        return body

    async def complaint(self) -> str:
        """What a refusal says, in one line."""
        body = await self.body()
        try:
            found = json.loads(body)["error"]
            message = found["message"] if isinstance(found, dict) else str(found)
        except (ValueError, KeyError, TypeError):
            message = body[:200].decode(errors="replace")
        return f"HTTP {self.status}: {' '.join(str(message).split())}"

    async def _blocks(self) -> AsyncGenerator[bytes, None]:
        if not self._chunked:
            while block := await self._reader.read(65536):
                yield block
            return
        while size := int((await self._reader.readline()).partition(b";")[0] or b"0", 16):
            try:
                yield await self._reader.readexactly(size)
            except asyncio.IncompleteReadError as error:
                raise ValueError("the server broke off in the middle of its answer") from error
            await self._reader.readline()


async def _read_head(reader: asyncio.StreamReader) -> Answer:
    """The status and how the body is framed."""
    first = await reader.readline()
    version, _, rest = first.decode("latin-1").partition(" ")
    if not version.startswith("HTTP/1.") or not rest[:3].isdigit():
        raise ValueError(f"this is no HTTP server: it answered {first[:40]!r}")
    chunked = False
    while line := (await reader.readline()).strip():
        name, _, value = line.decode("latin-1").partition(":")
        chunked |= name.lower() == "transfer-encoding" and "chunked" in value.lower()
    return Answer(int(rest[:3]), chunked, reader)


def _cards(body: bytes) -> dict[str, Any]:
    """The models that are served, by name."""
    try:
        return {card["id"]: card for card in json.loads(body)["data"]}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"/v1/models is no list of models: {body[:80]!r}") from error


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        chunk = json.loads(data)
    except ValueError as error:
        raise ValueError(f"an event is no JSON: {data[:80]!r}") from error
    if not isinstance(chunk, dict):
        raise ValueError(f"an event is no object: {data[:80]!r}")
    return chunk


def _delivery(chunk: dict[str, Any]) -> Delivery:
    if error := chunk.get("error"):
        raise ValueError(error.get("message", "an error") if isinstance(error, dict) else str(error))
    choices = chunk.get("choices") or [{}]
    choice = choices[0]
    usage = chunk.get("usage")
    ids = choice.get("token_ids")
    return Delivery(
        num_tokens=None if ids is None else len(ids),
        text=bool(choice.get("text") or (choice.get("delta") or {}).get("content")),
        finish=choice.get("finish_reason"),
        usage=None if usage is None else (usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)),
        speculation=choice.get("speculation"),
    )
