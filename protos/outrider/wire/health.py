"""Health that means something: a service is SERVING once its probe answered and only while its device thread lives.
The event loop answers health checks even while the device works, so liveness has to be asked for explicitly."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from grpc_health.v1 import health_pb2
from grpc_health.v1._async import HealthServicer

log = logging.getLogger(__name__)

POLL_S = 0.5


class HealthMonitor:
    """Keeps the health servicer's answers true, for the names given and for "" (the whole server).

    `probe` awaits a first sign of life (weights loaded, one step run); `is_alive` is asked every 500 ms after."""

    def __init__(
        self,
        services: Sequence[str],
        *,
        probe: Callable[[], Awaitable[object]] | None = None,
        is_alive: Callable[[], bool] = lambda: True,
        poll_s: float = POLL_S,
    ) -> None:
        self.servicer = HealthServicer()
        self._names = ("", *services)
        self._probe, self._is_alive, self._poll_s = probe, is_alive, poll_s
        self._serving = False
        self._task: asyncio.Task[None] | None = None

    @property
    def serving(self) -> bool:
        """What is answered now."""
        return self._serving

    async def start(self) -> None:
        """Answers NOT_SERVING from now on, SERVING after the probe."""
        await self._set(False)
        self._task = asyncio.create_task(self._watch())

    async def drain(self) -> None:
        """Answers NOT_SERVING for good; who watches is told at once."""
        await self._stop_task()
        self._serving = False
        await self.servicer.enter_graceful_shutdown()

    async def stop(self) -> None:
        """Ends the watching."""
        await self._stop_task()

    async def _stop_task(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _watch(self) -> None:
        await self._wait_for_probe()
        while True:
            alive = self._is_alive()
            if alive != self._serving:
                log.log(logging.INFO if alive else logging.ERROR, "health: %s", "serving" if alive else "not serving")
                await self._set(alive)
            await asyncio.sleep(self._poll_s)

    async def _wait_for_probe(self) -> None:
        while self._probe is not None:
            try:
                await self._probe()
                return
            except Exception:  # whatever keeps the engine from answering, the answer stays NOT_SERVING
                log.exception("health: the probe failed; trying again")
                await asyncio.sleep(self._poll_s)

    async def _set(self, serving: bool) -> None:
        self._serving = serving
        response = health_pb2.HealthCheckResponse
        for name in self._names:
            await self.servicer.set(name, response.SERVING if serving else response.NOT_SERVING)
