"""Whether a gateway has found its peers: it listens before, and then answers without a draft, or not at all."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from outrider.client import Client
from outrider.wire.errors import OutriderError

ASK_S = 5.0
POLL_S = 0.05


def wait_for_draft(address: str, timeout_s: float, check: Callable[[], None]) -> None:
    """Returns when the gateway knows a target and a draft; `check` is called while it does not. Raises TimeoutError."""
    asyncio.run(_wait(address, time.monotonic() + timeout_s, check))


async def _wait(address: str, end: float, check: Callable[[], None]) -> None:
    async with Client(address) as client:
        while not await has_draft(client):
            check()
            if time.monotonic() > end:
                raise TimeoutError(f"the gateway at {address} did not find its draft in time")
            await asyncio.sleep(POLL_S)


async def has_draft(client: Client) -> bool:
    """Whether the gateway has found its peers."""
    try:
        return (await client.info(timeout=ASK_S)).draft is not None
    except OutriderError:  # it has no target yet
        return False
