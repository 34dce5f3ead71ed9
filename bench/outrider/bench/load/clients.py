"""The servers that a load is sent to: an OpenAI-compatible one over HTTP, or a gateway over gRPC.

Over HTTP every request has a connection of its own, and its first token's time holds the handshake, as a new client's
does. What goes beyond OpenAI's fields is sent only to those that know it."""

from __future__ import annotations

import json
import ssl
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict
from typing import Any

import httpx

from outrider.bench.load.requests import BenchRequest, BenchServeSettings, Delivery
from outrider.client import NO_RETRY, Client, Part
from outrider.rpc.security import ClientTls
from outrider.rpc.words.sampling_params import AcceptanceRule


class HttpClient:
    """A server below a URL."""

    def __init__(self, settings: BenchServeSettings) -> None:
        self._settings = settings
        self._model = settings.model
        self._is_ours = False
        headers = {"Connection": "close", "Accept-Encoding": "identity"}
        if token := settings.api_key or settings.token:
            headers["Authorization"] = f"Bearer {token}"
        self._http = httpx.AsyncClient(
            base_url=settings.base_url.rstrip("/").removesuffix("/v1") + "/v1",
            headers=headers,
            timeout=None,  # a request's time has its own limit
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            trust_env=False,  # no proxy
            verify=_context(settings),
        )

    async def describe(self) -> str:
        """The model; raises OSError or ValueError where there is no such server."""
        async with self._exchange("GET", "/models") as response:
            named = _cards(await response.aread())
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
        async with self._exchange("POST", path, self._body(request)) as response, aclosing(_lines(response)) as lines:
            async for line in lines:
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                yield _delivery(_parsed(data))

    async def close(self) -> None:
        """Ends what is open."""
        await self._http.aclose()

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
    async def _exchange(self, method: str, path: str, body: Any = None) -> AsyncGenerator[httpx.Response, None]:
        """A request, and its answer up to the end of the headers. Raises OSError where there is no connection, and
        ValueError for a refusal or what is no HTTP."""
        began = False
        try:
            async with self._http.stream(method, path, json=body) as response:
                began = True
                if response.status_code != 200:
                    raise ValueError(f"HTTP {response.status_code}: {_error_text(await response.aread())}")
                yield response
        except httpx.RemoteProtocolError as error:
            broke_off = "the server broke off in the middle of its answer"
            raise ValueError(broke_off if began else f"this is no HTTP server: {error}") from error
        except httpx.TransportError as error:
            raise OSError(f"{self._settings.base_url}: {error or type(error).__name__}") from error


def _context(settings: BenchServeSettings) -> ssl.SSLContext:
    """Whom a URL's server is known by: the system's authorities, or those that are given. OutriderError for files that
    cannot be used."""
    tls = ClientTls.of(settings)
    return ssl.create_default_context() if tls is None else tls.http_context()


async def _lines(response: httpx.Response) -> AsyncGenerator[bytes, None]:
    """An answer's lines as they come. httpx's own end at U+2028, too, which a text may hold."""
    rest = b""
    async for block in response.aiter_raw():
        *lines, rest = (rest + block).split(b"\n")
        for line in lines:
            yield line
    if rest:
        yield rest


def _error_text(body: bytes) -> str:
    """What a refusal says, in one line."""
    try:
        found = json.loads(body)["error"]
        message = found["message"] if isinstance(found, dict) else str(found)
    except (ValueError, KeyError, TypeError):
        message = body[:200].decode(errors="replace")
    return " ".join(str(message).split())


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
        self._client = Client(settings.gateway, retry=NO_RETRY, **settings.access())
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
