"""The engines of an LLM in this process: loads the checkpoints, sizes the caches and joins them with the gateway's own
engine of generation.

An LLM without engines of its own: it asks a gateway that runs.

Runs the requests of one call together, and tells of each as it ends.

A thread with an event loop of its own, so that a blocking call works anywhere, a running loop (a notebook)
included."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from outrider.client import Client, Part, SpeculationStats
from outrider.draft_service.settings import DraftSettings
from outrider.engine.batch import ROWS
from outrider.engine.kv_cache import bytes_per_block
from outrider.engine.kv_cache_manager import BLOCK_SIZE
from outrider.engine.loader import LoadedModel, load_model
from outrider.engine.model_runner import sampling_bytes
from outrider.engine.models.base import UnsupportedModel
from outrider.engine.worker import set_switch_interval
from outrider.gateway.engine import EngineConfig, GenerationEngine
from outrider.gateway.peers.handshake import check_pair, check_tokenizer
from outrider.gateway.peers.local_ngram import LocalNgramDrafter
from outrider.gateway.request import GenerationDelta, GenerationRequest, SpeculationOptions, TokenUsage
from outrider.gateway.speculation.backends import Drafter
from outrider.gateway.speculation.schedule import ScheduledDrafter
from outrider.gateway.text.tokenizer import Tokenizer
from outrider.llm.config import (
    NGRAM_NAMES,
    EngineArguments,
    SpeculativeConfig,
    Unsupported,
    check_names,
    is_int,
    named_method,
)
from outrider.llm.local import LocalDraft, LocalService, LocalTarget
from outrider.llm.metrics import Statistics
from outrider.llm.outputs import OutputBuilder
from outrider.llm.sampling_params import NO_BOUND
from outrider.planner.policy import SpeculationTally
from outrider.proposers.ngram import NgramProposer
from outrider.rpc.hub import locate
from outrider.rpc.messages import ModelInfo
from outrider.rpc.validate import MAX_DRAFT_TOKENS, MAX_N
from outrider.target_service.boot import load as load_target
from outrider.target_service.settings import TargetSettings


class Backend(Protocol):
    """What an LLM asks: its own engines, or a gateway."""

    @property
    def info(self) -> ModelInfo:
        """The target's model."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None where only the gateway has one."""

    @property
    def num_draft_tokens(self) -> int:
        """k where a request says none."""

    @property
    def speculation(self) -> SpeculationOptions:
        """What every request says of speculation."""

    def encode(self, text: str) -> tuple[int, ...] | None:
        """A prompt's ids; None where the gateway makes them."""

    def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationDelta, None]:
        """The deltas of a request. Called on the loop."""

    def cache_usage(self) -> float | None:
        """The share of the key-value cache in use, where it is known."""

    def reset_prefix_cache(self) -> None:
        """Forgets every cached prefix."""

    def close(self) -> None:
        """Ends everything; from any thread."""


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt of a call."""

    request: GenerationRequest
    builder: OutputBuilder


async def run_jobs(backend: Backend, jobs: Sequence[Job], statistics: Statistics, put: Callable[[Job], None]) -> None:
    """Starts all jobs, the lowest priority number first; the first error ends them all."""
    statistics.num_unfinished += sum(job.request.n for job in jobs)
    ordered = sorted(jobs, key=lambda job: job.request.priority)
    tasks = [asyncio.create_task(_run(backend, job, statistics, put)) for job in ordered]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        statistics.num_unfinished -= sum(not c.finished() for job in jobs for c in job.builder.output.outputs)


async def _run(backend: Backend, job: Job, statistics: Statistics, put: Callable[[Job], None]) -> None:
    watch = statistics.watch()
    async with aclosing(backend.generate(job.request)) as deltas:
        async for delta in deltas:
            watch.add(delta)
            job.builder.add(delta)
    put(job)


T = TypeVar("T")

JOIN_S = 30.0


class LoopThread:
    """Runs coroutines for threads that have no loop."""

    def __init__(self, name: str = "llm-loop") -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Starts a coroutine."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine to its end; Ctrl-C cancels it."""
        future = self.submit(coroutine)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def call(self, function: Callable[[], T]) -> T:
        """Runs a function on the loop."""

        async def once() -> T:
            return function()

        return self.run(once())

    def iterate(self, start: Callable[[Callable[[T], None]], Coroutine[Any, Any, None]]) -> Generator[T, None, None]:
        """Runs `start(put)` and yields what it puts, as it comes; raises what it raises. Whoever stops reading (Ctrl-C)
        closes this: it ends, and has ended then."""
        items: queue.SimpleQueue[tuple[T] | None] = queue.SimpleQueue()
        tasks: list[asyncio.Task[None]] = []
        ended = threading.Event()

        def end(_: asyncio.Task[None]) -> None:
            ended.set()
            items.put(None)

        def begin() -> None:
            tasks.append(self.loop.create_task(start(lambda item: items.put((item,)))))
            tasks[0].add_done_callback(end)

        self.loop.call_soon_threadsafe(begin)
        try:
            while (item := items.get()) is not None:
                yield item[0]
            if tasks[0].cancelled():
                raise RuntimeError("closed while it ran")
            tasks[0].result()
        finally:
            if not ended.is_set():
                self.loop.call_soon_threadsafe(lambda: tasks[0].cancel())
                ended.wait(JOIN_S)

    def close(self) -> None:
        """Cancels what runs and ends the thread. A second call does nothing."""
        if self.loop.is_closed():
            return
        with suppress(RuntimeError):  # another call was first
            self.loop.call_soon_threadsafe(self.loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join(JOIN_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
            tasks = asyncio.all_tasks(self.loop)
            for task in tasks:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.run_until_complete(self.loop.shutdown_default_executor())
        finally:
            self.loop.close()


log = logging.getLogger(__name__)

CPU_CACHE_BYTES = 512 << 20  # of both caches where there is no GPU
WORKING_SHARE = 0.05  # of a GPU's memory: activations, beside weights and caches
UNBOUNDED = 2**31 - 1


@dataclass(frozen=True, slots=True)
class LocalBackend:
    """A pair of engines, and the loop that runs between them."""

    runtime: LoopThread
    engine: GenerationEngine
    tokenizer: Tokenizer
    info: ModelInfo
    services: tuple[LocalService, ...]
    num_draft_tokens: int
    speculation: SpeculationOptions

    def encode(self, text: str) -> tuple[int, ...]:
        """A prompt's ids."""
        return tuple(self.tokenizer.encode(text))

    def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationDelta, None]:
        """The deltas of a request. Called on the loop."""
        return self.engine.generate(request)

    def cache_usage(self) -> float:
        """The share of the target's cache that is in use."""
        pool = self._target.engine.cache.pool
        return 1 - pool.num_free / pool.num_blocks

    def reset_prefix_cache(self) -> None:
        """Forgets every cached prefix of the target."""
        self._target.thread.call(self._target.engine.cache.pool.clear_cache).result()

    def close(self) -> None:
        """Ends the loop, then the device threads."""
        self.runtime.close()
        for service in self.services:
            service.stop()

    @property
    def _target(self) -> LocalTarget:
        target = self.services[0]
        if not isinstance(target, LocalTarget):
            raise TypeError("the first peer is the target")
        return target


def start_local(
    runtime: LoopThread,
    arguments: EngineArguments,
    speculation: SpeculativeConfig | None,
    num_running: Callable[[], int],
) -> LocalBackend:
    """Loads and starts. Raises ValueError for a pair that is none."""
    if arguments.model is None:
        raise ValueError("there is no model to load")
    set_switch_interval()
    k = (speculation.num_speculative_tokens or 0) if speculation else 0
    device = _device(arguments.device)
    tokenizer = Tokenizer.load(arguments.tokenizer or arguments.model)
    settings = _target_settings(arguments, arguments.model, device, speculation)
    folder = _draft_folder(arguments, speculation)
    try:
        loaded = load_target(settings)
        draft = _load_draft(arguments, speculation, folder, device, loaded.max_model_len)
    except UnsupportedModel as error:
        raise ValueError(str(error)) from error
    if settings.num_blocks is None:
        sampling = sum(sampling_bytes(ROWS[-1], model.vocab_size) for model in (loaded, draft) if model is not None)
        num_blocks = _num_blocks(loaded, draft, _cache_bytes(arguments, device, sampling), arguments)
        settings = settings.model_copy(update={"num_blocks": num_blocks})
    target = runtime.call(lambda: LocalTarget(settings, loaded, runtime.loop))
    services: list[LocalService] = [target]
    try:
        _warn(check_tokenizer(tokenizer, target.info.model))
        _warn(_shorter(target.info.model.max_model_len, loaded.max_model_len))
        drafter: Drafter | None = None
        if draft is not None and folder is not None:
            draft_settings = _draft_settings(arguments, folder, device, settings.num_blocks)
            drafter = local = runtime.call(lambda: LocalDraft(draft_settings, draft, runtime.loop))
            services.append(local)
            _warn(check_pair(target.info.model, local.info.model, (tokenizer, Tokenizer.load(folder))))
        elif speculation is not None:
            drafter = LocalNgramDrafter(NgramProposer(speculation.prompt_lookup_min, speculation.prompt_lookup_max))
        if drafter is not None and speculation is not None and not speculation.schedule.constant:
            drafter = ScheduledDrafter(drafter, speculation.schedule, num_running)
        config = EngineConfig(
            num_draft_tokens=k,
            mode=arguments.mode or "sequential",
            max_draft_tokens=k,  # a controller goes below k, never above
            max_active=arguments.max_num_seqs,
            max_waiting=UNBOUNDED,
            model_name=arguments.served_model_name or "",
            max_logprobs=arguments.max_logprobs,
        )
        engine = runtime.call(lambda: GenerationEngine(tokenizer, target, drafter, config))
    except BaseException:
        for service in services:
            service.stop()
        raise
    options = SpeculationOptions(greedy_draft=speculation is not None and speculation.draft_sample_method == "greedy")
    return LocalBackend(runtime, engine, tokenizer, target.info.model, tuple(services), k, options)


def _target_settings(
    arguments: EngineArguments, model: Path, device: str, speculation: SpeculativeConfig | None
) -> TargetSettings:
    k = (speculation.num_speculative_tokens or 0) if speculation else 0
    return TargetSettings.model_validate(
        {
            "model": model,
            "dtype": arguments.dtype,
            "device": device,
            "threads": arguments.threads,
            "max_model_len": arguments.max_model_len,
            "num_blocks": arguments.num_gpu_blocks_override,
            "prefix_cache": arguments.enable_prefix_caching is not False,
            "batch_invariant": arguments.batch_invariant,
            "max_rows": arguments.max_num_batched_tokens,
            "max_window": max(32, k),
            "max_logprobs": arguments.max_logprobs,
            "max_sequences": arguments.max_num_seqs * MAX_N,
            "trust_remote_code": arguments.trust_remote_code,
            "name": arguments.served_model_name or "",
            "cuda_graphs": not arguments.enforce_eager,
        }
    )


def _draft_settings(arguments: EngineArguments, folder: Path, device: str, num_blocks: int | None) -> DraftSettings:
    return DraftSettings.model_validate(
        {
            "model": folder,
            "device": device,
            "threads": arguments.threads,
            "num_blocks": num_blocks,
            "max_rows": arguments.max_num_batched_tokens,
            "max_sequences": arguments.max_num_seqs * MAX_N,
            "cuda_graphs": not arguments.enforce_eager,
        }
    )


def _draft_folder(arguments: EngineArguments, speculation: SpeculativeConfig | None) -> Path | None:
    """Of the draft model, if there is one."""
    if speculation is None or speculation.method != "draft_model":
        return None
    folder = locate(str(speculation.model), trust_remote_code=arguments.trust_remote_code)
    if not folder.is_dir():
        raise ValueError(f"speculative_config: there is no folder {folder}; allowed: a folder, or a hub id (org/name)")
    return folder


def _load_draft(
    arguments: EngineArguments,
    speculation: SpeculativeConfig | None,
    folder: Path | None,
    device: str,
    target_len: int,
) -> LoadedModel | None:
    if speculation is None or folder is None:
        return None
    if speculation.max_model_len is not None and speculation.max_model_len > target_len:
        raise ValueError(
            f"speculative_config: max_model_len={speculation.max_model_len} is more than the target's {target_len}"
        )
    return load_model(
        folder,
        dtype=arguments.dtype,
        device=device,
        max_model_len=speculation.max_model_len,
        trust_remote_code=arguments.trust_remote_code,
    )


def _device(name: str) -> str:
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"


def _cache_bytes(arguments: EngineArguments, device: str, sampling: int) -> int:
    """What the caches of both models may take, now that the weights are there, on a GPU beside so many bytes of
    sampling."""
    if arguments.kv_cache_memory_bytes is not None:
        return arguments.kv_cache_memory_bytes
    if torch.device(device).type != "cuda":
        return CPU_CACHE_BYTES
    free, total = torch.cuda.mem_get_info(torch.device(device))
    left = int(arguments.gpu_memory_utilization * total) - (total - free) - int(WORKING_SHARE * total) - sampling
    if left <= 0:
        raise ValueError(
            f"gpu_memory_utilization={arguments.gpu_memory_utilization} leaves no memory for the key-value cache: "
            f"{(total - free) >> 20} of {total >> 20} MiB are in use"
        )
    return left


def _num_blocks(target: LoadedModel, draft: LoadedModel | None, memory: int, arguments: EngineArguments) -> int:
    """As many blocks for the draft as for the target, and no more than can be used. A length that was asked for must
    fit."""
    size = bytes_per_block(target.model.layers, target.model.dtype)
    if draft is not None:
        size += bytes_per_block(draft.model.layers, draft.model.dtype)
    blocks = memory // size
    if blocks < 1:
        raise ValueError(f"{memory} bytes hold no block of the key-value cache")
    length = arguments.max_model_len
    if length is not None and blocks * BLOCK_SIZE < length:
        raise ValueError(
            f"max_model_len={length} does not fit: the key-value cache holds {blocks * BLOCK_SIZE} tokens; raise "
            "gpu_memory_utilization or kv_cache_memory_bytes, or lower max_model_len"
        )
    return min(blocks, arguments.max_num_seqs * -(-target.max_model_len // BLOCK_SIZE))


def _shorter(held: int, longest: int) -> str:
    return f"max_model_len is {held}: the key-value cache holds no more of the model's {longest}" * (held < longest)


def _warn(message: str) -> None:
    if message:
        log.warning("%s", message)


INFO_S = 10.0
MAX_CALLS = 64  # at once; a gateway refuses what it cannot queue
# Keywords that this process decides; all others are the services' own.
OWN = (
    "gateway",
    "tokenizer",
    "seed",
    "max_logprobs",
    "logprobs_mode",
    "disable_log_stats",
    "generation_config",
    "override_generation_config",
    "per_request_spec_decode_metrics",
    "acceptance",
    "mode",
)


@dataclass(frozen=True, slots=True)
class AttachedBackend:
    """A gateway behind an address."""

    runtime: LoopThread
    client: Client
    tokenizer: Tokenizer | None
    info: ModelInfo
    num_draft_tokens: int  # the gateway's own k
    speculation: SpeculationOptions
    _room: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_CALLS))

    def encode(self, text: str) -> None:
        """The gateway's own tokenizer does."""

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationDelta, None]:
        """The deltas of a request. Called on the loop."""
        request = self._bounded(request)
        parts = self.client.generate(
            request.text,
            token_ids=request.token_ids,
            messages=request.messages,
            add_generation_prompt=request.add_generation_prompt,
            sampling=request.sampling,
            n=request.n,
            speculate=request.speculation.enabled,
            num_draft_tokens=request.speculation.num_draft_tokens,
            method=request.speculation.method,
            methods=request.speculation.methods,
            acceptance=request.speculation.acceptance,
            mode=request.speculation.mode,
            request_id=request.request_id,
            priority=request.priority,
            salt=request.salt,
            model=request.model,
        )
        async with self._room, aclosing(parts):
            async for part in parts:
                yield _delta_of(part)

    def cache_usage(self) -> float | None:
        """The target's own business."""
        return None

    def reset_prefix_cache(self) -> None:
        """Not from here."""
        raise Unsupported("reset_prefix_cache: the cache is the target service's")

    def close(self) -> None:
        """Ends the connection and the loop."""
        if not self.runtime.loop.is_closed():
            self.runtime.run(self.client.close())
        self.runtime.close()

    def _bounded(self, request: GenerationRequest) -> GenerationRequest:
        """A gateway refuses more tokens than the context leaves; here, as in vLLM, they are just not generated."""
        sampling, ids = request.sampling, request.token_ids
        if sampling is None:
            return request
        if ids is None and request.text is not None and self.tokenizer is not None:
            ids = tuple(self.tokenizer.encode(request.text))
        if ids is not None:
            room = max(1, self.info.max_model_len - len(ids))
            return replace(request, sampling=replace(sampling, max_tokens=min(sampling.max_tokens, room)))
        if sampling.max_tokens == NO_BOUND:
            raise ValueError("max_tokens=None needs the prompt's length: give LLM(tokenizer=...), or token ids")
        return request


