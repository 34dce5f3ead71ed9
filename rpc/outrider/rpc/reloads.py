"""Other weights for a service that runs: one change at a time, which goes on where its caller leaves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from outrider.rpc.errors import FailedPrecondition, one_line

log = logging.getLogger(__name__)

Done = TypeVar("Done")  # what is told of a change


class OneReload:
    """The change under way, if there is one. Belongs to the event loop."""

    def __init__(self) -> None:
        self._task: asyncio.Task[Any] | None = None

    async def run(self, change: Callable[[], Coroutine[Any, Any, Done]]) -> Done:
        """Begins one. Raises FailedPrecondition where another one is under way, and what it raises."""
        if self._task is not None and not self._task.done():
            raise FailedPrecondition("another reload is under way; wait for its end", reason="RELOADING")
        task = self._task = asyncio.create_task(change())
        task.add_done_callback(_note_failure)
        return await asyncio.shield(task)


def _note_failure(task: asyncio.Task[Any]) -> None:
    """Its caller may have left."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.warning("no reload: %s", one_line(error))
