"""What a load came to: percentiles, throughput, goodput, acceptance; as JSON holds it and as text.

The settings of `outrider bench serve`.

The load: requests that arrive by a clock of their own (open loop), or as others end (closed loop), and what was
seen of each."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar, Literal, Protocol, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from outrider.bench.results import Json, align
from outrider.rpc.errors import OutriderError
from outrider.rpc.settings import ServiceSettings


class BenchServeSettings(ServiceSettings):
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
    acceptance: Literal["auto", "rejection", "coupled"] = Field("auto", description="how drafted tokens are accepted")
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
            raise ValueError("--model and --api-key go with --base-url")
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


Tick = Callable[[Record], None]

PERCENTS = (50, 90, 95, 99)
# Key, what the table calls it.
TIMES = (
    ("ttft_ms", "time to first token"),
    ("itl_ms", "inter-token latency (between deliveries)"),
    ("tpot_ms", "time per output token (of a request)"),
    ("e2e_ms", "end to end"),
)


def summarise(settings: BenchServeSettings, server: str, records: Sequence[Record]) -> Json:
    """The whole result; only completions that ended count in the times."""
    done = [record for record in records if not record.error]
    seconds = max(record.ended for record in records) - min(record.due for record in records)
    tokens = sum(record.num_tokens for record in done)
    result: Json = {
        "server": server,
        "place": settings.place,
        "loop": settings.loop,
        "setup": settings.model_dump(mode="json", exclude={"json_file", "plot", "api_key"}),
        "seconds": round(seconds, 4),
        "requests": len(records),
        "completed": len(done),
        "failed": dict(Counter(record.error for record in records if record.error)),
        "prompt_tokens": sum(record.prompt_tokens for record in done),
        "output_tokens": tokens,
        "requests_per_s": round(len(done) / seconds, 4),
        "output_tokens_per_s": round(tokens / seconds, 4),
        "tokens_per_delivery": _ratio(tokens, sum(len(record.times) for record in done)),
        "most_late_ms": round(max(record.sent - record.due for record in records) * 1e3, 3),
        "times": {name: spread(values) for name, values in times_ms(done).items()},
        "goodput": _goodput(settings, records, seconds),
        "speculation": _speculation(done),
    }
    start = min(record.due for record in records)
    return result | {"records": [_row(settings, record, start) for record in records]}


def times_ms(records: Sequence[Record]) -> dict[str, list[float]]:
    """All times in milliseconds, by name."""
    return {
        "ttft_ms": [record.ttft * 1e3 for record in records if record.ttft is not None],
        "itl_ms": [gap * 1e3 for record in records for gap in record.gaps],
        "tpot_ms": [record.per_token * 1e3 for record in records if record.per_token is not None],
        "e2e_ms": [record.e2e * 1e3 for record in records],
    }


def spread(values: Sequence[float]) -> Json | None:
    """Mean, percentiles, greatest; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    percentiles = {f"p{percent}": round(percentile(ordered, percent), 3) for percent in PERCENTS}
    return {"mean": round(fmean(ordered), 3), **percentiles, "max": round(ordered[-1], 3), "count": len(ordered)}


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Between the two nearest values, in proportion."""
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def is_good(settings: BenchServeSettings, record: Record) -> bool:
    """Whether a request met what was asked for. One that failed did not."""
    if record.error or record.ttft is None:
        return False
    first = settings.slo_ttft_ms is None or record.ttft * 1e3 <= settings.slo_ttft_ms
    each = settings.slo_itl_ms is None or record.per_token is None or record.per_token * 1e3 <= settings.slo_itl_ms
    return first and each


def render(result: Json) -> Iterator[str]:
    """The result as lines."""
    yield f"{result['server']} at {result['place']}; {result['loop']}"
    failed = sum(result["failed"].values())
    yield f"{result['completed']} of {result['requests']} requests in {result['seconds']:.2f} s, {failed} failed"
    for problem, count in result["failed"].items():
        yield f"  {count} x {problem}"
    if result["setup"]["rate"] is not None and result["most_late_ms"] > 5:
        yield f"  the generator was up to {result['most_late_ms']:.0f} ms late; its lateness counts as the server's"
    yield ""
    yield from align([("ms", "mean", *(f"p{percent}" for percent in PERCENTS), "max"), *_rows(result)])
    yield ""
    speed = f"{result['output_tokens_per_s']:.1f} output tokens/s, {result['requests_per_s']:.2f} requests/s"
    yield f"  throughput   {speed}"
    if (good := result["goodput"]) is not None:
        yield (
            f"  goodput      {good['requests_per_s']:.2f} requests/s: {good['good']} of {result['requests']} requests "
            f"with {_objective(good)}"
        )
    yield f"  acceptance   {_acceptance(result['speculation'])}"


def _rows(result: Json) -> Iterator[tuple[str, ...]]:
    for key, name in TIMES:
        found = result["times"][key]
        values = ("mean", *(f"p{percent}" for percent in PERCENTS), "max")
        yield (name, *(("-" if found is None else f"{found[value]:.1f}") for value in values))


def _objective(good: Json) -> str:
    words = []
    if good["slo_ttft_ms"] is not None:
        words.append(f"a first token within {good['slo_ttft_ms']:g} ms")
    if good["slo_itl_ms"] is not None:
        words.append(f"{good['slo_itl_ms']:g} ms a token after it")
    return " and ".join(words)


def _acceptance(found: Json | None) -> str:
    if found is None:
        return "not known: the server does not say"
    if not found["num_draft_tokens"]:
        return f"nothing was drafted; {found['tokens_per_round']:.2f} tokens a round"
    positions = zip(found["accepted_per_position"], found["tested_per_position"], strict=True)
    shares = " ".join(f"{accepted / tested:.2f}" if tested else "-" for accepted, tested in positions)
    return (
        f"{found['acceptance_rate']:.1%} ({found['num_accepted_tokens']}/{found['num_draft_tokens']}), "
        f"{found['tokens_per_round']:.2f} tokens a round, by position {shares}"
    )


def _goodput(settings: BenchServeSettings, records: Sequence[Record], seconds: float) -> Json | None:
    """Only where an objective was given."""
    if settings.slo_ttft_ms is None and settings.slo_itl_ms is None:
        return None
    good = sum(is_good(settings, record) for record in records)
    return {
        "slo_ttft_ms": settings.slo_ttft_ms,
        "slo_itl_ms": settings.slo_itl_ms,
        "good": good,
        "requests_per_s": round(good / seconds, 4),
    }


def _speculation(records: Sequence[Record]) -> Json | None:
    """Sums over the completions whose rounds are known."""
    known = [(record, record.speculation) for record in records if record.speculation is not None]
    if not known:
        return None
    names = ("num_rounds", "num_drafts", "num_draft_tokens", "num_accepted_tokens")
    sums: Json = {name: sum(found[name] for _, found in known) for name in names}
    for name in ("accepted_per_position", "tested_per_position"):
        sums[name] = [sum(column) for column in zip_longest(*(found[f"num_{name}"] for _, found in known), fillvalue=0)]
    sums["acceptance_rate"] = _ratio(sums["num_accepted_tokens"], sums["num_draft_tokens"])
    sums["tokens_per_round"] = _ratio(sum(record.num_tokens for record, _ in known), sums["num_rounds"])
    return sums


def _row(settings: BenchServeSettings, record: Record, start: float) -> Json:
    """One request; milliseconds, from the load's start."""
    return {
        "index": record.index,
        "due_ms": round((record.due - start) * 1e3, 3),
        "ttft_ms": None if record.ttft is None else round(record.ttft * 1e3, 3),
        "e2e_ms": round(record.e2e * 1e3, 3),
        "itl_ms": [round(gap * 1e3, 3) for gap in record.gaps],
        "prompt_tokens": record.prompt_tokens,
        "output_tokens": record.num_tokens,
        "finish_reason": record.finish,
        "good": is_good(settings, record),
        "error": record.error or None,
    }


def _ratio(part: float, whole: float) -> float:
    return round(part / whole, 4) if whole else 0.0
