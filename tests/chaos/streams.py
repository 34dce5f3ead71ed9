"""What is asked of the gateways while faults happen, what the answers have to be, and who asks: readers that go from
one request to the next, each over both gateways."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import httpx
from chaos.fleet import HEAD, METHODS, Fleet

from outrider.client import Client, Part, Retry
from outrider.rpc.errors import OutriderError
from outrider.rpc.sampling_params import AcceptanceRule, FinishReason, StructuredOutput

NUM_TOKENS = 300
TIMEOUT_S = 240.0  # of a stream: longer than any fault, and than a service takes to start
LEAVES_AFTER, EVERY = 60, 4  # tokens; of so many streams of a reader one is not read to its end
PATIENT = Retry(attempts=60)  # both gateways may be away until one has been started again

PROMPTS = (
    "def parse_args(argv):\n",
    "class Stack:\n    def push(self, item):\n        self.items.append(item)\n\n    def pop(self):\n        return",
    "import os\nimport sys\n\n\ndef main():\n",
    "def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n    return",
)
LONG_PROMPT = "".join(f"def function_{number}(value):\n    return value + {number}\n\n\n" for number in range(40))
SCHEMA = json.dumps({"type": "array", "minItems": 12, "maxItems": 12, "items": {"enum": ["ada", "grace", "katherine"]}})

# How tokens are chosen. Of the last two nothing but the law is the same each time.
RULES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "coupled": {"temperature": 1.0, "acceptance": AcceptanceRule.COUPLED},
    "rejection": {"temperature": 1.0, "acceptance": AcceptanceRule.REJECTION},
    "block": {"temperature": 1.0, "acceptance": AcceptanceRule.BLOCK},
}
EXACT = ("greedy", "coupled")

# What else a request may want; the text decides the length where a constraint ends it.
SHAPES: dict[str, dict[str, Any]] = {
    "plain text": {},
    "penalties": {"presence_penalty": 0.6, "frequency_penalty": 0.4, "repetition_penalty": 1.1},
    "logprobs": {"logprobs": 3},
    "stop": {"stop": ["\n\n\n"], "ignore_eos": False},
    "schema": {"structured_output": StructuredOutput(json_schema=SCHEMA), "ignore_eos": False},
    "regex": {"structured_output": StructuredOutput(regex="([a-z]{3,9} ){30}"), "ignore_eos": False},
    "long prompt": {"prompt": LONG_PROMPT},
}
HOW: tuple[dict[str, Any], ...] = (
    *({"method": method, "num_draft_tokens": 4} for method in (*METHODS, HEAD)),
    {"mode": "branches", "num_draft_tokens": 4},
    {},  # as the gateway chooses
)


@dataclass(frozen=True)
class Ask:
    """One request."""

    name: str
    rule: str
    options: dict[str, Any]

    @property
    def exact(self) -> bool:
        """Whether its answer is the same each time, to the byte."""
        return self.rule in EXACT

    @property
    def key(self) -> str:
        """What tells it from all others."""
        return self.name + str(self.options["seed"])

    def plain(self) -> dict[str, Any]:
        """Its options without drafts."""
        options = {name: value for name, value in self.options.items() if name not in ("method", "mode", "prediction")}
        return {**options, "num_draft_tokens": 0, "speculate": False}


@dataclass(frozen=True)
class Answer:
    """All that a stream brought."""

    ids: tuple[int, ...]
    text: str
    finish: FinishReason | None
    logprobs: tuple[Any, ...] = ()

    @classmethod
    def of(cls, parts: Sequence[Part]) -> Answer:
        """Of a stream's parts."""
        ids = [token for part in parts for token in part.token_ids]
        logprobs = [entry for part in parts for entry in part.logprobs]
        finish = next((part.finish_reason for part in parts if part.finish_reason is not None), None)
        return cls(tuple(ids), "".join(part.text for part in parts), finish, tuple(logprobs))

    def difference(self, other: Answer) -> str:
        """Where they part; empty if nowhere."""
        for place, (one, another) in enumerate(itertools.zip_longest(self.ids, other.ids)):
            if one != another:
                return f"token {place} is {another}, and was {one} ({len(self.ids)} tokens, now {len(other.ids)})"
        for name in ("text", "finish", "logprobs"):
            if getattr(self, name) != getattr(other, name):
                return f"{name} differs: {getattr(other, name)!r:.200}, and was {getattr(self, name)!r:.200}"
        return ""


