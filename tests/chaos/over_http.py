"""One request over HTTP, as a client asks that takes care of itself: where its stream breaks, or ends with an error, it
goes on at the other gateway with what it has got (`output_ids`). That may be only by a fault: by one at the gateway
that it asked, or at all targets at once."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import httpx
from chaos.asks import TIMEOUT_S, Answer, Ask
from chaos.fleet import Fleet, Member

from outrider.rpc.words.sampling_params import FinishReason

SHAPES = ("plain text", "long prompt", "penalties", "stop", "two completions")  # that are asked for there
OPTIONS = (
    *("prompt", "max_tokens", "ignore_eos", "temperature", "seed", "n", "stop"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
WAIT_S = 0.2  # before it asks again


def body_of(ask: Ask) -> dict[str, Any]:
    """A request as OpenAI's interface has it."""
    body = {name: ask.options[name] for name in OPTIONS if name in ask.options}
    how: dict[str, Any] = {name: ask.options[name] for name in ("mode", "num_draft_tokens") if name in ask.options}
    if ask.options.get("method") and not ask.predicts:
        how["method"] = ask.options["method"]
    how["acceptance"] = ask.rule if ask.rule != "greedy" else "coupled"
    return body | {"model": "pair", "stream": True, "return_token_ids": True, "cache_salt": ask.key, "speculation": how}


def unpooled() -> httpx.AsyncClient:
    """Each request on a connection of its own: that a kept one has ended is seen only by the next request on it, which
    fails then and through no fault of that time."""
    return httpx.AsyncClient(timeout=TIMEOUT_S, limits=httpx.Limits(max_keepalive_connections=0))


async def is_ready(client: httpx.AsyncClient, address: str) -> bool:
    """What a balancer asks before it sends anybody there."""
    try:
        return (await client.get(f"http://{address}/readyz", timeout=5.0)).status_code == 200
    except httpx.HTTPError:
        return False


async def events(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
    """The events of a streamed answer; an error before the first is one, too."""
    async with client.stream("POST", url, json=body) as response:
        if response.status_code != 200:
            said = (await response.aread()).decode(errors="replace")
            yield {"error": f"status {response.status_code}: {said:.300}"}
            return
        async for line in response.aiter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                yield json.loads(line.removeprefix("data: "))


class Choices:
    """What has come of a request, over as many streams as it took."""

    def __init__(self, ask: Ask) -> None:
        self._body, self._single = body_of(ask), "n" not in ask.options
        count = ask.options.get("n", 1)
        self.ids: list[list[int]] = [[] for _ in range(count)]
        self._texts, self._finishes = [""] * count, [""] * count
        self.fingerprint = ""

    @property
    def is_whole(self) -> bool:
        """Whether every completion has its end."""
        return all(self._finishes)

    @property
    def num_tokens(self) -> int:
        """Of all completions."""
        return sum(map(len, self.ids))

    def answer(self) -> Answer:
        """As a stream over gRPC has it."""
        first, *others = (
            Answer(tuple(ids), text, FinishReason[finish.upper()] if finish else None)
            for ids, text, finish in zip(self.ids, self._texts, self._finishes, strict=True)
        )
        return Answer(first.ids, first.text, first.finish, others=tuple(others))

    def take(self, event: dict[str, Any]) -> int:
        """Adds what an event brings; returns the number of its tokens. What is said of a completion that has had its
        end was said before."""
        self.fingerprint = self.fingerprint or event.get("system_fingerprint", "")
        count = 0
        for choice in event.get("choices", ()):
            place = choice["index"]
            if self._finishes[place]:
                continue
            ids = choice.get("token_ids") or ()
            self.ids[place] += ids
            self._texts[place] += choice.get("text") or ""
            self._finishes[place] = choice.get("finish_reason") or ""
            count += len(ids)
        return count

    def body(self) -> dict[str, Any]:
        """The request: for what has not come."""
        if not any(self.ids):
            return self._body
        ids = self.ids[0] if self._single else self.ids
        return {**self._body, "output_ids": ids, "system_fingerprint": self.fingerprint}


class Asker:
    """Who asks over HTTP. The first gateway is another one each time."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet, self._turn = fleet, 0
        self.errors_told: list[str] = []  # by which streams ended that could not go on
        self.broken_off = 0  # streams that a gateway, or the way to it, did not bring to an end
        self.num_resumed = 0  # streams that began with tokens of others

    async def ask(self, choices: Choices, arrivals: list[float], leaves_after: int | None = None) -> str:
        """Reads until all has come, or so many tokens have; returns what is wrong: the error that no fault excuses.
        `arrivals` gets the times of tokens."""
        end = time.monotonic() + TIMEOUT_S
        async with unpooled() as client:
            while time.monotonic() < end:
                gateway, address = await self._ready(client, end)
                if not address:
                    break
                since, refused = time.monotonic(), gateway.proxies[-1].counts.refused
                self.num_resumed += any(choices.ids)
                told = ""
                try:
                    async with aclosing(events(client, f"http://{address}/v1/completions", choices.body())) as coming:
                        async for event in coming:
                            told = told or str(event.get("error", ""))
                            arrivals += [time.monotonic()] * (choices.take(event) > 0)
                            if leaves_after is not None and choices.num_tokens >= leaves_after and not told:
                                return ""
                    broken = "the stream ended without a reason"
                except httpx.HTTPError as error:
                    broken = repr(error)
                if choices.is_whole and not told:
                    return ""
                if gateway.proxies[-1].counts.refused > refused:  # it is not there, or takes nothing new
                    await asyncio.sleep(WAIT_S)
                    continue
                self.errors_told += [told] if told else []
                self.broken_off += not told
                if not self._is_excused(gateway, since):
                    what = f"ended with an error: {told}" if told else f"broken off: {broken}"
                    return f"over HTTP, by {gateway.name}, which nothing befell: {what}"
                await asyncio.sleep(WAIT_S)
        return f"over HTTP, no gateway brought it to its end within {TIMEOUT_S:g} s"

    async def _ready(self, client: httpx.AsyncClient, end: float) -> tuple[Member, str]:
        """A gateway that says that it is ready, and where; no address: there was none in time."""
        while True:
            self._turn += 1
            gateway = self._fleet.gateways[self._turn % len(self._fleet.gateways)]
            address = self._fleet.http_address(gateway)
            if address and await is_ready(client, address):
                return gateway, address
            if time.monotonic() > end:
                return gateway, ""
            await asyncio.sleep(WAIT_S)

    def _is_excused(self, gateway: Member, since: float) -> bool:
        """Whether a stream that began then may have ended there without all that it was asked for."""
        return gateway.was_victim(since) or all(target.was_victim(since) for target in self._fleet.targets)


def askable(asks: Sequence[Ask]) -> list[Ask]:
    """Those with exact answers that can be asked for over HTTP."""
    return [ask for ask in asks if ask.exact and ask.shape in SHAPES]
