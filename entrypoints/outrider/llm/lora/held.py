"""Which adapters an engine of this process has: each is loaded with the first request that names it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from outrider.llm.lora.request import LoRARequest
from outrider.rpc.hub import is_hub_id, locate
from outrider.rpc.messages import Adapter


class AdapterHost(Protocol):
    """An engine that takes adapters."""

    async def load_adapter(self, name: str, path: Path) -> Adapter:
        """Requests may name it then. Raises OutriderError."""

    async def unload_adapter(self, name: str) -> None:
        """None may name it any more."""


@dataclass(slots=True)
class _Held:
    path: str
    num_requests: int = 0


@dataclass(slots=True)
class HeldAdapters:
    """The adapters that an engine of this process has: those that were asked for last, at most `most` at once. One that
    finds no place waits until the requests of another one have ended."""

    host: AdapterHost
    most: int
    _held: dict[str, _Held] = field(default_factory=dict)  # the one that was used last is the last
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    @asynccontextmanager
    async def using(self, asked: LoRARequest) -> AsyncIterator[None]:
        """The adapter is there, and stays. Raises ValueError, OutriderError."""
        if not self.most:
            raise ValueError("lora_request: this LLM has no adapters; allowed: LLM(enable_lora=True)")
        async with self._changed:
            await self._changed.wait_for(lambda: self._has_place(asked.name))
            held = self._held.get(asked.name) or await self._loaded(asked)
            if asked.path not in ("", held.path):
                given = f"the adapter {asked.name!r} is of {held.path}, and now of {asked.path}"
                raise ValueError(f"lora_request: {given}; allowed: one folder for a name")
            held.num_requests += 1
        try:
            yield
        finally:
            async with self._changed:
                held.num_requests -= 1
                self._held[asked.name] = self._held.pop(asked.name)
                self._changed.notify_all()

    def forget(self) -> None:
        """The engine is another one, and has none; no request is under way."""
        self._held.clear()

    def _has_place(self, name: str) -> bool:
        return name in self._held or len(self._held) < self.most or self._idle is not None

    @property
    def _idle(self) -> str | None:
        """The one without requests whose last ended longest ago."""
        return next((name for name, held in self._held.items() if not held.num_requests), None)

    async def _loaded(self, asked: LoRARequest) -> _Held:
        if not asked.path:
            raise ValueError(f"lora_request: the adapter {asked.name!r} has no lora_path; allowed: its folder")
        folder = Path(asked.path)
        if is_hub_id(asked.path):  # which may have to be downloaded
            folder = await asyncio.to_thread(locate, asked.path)
        if len(self._held) >= self.most and self._idle is not None:
            name = self._idle
            await self.host.unload_adapter(name)
            del self._held[name]
        await self.host.load_adapter(asked.name, folder)
        held = self._held[asked.name] = _Held(asked.path)
        return held
