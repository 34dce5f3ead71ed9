"""Weights that draft for a while, and others in their place."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import cycle

import grpc.aio

from outrider.gateway.peers.remote import put_learned


@asynccontextmanager
async def changing(channel: grpc.aio.Channel, target_digest: str, paths: Sequence[str]) -> AsyncIterator[list[int]]:
    """While in it, other weights of these folders draft every few milliseconds, and none by turns; how many open
    sequences each change has met."""
    met, over = list[int](), asyncio.Event()

    async def change() -> None:
        for path in cycle([*paths, ""]):
            if over.is_set():
                return
            met.append((await put_learned(channel, target_digest, "", path)).num_sequences)
            await asyncio.sleep(0.02)

    task = asyncio.create_task(change())
    try:
        yield met
    finally:
        over.set()
        await task
        await put_learned(channel, target_digest, "", "")
