"""The processes of the network bench: TCP proxies that make networks between the services, and a draft whose passes are
stretched.

    python -m outrider.bench.network_workers proxy UPSTREAM...
    python -m outrider.bench.network_workers draft ARGUMENTS of outrider draft

The proxies are ready with {"addresses"}; {"delay_ms", "jitter_ms", "stall_ms", "seed"} sets what holds from then on,
for open connections too. Their loop waits in select(), whose timeouts are exact to microseconds; epoll's are whole
milliseconds. The draft is ready with {"address"}, and takes {"pass_ms"} at any time: it sleeps for what a pass of its
model is to last longer, which leaves the cores to others."""

from __future__ import annotations

import asyncio
import io
import json
import os
import random
import re
import selectors
import signal
import sys
import threading
import time
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Any

from outrider.bench.harness import Send, answer_requests, take_output
from outrider.cli.__main__ import main as run_command
from outrider.cli.local_services import LISTENING
from outrider.proposers.draft_model import DraftModelProposer
from outrider.proposers.draft_rows import DraftedToken, DraftRows

NOTATION = re.compile(r"(?P<delay>\d+(?:\.\d+)?)(?P<relative>v?)(?:~(?P<jitter>\d+(?:\.\d+)?))?(?:!(?P<stall>\d+))?")
STALL_EVERY_S = 2.0  # from the end of one stall to the next, on average
CROSSINGS = 4  # a round trip: target to gateway to draft, and back
CHUNK = 1 << 16
Queue = asyncio.Queue[tuple[float, bytes]]


@dataclass(frozen=True, slots=True)
class Network:
    """What a network does to each link, in milliseconds: `5` is 5 ms each way on each link, `0.2v` a share of the time
    of a verification, `0v` is what stands between the services and adds no delay, where `0` is loopback alone; `5~2`
    has up to 2 ms of jitter more or less, `5!200` stands still for 200 ms every now and then. Order is kept."""

    name: str
    delay: float  # each way
    relative: bool = False  # the delay is a share of a verification
    jitter_ms: float = 0.0
    stall_ms: float = 0.0

    @classmethod
    def parse(cls, name: str) -> Network:
        """A network by its notation. Raises ValueError."""
        found = NOTATION.fullmatch(name)
        if found is None:
            raise ValueError(f"{name} is no network: give DELAY, DELAYv, DELAY~JITTER or DELAY!STALL, as in 5~2")
        delay, jitter, stall = (float(found[part] or 0) for part in ("delay", "jitter", "stall"))
        return cls(name, delay, bool(found["relative"]), jitter, stall)

    @property
    def steady(self) -> bool:
        """Whether its delay is always the same."""
        return not (self.jitter_ms or self.stall_ms)

    @property
    def is_direct(self) -> bool:
        """Whether nothing stands between the services but loopback."""
        return not (self.delay or self.relative) and self.steady

    def delay_ms(self, verify_ms: float) -> float:
        """Each way."""
        return self.delay * verify_ms if self.relative else self.delay

    def round_trip_ms(self, verify_ms: float) -> float:
        """From a commit to the chain that follows from it, drafting apart."""
        return CROSSINGS * self.delay_ms(verify_ms)


class Stalls:
    """When a link stands still: the same times for the same seed."""

    def __init__(self, stall_s: float, began: float, seed: int) -> None:
        self._stall_s = stall_s
        self._rng = random.Random(seed)
        self._starts = [began + self._gap()]

    def after(self, when: float) -> float:
        """The end of the stall that `when` lies in, else `when`."""
        if not self._stall_s:
            return when
        while self._starts[-1] <= when:
            self._starts.append(self._starts[-1] + self._stall_s + self._gap())
        index = bisect_right(self._starts, when) - 1
        return max(when, self._starts[index] + self._stall_s) if index >= 0 else when

    def _gap(self) -> float:
        return self._rng.expovariate(1 / STALL_EVERY_S)


class LinkDirection:
    """One direction of a link, as of one change of its conditions."""

    def __init__(self, delay_s: float, jitter_s: float, stalls: Stalls, seed: int) -> None:
        self._delay_s, self._jitter_s, self._stalls = delay_s, jitter_s, stalls
        self._rng = random.Random(seed)
        self._last = 0.0

    def due(self, now: float) -> float:
        """When what enters now comes out: never before what entered earlier."""
        late = self._rng.uniform(-self._jitter_s, self._jitter_s) if self._jitter_s else 0.0
        self._last = self._stalls.after(max(self._last, now + max(0.0, self._delay_s + late)))
        return self._last


