"""All that runs in the network bench: target and draft on cores of their own, delay proxies in front of both, and
co-located engines on the target's cores and on all. The gateway's engine runs in the bench itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from outrider.bench.machine import Cores
from outrider.bench.network.backends import (
    COLOCATED,
    COLOCATED_ALL,
    BranchWatcher,
    ColocatedBackend,
    NetworkBackend,
    ServicesBackend,
)
from outrider.bench.network.proxy import Network
from outrider.bench.processes import start_colocated, start_proxy, start_slow_draft, start_target
from outrider.bench.worker import BenchWorker
from outrider.cli.local_services import Folders, Service, Services
from outrider.gateway.engine import EngineConfig, GenerationEngine
from outrider.gateway.peers.remote import RemoteDrafts, RemoteTargets
from outrider.gateway.text.tokenizer import Tokenizer

MAX_ACTIVE = 64
COLOCATED_ON = (COLOCATED, COLOCATED_ALL)


@dataclass(frozen=True, slots=True)
class Setup:
    """What the processes are started with."""

    folders: Folders
    cores: Cores
    expand: bool
    num_draft_tokens: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Gateway:
    """The gateway's engine over one pair of addresses."""

    engine: GenerationEngine
    watcher: BranchWatcher


@dataclass(frozen=True, slots=True)
class NetworkFleet:
    """Everything that runs."""

    setup: Setup
    target: Service
    draft: BenchWorker
    proxy: BenchWorker
    direct: Gateway
    proxied: dict[str, Gateway]  # one for each network, since its controller learns what it is like
    colocated: dict[str, BenchWorker]

    async def set_network(self, network: Network, verify_ms: float, seed: int) -> None:
        """From now on between the proxied services."""
        conditions = {
            "delay_ms": network.delay_ms(verify_ms),
            "jitter_ms": network.jitter_ms,
            "stall_ms": network.stall_ms,
            "seed": seed,
        }
        await asyncio.to_thread(self.proxy.ask, conditions)

    async def set_pass_ms(self, pass_ms: float) -> None:
        """How long a pass of the draft service takes at least."""
        await asyncio.to_thread(self.draft.ask, {"pass_ms": pass_ms})

    def backend(self, mode: str, network: Network, pass_ms: float) -> NetworkBackend:
        """A mode over a network; loopback alone goes around the proxies."""
        if mode in self.colocated:
            return ColocatedBackend(self.colocated[mode], pass_ms)
        gateway = self.direct if network.is_direct else self.proxied[network.name]
        return ServicesBackend(gateway.engine, gateway.watcher, mode)


@asynccontextmanager
async def start_network_fleet(
    setup: Setup, modes: Sequence[str], networks: Iterable[Network]
) -> AsyncIterator[NetworkFleet]:
    """Starts all that the modes and networks need, and ends it. Raises ServiceFailed or BenchWorkerFailed."""
    async with AsyncExitStack() as stack:
        services = stack.enter_context(Services())
        threads, expanded = str(setup.cores.target_threads), ("--expand",) if setup.expand else ()
        target = start_target(services, setup.folders.target, "--threads", threads, *expanded, cores=setup.cores.target)
        draft = stack.enter_context(start_slow_draft(setup.folders.draft, setup.cores.draft))
        colocated = {name: stack.enter_context(_colocated(setup, name)) for name in modes if name in COLOCATED_ON}
        await asyncio.to_thread(services.wait, target, setup.timeout_s)
        for worker in (*colocated.values(), draft):
            await asyncio.to_thread(worker.wait, setup.timeout_s)
        draft_address = draft.ready["address"]
        proxy = stack.enter_context(start_proxy(target.address, draft_address))
        addresses = (await asyncio.to_thread(proxy.wait, setup.timeout_s))["addresses"]
        direct = await stack.enter_async_context(connect(setup, target.address, draft_address))
        proxied = {
            network.name: await stack.enter_async_context(connect(setup, *addresses))
            for network in networks
            if not network.is_direct
        }
        yield NetworkFleet(setup, target, draft, proxy, direct, proxied, colocated)


@asynccontextmanager
async def connect(setup: Setup, target: str, draft: str) -> AsyncIterator[Gateway]:
    """The gateway's engine over two addresses, when both have answered."""
    async with RemoteTargets([target]) as targets, RemoteDrafts([draft]) as drafts:
        async with asyncio.timeout(setup.timeout_s):
            await asyncio.gather(targets.wait_usable(), drafts.wait_usable())
        watcher = BranchWatcher(drafts)
        config = EngineConfig(num_draft_tokens=setup.num_draft_tokens, mode="auto", max_active=MAX_ACTIVE)
        tokenizer = Tokenizer.load(setup.folders.target)
        yield Gateway(GenerationEngine(tokenizer, targets, watcher, config), watcher)


def _colocated(setup: Setup, name: str) -> BenchWorker:
    """On the target's cores, as where both models share the large device, or on all that the services have."""
    if name == COLOCATED:
        return start_colocated(name, setup.folders, setup.cores.target_threads, setup.cores.target, setup.expand)
    return start_colocated(name, setup.folders, setup.cores.num_all, (), setup.expand)
