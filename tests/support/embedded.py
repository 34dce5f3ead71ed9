"""The embedded target as a service of this process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from outrider.gateway.peers.remote import RemoteTargets
from outrider.gateway.text.tokenizer import Tokenizer
from outrider.pairs import pair_path
from outrider.target_service.boot import build, load
from outrider.target_service.settings import TargetSettings


@asynccontextmanager
async def embedded_target() -> AsyncIterator[tuple[RemoteTargets, Tokenizer]]:
    """Batch-invariant, over gRPC, with its tokenizer."""
    settings = TargetSettings(
        model=pair_path().target, listen="127.0.0.1:0", threads=1, cache_mb=64, batch_invariant=True
    )
    service = build(settings, load(settings))
    await service.server.start()
    async with RemoteTargets([service.server.address]) as pool:
        await pool.wait_usable()
        yield pool, Tokenizer.load(settings.model)
    await service.stop()
