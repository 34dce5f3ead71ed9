"""What `outrider bench serve` sends: its settings, and requests that arrive by a clock of their own (open loop) or as
others end (closed loop), with what was seen of each."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from outrider.cli.access import AccessSettings
from outrider.rpc.errors import OutriderError


class BenchServeSettings(AccessSettings):
    """Whom to load, how, with what, and what counts as good."""

    section: ClassVar[str] = "bench_serve"

    base_url: str = Field("", description="OpenAI-compatible server, as http://127.0.0.1:8000 (with or without /v1)")
    gateway: str = Field("", description="address of a gateway, over gRPC, instead")
    model: str = Field("", description="name of the model, with --base-url (default: the first that is served)")
    api_key: str = Field("", description="bearer token, with --base-url")
    rate: float | None = Field(
        None, gt=0, description="open loop: requests a second, arriving by a Poisson process whatever is under way"
    )
    concurrency: int | None = Field(
        None, ge=1, le=4096, description="closed loop: requests under way at once (4, where no rate is given)"
    )
    requests: int = Field(64, ge=1, description="requests that are measured")
    warmup: int = Field(2, ge=0, description="requests before, one after another, that are not")
    prompts: Path | None = Field(
        None, description="a JSON list of texts, JSON lines of texts or of objects with prompt, or a text a line"
    )
    chat: bool = Field(False, description="send each prompt as the message of a conversation")
    max_tokens: int = Field(64, ge=1, description="most tokens of a completion")
    ignore_eos: bool = Field(False, description="go on past the end of sequence: all completions have max-tokens")
    temperature: float = Field(0.0, ge=0, description="0 is greedy")
    seed: int = Field(
        0, ge=0, lt=2**32, description="of the arrivals, of the order of the prompts, and of the sampling"
    )
    speculation: bool = Field(True, description="draft at all")
    num_draft_tokens: int | None = Field(None, ge=0, description="tokens drafted a round (default: the gateway's)")
    mode: Literal["auto", "sequential", "chains", "branches"] | None = Field(
        None, description="how far the draft runs ahead (default: the gateway's)"
    )
    acceptance: Literal["auto", "rejection", "coupled", "block"] = Field(
        "auto", description="how drafted tokens are accepted"
    )
    slo_ttft_ms: float | None = Field(None, gt=0, description="a good request's first token comes within this time")
    slo_itl_ms: float | None = Field(
        None, gt=0, description="and its further ones within this time each, on the request's average"
    )
    timeout: float = Field(120.0, gt=0, description="seconds until a request counts as failed")
    json_file: Path | None = Field(None, description="also --json FILE: the result and every request, as JSON")
    plot: Path | None = Field(None, description="the distributions as a picture, an SVG file")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if bool(self.base_url) == bool(self.gateway):
            raise ValueError("give one of --base-url http://HOST:PORT and --gateway HOST:PORT")
        url = urlsplit(self.base_url)
        if self.base_url and (url.scheme not in ("http", "https") or not url.hostname):
            raise ValueError(f"--base-url must be as http://HOST:PORT, not {self.base_url!r}")
        if self.rate is not None and self.concurrency is not None:
            raise ValueError("give --rate, for an open loop, or --concurrency, for a closed one, not both")
        if self.gateway and (self.model or self.api_key):
            raise ValueError("--model and --api-key go with --base-url; a gateway takes --token-file")
        if self.api_key and self.token_file is not None:
            raise ValueError("give one of --api-key and --token-file")
        if self.peer_ca is not None and self.base_url and url.scheme != "https":
            raise ValueError(f"--peer-ca is for TLS: --base-url must be as https://HOST:PORT, not {self.base_url!r}")
        if self.peer_name and self.base_url:
            raise ValueError("--peer-name goes with --gateway; a URL's host is the name")
        return self

    @property
    def num_at_once(self) -> int:
        """Requests under way at once in a closed loop."""
        return self.concurrency or 4

    @property
    def place(self) -> str:
        """The server, in words."""
        return self.base_url or f"gateway {self.gateway}"

    @property
    def loop(self) -> str:
        """How it is loaded, in words."""
        if self.rate is not None:
            return f"open loop, {self.rate:g} requests/s (Poisson)"
        return f"closed loop, {self.num_at_once} at once"

    @property
    def asks_for_speculation(self) -> bool:
        """Whether anything about speculation is other than the server's own."""
        others = self.num_draft_tokens is not None or self.mode is not None or self.acceptance != "auto"
        return others or not self.speculation


@dataclass(frozen=True, slots=True)
class BenchRequest:
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


class LoadClient(Protocol):
    """Whom requests are sent to."""

    def send(self, request: BenchRequest) -> AsyncGenerator[Delivery, None]:
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


Tick = Callable[[Record], None]


async def open_loop(
    load_client: LoadClient, requests: Sequence[BenchRequest], rate: float, seed: int, limit: float, tick: Tick
) -> list[Record]:
    """Requests arrive by a Poisson process, however many are under way."""
    started = time.monotonic()
    dues = [started + offset for offset in arrivals(len(requests), rate, seed)]
    async with asyncio.TaskGroup() as group:
        tasks = []
        for index, (request, due) in enumerate(zip(requests, dues, strict=True)):
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            tasks.append(group.create_task(measure(load_client, request, Record(index, due), limit, tick)))
    return [task.result() for task in tasks]


async def closed_loop(
    load_client: LoadClient, requests: Sequence[BenchRequest], num_at_once: int, limit: float, tick: Tick
) -> list[Record]:
    """As many clients, each of which sends its next request when its last one has ended."""
    waiting = iter(enumerate(requests))
    records: list[Record] = []

    async def client() -> None:
        for index, request in waiting:
            records.append(await measure(load_client, request, Record(index, time.monotonic()), limit, tick))

    async with asyncio.TaskGroup() as group:
        for _ in range(min(num_at_once, len(requests))):
            group.create_task(client())
    return sorted(records, key=lambda record: record.index)


async def measure(load_client: LoadClient, request: BenchRequest, record: Record, limit: float, tick: Tick) -> Record:
    """Sends one request and follows it to its end. One that fails says why."""
    record.sent = time.monotonic()
    try:
        async with asyncio.timeout(limit), aclosing(load_client.send(request)) as deliveries:
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
