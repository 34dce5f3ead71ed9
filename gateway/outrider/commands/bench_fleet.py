"""The services that the bench measures, as `outrider serve` starts them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from outrider.client import Client
from outrider.commands.fleet import Folders
from outrider.commands.processes import Service, Services
from outrider.commands.readiness import POLL_S, has_draft


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where the services listen."""

    target: str
    draft: str
    gateway: str


def start_fleet(services: Services, folders: Folders, num_draft_tokens: int, timeout_s: float) -> Addresses:
    """Starts target, draft and gateway, each with the threads that it takes by itself. The target keeps no prompts:
    nobody else does between runs."""
    target, draft = str(folders.target), str(folders.draft)
    verifier = _start(services, "target", "--model", target, "--no-prefix-cache")
    drafter = _start(services, "draft", "--model", draft)
    for service in (verifier, drafter):
        services.wait(service, timeout_s)
    gateway = _start(
        services, "gateway", "--target", verifier.address, "--draft", drafter.address,
        "--tokenizer", target, "--num-draft-tokens", str(num_draft_tokens), "--mode", "sequential",
    )  # fmt: skip
    services.wait(gateway, timeout_s)
    return Addresses(verifier.address, drafter.address, gateway.address)


async def wait_for_draft(address: str, timeout_s: float) -> None:
    """Returns when the gateway has found both. Raises TimeoutError. On the caller's loop, as readiness's is not."""
    async with asyncio.timeout(timeout_s), Client(address) as client:
        while not await has_draft(client):  # noqa: ASYNC110  # the event is in another process
            await asyncio.sleep(POLL_S)


def _start(services: Services, name: str, *arguments: str) -> Service:
    return services.start(name, [name, "--listen", "127.0.0.1:0", "--grace-s", "2", *arguments])
