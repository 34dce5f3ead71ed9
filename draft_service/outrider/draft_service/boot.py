"""Puts a draft service together: methods, engine, device thread, servicer, server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from outrider.draft_service.admission import ModelMethod, make_methods
from outrider.draft_service.engine import DraftEngine
from outrider.draft_service.grammar import DraftGrammars
from outrider.draft_service.learned import ModelsLearned
from outrider.draft_service.observer import DraftEngineCommand
from outrider.draft_service.reload import Build, Reloads
from outrider.draft_service.scheduler import LONG_PREFILL
from outrider.draft_service.servicer import DraftServicer
from outrider.draft_service.settings import DraftSettings
from outrider.draft_service.vocabularies import Vocabularies, join_all
from outrider.engine.adapters.loader import LoadedAdapter, load_adapter
from outrider.engine.adapters.resident import AdapterRoom
from outrider.engine.batch import StepLimits
from outrider.engine.kv_cache_manager import BlockPool, KVCacheManager
from outrider.engine.loader import LoadedModel, load_model
from outrider.engine.model_runner import RunnerOptions, build_runner
from outrider.engine.profile import measure_steps
from outrider.engine.token_tree import TokenTree
from outrider.engine.worker import DeviceWorker, set_switch_interval
from outrider.proposers.base import LearningProposer, TokenProposer
from outrider.proposers.reencoding import JoinedVocabulary
from outrider.proposers.registry import METHODS, TOKEN_METHODS, is_class, make_proposer, method_of
from outrider.rpc.engine_service import EngineService, build_service, info_of, this_machine
from outrider.rpc.hub import locate
from outrider.rpc.learning.learned import LearnedAdapters
from outrider.rpc.learning.promotion import LearnedDrafts
from outrider.rpc.learning.servicer import Taught
from outrider.rpc.messages import DraftInfo, DraftMethod, ModelInfo
from outrider.rpc.reloads import OneReload
from outrider.rpc.settings import usable_threads
from outrider.rpc.stream import Outboxes
from outrider.rpc.telemetry import StepTracer
from outrider.rpc.vocabulary import has_tokenizer
from outrider.rpc.words.sampling_params import CAPABILITIES, FRESH_SEED
from outrider.rpc.words.structured import CONSTRAINTS

if TYPE_CHECKING:
    from outrider.draft_service.metrics import DraftMetrics

logger = logging.getLogger(__name__)


DraftService = EngineService[DraftEngine]


async def start(settings: DraftSettings) -> DraftService:
    """Loads the methods and binds the server."""
    threads = settings.threads or usable_threads()
    set_switch_interval()
    torch.set_num_threads(threads)
    settings = await asyncio.to_thread(located, settings)
    methods, info = await asyncio.to_thread(load_methods, settings)
    outboxes = Outboxes(asyncio.get_running_loop())
    metrics = new_metrics(settings, [method.name for method in methods])
    engine = DraftEngine(
        make_methods(methods),
        settings.max_sequences,
        settings.max_rows,
        max_open_tokens=info.model.max_open_tokens,
        flush=outboxes.flush,
        tracer=StepTracer.if_enabled("outrider.draft"),
        observer=metrics,
        default_methods=info.default_methods,
        learn_from=frozenset(settings.learn_from),
        weights=settings.weights,
    )
    thread: DeviceWorker[DraftEngineCommand] = DeviceWorker(engine, "draft-device", threads, settings.device)
    thread.ended.add_done_callback(lambda _: engine.close())  # as the thread's last act
    one = OneReload()
    reloads = new_reloads(settings, engine, thread, info.model, one)
    servicer = DraftServicer(thread, outboxes, info, reloads, new_vocabularies(settings, methods))
    if settings.learn_from:
        learns = ModelsLearned(engine, lambda: servicer.model.digest)
        learned = LearnedDrafts(lambda: learns, thread, one, servicer.tell_learned)
        servicer.learning.taught = Taught(engine.lessons, learned, learns.model_digest, settings.learned_rank)
    if metrics is not None:
        metrics.attach(engine, thread, info.model)
    if reloads is not None:
        reloads.listeners = [servicer.tell_model, *([] if metrics is None else [metrics.model_info])]
        reloads.on_method = servicer.tell_method
    return build_service(settings, engine, thread, servicer, metrics)


def new_vocabularies(settings: DraftSettings, methods: Iterable[ModelMethod | TokenProposer]) -> Vocabularies | None:
    """What targets' vocabularies are joined with the model's, where it has a tokenizer."""
    model = next((method for method in methods if isinstance(method, ModelMethod)), None)
    if model is None or settings.model is None or not has_tokenizer(settings.model):
        return None
    return Vocabularies(settings.model, settings.vocabulary_level, model.vocabularies)


def new_reloads(
    settings: DraftSettings,
    engine: DraftEngine,
    thread: DeviceWorker[DraftEngineCommand],
    info: ModelInfo,
    one: OneReload,
) -> Reloads | None:
    """What puts other weights in the model's place, where that is allowed."""
    if not settings.allow_reload or settings.model is None:
        return None

    def load(folder: Path) -> Build:
        found = settings.model_copy(
            update={"model": folder, "target_tokenizer": []}
        )  # it keeps the maps that there are
        return model_builder(found, folder, runner_options(settings).beside_another())

    return Reloads(engine, thread, settings.model, info, load, settings.allow_hub_reload, one=one)


