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

from chaos.asks import PATIENT, TIMEOUT_S, Answer, Ask
from chaos.fleet import Fleet
from chaos.over_http import SHAPES, Asker, Choices
from chaos.streams import Stream, judge

from outrider.client import Client, Part
from outrider.rpc.errors import OutriderError

# How a request ends, and how often.
ENDS = {"whole": 8, "closed": 6, "cut off": 2, "deadline": 2, "http": 3, "http closed": 3}
NUMBERS = (1, 1, 1, 1, 2, 3)  # of completions


class Crowd:
    """`num_readers` callers at a time. What follows from the seed is who asks for what, and where it ends."""

    def __init__(
        self, fleet: Fleet, asks: Sequence[Ask], expected: Mapping[str, Answer], seed: int, num_readers: int
    ) -> None:
        self._fleet, self._expected, self._num_readers = fleet, expected, num_readers
        single = [ask for ask in asks if "n" not in ask.options]  # how many completions are wanted is drawn
        self._asks, self._dice, self._http = itertools.cycle(single), random.Random(f"crowd {seed}"), Asker(fleet)
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
            if end.startswith("http") and ask.shape not in SHAPES:
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
        """Who closes does so at a random token; who does not goes on at the other gateway where a fault ends it."""
        leaves_after = self._dice.randrange(stream.ask.options["max_tokens"]) if end == "http closed" else None
        choices = Choices(stream.ask)
        stream.error = await self._http.ask(choices, stream.arrivals, leaves_after)
        if not stream.error:
            judge(stream, choices.answer(), self._expected, leaves_after is not None)
