"""The processes of the network bench: TCP proxies that make networks between the services, a draft whose passes are
stretched, and draft and target in one process, which take turns.

    python -m outrider.bench.network_workers proxy UPSTREAM...
    python -m outrider.bench.network_workers draft ARGUMENTS of outrider draft
    python -m outrider.bench.network_workers colocated TARGET DRAFT THREADS [expand]

The proxies are ready with {"addresses"}; {"delay_ms", "jitter_ms", "stall_ms", "seed"} sets what holds from then on,
for open connections too. Their loop waits in select(), whose timeouts are exact to microseconds; epoll's are whole
milliseconds. The draft is ready with {"address"}, and takes {"pass_ms"} at any time: it sleeps for what a pass of its
model is to last longer, which leaves the cores to others. Co-located is speculation as `outrider colocated` serves it,
with the gateway's engine between both and no socket: it answers a NetworkBatch with "pass_ms" by its RoundSummary."""

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
from dataclasses import asdict
from pathlib import Path
from typing import Any

from outrider.bench.harness import Handler, Send, answer_requests, serve_requests, take_output
from outrider.bench.network_fleet import MAX_ACTIVE, SEQUENTIAL, BranchWatcher, NetworkBatch, ServicesBackend
from outrider.cli.__main__ import main as run_command
from outrider.cli.local_services import LISTENING
from outrider.draft_service.settings import DraftSettings
from outrider.engine.loader import load_model
from outrider.engine.worker import set_switch_interval
from outrider.gateway.engine import EngineConfig, GenerationEngine
from outrider.gateway.text.tokenizer import Tokenizer
from outrider.llm.services import LocalDraft, LocalTarget
from outrider.proposers.draft_model import DraftModelProposer
from outrider.proposers.draft_rows import DraftedToken, DraftRows
from outrider.target_service.boot import load
from outrider.target_service.settings import TargetSettings

STALL_EVERY_S = 2.0  # from the end of one stall to the next, on average
CHUNK = 1 << 16
Queue = asyncio.Queue[tuple[float, bytes]]


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


async def colocated_backend(target: Path, draft: Path, threads: int, expand: bool) -> ServicesBackend:
    """Both models. A draft's products are too small for more than one thread."""
    set_switch_interval()
    of_target = TargetSettings(model=target, threads=threads, prefix_cache=False, expand=expand)
    of_draft = DraftSettings(model=draft, threads=1)
    loop = asyncio.get_running_loop()
    large = LocalTarget(of_target, load(of_target), loop)
    watcher = BranchWatcher(LocalDraft(of_draft, load_model(draft), loop))
    config = EngineConfig(mode=SEQUENTIAL, max_active=MAX_ACTIVE)
    return ServicesBackend(GenerationEngine(Tokenizer.load(target), large, watcher, config), watcher, SEQUENTIAL)


def colocated_handler(arguments: Sequence[str]) -> Handler:
    """On a loop of its own."""
    target, draft, threads, *expand = arguments
    pace, runner = PassPacer(), asyncio.Runner()
    pace.stretch_passes()
    backend = runner.run(colocated_backend(Path(target), Path(draft), int(threads), bool(expand)))

    def handle(question: dict[str, Any]) -> dict[str, Any]:
        pace.pass_s = question.pop("pass_ms") / 1e3
        batch = NetworkBatch(**question | {"prompts": tuple(map(tuple, question["prompts"]))})
        return asdict(runner.run(backend.run(batch)))

    return handle


if __name__ == "__main__":
    kind, *arguments = sys.argv[1:]
    if kind == "draft":
        sys.exit(serve_draft(arguments))
    if kind == "colocated":
        sys.exit(serve_requests(lambda: colocated_handler(arguments)))
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(serve_proxies(arguments, take_output()))
