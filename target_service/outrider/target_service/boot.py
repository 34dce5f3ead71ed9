"""Puts a target service together: model, engine, device thread, servicer, server."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from outrider.engine.adapters.loader import LoadedAdapter, load_adapter
from outrider.engine.adapters.ranks import MOST_RANK
from outrider.engine.adapters.resident import AdapterRoom
from outrider.engine.batch import StepLimits
from outrider.engine.checkpoint import read_config, read_json, unheeded_rules
from outrider.engine.hidden_states import check_taps
from outrider.engine.kv_cache_manager import BLOCK_SIZE
from outrider.engine.loader import LoadedModel, load_model
from outrider.engine.model_runner import ModelRunner, RunnerOptions, build_runner
from outrider.engine.models.base import UnsupportedModel
from outrider.engine.profile import StepProfile
from outrider.engine.quantized.choice import rounding_for
from outrider.engine.worker import DeviceWorker, set_switch_interval
from outrider.pairs.expansion import expand_llama
from outrider.planner.draft_trial import NUM_TOKENS, trial_prompts
from outrider.proposers.heads import loading as heads
from outrider.proposers.heads.block import BlockHead
from outrider.proposers.heads.block_config import MOST_ROWS
from outrider.proposers.heads.conventions import other_conventions
from outrider.proposers.heads.head import bytes_beside_block
from outrider.proposers.heads.loading import AnyHead
from outrider.proposers.heads.target import target_weights
from outrider.proposers.registry import method_of
from outrider.rpc.engine_service import EngineService, build_service, this_machine
from outrider.rpc.engine_service import info_of as model_info_of
from outrider.rpc.errors import FailedPrecondition
from outrider.rpc.hub import locate
from outrider.rpc.learning.promotion import LearnedDrafts
from outrider.rpc.learning.servicer import Taught
from outrider.rpc.messages import OVERCOMMIT, Adapter, DraftMethod, TargetInfo
from outrider.rpc.reloads import OneReload
from outrider.rpc.settings import usable_threads
from outrider.rpc.stream import Outboxes
from outrider.rpc.vocabulary import has_tokenizer, load_backend
from outrider.rpc.words.expert_costs import ExpertCosts
from outrider.target_service.adapter_changes import AdapterChanges, OwnAdapters, adapter_room, adapters_at_start
from outrider.target_service.engine import TargetEngine, TargetEngineCommand
from outrider.target_service.engines import engine_of
from outrider.target_service.heads.drafter import check_tree
from outrider.target_service.heads.learning import HeadLearning, HeadTeaching, require_learning
from outrider.target_service.heads.trial import NO_HEAD, HeadTrials, TriedHead
from outrider.target_service.observed import stats_of
from outrider.target_service.reload import Successor, WeightReloads, with_weights
from outrider.target_service.sequence import TargetLimits
from outrider.target_service.servicer import TargetServicer
from outrider.target_service.settings import TargetSettings
from outrider.target_service.threads import thread_split
from outrider.target_service.watchers import new_metrics, own_step_watcher

if TYPE_CHECKING:
    from outrider.target_service.grammars import Grammars
    from outrider.target_service.metrics import TargetMetrics

log = logging.getLogger(__name__)

TargetService = EngineService[TargetEngine]


async def start(settings: TargetSettings) -> EngineService[Any]:
    """Loads the model and binds the server."""
    if settings.engine != "outrider":
        service: EngineService[Any] = await engine_of(settings.engine).start(await asyncio.to_thread(located, settings))
        return service
    set_switch_interval()
    torch.set_num_threads(settings.threads or usable_threads())
    settings = await asyncio.to_thread(located, settings)
    return build(settings, await asyncio.to_thread(load, settings))


async def join(settings: TargetSettings) -> None:
    """Computes for a target whose server is another host's, until that ends."""
    await engine_of(settings.engine).join(await asyncio.to_thread(located, settings))


