"""A process that serves one engine, alike for draft and target: from its command line to a server that listens, until a
signal ends it or the thread that owns the engine's device does."""

from __future__ import annotations

import asyncio
import hashlib
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from outrider.rpc.errors import OutriderError
from outrider.rpc.hub import model_name
from outrider.rpc.logs import setup_logging
from outrider.rpc.messages import ModelInfo, validate_sampling
from outrider.rpc.security import ServerTls
from outrider.rpc.server import HealthMonitor, Server, build_server, require_free, serve_until_signal
from outrider.rpc.servicer import EngineServicer, EngineThread
from outrider.rpc.settings import ModelSettings, ServerSettings, parse_settings
from outrider.rpc.telemetry import setup_tracing
from outrider.rpc.vocabulary import read_vocabulary
from outrider.rpc.words.sampling_params import SamplingParams

if TYPE_CHECKING:
    from outrider.rpc.metrics import Metrics

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
DEVICE_TIMEOUT_S = 30.0  # a step that takes longer is a dead device; a long prefill below that is not


class DeviceThread(EngineThread, Protocol):
    """The thread that owns an engine's device, as its process sees it."""

    ended: Future[None]

    def call(self, function: Callable[[], Any]) -> Future[Any]:
        """Runs a function between two steps."""

    def stop(self) -> None:
        """Ends it after what was submitted before."""


class Engine(Protocol):
    """What is asked of the engine itself, on its thread."""

    def probe(self) -> None:
        """A sign of life. Raises where the device is unusable."""


Settings = TypeVar("Settings", bound=ServerSettings)
ServedEngine = TypeVar("ServedEngine", bound=Engine)


@dataclass(slots=True)
class EngineService(Generic[ServedEngine]):
    """An engine behind a server that is bound and not yet serving."""

    server: Server
    servicer: EngineServicer
    engine: ServedEngine  # at present
    thread: DeviceThread
    metrics: Metrics | None = None  # where they are asked for

    async def stop(self) -> None:
        """Ends the server and the device thread at once."""
        await self.server.stop()
        await asyncio.to_thread(self.thread.stop)


def main(
    settings_type: type[Settings],
    arguments: Sequence[str] | None,  # None: those of the process
    prog: str,
    description: str,
    serve: Callable[[Settings], Coroutine[Any, Any, None]],
) -> int:
    """Serves until SIGTERM or SIGINT; 2 for settings or a checkpoint that cannot be served. `serve` shall import what
    needs torch: the environment is set before."""
    settings = parse_settings(settings_type, sys.argv[1:] if arguments is None else arguments, prog, description)
    setup_logging(settings.log_format, f"outrider-{settings.section}")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning OpenMP threads starve the event loop
    try:
        asyncio.run(serve(settings))
    except (OutriderError, FileNotFoundError, ValueError) as error:
        print(f"{prog}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


async def serve_engine(role: str, settings: ServerSettings, start: Callable[[], Awaitable[EngineService[Any]]]) -> None:
    """Loads, serves, drains."""
    require_free(settings.listen, settings.health, settings.metrics)
    stop_tracing = setup_tracing(
        f"outrider-{role}", settings.trace_file, settings.trace_file_mb << 20, follows_links=True
    )
    try:
        service = await start()
        on_drain, work = service.servicer.drain, service.thread.ended
        try:
            async with _exported(service, settings.metrics, role):
                await serve_until_signal(
                    service.server, name=role, grace_s=settings.grace_s, on_drain=on_drain, work=work
                )
        finally:
            await asyncio.to_thread(service.thread.stop)
    finally:
        await asyncio.to_thread(stop_tracing)


@asynccontextmanager
async def _exported(service: EngineService[Any], listen: str, role: str) -> AsyncIterator[None]:
    """Nothing of metrics is imported unless they are asked for."""
    if service.metrics is None:
        yield
        return
    from outrider.rpc.metrics import exported

    async with exported(service.metrics, listen, service.server.health, role):
        yield


def build_service(
    settings: ServerSettings,
    engine: ServedEngine,
    thread: DeviceThread,
    servicer: EngineServicer,
    metrics: Metrics | None = None,
) -> EngineService[ServedEngine]:
    """Binds the server: SERVING once the model answered a forward, and while no step hangs."""

    async def probe() -> None:
        await asyncio.wrap_future(thread.call(lambda: service.engine.probe()))

    def is_alive() -> bool:
        return thread.is_alive and thread.step_age_s() < DEVICE_TIMEOUT_S

    names = [servicer.service]
    health = HealthMonitor(names, probe=probe, is_alive=is_alive)
    tls = ServerTls.of(settings)
    server = build_server(
        settings.listen,
        names,
        servicer.register,
        health=health,
        enable_reflection=settings.reflection,
        tls=tls,
        health_address=settings.health,
    )
    service = EngineService(server, servicer, engine, thread, metrics)
    return service


def this_machine() -> str:
    """The same for all processes of a machine, those in containers, too, until it starts again; empty: unknown."""
    try:
        return hashlib.sha256(BOOT_ID.read_bytes()).hexdigest()[:16]
    except OSError:
        return ""


def info_of(
    settings: ModelSettings,
    folder: Path,  # of the checkpoint
    loaded: Any,  # the engine's LoadedModel, which nothing here may import
    max_model_len: int,
    num_blocks: int,
    block_size: int,
) -> ModelInfo:
    """The model's part of the handshake; of the vocabulary what the folder has. InvalidArgument where its authors
    recommend sampling parameters that no request may have: each would be refused for what it does not say."""
    vocabulary, sampling = read_vocabulary(folder), SamplingParams(**loaded.default_sampling)
    validate_sampling(replace(sampling, max_tokens=1), loaded.vocab_size, max_model_len, "generation_config.json: ")
    return ModelInfo(
        name=settings.name or model_name(folder),
        digest=loaded.digest,
        vocab_size=loaded.vocab_size,
        max_model_len=max_model_len,
        num_tokens=vocabulary.num_tokens if vocabulary is not None else 0,
        tokenizer_fingerprint=vocabulary.fingerprint if vocabulary is not None else "",
        eos_token_ids=loaded.eos_token_ids,
        default_sampling=sampling,
        dtype=loaded.dtype,
        device=settings.device,
        num_blocks=num_blocks,
        block_size=block_size,
        engine=loaded.engine,
        kernels=loaded.kernels,
    )
