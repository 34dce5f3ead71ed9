"""Health in two senses, as orchestrators ask for it. Liveness, under the name "": the process works, and a restart
would mend nothing. Readiness, under the names of the services: calls can be served now. The event loop answers health
checks even while the device works, so a device thread has to be asked for explicitly."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from grpc_health.v1 import health_pb2
from grpc_health.v1._async import HealthServicer

log = logging.getLogger(__name__)

POLL_S = 0.5
LIVENESS = ""


class HealthMonitor:
    """Keeps the health servicer's answers true. `is_alive` is asked every 500 ms, and is liveness. The services given
    are ready once `probe` has answered (weights loaded, one step run), while `is_alive` and `is_ready`, and not when
    they drain."""

    def __init__(
        self,
        services: Sequence[str],
        *,
        probe: Callable[[], Awaitable[object]] | None = None,
        is_alive: Callable[[], bool] = lambda: True,
        is_ready: Callable[[], bool] = lambda: True,
        poll_s: float = POLL_S,
    ) -> None:
        self.servicer = HealthServicer()
        self._services = tuple(services)
        self._probe, self._is_alive, self._is_ready, self._poll_s = probe, is_alive, is_ready, poll_s
        self._probed = probe is None
        self._draining = False
        self._answers: dict[str, bool] = {}  # as they were last set
        self._publishing = asyncio.Lock()
        self._tasks: tuple[asyncio.Task[None], ...] = ()

    @property
    def ready(self) -> bool:
        """Whether the services answer SERVING now."""
        return any(serving for name, serving in self._answers.items() if name != LIVENESS)

    async def start(self) -> None:
        """Answers from now on; a service SERVING after the probe alone."""
        await self._publish()
        self._tasks = asyncio.create_task(self._watch()), asyncio.create_task(self._wait_for_probe())

    async def drain(self) -> None:
        """The services answer NOT_SERVING for good; who watches is told at once. The process lives on."""
        self._draining = True
        await self._publish()

    async def stop(self) -> None:
        """Ends the watching."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._poll_s)
            await self._publish()

    async def _wait_for_probe(self) -> None:
        while not self._probed and self._probe is not None:
            try:
                await self._probe()
                self._probed = True
            except Exception:  # whatever keeps the engine from answering, it is not ready
                log.exception("health: the probe failed; trying again")
                await asyncio.sleep(self._poll_s)
        await self._publish()

    async def _publish(self) -> None:
        """Sets what has changed; one at a time, so that nothing older is set last."""
        async with self._publishing:
            alive = self._is_alive()
            ready = alive and self._probed and not self._draining and self._is_ready()
            for name in (LIVENESS, *self._services):
                await self._set(name, ready if name else alive)

    async def _set(self, name: str, serving: bool) -> None:
        if self._answers.get(name) == serving:
            return
        if name in self._answers or serving:
            level = logging.INFO if serving or self._draining else logging.ERROR
            log.log(level, "health: %s %s", name or "the process", "is serving" if serving else "is not serving")
        self._answers[name] = serving
        response = health_pb2.HealthCheckResponse
        await self.servicer.set(name, response.SERVING if serving else response.NOT_SERVING)
