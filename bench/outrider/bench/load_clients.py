"""The servers that a load is sent to: an OpenAI-compatible one over HTTP, or a gateway over gRPC.

Over HTTP every request has a connection of its own, and its first token's time holds the handshake, as a new client's
does. What goes beyond OpenAI's fields is sent only to those that know it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict
from typing import Any
from urllib.parse import urlsplit

from outrider.bench.load_requests import BenchRequest, BenchServeSettings, Delivery
from outrider.client import NO_RETRY, Client, Part
from outrider.rpc.sampling_params import AcceptanceRule

LINE_BYTES = 16 * 2**20  # the longest line of a stream
MAX_BODY_BYTES = 2**20  # read of an answer that is no stream


class HttpClient:
    """A server below a URL."""

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
        async with self._exchange("GET", "/models") as response:
            if response.status != 200:
                raise ValueError(await response.error_text())
            named = _cards(await response.body())
        self._model = self._model or next(iter(named), "")
        if self._model not in named:
            raise ValueError(f"there is no model {self._model!r}; there are: {', '.join(named) or 'none'}")
        self._is_ours = "speculation" in named[self._model]
        if self._settings.asks_for_speculation and not self._is_ours:
            raise ValueError("this server says nothing of speculation: leave those settings out")
        return self._model

    async def send(self, request: BenchRequest) -> AsyncGenerator[Delivery, None]:
        """One completion, streamed."""
        path = "/chat/completions" if request.chat else "/completions"
        async with self._exchange("POST", path, self._body(request)) as response:
            if response.status != 200:
                raise ValueError(await response.error_text())
            async with aclosing(response.lines()) as lines:
                async for line in lines:
                    if not line.startswith(b"data:"):
                        continue
                    data = line[5:].strip()
                    if data == b"[DONE]":
                        return
                    yield _delivery(_parsed(data))

    async def close(self) -> None:
        """There is nothing to close."""

    def _body(self, request: BenchRequest) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "seed": request.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        body |= (
            {"messages": [{"role": "user", "content": request.prompt}]} if request.chat else {"prompt": request.prompt}
        )
        if request.ignore_eos:
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
    async def _exchange(self, method: str, path: str, body: Any = None) -> AsyncGenerator[HttpResponse, None]:
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


class HttpResponse:
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

    async def error_text(self) -> str:
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


async def _read_head(reader: asyncio.StreamReader) -> HttpResponse:
    """The status and how the body is framed."""
    first = await reader.readline()
    version, _, rest = first.decode("latin-1").partition(" ")
    if not version.startswith("HTTP/1.") or not rest[:3].isdigit():
        raise ValueError(f"this is no HTTP server: it answered {first[:40]!r}")
    chunked = False
    while line := (await reader.readline()).strip():
        name, _, value = line.decode("latin-1").partition(":")
        chunked |= name.lower() == "transfer-encoding" and "chunked" in value.lower()
    return HttpResponse(int(rest[:3]), chunked, reader)


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


INFO_S = 10.0


class GrpcClient:
    """One connection. Nothing is tried again: what fails is to be seen."""

    def __init__(self, settings: BenchServeSettings) -> None:
        self._client = Client(settings.gateway, retry=NO_RETRY)
        self._options: dict[str, Any] = {
            "speculate": None if settings.speculation else False,
            "num_draft_tokens": settings.num_draft_tokens,
            "mode": settings.mode or "",
            "acceptance": AcceptanceRule[settings.acceptance.upper()],
        }

    async def describe(self) -> str:
        """The models."""
        info = await self._client.info(timeout=INFO_S)
        return f"{info.target.name} with {info.draft.name if info.draft else 'no draft'}"

    async def send(self, request: BenchRequest) -> AsyncGenerator[Delivery, None]:
        """One completion."""
        prompt: dict[str, Any] = {"messages": [{"role": "user", "content": request.prompt}]} if request.chat else {}
        parts = self._client.generate(
            None if request.chat else request.prompt,
            max_tokens=request.max_tokens,
            ignore_eos=request.ignore_eos,
            temperature=request.temperature,
            seed=request.seed,
            **prompt,
            **self._options,
        )
        async with aclosing(parts):
            async for part in parts:
                yield _grpc_delivery(part)

    async def close(self) -> None:
        """Ends the connection."""
        await self._client.close()


def _grpc_delivery(part: Part) -> Delivery:
    usage, stats = part.usage, part.speculation
    return Delivery(
        num_tokens=len(part.token_ids),
        text=bool(part.text),
        finish=None if part.finish_reason is None else part.finish_reason.name.lower(),
        usage=None if usage is None else (usage.prompt_tokens, usage.completion_tokens),
        speculation=None if stats is None else asdict(stats),
    )