def all_asks(seed: int, num_tokens: int = NUM_TOKENS) -> list[Ask]:
    """Every rule with every method, each with a shape in turn, and every shape with every exact rule; shuffled."""
    dice = random.Random(f"asks {seed}")
    pairs = [(rule, how, None) for rule in RULES for how in HOW]
    pairs += [(rule, dice.choice(HOW), shape) for rule in EXACT for shape in SHAPES]
    shapes = itertools.cycle(SHAPES)
    asks = [
        _ask(number, rule, how, shape or next(shapes), num_tokens) for number, (rule, how, shape) in enumerate(pairs)
    ]
    dice.shuffle(asks)
    return asks


def _ask(number: int, rule: str, how: dict[str, Any], shape: str, num_tokens: int) -> Ask:
    name = f"{rule}, {how.get('method') or how.get('mode') or 'auto'}, {shape}"
    options: dict[str, Any] = {"prompt": PROMPTS[number % len(PROMPTS)], "max_tokens": num_tokens, "ignore_eos": True}
    options |= {"seed": number, "salt": f"ask {number}", **RULES[rule], **how, **SHAPES[shape]}
    return Ask(name, rule, options)


async def expectations(asks: Sequence[Ask], fleet: Fleet) -> dict[str, Answer]:
    """The answers to those that are exact, decoded plainly by services that nothing happens to. Requests that predict
    their answer are given it, with every seventh token wrong."""
    async with Client(fleet.addresses) as client:
        found = {}
        for ask in asks:
            if not ask.exact and ask.options.get("method") != "prediction":
                continue
            answer = Answer.of([part async for part in client.generate(timeout=TIMEOUT_S, **ask.plain())])
            if ask.options.get("method") == "prediction":
                ask.options["prediction"] = [
                    token if place % 7 else token // 2 for place, token in enumerate(answer.ids)
                ]
            if ask.exact:
                found[ask.key] = answer
        return found


@dataclass
class Stream:
    """One request under way, or over."""

    ask: Ask
    reader: str
    began: float
    arrivals: list[float] = field(default_factory=list)  # of tokens
    ended: float | None = None
    error: str = ""  # it came to no end
    change: str = ""  # it is another answer than undisturbed
    answer: Answer | None = None  # what it brought, where it came to an end
    left: bool = False  # by its reader, before the end
    digest: str = ""  # of the target's weights, as the answer says; over HTTP its beginning

    def pause_s(self, since: float, until: float) -> float:
        """The longest time without a token in that span, in which it ran."""
        until = min(until, self.ended if self.ended is not None else until)
        inside = [when for when in self.arrivals if since < when < until]
        times = [max(since, self.began), *inside, until]
        return max((after - before for before, after in itertools.pairwise(times)), default=0.0)


def judge(stream: Stream, answer: Answer, expected: Mapping[str, Answer], left: bool) -> None:
    """Says of a stream what is wrong with its answer. Of other rules than the exact ones an answer has to be whole; one
    that was `left` has to be a beginning."""
    ask = stream.ask
    if answer.finish is None and left:
        if ask.exact and answer.ids != expected[ask.key].ids[: len(answer.ids)]:
            stream.change = "the first tokens are others"
    elif answer.finish is None:
        stream.error = "the stream ended without a reason"
    elif ask.exact:
        stream.change = expected[ask.key].difference(answer)
    elif answer.finish is FinishReason.LENGTH and len(answer.ids) != ask.options["max_tokens"]:
        stream.change = f"{len(answer.ids)} tokens of {ask.options['max_tokens']}"