def build(settings: TargetSettings, loaded: LoadedModel) -> TargetService:
    """Puts the parts together on the running event loop; the device thread starts here, and measures its steps before
    anybody can reach it."""
    service: TargetService
    tried, adapters = believed_head(settings, loaded), load_adapters(settings, loaded)
    teaching = new_teaching(settings, tried)
    outboxes = Outboxes(asyncio.get_running_loop())
    metrics = new_metrics(settings)
    assemble = partial(assembled, settings, flush=outboxes.flush, metrics=metrics, teaching=teaching)
    engine = assemble(loaded, tried.head, adapters)
    thread: DeviceWorker[TargetEngineCommand] = DeviceWorker(
        engine, "target-device", settings.threads or usable_threads(), settings.device
    )
    thread.ended.add_done_callback(lambda _: service.engine.close())
    costs = thread.call(engine.profile).result()
    engine.parts += thread_split(settings.threads, loaded.kernels, costs)
    info = info_of(settings, loaded, engine.limits, costs, tried, adapters, engine.capabilities, engine.expert_costs)
    changes = new_adapter_changes(settings, loaded, engine, thread, info)
    reloads = new_reloads(settings, loaded, tried, engine, thread, lambda: servicer.info, assemble)
    servicer = TargetServicer(thread, outboxes, info, lambda: service.engine.load(), changes, reloads)
    if changes is not None:
        changes.listeners = [servicer.tell_adapters]
    if reloads is not None:
        reloads.listeners = [servicer.tell_target]
        reloads.on_engine = partial(_serve_by, lambda: service, changes)
    if teaching is not None:
        one = OneReload() if reloads is None else reloads.one
        learned = LearnedDrafts(lambda: _learning_of(service.engine), thread, one, servicer.tell_learned)
        servicer.learning.taught = Taught(teaching.lessons, learned, lambda: teaching.digest, settings.learned_rank)
    if metrics is not None:
        metrics.attach(lambda: stats_of(service.engine), thread, info.model, settings.vllm_metrics)
    log.info(
        "steps take %s", ", ".join(f"{us / 1000:.1f} ms with {rows} rows" for rows, us in costs) or "unknown times"
    )
    service = build_service(settings, engine, thread, servicer, metrics)
    return service


def assembled(
    settings: TargetSettings,
    loaded: LoadedModel,
    head: AnyHead | None,
    adapters: Mapping[str, LoadedAdapter],
    *,
    flush: Callable[[], None],
    metrics: TargetMetrics | None,
    teaching: HeadTeaching | None = None,
) -> TargetEngine:
    """An engine over loaded weights, with a runner, a cache and grammars of its own."""
    learning = None if teaching is None or head is None else teaching.beside(head, loaded.digest)  # before the cache
    runner = new_runner(settings, loaded, head, adapters)
    grammars = new_grammars(Path(settings.model), loaded, settings.device)
    if metrics is not None and grammars is not None:
        grammars.on_compiled = metrics.add_compiled
    limits = limits_of(settings, loaded, runner)
    return new_engine(settings, runner, limits, flush, metrics, head, grammars, adapters, learning)


def new_teaching(settings: TargetSettings, tried: TriedHead) -> HeadTeaching | None:
    """What the head learns of, where it may. Raises UnsupportedModel for one that cannot."""
    if not settings.learn_from or settings.head is None or tried.head is None:
        return None
    require_learning(tried.head)
    room = AdapterRoom(settings.learned_drafts, settings.learned_rank)
    return HeadTeaching(heads.head_digest(settings.head), frozenset(settings.learn_from), room)


def new_reloads(
    settings: TargetSettings,
    loaded: LoadedModel,
    tried: TriedHead,
    engine: TargetEngine,
    thread: DeviceWorker[Any],
    said: Callable[[], TargetInfo],
    assemble: Callable[[LoadedModel, AnyHead | None, Mapping[str, LoadedAdapter]], TargetEngine],
) -> WeightReloads | None:
    """What puts other weights in the model's place, where that is allowed."""
    if not settings.allow_reload:
        return None
    has_head = tried.head is not None

    def read(folder: Path, present: TargetInfo) -> Successor:
        found = settings.model_copy(update={"model": folder})
        weights = load(found)
        head = load_head(found, weights) if has_head else None
        adapters = load_adapters(found, weights)
        rows = tuple(_info_of_adapter(name, adapter) for name, adapter in adapters.items())
        said = replace(with_weights(present, weights), adapters=rows)
        return Successor(weights, said, partial(assemble, weights, head, adapters))

    return WeightReloads(engine, thread, Path(settings.model), loaded, said, read)


def _serve_by(
    service: Callable[[], TargetService], changes: AdapterChanges | None, engine: TargetEngine, successor: Successor
) -> None:
    """Another engine serves: it is asked for everything, and has its own adapters."""
    before, service().engine = service().engine, engine
    before.close()
    if changes is not None and engine.adapters.resident is not None:
        reader = OwnAdapters(successor.loaded, engine.adapters.resident)
        changes.move_to(engine.adapters.table, reader, successor.info.adapters)


