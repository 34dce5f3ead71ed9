"""The load: requests that arrive by a clock of their own (open loop), or as others end (closed loop), and what was
seen of each."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

from outrider.wire.errors import OutriderError


@dataclass(frozen=True, slots=True)
class Ask:
    """One request, as both protocols send it."""

    prompt: str
    chat: bool
    max_tokens: int
    ignore_eos: bool
    temperature: float
    seed: int


@dataclass(frozen=True, slots=True)
class Delivery:
    """What came at once. `num_tokens` is None where the server does not say it."""

    num_tokens: int | None = None
    text: bool = False
    finish: str | None = None
    usage: tuple[int, int] | None = None  # prompt and completion tokens
    speculation: dict[str, Any] | None = None


class Server(Protocol):
    """Whom requests are sent to."""

    def send(self, ask: Ask) -> AsyncGenerator[Delivery, None]:
        """Yields what comes, as it comes. Raises OutriderError, OSError or ValueError where the request fails."""


@dataclass(slots=True)
class Record:
    """One request. Seconds are on the monotonic clock; `due` is when it was to be sent: a generator that is late must
    not make the server look good."""

    index: int
    due: float
    sent: float = 0.0
    ended: float = 0.0
    times: list[float] = field(default_factory=list)  # of the deliveries with tokens
    counts: list[int | None] = field(default_factory=list)  # tokens of each
    prompt_tokens: int = 0
    completion_tokens: int | None = None
    finish: str | None = None
    speculation: dict[str, Any] | None = None
    error: str = ""

    @property
    def num_tokens(self) -> int:
        """Tokens that came: as the server counted them, or delivery by delivery."""
        if self.completion_tokens is not None:
            return self.completion_tokens
        return sum(1 if count is None else count for count in self.counts)

    @property
    def ttft(self) -> float | None:
        """Seconds to the first token."""
        return self.times[0] - self.due if self.times else None

    @property
    def e2e(self) -> float:
        """Seconds to the end."""
        return self.ended - self.due

    @property
    def gaps(self) -> list[float]:
        """Seconds between deliveries."""
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]

    @property
    def per_token(self) -> float | None:
        """Seconds a token after the first delivery, spread over all of them; None where it was the only one."""
        rest = self.num_tokens - (self.counts[0] or 1) if self.counts else 0
        return (self.times[-1] - self.times[0]) / rest if rest > 0 and len(self.times) > 1 else None

    def take(self, delivery: Delivery) -> None:
        """Notes what came, and when."""
        if delivery.num_tokens or (delivery.num_tokens is None and delivery.text):
            self.times.append(time.monotonic())
            self.counts.append(delivery.num_tokens)
        if delivery.usage is not None:
            self.prompt_tokens, self.completion_tokens = delivery.usage
        self.finish = delivery.finish or self.finish
        self.speculation = delivery.speculation or self.speculation


async def open_loop(
    server: Server, asks: Sequence[Ask], rate: float, seed: int, limit: float, tick: Tick
) -> list[Record]:
    """Requests arrive by a Poisson process, however many are under way."""
    started = time.monotonic()
    dues = [started + offset for offset in arrivals(len(asks), rate, seed)]
    async with asyncio.TaskGroup() as group:
        tasks = []
        for index, (ask, due) in enumerate(zip(asks, dues, strict=True)):
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            tasks.append(group.create_task(measure(server, ask, Record(index, due), limit, tick)))
    return [task.result() for task in tasks]


async def closed_loop(server: Server, asks: Sequence[Ask], num_at_once: int, limit: float, tick: Tick) -> list[Record]:
    """As many clients, each of which sends its next request when its last one has ended."""
    waiting = iter(enumerate(asks))
    records: list[Record] = []

    async def client() -> None:
        for index, ask in waiting:
            records.append(await measure(server, ask, Record(index, time.monotonic()), limit, tick))

    async with asyncio.TaskGroup() as group:
        for _ in range(min(num_at_once, len(asks))):
            group.create_task(client())
    return sorted(records, key=lambda record: record.index)


async def measure(server: Server, ask: Ask, record: Record, limit: float, tick: Tick) -> Record:
    """Sends one request and follows it to its end. One that fails says why."""
    record.sent = time.monotonic()
    try:
        async with asyncio.timeout(limit), aclosing(server.send(ask)) as deliveries:
            async for delivery in deliveries:
                record.take(delivery)
        if record.finish is None:
            record.error = "the stream ended without a finish reason"
    except TimeoutError:
        record.error = f"no end within {limit:g} s"
    except (OutriderError, OSError, ValueError) as error:
        record.error = " ".join(str(error).split()) or type(error).__name__
    record.ended = time.monotonic()
    tick(record)
    return record


def arrivals(num: int, rate: float, seed: int) -> list[float]:
    """Seconds of a Poisson process's events, from its start; the first is at once."""
    chance = random.Random(seed)
    times = [0.0]
    while len(times) < num:
        times.append(times[-1] + chance.expovariate(rate))
    return times


Tick = Callable[[Record], None]
