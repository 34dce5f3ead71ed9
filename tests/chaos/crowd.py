"""Callers who mostly do not wait for the end: over gRPC and HTTP, for one completion or several, they close the call,
drop the connection, or have set a deadline, at a random point. What they have got by then has to be right."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import Any

import httpx
from chaos.fleet import Fleet
from chaos.streams import PATIENT, TIMEOUT_S, Answer, Ask, Stream, events, judge

from outrider.client import Client, Part
from outrider.rpc.errors import OutriderError

# How a request ends, and how often.
ENDS = {"whole": 8, "closed": 6, "cut off": 2, "deadline": 2, "http": 3, "http closed": 3}
OVER_HTTP = ("plain text", "long prompt", "penalties")  # the shapes that are asked for there, too
HTTP_OPTIONS = (
    *("prompt", "max_tokens", "ignore_eos", "temperature", "seed"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
NUMBERS = (1, 1, 1, 1, 2, 3)  # of completions


class Crowd:
    """`num_readers` callers at a time. What follows from the seed is who asks for what, and where it ends."""

    def __init__(
        self, fleet: Fleet, asks: Sequence[Ask], expected: Mapping[str, Answer], seed: int, num_readers: int
    ) -> None:
        self._fleet, self._expected, self._num_readers = fleet, expected, num_readers
        self._asks, self._dice = itertools.cycle(asks), random.Random(f"crowd {seed}")
        self.ends: Counter[str] = Counter()
        self.wrong: list[Stream] = []  # lost or changed
        self._tasks: list[asyncio.Task[None]] = []
        self._resting = False

    @property
    def num_requests(self) -> int:
        """That have ended, in whatever way."""
        return self.ends.total()

    def go(self) -> None:
        """Everybody asks, one request after another."""
        self._resting = False
        self._tasks = [asyncio.create_task(self._ask(number)) for number in range(self._num_readers)]

    async def rest(self) -> None:
        """Returns when the last stream has ended; nobody asks for more."""
        self._resting = True
        await asyncio.gather(*self._tasks)

    async def _ask(self, number: int) -> None:
        while not self._resting:
            ask, end = next(self._asks), self._dice.choices(list(ENDS), list(ENDS.values()))[0]
            if end.startswith("http") and ask.name.rpartition(", ")[2] not in OVER_HTTP:
                end = end.removeprefix("http").strip() or "whole"
            stream = Stream(ask, f"caller {number}, {end}", time.monotonic())
            await (self._over_http if end.startswith("http") else self._over_grpc)(stream, end)
            self.ends[end] += 1
            if stream.error or stream.change:
                self.wrong.append(stream)

    async def _over_grpc(self, stream: Stream, end: str) -> None:
        """A connection of its own: of those that drop it, it is cut in the middle of what the gateway sends."""
        dice, options = self._dice, stream.ask.options
        leaves_after = dice.randrange(options["max_tokens"])  # tokens; 0: before any has come
        timeout_s = dice.uniform(0.02, 1.0) if end == "deadline" else TIMEOUT_S
        parts: list[Part] = []
        leaves = end in ("closed", "cut off")
        addresses = self._fleet.addresses[:: dice.choice((1, -1))]
        async with Client(addresses, retry=PATIENT) as client:
            coming = client.generate(timeout=timeout_s, n=dice.choice(NUMBERS), **options)
            try:
                async with aclosing(coming):
                    async for part in coming:
                        parts += [part] if part.index == 0 else []
                        if leaves and sum(len(one.token_ids) for one in parts) >= leaves_after:
                            if end == "cut off":
                                await client.close()
                            break
                judge(stream, Answer.of(parts), self._expected, leaves)
            except OutriderError as error:  # whose deadline is near gets the error that there is no time to mend
                if end != "deadline":
                    stream.error = f"{type(error).__name__}: {error.message}"
                else:
                    judge(stream, Answer.of(parts), self._expected, left=True)
                    stream.error = ""

    async def _over_http(self, stream: Stream, end: str) -> None:
        """Nothing is asked of a gateway that is about to start; one that ends may break off what it answers."""
        gateway = self._dice.choice(self._fleet.gateways)
        num_starts, address = gateway.num_starts, self._fleet.http_address(gateway)
        leaves_after = self._dice.randrange(stream.ask.options["max_tokens"]) if end == "http closed" else None
        if not address:
            await asyncio.sleep(0.2)
            return
        ids: list[int] = []
        error = ""
        try:
            async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
                coming = events(client, f"http://{address}/v1/completions", http_body(stream.ask))
                async with aclosing(coming):
                    async for event in coming:
                        error = error or str(event.get("error", ""))
                        ids += [token for choice in event.get("choices", ()) for token in choice.get("token_ids") or ()]
                        if leaves_after is not None and len(ids) >= leaves_after:
                            break
        except httpx.HTTPError as broken:
            error = f"broken off: {broken!r}"
            await asyncio.sleep(0.2)
        ends = gateway.num_starts != num_starts or gateway.status is not None
        if error:
            stream.error = "" if ends or not address else error
        elif stream.ask.exact:
            expected = self._expected[stream.ask.key].ids
            if tuple(ids) != (expected if leaves_after is None else expected[: len(ids)]):
                stream.change = f"over HTTP {len(ids)} tokens, {len(expected)} expected, or others"


def http_body(ask: Ask) -> dict[str, Any]:
    """A request as OpenAI's interface has it."""
    body = {name: ask.options[name] for name in HTTP_OPTIONS if name in ask.options}
    how = {name: ask.options[name] for name in ("mode", "num_draft_tokens") if name in ask.options}
    if ask.options.get("method") not in (None, "prediction"):
        how["method"] = ask.options["method"]
    how["acceptance"] = ask.rule if ask.rule != "greedy" else "coupled"
    return body | {"model": "pair", "stream": True, "return_token_ids": True, "cache_salt": ask.key, "speculation": how}
