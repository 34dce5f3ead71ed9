"""Delay proxies as a worker: `python -m outrider.bench.network_proxy UPSTREAM...`. {} asks for the addresses,
{"delay_ms", "jitter_ms", "stall_ms", "seed"} sets what holds from then on, for open connections too.

The loop waits in select(), whose timeouts are exact to microseconds; epoll's are whole milliseconds."""

from __future__ import annotations

import asyncio
import selectors
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from outrider.bench.network_fleet import LinkDirection, Stalls
from outrider.bench.worker import serve_requests

CHUNK = 1 << 16
START_S = 10.0
Queue = asyncio.Queue[tuple[float, bytes]]


class DelayProxy:
    """A TCP proxy whose every connection suffers the same conditions. An end of a connection crosses it like data."""

    def __init__(self, upstream: str) -> None:
        self._host, _, port = upstream.rpartition(":")
        self._port = int(port)
        self._server: asyncio.Server | None = None
        self._pumps: set[asyncio.Task[None]] = set()
        self.set_conditions(0.0, 0.0, 0.0, 0)

    def set_conditions(self, delay_ms: float, jitter_ms: float, stall_ms: float, seed: int) -> None:
        """For all that enters from now on. Both directions stall together. Called from any thread."""
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


def make_handler(upstreams: Sequence[str]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Proxies on a loop in a thread of its own."""
    proxies = [DelayProxy(upstream) for upstream in upstreams]
    addresses: list[str] = []
    started = threading.Event()

    async def serve() -> None:
        addresses.extend([await proxy.start() for proxy in proxies])
        started.set()
        await asyncio.Event().wait()

    def run() -> None:
        with asyncio.Runner(loop_factory=new_loop) as runner, suppress(asyncio.CancelledError):
            runner.run(serve())

    threading.Thread(target=run, daemon=True).start()
    if not started.wait(START_S):
        raise TimeoutError("the proxies did not start")

    def handle(question: dict[str, Any]) -> dict[str, Any]:
        for index, proxy in enumerate(proxies if question else ()):
            conditions = {**question, "seed": question["seed"] * len(proxies) + index}
            proxy.set_conditions(**conditions)
        return {"addresses": addresses}

    return handle


def new_loop() -> asyncio.AbstractEventLoop:
    """A loop with exact timers."""
    return asyncio.SelectorEventLoop(selectors.SelectSelector())


if __name__ == "__main__":
    sys.exit(serve_requests(lambda: make_handler(sys.argv[1:])))