def new_metrics(settings: DraftSettings, methods: Sequence[str]) -> DraftMetrics | None:
    """What counts, where somebody asks for it; nothing of metrics is imported elsewhere."""
    if not settings.metrics:
        return None
    from outrider.draft_service.metrics import DraftMetrics

    return DraftMetrics(methods)


def located(settings: DraftSettings) -> DraftSettings:
    """The settings with folders in place of hub ids. Raises ModelNotFound."""
    if settings.model is None:
        return settings
    targets = [locate(folder, weights=False) for folder in settings.target_tokenizer]
    model = locate(settings.model, drafts_by=settings.method)
    return settings.model_copy(update={"model": model, "target_tokenizer": targets})


def load_methods(settings: DraftSettings) -> tuple[list[ModelMethod | TokenProposer], DraftInfo]:
    """The methods to offer, the defaults first, and what GetDraftInfo answers."""
    wanted = settings.methods
    names = [name for name in TOKEN_METHODS if not METHODS[name].learns or name in wanted]
    names += [name for name in wanted if is_class(name)]
    given = dict(settings)
    made = {name: make_proposer(name, given, settings.allow_code) for name in names}
    methods: list[ModelMethod | TokenProposer] = [*made.values()]
    defaults = [made[name].name if name in made else name for name in wanted]
    info = ModelInfo(name=settings.name or ",".join(defaults), digest="", vocab_size=0, max_model_len=0, dtype="")
    if settings.model is not None:
        method, info = model_builder(settings, settings.model, runner_options(settings))()
        methods.append(method)
    methods.sort(key=lambda method: defaults.index(method.name) if method.name in defaults else len(defaults))
    logger.info("methods: %s", ", ".join(method.name for method in methods))
    in_turn = tuple(defaults) if len(defaults) > 1 else ()
    return methods, DraftInfo(
        info,
        describe(methods, bool(settings.learn_from)),
        version=metadata.version("outrider"),
        default_methods=in_turn,
        # Those that draft without regard to constraints are refused more.
        capabilities=(*CAPABILITIES, *CONSTRAINTS, FRESH_SEED),
        machine=this_machine(),
    )


def load_draft(settings: DraftSettings, trust_remote_code: bool = False) -> LoadedModel:
    """Loads the draft's model. Raises FileNotFoundError where there is no such folder."""
    if settings.model is None or not settings.model.is_dir():
        raise FileNotFoundError(f"there is no folder {settings.model}")
    return load_model(
        settings.model,
        dtype=settings.dtype,
        quantization=settings.quantization,
        activations=settings.activations,
        device=settings.device,
        max_model_len=settings.max_model_len,
        trust_remote_code=trust_remote_code,
        lone_file=True,
    )


