"""Other weights for a service that runs: one change at a time, which goes on where its caller leaves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from outrider.rpc.errors import FailedPrecondition, one_line
from outrider.rpc.messages import Reloaded

log = logging.getLogger(__name__)


class OneReload:
    """The change under way, if there is one. Belongs to the event loop."""

    def __init__(self) -> None:
        self._task: asyncio.Task[Reloaded] | None = None

    async def run(self, reload: Callable[[], Coroutine[Any, Any, Reloaded]]) -> Reloaded:
        """Begins one. Raises FailedPrecondition where another one is under way, and what it raises."""
        if self._task is not None and not self._task.done():
            raise FailedPrecondition("another reload is under way; wait for its end", reason="RELOADING")
        self._task = asyncio.create_task(reload())
        self._task.add_done_callback(_note_failure)
        return await asyncio.shield(self._task)


def _note_failure(task: asyncio.Task[Reloaded]) -> None:
    """Its caller may have left."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.warning("no reload: %s", one_line(error))