def new_engine(
    settings: TargetSettings,
    runner: ModelRunner,
    limits: TargetLimits,
    flush: Callable[[], None] = lambda: None,
    metrics: TargetMetrics | None = None,
    head: AnyHead | None = None,
    grammars: Grammars | None = None,
    adapters: Mapping[str, LoadedAdapter] | None = None,  # the runner has room for
    learning: HeadLearning | None = None,  # of the head
) -> TargetEngine:
    """An engine by the settings, traced if tracing is on. The runner taps what the head reads."""
    engine = TargetEngine(
        runner,
        limits,
        prefix_cache=settings.prefix_cache,
        max_rows=settings.max_rows,
        cut_windows=settings.cut_windows,
        flush=flush,
        on_step=own_step_watcher(metrics),
        head=head,
        tree=settings.tree,
        grammars=grammars,
        learning=learning,
    )
    engine.scheduler.max_forced = settings.max_forced_tokens
    if runner.adapters is not None:
        for name, adapter in (adapters or {}).items():
            engine.adapters.table.add(_info_of_adapter(name, adapter), runner.adapters.prepare(adapter))
    return engine


def load_adapters(settings: TargetSettings, loaded: LoadedModel) -> dict[str, LoadedAdapter]:
    """The adapters that are there at the start, by name. Raises UnsupportedAdapter for what does not fit the model."""
    most_rank = settings.max_adapter_rank or MOST_RANK
    return adapters_at_start(settings, lambda folder: load_adapter(folder, loaded.model, loaded.digest, most_rank))


def _learning_of(engine: TargetEngine) -> HeadLearning:
    if engine.learning is None:
        raise FailedPrecondition("path: no head drafts beside this target now", reason="NO_ROOM")
    return engine.learning


def new_adapter_changes(
    settings: TargetSettings,
    loaded: LoadedModel,
    engine: TargetEngine,
    thread: DeviceWorker[Any],
    info: TargetInfo,
) -> AdapterChanges | None:
    """What loads and unloads adapters, where that is allowed."""
    resident = engine.adapters.resident
    if not settings.allow_adapter_changes or resident is None:
        return None
    served = {adapter.name: adapter for adapter in info.adapters}
    return AdapterChanges(engine.adapters.table, thread, OwnAdapters(loaded, resident), info.model.name, served)


def _info_of_adapter(name: str, adapter: LoadedAdapter) -> Adapter:
    return Adapter(name, adapter.digest, adapter.rank)


def new_grammars(folder: Path, loaded: LoadedModel, device: str) -> Grammars | None:
    """What serves constraints, for a folder with a tokenizer that says its tokens' bytes."""
    if not has_tokenizer(folder):
        return None
    from outrider.target_service.grammars import grammars_of

    layout = load_backend(folder)[0].to_str().encode()
    return grammars_of(layout, loaded.vocab_size, loaded.eos_token_ids, pin_memory=device != "cpu")


def located(settings: TargetSettings) -> TargetSettings:
    """The settings with the checkpoints' folders in place of hub ids. Raises ModelNotFound."""
    folder = locate(settings.model, trust_remote_code=settings.trust_remote_code)
    head = None if settings.head is None else locate(settings.head)
    return settings.model_copy(update={"model": folder, "head": head})


def load(settings: TargetSettings) -> LoadedModel:
    """The checkpoint, or its function-preserving expansion, built in memory: a large target's cost with a real
    acceptance."""
    if unheeded := unheeded_rules(read_json(Path(settings.model) / "generation_config.json")):
        log.warning("%s", unheeded)
    rounding = rounding_for(settings.quantization, Path(settings.model))
    if rounding is not None:
        log.info("the weights are rounded to %s as they are loaded: another model than the checkpoint's", rounding)
    return load_model(
        settings.model,
        dtype=settings.dtype,
        quantization=rounding,
        activations=settings.activations,
        device=settings.device,
        max_model_len=settings.max_model_len,
        batch_invariant=settings.batch_invariant,
        trust_remote_code=settings.trust_remote_code,
        expand=expand_llama if settings.expand else None,
    )


def believed_head(
    settings: TargetSettings, loaded: LoadedModel, check: Callable[[AnyHead], None] = lambda head: None
) -> TriedHead:
    """What shall draft beside the model, if anything, and what it was found to be worth, if it was tried: a target
    without a tokenizer has no texts. Raises UnsupportedModel for what does not fit the model, and what `check`
    raises."""
    head, verdict = load_head(settings, loaded), settings.head_trial
    if settings.head is None or head is None:
        return NO_HEAD
    check(head)
    prompts = [] if verdict == "off" else _trial_prompts(settings.model, loaded)
    if not prompts:
        return TriedHead(head)
    trials = HeadTrials(
        prompts,
        partial(_trial_engine, settings, loaded, prompts),
        lambda changes: _required(load_head(settings, loaded, changes)),
        settings.max_window,
    )
    found = trials.judge(head, other_conventions(read_config(settings.head), head.taps), verdict)
    gc.collect()  # what was tried by is large, and the cache is about to be measured out
    return found


def _trial_prompts(folder: Path, loaded: LoadedModel) -> Sequence[tuple[int, ...]]:
    if not has_tokenizer(folder):
        return ()
    backend = load_backend(folder)[0]
    return trial_prompts(lambda text: backend.encode(text).ids, loaded.max_model_len)


