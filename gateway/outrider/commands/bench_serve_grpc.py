"""A gateway over gRPC, as the load sees it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import asdict
from typing import Any

from outrider.client import NO_RETRY, Client, Part
from outrider.commands.bench_serve_load import Ask, Delivery
from outrider.commands.bench_serve_settings import BenchServeSettings
from outrider.wire.sampling import AcceptanceRule

INFO_S = 10.0


class GrpcServer:
    """One connection. Nothing is tried again: what fails is to be seen."""

    def __init__(self, settings: BenchServeSettings) -> None:
        self._client = Client(settings.gateway, retry=NO_RETRY)
        self._options: dict[str, Any] = {
            "speculate": None if settings.speculation else False,
            "num_draft_tokens": settings.num_draft_tokens,
            "mode": settings.mode or "",
            "acceptance": AcceptanceRule[settings.acceptance.upper()],
        }

    async def describe(self) -> str:
        """The models."""
        info = await self._client.info(timeout=INFO_S)
        return f"{info.target.name} with {info.draft.name if info.draft else 'no draft'}"

    async def send(self, ask: Ask) -> AsyncGenerator[Delivery, None]:
        """One completion."""
        prompt: dict[str, Any] = {"messages": [{"role": "user", "content": ask.prompt}]} if ask.chat else {}
        parts = self._client.generate(
            None if ask.chat else ask.prompt,
            max_tokens=ask.max_tokens,
            ignore_eos=ask.ignore_eos,
            temperature=ask.temperature,
            seed=ask.seed,
            **prompt,
            **self._options,
        )
        async with aclosing(parts):
            async for part in parts:
                yield _delivery(part)

    async def close(self) -> None:
        """Ends the connection."""
        await self._client.close()


def _delivery(part: Part) -> Delivery:
    usage, stats = part.usage, part.speculation
    return Delivery(
        num_tokens=len(part.token_ids),
        text=bool(part.text),
        finish=None if part.finish_reason is None else part.finish_reason.name.lower(),
        usage=None if usage is None else (usage.prompt_tokens, usage.completion_tokens),
        speculation=None if stats is None else asdict(stats),
    )