def attach(
    runtime: LoopThread, arguments: EngineArguments, config: SpeculativeConfig | Mapping[str, Any] | None
) -> AttachedBackend:
    """Connects. `config` is the speculative configuration."""
    given = {entry.name for entry in fields(arguments) if getattr(arguments, entry.name) != entry.default}
    if foreign := sorted(given - set(OWN)):
        raise Unsupported(f"LLM(gateway=...): the services behind the gateway decide {', '.join(foreign)}")
    if arguments.per_request_spec_decode_metrics == "detailed":
        raise Unsupported("LLM(gateway=...): per_request_spec_decode_metrics is 'none' or 'summary' over a gateway")
    speculation = speculation_options(config, arguments.mode or "")
    address = arguments.gateway or ""

    async def connect() -> Client:
        return Client(address)

    client = runtime.run(connect())
    try:
        info = runtime.run(client.info(INFO_S))
    except BaseException:
        runtime.run(client.close())
        raise
    tokenizer = None if arguments.tokenizer is None else Tokenizer.load(arguments.tokenizer)
    return AttachedBackend(runtime, client, tokenizer, info.target, info.num_draft_tokens, speculation)


def speculation_options(config: SpeculativeConfig | Mapping[str, Any] | None, mode: str = "") -> SpeculationOptions:
    """What a request can say of speculation; the draft service decides the rest."""
    if isinstance(config, SpeculativeConfig):
        raise Unsupported("LLM(gateway=...): give speculative_config as a dict of method and num_speculative_tokens")
    given = dict(config or {})
    check_names(given)
    if given.get("model") in NGRAM_NAMES and given.setdefault("method", "ngram") in NGRAM_NAMES:
        del given["model"]
    method, k = named_method(given.pop("method", None)) or "", given.pop("num_speculative_tokens", None)
    if k is not None and not (is_int(k) and 0 <= k <= MAX_DRAFT_TOKENS):
        raise ValueError(f"num_speculative_tokens must be 0 to {MAX_DRAFT_TOKENS}, got {k!r:.100}")
    if given:
        raise Unsupported(
            f"LLM(gateway=...): the draft service decides {', '.join(given)}; a request says method and "
            "num_speculative_tokens"
        )
    return SpeculationOptions(method="ngram" if method in NGRAM_NAMES else method, num_draft_tokens=k, mode=mode)


