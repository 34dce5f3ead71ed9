"""Puts a draft service together: methods, engine, device thread, servicer, server."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import torch

from outrider.draft_service.admission import ModelMethod, installed_tracer, make_methods
from outrider.draft_service.engine import DraftEngine, DraftEngineCommand
from outrider.draft_service.scheduler import LONG_PREFILL
from outrider.draft_service.servicer import SERVICE, DraftServicer, register
from outrider.draft_service.settings import DraftSettings
from outrider.engine.batch import StepLimits
from outrider.engine.kv_cache_manager import BlockPool, KVCacheManager
from outrider.engine.loader import LoadedModel, load_model
from outrider.engine.model_runner import RunnerOptions, build_runner
from outrider.engine.worker import Worker, set_switch_interval
from outrider.proposers.base import TokenProposer
from outrider.proposers.draft_model import DraftModelProposer
from outrider.proposers.ngram import NgramProposer
from outrider.rpc.hub import locate, model_name
from outrider.rpc.messages import DraftInfo, DraftMethod, ModelInfo
from outrider.rpc.sampling_params import SamplingParams
from outrider.rpc.server import HealthMonitor, build_server, require_free, serve_until_signal
from outrider.rpc.settings import usable_threads
from outrider.rpc.stream import Outboxes
from outrider.rpc.telemetry import setup_tracing
from outrider.rpc.vocabulary import read_vocabulary

logger = logging.getLogger(__name__)

DEVICE_TIMEOUT_S = 30.0


async def serve(settings: DraftSettings) -> None:
    """Loads, serves, drains."""
    require_free(settings.listen)
    set_switch_interval()
    threads = settings.threads or usable_threads()
    torch.set_num_threads(threads)
    stop_tracing = setup_tracing("outrider-draft", settings.trace_file)
    settings = await asyncio.to_thread(located, settings)
    methods, info = await asyncio.to_thread(load_methods, settings)
    outboxes = Outboxes(asyncio.get_running_loop())
    engine = DraftEngine(
        make_methods(methods),
        settings.max_sequences,
        settings.max_rows,
        flush=outboxes.flush,
        tracer=installed_tracer(),
    )
    thread: Worker[DraftEngineCommand] = Worker(engine, "draft-device", threads, settings.device)
    servicer = DraftServicer(thread, outboxes, info)
    try:
        server = build_server(
            settings.listen,
            [SERVICE],
            lambda grpc_server: register(servicer, grpc_server),
            health=build_health(engine, thread),
            enable_reflection=settings.reflection,
        )
        await serve_until_signal(
            server, name="draft", grace_s=settings.grace_s, on_drain=servicer.drain, work=thread.ended
        )
    finally:
        await asyncio.to_thread(thread.stop)
        await asyncio.to_thread(stop_tracing)


def build_health(engine: DraftEngine, thread: Worker[DraftEngineCommand]) -> HealthMonitor:
    """SERVING once the model answered a forward, and while no step hangs."""

    async def probe() -> None:
        await asyncio.wrap_future(thread.call(engine.probe))

    return HealthMonitor(
        [SERVICE], probe=probe, is_alive=lambda: thread.is_alive and thread.step_age_s() < DEVICE_TIMEOUT_S
    )


def located(settings: DraftSettings) -> DraftSettings:
    """With the checkpoint's folder in place of a hub id. Raises ModelNotFound."""
    if settings.model is None:
        return settings
    return settings.model_copy(update={"model": locate(settings.model)})


def load_methods(settings: DraftSettings) -> tuple[list[ModelMethod | TokenProposer], DraftInfo]:
    """The methods to offer, the default first, and what GetDraftInfo answers."""
    methods: list[ModelMethod | TokenProposer] = [NgramProposer(settings.prompt_lookup_min, settings.prompt_lookup_max)]
    model = ModelInfo(name=settings.name or settings.method, digest="", vocab_size=0, max_model_len=0, dtype="")
    if settings.model is not None:
        if not settings.model.is_dir():
            raise FileNotFoundError(f"there is no folder {settings.model}")
        loaded = load_model(
            settings.model, dtype=settings.dtype, device=settings.device, max_model_len=settings.max_model_len
        )
        method = build_model_method(loaded, runner_options(settings))
        methods.append(method)
        model = model_info(settings, loaded, method)
    methods.sort(key=lambda method: method.name != settings.method)
    logger.info("methods: %s", ", ".join(method.name for method in methods))
    return methods, DraftInfo(model, tuple(DraftMethod(method.name) for method in methods))


def runner_options(settings: DraftSettings) -> RunnerOptions:
    """What the runner is told. Rows of a sequence are one, two after a bonus token, and more where a chain died."""
    return RunnerOptions(
        StepLimits(settings.max_rows, settings.max_sequences, LONG_PREFILL),
        num_blocks=settings.num_blocks,
        cache_bytes=settings.cache_bytes,
        default_cache_bytes=256 << 20,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        cuda_graphs=settings.cuda_graphs,
    )


def build_model_method(loaded: LoadedModel, options: RunnerOptions) -> ModelMethod:
    """The model over a cache of its own."""
    runner = build_runner(loaded.model, options)
    cache = KVCacheManager(BlockPool(runner.cache.num_blocks), runner.block_size, cache_dtype=str(loaded.model.dtype))
    return ModelMethod(DraftModelProposer(runner), cache, loaded.eos_token_ids)


def model_info(settings: DraftSettings, loaded: LoadedModel, method: ModelMethod) -> ModelInfo:
    """The model's part of the handshake."""
    folder = settings.model
    vocabulary = read_vocabulary(folder) if folder is not None else None
    info = ModelInfo(
        name=settings.name or (model_name(folder) if folder is not None else settings.method),
        digest=loaded.digest,
        vocab_size=loaded.vocab_size,
        max_model_len=method.capacity,
        eos_token_ids=loaded.eos_token_ids,
        default_sampling=SamplingParams(**loaded.default_sampling),  # type: ignore[arg-type]
        dtype=str(loaded.model.dtype).removeprefix("torch."),
        device=settings.device,
        num_blocks=method.cache.pool.num_blocks,
        block_size=method.cache.block_size,
        engine=loaded.engine,
        kernels=loaded.kernels,
    )
    if vocabulary is None:
        return info
    return replace(info, num_tokens=vocabulary.num_tokens, tokenizer_fingerprint=vocabulary.fingerprint)