class Readers:
    """Who asks: `num_grpc` of them by the client, which resumes, and one over HTTP, which cannot. Each goes on with
    another request as soon as one has ended."""

    def __init__(self, fleet: Fleet, asks: Sequence[Ask], expected: dict[str, Answer], num_grpc: int) -> None:
        self._fleet, self.expected = fleet, expected
        self.streams: list[Stream] = []
        self.errors_told: list[str] = []  # by which streams over HTTP ended, as they must if they cannot go on
        self.broken_off = 0  # and that a gateway that ended did not bring to an end
        self._asks = itertools.cycle(asks)
        self._stopping = False
        self._tasks = [asyncio.create_task(self._read(f"client {number}", number)) for number in range(num_grpc)]
        self._tasks.append(asyncio.create_task(self._read_http()))

    def running(self) -> list[Stream]:
        """Those that are under way."""
        return [stream for stream in self.streams if stream.ended is None]

    async def stop(self) -> None:
        """Returns when every stream has come to its end."""
        self._stopping = True
        await asyncio.gather(*self._tasks)

    def _next(self, reader: str) -> Iterator[Stream]:
        while not self._stopping:
            stream = Stream(next(self._asks), reader, time.monotonic())
            self.streams.append(stream)
            yield stream

    async def _read(self, name: str, number: int) -> None:
        """A client stays with the gateway that answers: so each stream has a client of its own, and begins at another
        gateway than the one before."""
        for place, stream in enumerate(self._next(name), number):
            addresses = self._fleet.addresses[:: 1 if place % 2 else -1]
            parts: list[Part] = []
            leaves = place % EVERY == 0
            async with Client(addresses, retry=PATIENT) as client:
                try:
                    async with aclosing(client.generate(timeout=TIMEOUT_S, **stream.ask.options)) as coming:
                        async for part in coming:
                            parts.append(part)
                            if part.token_ids:
                                stream.arrivals.append(time.monotonic())
                            if leaves and sum(len(one.token_ids) for one in parts) >= LEAVES_AFTER:
                                break
                    stream.answer, stream.left = Answer.of(parts), leaves
                    stream.digest = next((part.model_digest for part in parts if part.model_digest), "")
                    judge(stream, stream.answer, self.expected, leaves)
                except OutriderError as error:
                    stream.error = f"{type(error).__name__}: {error.message}"
                finally:
                    stream.ended = time.monotonic()

    async def _read_http(self) -> None:
        """One greedy request over and over, at a gateway that is there. It has to come out as expected, or to end with
        an error event; only a gateway that ends, or has no memory, may break it off."""
        ask = next(ask for ask in self._asks if ask.rule == "greedy" and ask.name.endswith("plain text"))
        body = {
            **{name: ask.options[name] for name in ("prompt", "max_tokens", "ignore_eos", "temperature")},
            **{"model": "pair", "stream": True, "return_token_ids": True, "cache_salt": "http"},
        }
        turn = 0
        async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
            while not self._stopping:
                turn += 1
                gateway = self._fleet.gateways[turn % 2]
                num_starts, address = gateway.num_starts, self._fleet.http_address(gateway)
                if not address or not await _is_ready(client, address):  # it is about to start, or to end
                    await asyncio.sleep(0.2)
                    continue
                stream = Stream(ask, "http", time.monotonic())
                try:
                    ids, error, fingerprint = [], "", ""
                    async for event in events(client, f"http://{address}/v1/completions", body):
                        stream.arrivals.append(time.monotonic())
                        error = error or str(event.get("error", ""))
                        fingerprint = fingerprint or event.get("system_fingerprint", "")
                        ids += [token for choice in event.get("choices", ()) for token in choice.get("token_ids") or ()]
                except httpx.ConnectError:  # it is not there, or takes nothing new
                    await asyncio.sleep(0.2)
                    continue
                except httpx.HTTPError as broken:
                    await asyncio.sleep(0.2)
                    excused = gateway.num_starts != num_starts or gateway.status is not None
                    if not excused and time.monotonic() > gateway.short_until:
                        stream.error = f"broken off by a gateway that lives: {broken!r}"
                        self.streams.append(stream)
                    self.broken_off += 1
                    continue
                finally:
                    stream.ended = time.monotonic()
                self.errors_told += [error] if error else []
                stream.answer = None if error else Answer(tuple(ids), "", None)
                stream.digest = fingerprint.removeprefix("fp_")
                if not error:
                    expected = self.expected[ask.key].ids
                    if tuple(ids) != expected:
                        stream.change = f"over HTTP {len(ids)} tokens, {len(expected)} expected, or others"
                    self.streams.append(stream)
                await asyncio.sleep(0.05)


async def _is_ready(client: httpx.AsyncClient, address: str) -> bool:
    """What a balancer asks before it sends anybody there."""
    try:
        return (await client.get(f"http://{address}/readyz")).status_code == 200
    except httpx.HTTPError:
        return False


async def events(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """The events of a streamed answer; an error before the first is one, too."""
    async with client.stream("POST", url, json=body) as response:
        if response.status_code != 200:
            yield {"error": f"status {response.status_code}"}
            return
        async for line in response.aiter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                yield json.loads(line.removeprefix("data: "))