def _delta_of(part: Part) -> GenerationDelta:
    stop: dict[str, Any] = {}
    if isinstance(part.stop_reason, str):
        stop["stop_string"] = part.stop_reason
    elif part.stop_reason is not None:
        stop["stop_token_id"] = part.stop_reason
    usage = part.usage
    return GenerationDelta(
        part.request_id,
        part.index,
        text=part.text,
        token_ids=part.token_ids,
        origins=part.origins,
        logprobs=part.logprobs,
        finish_reason=part.finish_reason,
        usage=None if usage is None else TokenUsage(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens),
        tally=None if part.speculation is None else _tally_of(part.speculation),
        seed=part.seed,
        model_digest=part.model_digest,
        near_ties=part.near_ties,
        prompt_token_ids=part.prompt_token_ids,
        prompt_logprobs=part.prompt_logprobs,
        **stop,
    )


def _tally_of(stats: SpeculationStats) -> SpeculationTally:
    return SpeculationTally(
        num_rounds=stats.num_rounds,
        num_drafts=stats.num_drafts,
        num_draft_tokens=stats.num_draft_tokens,
        num_accepted_tokens=stats.num_accepted_tokens,
        accepted_per_position=list(stats.num_accepted_per_position),
        tested_per_position=list(stats.num_tested_per_position),
        method=stats.method,
        mode=stats.mode,
        rounds_by_mode=dict(stats.num_rounds_by_mode),
    )