class DelayProxy:
    """A TCP proxy whose every connection suffers the same conditions. An end of a connection crosses it like data."""

    def __init__(self, upstream: str) -> None:
        self._host, _, port = upstream.rpartition(":")
        self._port = int(port)
        self._server: asyncio.Server | None = None
        self._pumps: set[asyncio.Task[None]] = set()
        self.set_conditions(0.0, 0.0, 0.0, 0)

    def set_conditions(self, delay_ms: float, jitter_ms: float, stall_ms: float, seed: int) -> None:
        """For all that enters from now on. Both directions stall together."""
        stalls = Stalls(stall_ms / 1e3, time.monotonic(), seed)
        self._directions = tuple(
            LinkDirection(delay_ms / 1e3, jitter_ms / 1e3, stalls, 2 * seed + direction) for direction in range(2)
        )

    async def start(self) -> str:
        """Listens on a free port; returns the address."""
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        """Ends it and every connection."""
        if self._server is not None:
            self._server.close()
        for pump in list(self._pumps):
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection(self._host, self._port)
        except OSError:  # nobody listens there (any more)
            writer.close()
            return
        for direction, (source, sink) in enumerate(((reader, back), (there, writer))):
            queue: Queue = asyncio.Queue()
            for pump in (self._take(source, queue, direction), _give(queue, sink)):
                task = asyncio.create_task(pump)
                self._pumps.add(task)
                task.add_done_callback(self._pumps.discard)

    async def _take(self, source: asyncio.StreamReader, queue: Queue, direction: int) -> None:
        """Stamps what arrives with when it may leave; nothing at all is the end."""
        data = b"."
        while data:
            try:
                data = await source.read(CHUNK)
            except OSError:
                data = b""
            queue.put_nowait((self._directions[direction].due(time.monotonic()), data))


async def _give(queue: Queue, sink: asyncio.StreamWriter) -> None:
    """Sends each chunk at its time."""
    try:
        while True:
            due, data = await queue.get()
            if (wait := due - time.monotonic()) > 0:
                await asyncio.sleep(wait)
            if not data:
                return
            sink.write(data)
            await sink.drain()
    except OSError:  # the receiver is gone; so will the sender be
        return
    finally:
        sink.close()


async def serve_proxies(upstreams: Sequence[str], send: Send) -> None:
    """Says where the proxies listen, then takes conditions until the input ends."""
    proxies = [DelayProxy(upstream) for upstream in upstreams]
    send({"addresses": [await proxy.start() for proxy in proxies]})
    while line := await asyncio.to_thread(sys.stdin.readline):
        conditions: dict[str, Any] = json.loads(line)
        for index, proxy in enumerate(proxies):
            proxy.set_conditions(**conditions | {"seed": conditions["seed"] * len(proxies) + index})
        send(conditions)


def new_loop() -> asyncio.AbstractEventLoop:
    """A loop with exact timers."""
    return asyncio.SelectorEventLoop(selectors.SelectSelector())


class PassPacer:
    """How long a pass takes at least. Set from any thread."""

    def __init__(self) -> None:
        self.pass_s = 0.0

    def stretch_passes(self) -> None:
        """Makes every draft model of this process take its time: a pass, its sampling included, with any number of
        rows, as on a device whose memory is the limit."""
        run = DraftModelProposer.run

        def paced(
            proposer: DraftModelProposer, rows: Sequence[DraftRows], counts: Sequence[int]
        ) -> list[list[DraftedToken]]:
            end = time.perf_counter() + self.pass_s * counts[0]  # one a pass
            drafted = run(proposer, rows, counts)
            time.sleep(max(0.0, end - time.perf_counter()))
            return drafted

        setattr(DraftModelProposer, "run", paced)  # noqa: B010  # for this process, on purpose


class Announcement(io.StringIO):
    """Takes what the service prints, and passes its address on."""

    def __init__(self, send: Send) -> None:
        super().__init__()
        self._send = send

    def write(self, text: str) -> int:
        """Looks for the line that says where the service listens."""
        written = super().write(text)
        if "\n" in text and (found := re.search(LISTENING, self.getvalue())):
            self._send({"address": found[1]})
            self.seek(0)
            self.truncate()
        return written


def serve_draft(argv: Sequence[str]) -> int:
    """Serves until the input ends."""
    send = take_output()
    pace = PassPacer()
    pace.stretch_passes()
    threading.Thread(target=_take_orders, args=(pace, send), daemon=True).start()
    with redirect_stdout(Announcement(send)):
        return run_command(["draft", *argv])


def _take_orders(pace: PassPacer, send: Send) -> None:
    def handle(question: dict[str, Any]) -> dict[str, Any]:
        pace.pass_s = question["pass_ms"] / 1e3
        return question

    answer_requests(handle, send)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    if sys.argv[1] == "draft":
        sys.exit(serve_draft(sys.argv[2:]))
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(serve_proxies(sys.argv[2:], take_output()))