def _trial_engine(
    settings: TargetSettings, loaded: LoadedModel, prompts: Sequence[Sequence[int]], head: AnyHead
) -> TargetEngine:
    """One that has room for the prompts and what comes behind them, and nothing else."""
    longest = max(map(len, prompts)) + NUM_TOKENS + MOST_ROWS
    changes: dict[str, Any] = {
        "num_blocks": len(prompts) * (-(-longest // BLOCK_SIZE) + 1), "cuda_graphs": False, "cut_windows": False,
        "speculative_token_tree": None, "adapter": [], "allow_adapter_changes": False,
    }  # fmt: skip
    own = settings.model_copy(update=changes)
    runner = new_runner(own, loaded, head)
    return new_engine(own, runner, limits_of(own, loaded, runner), head=head)


def _required(head: AnyHead | None) -> AnyHead:
    if head is None:
        raise UnsupportedModel("head (--head): is not given; allowed: a head's folder")
    return head


def load_head(
    settings: TargetSettings, loaded: LoadedModel, changes: Mapping[str, Any] | None = None
) -> AnyHead | None:
    """What shall draft beside the model, if anything, its config.json with these changes. Raises UnsupportedModel for
    what does not fit it."""
    if settings.head is None:
        return None
    try:
        weights = target_weights(settings.model, loaded.model, settings.expand)
        head = heads.load_head(settings.head, weights, loaded.model.dtype, loaded.model.device, changes)
        expect_confidence(head, settings.head_confidence)
        check_taps(head.taps, len(loaded.model.layers))
        check_tree(settings.tree, head, loaded.model.takes_trees)
    except ValueError as error:
        raise UnsupportedModel(f"head (--head {settings.head}) does not fit the model: {error}") from error
    if changes is None:
        log.info("%s drafts beside the model, from layers %s", head.name, ", ".join(map(str, head.taps)))
    return head


def expect_confidence(head: AnyHead, least: float) -> None:
    """Has chains end before tokens that are less likely to be taken. Raises ValueError for a head that cannot tell."""
    if least == 0:
        return
    if not isinstance(head, BlockHead) or not head.tells_confidence:
        raise ValueError(f"head_confidence: is {least}; allowed: 0, since this {head.name} head tells no confidence")
    head.least_confidence = least


def new_runner(
    settings: TargetSettings,
    loaded: LoadedModel,
    head: AnyHead | None = None,
    adapters: Mapping[str, LoadedAdapter] | None = None,
) -> ModelRunner:
    """One whose passes leave what the head reads, and whose cache leaves room for the head's, and for adapters. Raises
    ValueError where no block fits."""
    options = replace(runner_options(settings), adapters=adapter_room(settings, adapters or {}))
    if head is not None:
        beside = bytes_beside_block(head, loaded.model.dtype)
        options = replace(options, taps=head.taps, bytes_beside_block=beside)
    return build_runner(loaded.model, options)


def runner_options(settings: TargetSettings) -> RunnerOptions:
    """What the runner is told: a window's rows are its drafted tokens and the token before them."""
    return RunnerOptions(
        StepLimits(settings.max_rows, settings.max_sequences, settings.max_window + 1, settings.tree is not None),
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
        max_open_tokens=OVERCOMMIT * runner.cache.num_blocks * runner.block_size,
        max_logprobs=settings.max_logprobs,
        untrusted_draft=settings.untrusted_draft,
        model_digest=loaded.digest,
    )


def info_of(
    settings: TargetSettings,
    loaded: LoadedModel,
    limits: TargetLimits,
    step_costs: StepProfile = (),
    tried: TriedHead = NO_HEAD,
    adapters: Mapping[str, LoadedAdapter] | None = None,
    capabilities: Sequence[str] = (),  # beside what every target can
    expert_costs: ExpertCosts | None = None,
) -> TargetInfo:
    """What GetTargetInfo answers."""
    room = limits.num_blocks, limits.block_size
    model = model_info_of(settings, Path(settings.model), loaded, loaded.max_model_len, *room)
    invariant = replace(model, batch_invariant=loaded.model.batch_invariant)
    methods = () if tried.head is None else (method_of(tried.head.name),)
    info = TargetInfo(
        invariant,
        limits.max_window,
        step_costs=step_costs,
        version=metadata.version("outrider"),
        methods=tuple(DraftMethod(row.name, row.needs_features, row.can_run_ahead) for row in methods),
        adapters=tuple(_info_of_adapter(name, adapter) for name, adapter in (adapters or {}).items()),
        machine=this_machine(),
        trials=() if tried.trial is None else (tried.trial,),
        expert_costs=expert_costs,
    )
    return replace(info, capabilities=(*info.capabilities, *capabilities))