def model_builder(settings: DraftSettings, folder: Path, options: RunnerOptions) -> Build:
    """Loads the weights of a folder; what it returns gives them their cache."""
    loaded = load_draft(settings.model_copy(update={"model": folder}))
    vocabularies = join_all(settings.target_tokenizer, folder, settings.vocabulary_level)
    adapters = {name: load_adapter(path, loaded.model, loaded.digest) for name, path in settings.adapters.items()}

    def build() -> tuple[ModelMethod, ModelInfo]:
        learned = AdapterRoom(settings.learned_drafts, settings.learned_rank) if settings.learn_from else None
        by = model_method(settings), vocabularies, settings.tree, adapters, learned
        method = build_model_method(loaded, options, *by)
        if has_tokenizer(folder):
            grammars = DraftGrammars(folder / "tokenizer.json", method.vocab_size, loaded.eos_token_ids)
            method = replace(method, grammars=grammars)
        return method, model_info(settings, loaded, method)

    return build


def model_method(settings: DraftSettings) -> str:
    """How the service's model drafts."""
    return next((name for name in settings.methods if method_of(name).needs_model), "draft_model")


def describe(methods: Iterable[ModelMethod | TokenProposer], learns: bool = False) -> tuple[DraftMethod, ...]:
    """The methods' part of the handshake; whether the model `learns`."""
    return tuple(
        DraftMethod(
            row.name,
            row.needs_features,
            row.can_run_ahead,
            learns=isinstance(method, LearningProposer) or (learns and isinstance(method, ModelMethod)),
            step_costs=method.step_costs if isinstance(method, ModelMethod) else (),
        )
        for method in methods
        for row in [method_of(method.name)]
    )


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


def build_model_method(
    loaded: LoadedModel,
    options: RunnerOptions,
    name: str = "draft_model",
    vocabularies: dict[str, JoinedVocabulary] | None = None,
    tree: TokenTree | None = None,
    adapters: Mapping[str, LoadedAdapter] | None = None,
    learned: AdapterRoom | None = None,
) -> ModelMethod:
    """The model over a cache of its own; `vocabularies` are those of `join_all`, `adapters` by the names of the
    target's; beside these there is room for what is `learned`. Raises ValueError for a model that cannot draft by that
    method."""
    if tree is not None and not loaded.model.takes_trees:
        raise ValueError("speculative_token_tree: this draft's model computes chains alone; leave it out")
    room = [AdapterRoom(1, one.rank) for one in (adapters or {}).values()] + ([learned] if learned else [])
    if room:  # all have their place at once
        whole = AdapterRoom(sum(one.num_slots for one in room), max(one.max_rank for one in room))
        options = replace(options, adapters=whole)
    runner = build_runner(loaded.model, options)
    prepared = (
        {} if runner.adapters is None else {n: runner.adapters.prepare(one) for n, one in (adapters or {}).items()}
    )
    cache_dtype, pool = str(loaded.model.dtype), BlockPool(runner.cache.num_blocks)
    cache = KVCacheManager(pool, runner.block_size, cache_dtype=cache_dtype, model=loaded.digest)
    one_a_pass = name == "draft_model"  # others draft several tokens in one
    most = options.steps.max_sequences
    return ModelMethod(
        METHODS[name].load().of(runner, loaded),
        cache,
        loaded.eos_token_ids,
        {} if vocabularies is None else vocabularies,
        tree,
        adapters=prepared,
        learned=LearnedAdapters(learned.num_slots if learned else 0),
        step_costs=measure_steps(runner, cache.pool, most, loaded.model.max_model_len) if one_a_pass else (),
    )


def model_info(settings: DraftSettings, loaded: LoadedModel, method: ModelMethod) -> ModelInfo:
    """The model's part of the handshake. Raises ValueError without a checkpoint."""
    if settings.model is None:
        raise ValueError("model: is not set; allowed: the folder of the checkpoint that was loaded")
    cache = method.cache
    info = info_of(settings, settings.model, loaded, method.capacity, cache.pool.num_blocks, cache.block_size)
    return replace(info, mapped_fingerprints=tuple(method.vocabularies))
