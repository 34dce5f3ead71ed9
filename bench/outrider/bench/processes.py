"""Every process that a bench starts, in one place: services as `outrider serve` starts them, and workers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from outrider.bench.worker import BenchWorker, BenchWorkerFailed, on_cores
from outrider.cli.local_services import LOOPBACK, POLL_S, Folders, Service, Services, has_peers
from outrider.client import Client
from outrider.rpc.settings import usable_cores

PEER_START_S = 600.0  # vllm compiles
GRACE_S = "0"  # nothing runs when they end


@dataclass(frozen=True, slots=True)
class ServiceAddresses:
    """Where the services listen."""

    target: str
    draft: str
    gateway: str


def start_services(services: Services, folders: Folders, num_draft_tokens: int, timeout_s: float) -> ServiceAddresses:
    """Starts target, draft and gateway, each with the threads that it takes by itself."""
    target = start_target(services, folders.target)
    draft = _start(services, "draft", "--model", str(folders.draft))
    for service in (target, draft):
        services.wait(service, timeout_s)
    gateway = _start(
        services, "gateway", "--target", target.address, "--draft", draft.address,
        "--tokenizer", str(folders.target), "--num-draft-tokens", str(num_draft_tokens), "--mode", "sequential",
    )  # fmt: skip
    services.wait(gateway, timeout_s)
    return ServiceAddresses(target.address, draft.address, gateway.address)


def start_head(
    services: Services, target: Path, head: Path, expand: bool, num_draft_tokens: int, timeout_s: float
) -> str:
    """Starts a target with a head, of a checkpoint or of its expansion, and a gateway; the gateway's address."""
    own = start_target(services, target, "--head", str(head), *(["--expand"] if expand else []))
    services.wait(own, timeout_s)
    gateway = _start(
        services, "gateway", "--target", own.address, "--tokenizer", str(target),
        "--num-draft-tokens", str(num_draft_tokens), "--mode", "sequential",
    )  # fmt: skip
    return services.wait(gateway, timeout_s)


def start_target(services: Services, folder: Path, *more: str, cores: Sequence[int] = ()) -> Service:
    """A target; it does not listen yet. It keeps no prompts: nobody else does between runs."""
    with on_cores(cores):
        return _start(services, "target", "--model", str(folder), "--no-prefix-cache", *more)


async def wait_for_draft(address: str, timeout_s: float, with_draft: bool = True) -> None:
    """Returns when the gateway has found both; a target is enough where there is no draft. Raises TimeoutError. On the
    caller's loop, as readiness's is not."""
    async with asyncio.timeout(timeout_s), Client(address) as client:
        while not await has_peers(client, with_draft):  # noqa: ASYNC110  # the event is in another process
            await asyncio.sleep(POLL_S)


def _start(services: Services, name: str, *arguments: str) -> Service:
    return services.start(name, [name, "--listen", LOOPBACK, "--grace-s", GRACE_S, *arguments])


def start_slow_draft(folder: Path, cores: Sequence[int]) -> BenchWorker:
    """A draft service whose passes can be stretched; it does not listen yet."""
    arguments = ("--model", folder, "--listen", LOOPBACK, "--threads", 1, "--grace-s", GRACE_S)
    return BenchWorker.of_module("draft", "network.draft", *arguments, cores=cores)


def start_proxy(*upstreams: str) -> BenchWorker:
    """Delay proxies in front of services."""
    return BenchWorker.of_module("proxy", "network.proxy", *upstreams)


def start_colocated(name: str, folders: Folders, threads: int, cores: Sequence[int], expand: bool) -> BenchWorker:
    """Both models in one process."""
    expanded = ("expand",) if expand else ()
    return BenchWorker.of_module(name, "colocated", folders.target, folders.draft, threads, *expanded, cores=cores)


def start_floor(stack: ExitStack, target: Path, timeout_s: float) -> BenchWorker:
    """The bare products and the probe, on all cores."""
    worker = stack.enter_context(BenchWorker.of_module("floor", "floor", target, usable_cores()))
    worker.wait(timeout_s)
    return worker


def start_transformers(stack: ExitStack, folders: Folders, num_draft_tokens: int, timeout_s: float) -> BenchWorker:
    """transformers' generate, on all cores."""
    arguments = (folders.target, folders.draft, usable_cores(), num_draft_tokens)
    worker = stack.enter_context(BenchWorker.of_module("transformers", "transformers_worker", *arguments))
    worker.wait(timeout_s)
    return worker


def start_peer(
    stack: ExitStack, script: Path, name: str, python: Path, folders: Folders, num_draft_tokens: int
) -> Iterator[tuple[str, BenchWorker]]:
    """A peer in a virtual environment of its own, by mode: a worker each, since an engine is made for one."""
    if not script.is_file():
        raise BenchWorkerFailed(f"{name}: there is no {script}; give --peers-script")
    models = [str(folders.target), str(folders.draft), str(usable_cores()), str(num_draft_tokens)]
    for mode in ("plain", "draft"):
        worker = stack.enter_context(BenchWorker(name, [str(python), str(script), name, mode, *models], pauses=True))
        worker.wait(PEER_START_S)
        yield mode, worker
