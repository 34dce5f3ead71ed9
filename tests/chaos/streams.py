"""Who asks while faults happen: readers that go from one request to the next, each over both gateways."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from chaos.asks import PATIENT, TIMEOUT_S, Answer, Ask
from chaos.fleet import Fleet
from chaos.over_http import Asker, Choices, askable

from outrider.client import Client, Part
from outrider.rpc.errors import OutriderError
from outrider.rpc.words.sampling_params import FinishReason

LEAVES_AFTER, EVERY = 60, 4  # tokens; of so many streams of a reader one is not read to its end


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
    is_whole = all(one.finish is not None for one in answer.completions)
    if not is_whole and left:
        if ask.exact and not answer.begins(expected[ask.key]):
            stream.change = "the first tokens are others"
    elif not is_whole:
        stream.error = "the stream ended without a reason"
    elif ask.exact:
        stream.change = expected[ask.key].difference(answer)
    elif len(answer.completions) != ask.options.get("n", 1):
        stream.change = f"{len(answer.completions)} completions of {ask.options.get('n', 1)}"
    else:
        lengths = [len(one.ids) for one in answer.completions if one.finish is FinishReason.LENGTH]
        wrong = [length for length in lengths if length != ask.options["max_tokens"]]
        stream.change = f"{wrong[0]} tokens of {ask.options['max_tokens']}" if wrong else ""


class Readers:
    """Who asks: `num_grpc` of them by the client, which resumes, and one over HTTP, which resumes by hand. Each goes on
    with another request as soon as one has ended."""

    def __init__(self, fleet: Fleet, asks: Sequence[Ask], expected: dict[str, Answer], num_grpc: int) -> None:
        self._fleet, self.expected = fleet, expected
        self.streams: list[Stream] = []
        self.http = Asker(fleet)
        self._asks, self._http_asks = itertools.cycle(asks), itertools.cycle(askable(asks))
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

    async def give_up(self) -> None:
        """Ends them where they are: the services will not go on."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def read(self, ask: Ask, reader: str, addresses: Sequence[str], leaves: bool = False) -> Stream:
        """One request, whose answer is to be judged. Who `leaves` does so before the end."""
        stream = self._begun(ask, reader)
        parts: list[Part] = []
        async with Client(addresses, retry=PATIENT) as client:
            try:
                async with aclosing(client.generate(timeout=TIMEOUT_S, **ask.options)) as coming:
                    async for part in coming:
                        parts.append(part)
                        if part.token_ids:
                            stream.arrivals.append(time.monotonic())
                        if leaves and sum(len(one.token_ids) for one in parts) >= LEAVES_AFTER:
                            break
                stream.answer, stream.left = Answer.of(parts), leaves
                stream.digest = next((part.model_digest for part in parts if part.model_digest), "")
            except OutriderError as error:
                stream.error = f"{type(error).__name__}: {error.message}"
            finally:
                stream.ended = time.monotonic()
        return stream

    def _begun(self, ask: Ask, reader: str) -> Stream:
        stream = Stream(ask, reader, time.monotonic())
        self.streams.append(stream)
        return stream

    def _next(self, asks: Iterator[Ask]) -> Iterator[Ask]:
        while not self._stopping:
            yield next(asks)

    async def _read(self, name: str, number: int) -> None:
        """A client stays with the gateway that answers: so each stream has a client of its own, and begins at another
        gateway than the one before."""
        for place, ask in enumerate(self._next(self._asks), number):
            stream = await self.read(ask, name, self._fleet.addresses[:: 1 if place % 2 else -1], place % EVERY == 0)
            self._judge(stream)

    async def _read_http(self) -> None:
        for ask in self._next(self._http_asks):
            stream, choices = self._begun(ask, "http"), Choices(ask)
            stream.error = await self.http.ask(choices, stream.arrivals)
            stream.ended = time.monotonic()
            stream.answer = None if stream.error else choices.answer()
            stream.digest = choices.fingerprint.removeprefix("fp_")
            self._judge(stream)
            await asyncio.sleep(0.05)

    def _judge(self, stream: Stream) -> None:
        if stream.answer is not None:
            judge(stream, stream.answer, self.expected, stream.left)
