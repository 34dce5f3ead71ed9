"""Puts a target service together: model, engine, device thread, servicer, server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from outrider.engine.batch import StepLimits
from outrider.engine.loader import LoadedModel, load_model
from outrider.engine.model_runner import ModelRunner, RunnerOptions, build_runner
from outrider.engine.worker import Worker, set_switch_interval
from outrider.pairs.expansion import expand_llama
from outrider.rpc.hub import locate, model_name
from outrider.rpc.messages import ModelInfo, TargetInfo
from outrider.rpc.sampling_params import SamplingParams
from outrider.rpc.server import HealthMonitor, Server, build_server, require_free, serve_until_signal
from outrider.rpc.settings import usable_threads
from outrider.rpc.stream import Outboxes
from outrider.rpc.telemetry import setup_tracing
from outrider.rpc.vocabulary import read_vocabulary
from outrider.target_service.engine import TargetEngine, TargetEngineCommand
from outrider.target_service.outputs import StepTracer
from outrider.target_service.profile import StepProfile, thread_split
from outrider.target_service.sequence import TargetLimits
from outrider.target_service.servicer import SERVICE, TargetServicer, register
from outrider.target_service.settings import TargetSettings

log = logging.getLogger(__name__)

DEVICE_TIMEOUT_S = 30.0  # a step that takes longer is a dead device; a long prefill below that is not


@dataclass(frozen=True, slots=True)
class TargetService:
    """A target that is bound and not yet serving."""

    server: Server
    servicer: TargetServicer
    engine: TargetEngine
    thread: Worker[TargetEngineCommand]

    async def stop(self) -> None:
        """Ends the server and the device thread at once."""
        await self.server.stop()
        await asyncio.to_thread(self.thread.stop)


async def serve(settings: TargetSettings) -> None:
    """Loads, serves, drains."""
    require_free(settings.listen)
    settings = await asyncio.to_thread(located, settings)
    set_switch_interval()
    torch.set_num_threads(settings.threads or usable_threads())
    stop_tracing = setup_tracing("outrider-target", settings.trace_file)
    service = build(settings, await asyncio.to_thread(load, settings))
    try:
        on_drain = service.servicer.drain
        await serve_until_signal(
            service.server, name="target", grace_s=settings.grace_s, on_drain=on_drain, work=service.thread.ended
        )
    finally:
        await asyncio.to_thread(service.thread.stop)
        await asyncio.to_thread(stop_tracing)


def build(settings: TargetSettings, loaded: LoadedModel) -> TargetService:
    """Puts the parts together on the running event loop; the device thread starts here, and measures its steps before
    anybody can reach it."""
    runner = build_runner(loaded.model, runner_options(settings))
    limits = limits_of(settings, loaded, runner)
    outboxes = Outboxes(asyncio.get_running_loop())
    engine = new_engine(settings, runner, limits, outboxes.flush)
    thread: Worker[TargetEngineCommand] = Worker(
        engine, "target-device", settings.threads or usable_threads(), settings.device
    )
    costs = thread.call(engine.profile).result()
    engine.threads = thread_split(settings.threads, loaded.kernels, costs)
    servicer = TargetServicer(thread, outboxes, info_of(settings, loaded, limits, costs), engine.load)

    async def probe() -> None:
        await asyncio.wrap_future(thread.call(engine.probe))

    server = build_server(
        settings.listen,
        [SERVICE],
        lambda grpc_server: register(servicer, grpc_server),
        health=HealthMonitor(
            [SERVICE], probe=probe, is_alive=lambda: thread.is_alive and thread.step_age_s() < DEVICE_TIMEOUT_S
        ),
        enable_reflection=settings.reflection,
    )
    log.info(
        "steps take %s", ", ".join(f"{us / 1000:.1f} ms with {rows} rows" for rows, us in costs) or "unknown times"
    )
    return TargetService(server, servicer, engine, thread)


def new_engine(
    settings: TargetSettings, runner: ModelRunner, limits: TargetLimits, flush: Callable[[], None] = lambda: None
) -> TargetEngine:
    """An engine by the settings, traced if tracing is on."""
    tracer = StepTracer.if_enabled()
    return TargetEngine(
        runner,
        limits,
        prefix_cache=settings.prefix_cache,
        max_rows=settings.max_rows,
        cut_windows=settings.cut_windows,
        flush=flush,
        on_step=tracer.on_step if tracer is not None else None,
    )


def located(settings: TargetSettings) -> TargetSettings:
    """With the checkpoint's folder in place of a hub id. Raises ModelNotFound."""
    folder = locate(settings.model, trust_remote_code=settings.trust_remote_code)
    return settings.model_copy(update={"model": folder})


def load(settings: TargetSettings) -> LoadedModel:
    """The checkpoint, or its function-preserving expansion, built in memory: a large target's cost with a real
    acceptance."""
    return load_model(
        settings.model,
        dtype=settings.dtype,
        device=settings.device,
        max_model_len=settings.max_model_len,
        batch_invariant=settings.batch_invariant,
        trust_remote_code=settings.trust_remote_code,
        expand=expand_llama if settings.expand else None,
    )


def runner_options(settings: TargetSettings) -> RunnerOptions:
    """What the runner is told: a window's rows are its drafted tokens and the token before them."""
    return RunnerOptions(
        StepLimits(settings.max_rows, settings.max_sequences, settings.max_window + 1),
        num_blocks=settings.num_blocks,
        cache_bytes=settings.cache_bytes,
        default_cache_bytes=512 << 20,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        cuda_graphs=settings.cuda_graphs,
    )


def limits_of(settings: TargetSettings, loaded: LoadedModel, runner: ModelRunner) -> TargetLimits:
    """What the engine may hold."""
    return TargetLimits(
        vocab_size=loaded.vocab_size,
        max_model_len=loaded.max_model_len,
        eos_ids=loaded.eos_token_ids,
        num_blocks=runner.cache.num_blocks,
        block_size=runner.block_size,
        max_window=settings.max_window,
        max_sequences=settings.max_sequences,
        max_logprobs=settings.max_logprobs,
        untrusted_draft=settings.untrusted_draft,
        model_digest=loaded.digest,
    )


def info_of(
    settings: TargetSettings, loaded: LoadedModel, limits: TargetLimits, step_costs: StepProfile = ()
) -> TargetInfo:
    """What GetTargetInfo answers."""
    vocabulary = read_vocabulary(Path(settings.model))
    model = ModelInfo(
        name=settings.name or model_name(settings.model),
        digest=loaded.digest,
        vocab_size=loaded.vocab_size,
        max_model_len=loaded.max_model_len,
        num_tokens=vocabulary.num_tokens if vocabulary is not None else 0,
        tokenizer_fingerprint=vocabulary.fingerprint if vocabulary is not None else "",
        eos_token_ids=loaded.eos_token_ids,
        default_sampling=SamplingParams(**loaded.default_sampling),  # type: ignore[arg-type]
        dtype=str(loaded.model.dtype).removeprefix("torch."),
        device=settings.device,
        batch_invariant=loaded.model.batch_invariant,
        num_blocks=limits.num_blocks,
        block_size=limits.block_size,
        engine=loaded.engine,
        kernels=loaded.kernels,
    )
    return TargetInfo(model, limits.max_window, step_costs=step_costs)
