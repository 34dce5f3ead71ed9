"""The processes of the network bench: target and draft on cores of their own, delay proxies in front of both, and
co-located engines on the target's cores and on all. The gateway's engine runs in the bench itself."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from outrider.commands.bench_machine import Cores
from outrider.commands.bench_network_draft import DraftWorker
from outrider.commands.bench_network_link import Network
from outrider.commands.bench_network_run import COLOCATED, COLOCATED_ALL, BranchWatcher, ColocatedWay, ServicesWay, Way
from outrider.commands.bench_worker import Worker, on_cores
from outrider.commands.fleet import Folders
from outrider.commands.processes import Service, Services
from outrider.gateway.remote import RemoteDrafts, RemoteTargets
from outrider.gateway.service import EngineConfig, GenerationEngine
from outrider.gateway.tokenizer import Tokenizer

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
    draft: DraftWorker
    proxy: Worker
    direct: Gateway
    proxied: dict[str, Gateway]  # one for each network, since its controller learns what it is like
    colocated: dict[str, Worker]

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
        await asyncio.to_thread(self.draft.set_pass_ms, pass_ms)

    def way(self, mode: str, network: Network, pass_ms: float) -> Way:
        """A mode over a network; loopback alone goes around the proxies."""
        if mode in self.colocated:
            return ColocatedWay(self.colocated[mode], pass_ms)
        gateway = self.direct if network.is_direct else self.proxied[network.name]
        return ServicesWay(gateway.engine, gateway.watcher, mode)


@asynccontextmanager
async def start_network_fleet(
    setup: Setup, modes: Sequence[str], networks: Iterable[Network]
) -> AsyncIterator[NetworkFleet]:
    """Starts all that the modes and networks need, and ends it. Raises ServiceFailed or WorkerFailed."""
    async with AsyncExitStack() as stack:
        services = stack.enter_context(Services())
        target = _start_target(services, setup)
        draft = stack.enter_context(start_draft(setup))
        colocated = {name: stack.enter_context(_colocated(setup, name)) for name in modes if name in COLOCATED_ON}
        await asyncio.to_thread(services.wait, target, setup.timeout_s)
        for worker in colocated.values():
            await asyncio.to_thread(worker.receive, setup.timeout_s)
        await asyncio.to_thread(draft.wait, setup.timeout_s)
        proxy = stack.enter_context(_start_proxy(target.address, draft.address))
        await asyncio.to_thread(proxy.receive, setup.timeout_s)
        addresses = (await asyncio.to_thread(proxy.ask, {}))["addresses"]
        direct = await stack.enter_async_context(connect(setup, target.address, draft.address))
        proxied = {
            network.name: await stack.enter_async_context(connect(setup, *addresses))
            for network in networks
            if not network.is_direct
        }
        yield NetworkFleet(setup, target, draft, proxy, direct, proxied, colocated)


def start_draft(setup: Setup) -> DraftWorker:
    """A draft service; it does not listen yet."""
    model = str(setup.folders.draft)
    arguments = ["--model", model, "--listen", "127.0.0.1:0", "--threads", "1", "--grace-s", "0"]
    return DraftWorker(arguments, setup.cores.draft)


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


def _start_target(services: Services, setup: Setup) -> Service:
    """It keeps no prompts: nobody else does between runs."""
    arguments = ["target", "--model", str(setup.folders.target), "--listen", "127.0.0.1:0", "--grace-s", "0"]
    arguments += ["--threads", str(setup.cores.target_threads), "--no-prefix-cache"]
    with on_cores(setup.cores.target):
        return services.start("target", [*arguments, *(["--expand"] if setup.expand else [])])


def _colocated(setup: Setup, name: str) -> Worker:
    """On the target's cores, as where both models share the large device, or on all that the services have."""
    cores = setup.cores.target if name == COLOCATED else ()
    threads = setup.cores.target_threads if name == COLOCATED else setup.cores.num_all
    folders = [str(setup.folders.target), str(setup.folders.draft)]
    command = [sys.executable, "-m", "outrider.commands.bench_network_colocated", *folders, str(threads)]
    return Worker(name, [*command, *(["expand"] if setup.expand else [])], cores)


def _start_proxy(*upstreams: str) -> Worker:
    return Worker("proxy", [sys.executable, "-m", "outrider.commands.bench_network_proxy", *upstreams])
