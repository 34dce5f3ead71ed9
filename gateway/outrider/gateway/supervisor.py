"""Several gateway processes behind the same addresses. This one only supervises: it holds the addresses, starts a child
for each process and starts one that died again, answers for all of them on `--health` and `--metrics`, and ends them as
one gateway ends. The kernel shares new connections out among the children's listening sockets (SO_REUSEPORT)."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import shutil
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir

from outrider.gateway.processes import READY, GatewayProcess
from outrider.gateway.servicer import SERVICE_NAME
from outrider.gateway.settings import GatewaySettings
from outrider.rpc.server import FORCED_EXIT, POLL_S, HealthMonitor, bind, build_health_server, require_free

log = logging.getLogger(__name__)

COMMAND = (sys.executable, "-m", "outrider.gateway.child")
FAILED, REFUSED = 1, 2  # statuses; REFUSED: by its settings, or by what its peers are, a gateway cannot serve
WELL = (0, -signal.SIGTERM)  # SIGTERM ends one that does not listen yet
LISTENS = b"gateway listening on "
MIN_BACKOFF_S, MAX_BACKOFF_S = 0.2, 30.0
STABLE_S = 10.0  # a child that lived that long is started again without growing pauses
HUNG_POLLS = 60  # half seconds in which a child's event loop does not turn
FOLDERS = "outrider-gateway-"  # in the system's for what is temporary
LEFT_S = 60.0  # until a folder without a lock is nobody's: neither just made nor its children's, who end
LATE_S = 10.0  # beyond drain delay and grace, until a child that drains is killed


async def supervise(settings: GatewaySettings) -> int:
    """Serves until SIGTERM or SIGINT; returns the status to end with. Raises Unavailable for an address in use."""
    require_free(settings.listen, settings.health, settings.metrics, settings.http)
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(own_folder())
        shared = {name: getattr(settings, name) for name in ("listen", "http")}
        for name, address in shared.items():
            if address:
                held, shared[name] = bind(address, reuse_port=True)
                stack.enter_context(held)
        settings = settings.model_copy(update=shared)
        processes = [GatewayProcess(index, folder) for index in range(settings.processes)]
        processes[0].settings.write_text(settings.model_dump_json(exclude={"health"}), encoding="utf-8")
        supervisor = Supervisor(settings, processes)
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, supervisor.stop)
        await stack.enter_async_context(_answering(settings, supervisor.health, processes[0]))
        return await supervisor.run()


@contextmanager
def own_folder() -> Iterator[Path]:
    """A folder for what the children share, gone at the end. Those of supervisors that were killed are removed, too:
    nobody holds their locks."""
    for left in Path(gettempdir()).glob(f"{FOLDERS}*"):
        with suppress(OSError):  # another user's, or a lock that is held
            if time.time() - left.stat().st_mtime > LEFT_S:
                with _locked(left):
                    shutil.rmtree(left)
    with TemporaryDirectory(prefix=FOLDERS) as name, _locked(Path(name)):
        yield Path(name)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Raises OSError where another process has it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


@asynccontextmanager
async def _answering(settings: GatewaySettings, health: HealthMonitor, series: GatewayProcess) -> AsyncIterator[None]:
    """While in it, `--health` and `--metrics` are answered, for all children."""
    async with AsyncExitStack() as stack:
        await health.start()
        stack.push_async_callback(health.stop)
        if settings.health:
            server, _ = build_health_server(settings.health, health)
            await server.start()
            stack.push_async_callback(server.stop, None)
        if settings.metrics:
            from outrider.rpc.metrics import MetricsServer

            metrics = MetricsServer(settings.metrics, series, health)
            metrics.start()
            stack.push_async_callback(asyncio.to_thread, metrics.stop)
            print(f"gateway metrics on {metrics.address}", flush=True)
        yield


class Supervisor:
    """The children, from the first one's start to the last one's end."""

    def __init__(self, settings: GatewaySettings, processes: Sequence[GatewayProcess]) -> None:
        """`settings` name the ports that are held."""
        self._settings = settings
        self._children = [Child(process, self._note) for process in processes]
        self.health = HealthMonitor([SERVICE_NAME], is_ready=lambda: any(child.ready for child in self._children))
        self._listened = self._served = False  # whether all have listened at once, and whether any was ready
        self._stopping = asyncio.Event()

    async def run(self) -> int:
        """Until it is stopped, or a child ends that no restart helps. Zero if all children ended well."""
        kept = [asyncio.create_task(self._keep(child)) for child in self._children]
        others = [asyncio.create_task(self._stopping.wait()), asyncio.create_task(self._watch())]
        try:
            await asyncio.wait((*kept, *others), return_when=asyncio.FIRST_COMPLETED)
            self._stopping.set()
            await self.health.drain()
            for child in self._children:
                child.end(signal.SIGTERM)
            await asyncio.wait(kept, timeout=self._settings.drain_delay_s + self._settings.grace_s + LATE_S)
        finally:
            for child in self._children:
                child.end(signal.SIGKILL)
            statuses = await asyncio.gather(*kept)
            for task in others:
                task.cancel()
        return next((status if status > 0 else FAILED for status in statuses if status not in WELL), 0)

    def stop(self) -> None:
        """Ends the children as SIGTERM does; called again, all processes at once."""
        if self._stopping.is_set():
            log.warning("gateway: second signal, ending at once")
            for child in self._children:
                child.kill()
            os._exit(FORCED_EXIT)
        self._stopping.set()

    def _note(self) -> None:
        """A child has said something."""
        self._served = self._served or any(child.ready for child in self._children)
        if not self._listened and all(child.listens for child in self._children):
            self._listened = True
            if self._settings.http:
                print(f"gateway http on {self._settings.http}", flush=True)
            print(f"gateway listening on {self._settings.listen}", flush=True)

    async def _keep(self, child: Child) -> int:
        """Runs a child again and again, and returns its last status: at the end, or where another start would bring no
        more."""
        loop, backoff = asyncio.get_running_loop(), MIN_BACKOFF_S
        while True:
            began = loop.time()
            status = await child.run()
            if self._stopping.is_set():
                return status
            if not self._listened or (status == REFUSED and not self._served):
                log.error("gateway: process %d %s, before all served", child.index, _ending(status))
                return status
            backoff = MIN_BACKOFF_S if loop.time() - began >= STABLE_S else backoff
            log.error("gateway: process %d %s; starting another in %g s", child.index, _ending(status), backoff)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), backoff)
                return 0
            backoff = min(2 * backoff, MAX_BACKOFF_S)

    async def _watch(self) -> None:
        """Kills children whose event loops do not turn. Polls are counted, not seconds: where this process was stopped,
        too, nobody is to blame."""
        while True:
            await asyncio.sleep(POLL_S)
            for child in self._children:
                child.silent_polls += 1
                if child.listens and child.silent_polls > HUNG_POLLS:
                    log.error("gateway: process %d hangs", child.index)
                    child.kill()


def _ending(status: int) -> str:
    return f"ended with status {status}" if status >= 0 else f"was ended by {signal.Signals(-status).name}"


class Child:
    """One of the processes, which may live several times."""

    def __init__(self, place: GatewayProcess, on_change: Callable[[], None]) -> None:
        self.index = place.index
        self.listens = self.ready = False
        self.silent_polls = 0  # since it last said something
        self._place, self._on_change = place, on_change
        self._process: Process | None = None
        self._ended_by: int | None = None

    async def run(self) -> int:
        """One life; returns the status that it ended with, for a signal its number below zero."""
        command = *COMMAND, str(self.index), str(self._place.folder)
        try:  # in a group of its own: what a terminal's Ctrl-C reaches is the supervisor
            process = self._process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, process_group=0)
        except OSError as error:  # too many processes, or too little memory
            log.error("gateway: process %d cannot be started: %s", self.index, error)
            return FAILED
        if self._ended_by is not None:
            self.end(self._ended_by)
        if process.stdout is not None:
            async for line in process.stdout:
                self.silent_polls, self.ready = 0, line == READY
                if line.startswith(LISTENS):
                    self.listens = True
                    log.info("gateway: process %d listens, pid %d", self.index, process.pid)
                self._on_change()
        self.listens = self.ready = False
        return await process.wait()

    def kill(self) -> None:
        """Ends this life of it."""
        self._send(signal.SIGKILL)

    def end(self, number: int) -> None:
        """Ends this life by a signal, and one that is just beginning, too."""
        self._ended_by = number
        self._send(number)

    def _send(self, number: int) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)
