"""The engines of an LLM in the caller's own process: loads the checkpoints, sizes the caches and joins draft and target
with the gateway's own engine of generation. They are a Drafter and a Verifier whose links are the queues of the two
device threads; there is no socket in between."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from outrider.draft_service.admission import make_methods
from outrider.draft_service.boot import build_model_method, describe, model_info, model_method
from outrider.draft_service.boot import runner_options as draft_options
from outrider.draft_service.engine import DraftEngine
from outrider.draft_service.engine import DraftEngineCommand as DraftCommand
from outrider.draft_service.settings import DraftSettings
from outrider.draft_service.vocabularies import join_all
from outrider.engine.batch import ROWS
from outrider.engine.checkpoint import read_config
from outrider.engine.kv_cache import bytes_per_block
from outrider.engine.kv_cache_manager import BLOCK_SIZE
from outrider.engine.loader import LoadedModel, load_model
from outrider.engine.model_runner import sampling_bytes
from outrider.engine.models.base import TakesAdapters, UnsupportedModel, WrongCheckpoint
from outrider.engine.worker import DeviceStopped, Worker, set_switch_interval
from outrider.gateway.engine import EngineConfig, GenerationEngine
from outrider.gateway.media import MediaLimits
from outrider.gateway.peers.handshake import check_tokenizer
from outrider.gateway.peers.local_drafts import LocalDrafter
from outrider.gateway.prediction import NUM_DRAFT_TOKENS
from outrider.gateway.speculation.backends import Drafter, Lost, VerifierLink
from outrider.gateway.speculation.schedule import ScheduledDrafter
from outrider.gateway.text.tokenizer import Tokenizer
from outrider.llm.arguments import EngineArguments
from outrider.llm.backends import LoopThread
from outrider.llm.config import SpeculativeConfig, acceptance_of
from outrider.llm.engine_choice import (
    INSTALL,
    OURS,
    VLLM,
    beyond_ours,
    choose_engine,
    has_vllm,
    require_vllm_can,
    sees,
    vllms_own,
)
from outrider.llm.lora.held import HeldAdapters
from outrider.llm.lora.request import LoRARequest
from outrider.proposers.base import TokenProposer
from outrider.proposers.heads.head import Head, bytes_beside_block
from outrider.proposers.registry import make_proposer, method_of, needs_model
from outrider.rpc.errors import FailedPrecondition, Internal
from outrider.rpc.messages import (
    MAX_N,
    Adapter,
    Arithmetic,
    Close,
    Closed,
    Commit,
    DraftEvent,
    DraftInfo,
    Failure,
    ModelInfo,
    Open,
    TargetEvent,
    TargetInfo,
    to_failure,
)
from outrider.rpc.pair import check_pair
from outrider.rpc.servicer import Deliver
from outrider.rpc.settings import usable_threads
from outrider.rpc.telemetry import StepTracer
from outrider.rpc.vocabulary import has_tokenizer
from outrider.rpc.words.answer import GenerationDelta
from outrider.rpc.words.request import GenerationRequest, SpeculationOptions, options_for_draft
from outrider.rpc.words.sampling_params import AcceptanceRule
from outrider.target_service.adapter_changes import AdapterChanges
from outrider.target_service.boot import (
    info_of,
    limits_of,
    load_head,
    new_adapter_changes,
    new_engine,
    new_grammars,
    new_runner,
    with_grammars,
)
from outrider.target_service.boot import load as load_target
from outrider.target_service.engine import TargetEngineCommand as TargetCommand
from outrider.target_service.profile import thread_split
from outrider.target_service.settings import TargetSettings
from outrider.target_service.vllm.assembly import SPECULATIVE, adapter_changes_of, start_engine
from outrider.target_service.vllm.engine import VllmEngine

log = logging.getLogger(__name__)

STREAM = 1  # each engine has one caller
WATCH_S = 1.0  # how often a device thread is looked after
CPU_CACHE_BYTES = 512 << 20  # of both caches where there is no GPU; beside vLLM of each
CACHE_BESIDE_VLLM = 256 << 20  # of a draft on the GPU of a vLLM, which takes its share first
WORKING_SHARE = 0.05  # of a GPU's memory: activations, beside weights and caches
STOP_S = 30.0
UNBOUNDED = 2**31 - 1
MEDIA_BYTES = 1 << 30  # of a prompt's pictures: they are the caller's own


class LocalLink:
    """One sequence in an engine of this process. It sets the sequence id of what it sends."""

    __slots__ = ("_service", "on_event", "sequence_id")

    def __init__(self, service: LocalService, sequence_id: int, on_event: Callable[[Any], None]) -> None:
        self._service, self.sequence_id, self.on_event = service, sequence_id, on_event

    @property
    def model(self) -> ModelInfo:
        """The engine's."""
        return self._service.info.model

    def send(self, *messages: Any) -> None:
        """Sends in order; nothing after the end."""
        if self._service.holds(self):
            self._service.submit([replace(message, sequence_id=self.sequence_id) for message in messages])

    def close(self) -> None:
        """Ends the sequence, if it has not ended."""
        if self._service.holds(self):
            self._service.drop(self)
            self._service.submit([Close(self.sequence_id)])


class LocalService:
    """One engine's sequences, seen from the event loop. `take` and `flush` are called on the device thread; vLLM's
    engine has none, and calls them on the loop."""

    thread: Worker[Any] | VllmEngine  # that owns the model
    info: TargetInfo | DraftInfo  # what a service over the engine would say of itself

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._links: dict[int, LocalLink] = {}
        self._last_id = 0
        self._taken: list[Any] = []
        self._watch = loop.call_later(WATCH_S, self._check_alive)

    def holds(self, link: object) -> bool:
        """Whether the sequence is open, as far as the loop knows."""
        return isinstance(link, LocalLink) and self._links.get(link.sequence_id) is link

    def drop(self, link: LocalLink) -> None:
        """Forgets a sequence; its events go nowhere."""
        self._links.pop(link.sequence_id, None)

    def submit(self, messages: Sequence[Any]) -> bool:
        """Sends messages; whether the engine is still there to take them."""
        try:
            self.thread.submit(Deliver(STREAM, messages, self.take, time.monotonic()))
        except DeviceStopped as error:
            self._loop.call_soon(self._lose, str(error))
            return False
        return True

    def start(self, request: Open, on_event: Callable[[Any], None], parent: object = None) -> LocalLink | None:
        """Opens a sequence; a fork of one that is open here shares its prompt."""
        self._last_id += 1
        message = replace(request, sequence_id=self._last_id, fork_of=None)
        if isinstance(parent, LocalLink) and self.holds(parent):
            message = replace(message, fork_of=parent.sequence_id, prompt_ids=(), media=())
        link = self._links[self._last_id] = LocalLink(self, self._last_id, on_event)
        if not self.submit([message]):
            self.drop(link)
            return None
        return link

    def take(self, event: Any) -> None:
        """Keeps what the engine says until the step is over."""
        self._taken.append(event)

    def flush(self) -> None:
        """What one step said reaches the loop in one call."""
        events, self._taken = self._taken, []
        if events:
            with suppress(RuntimeError):  # the loop has ended: there is nobody to tell
                self._loop.call_soon_threadsafe(self._deliver, events)

    def leave(self) -> None:
        """Gives back what is of the loop, on it, before it ends."""
        self._watch.cancel()

    def stop(self) -> None:
        """Ends the device thread, or vLLM's processes, once the loop has ended. Called from any thread."""
        if isinstance(self.thread, Worker):
            self.thread.stop(timeout=STOP_S)
        else:
            self.thread.stop()

    def _deliver(self, events: Sequence[Any]) -> None:
        for event in events:
            link = self._links.get(event.sequence_id)
            if link is None:
                continue
            if isinstance(event, Closed | Failure) or (isinstance(event, Commit) and event.finish_reason is not None):
                self.drop(link)
            link.on_event(event)

    def _check_alive(self) -> None:
        if not self.thread.is_alive:
            self._lose("its device thread has ended")
            return
        self._watch = self._loop.call_later(WATCH_S, self._check_alive)

    def _lose(self, reason: str) -> None:
        links, self._links = list(self._links.values()), {}
        for link in links:
            link.on_event(Lost(reason))


class LocalVerifier(LocalService, ABC):
    """A Verifier over a target engine in this process."""

    info: TargetInfo
    _adapters: AdapterChanges | None = None

    def open(
        self,
        request: Open,
        on_event: Callable[[TargetEvent | Lost], None],
        fork_of: VerifierLink | None = None,
        like: Arithmetic | None = None,
        refused_by: Sequence[VerifierLink] = (),
    ) -> LocalLink | None:
        """Starts a sequence, or a fork of one that is open. There is no other target: who comes after the engine's end
        is told of it."""
        if not self.thread.is_alive:
            gone = Internal("the target's engine has ended; see its log, and make another LLM", reason="DEVICE_DEAD")
            self._loop.call_soon(on_event, to_failure(0, gone))
            return LocalLink(self, 0, on_event)
        return None if refused_by else self.start(request, on_event, fork_of)

    async def load_adapter(self, name: str, path: Path) -> Adapter:
        """Requests may name it then. Raises OutriderError for what cannot be used."""
        if self._adapters is None:
            raise FailedPrecondition(f"adapter {name!r}: this target takes none", reason="NO_ADAPTERS")
        return await self._adapters.load(name, str(path))

    async def unload_adapter(self, name: str) -> None:
        """None may name it any more."""
        if self._adapters is None:
            raise FailedPrecondition(f"adapter {name!r}: this target has none", reason="NO_ADAPTERS")
        await self._adapters.unload(name)

    def change_by(self, changes: AdapterChanges | None) -> None:
        """Adapters come and go by these."""
        self._adapters = changes
        if changes is not None:
            changes.listeners = [self._tell_adapters]

    def _tell_adapters(self, adapters: Sequence[Adapter]) -> None:
        self.info = replace(self.info, adapters=tuple(adapters))

    @abstractmethod
    def cache_usage(self) -> float:
        """The share of its cache that is in use."""

    @abstractmethod
    def reset_prefix_cache(self) -> None:
        """Forgets every cached prefix. Called from any thread but the loop's."""


class LocalTarget(LocalVerifier):
    """Over our own engine."""

    def __init__(
        self,
        settings: TargetSettings,
        loaded: LoadedModel,
        loop: asyncio.AbstractEventLoop,
        head: Head | None = None,
        tokenizer: Path | None = None,
    ) -> None:
        """`head` drafts beside the model; `tokenizer` is the folder of what grammars are over, by default the
        model's."""
        super().__init__(loop)
        runner = new_runner(settings, loaded, head)
        limits = limits_of(settings, loaded, runner)
        longest = min(limits.max_model_len, limits.num_blocks * limits.block_size)  # what the cache can hold at all
        limits = replace(limits, max_model_len=longest)
        info = info_of(settings, loaded, limits, head=head)
        grammars = new_grammars(tokenizer or Path(settings.model), loaded, settings.device)
        self.engine = new_engine(settings, runner, limits, self.flush, head=head, grammars=grammars)
        threads = settings.threads or usable_threads()
        self.thread: Worker[TargetCommand] = Worker(self.engine, "llm-target", threads, settings.device)
        if grammars is not None:
            info = with_grammars(info)
            self.thread.ended.add_done_callback(lambda _: grammars.close())
        costs = self.thread.call(self.engine.profile).result()
        self.engine.threads = thread_split(settings.threads, loaded.kernels, costs)
        self.info: TargetInfo = replace(info, model=replace(info.model, max_model_len=longest), step_costs=costs)
        self.change_by(new_adapter_changes(settings, loaded, runner, self.engine, self.thread, self.info))

    def cache_usage(self) -> float:
        """The share of its cache that is in use."""
        pool = self.engine.cache.pool
        return 1 - pool.num_free / pool.num_blocks

    def reset_prefix_cache(self) -> None:
        """Forgets every cached prefix."""
        self.thread.call(self.engine.cache.pool.clear_cache).result()


@contextmanager
def without_main() -> Iterator[None]:
    """Processes that are spawned import the caller's script, and would run it where nothing guards it; vLLM's need
    nothing of it."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


class VllmTarget(LocalVerifier):
    """Over vLLM, whose processes are this one's children."""

    def __init__(self, engine: VllmEngine, info: TargetInfo, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self.engine, self._own_loop = engine, loop
        self.thread: VllmEngine = engine
        self.info: TargetInfo = info

    @classmethod
    async def started(cls, settings: TargetSettings) -> VllmTarget:
        """Starts vLLM, which loads the model. Raises what `start_engine` raises."""
        with without_main():
            engine, info = await start_engine(settings, lambda: target.flush())
        target = cls(engine, info, asyncio.get_running_loop())
        target.change_by(adapter_changes_of(settings, engine, info))
        return target

    def leave(self) -> None:
        """The link to vLLM's processes is of the loop, too."""
        super().leave()
        self.engine.unlink()

    def cache_usage(self) -> float:
        """The share of its cache that was in use after the last step."""
        return 1 - self.engine.load().free_blocks / self.engine.limits.num_blocks

    def reset_prefix_cache(self) -> None:
        """Forgets every cached prefix."""
        asyncio.run_coroutine_threadsafe(self.engine.reset_prefix_cache(), self._own_loop).result()


class LocalDraft(LocalService):
    """A Drafter over a draft model in this process."""

    def __init__(
        self,
        settings: DraftSettings,
        loaded: LoadedModel,
        loop: asyncio.AbstractEventLoop,
        lookups: Mapping[str, TokenProposer] | None = None,
    ) -> None:
        """`lookups` draft in turn with the model, in the order of the settings; by the names that they have there."""
        super().__init__(loop)
        level, folder = settings.vocabulary_level, settings.model
        vocabularies = join_all(settings.target_tokenizer, folder, level) if folder is not None else {}
        options = draft_options(settings).beside_another()
        method = build_model_method(loaded, options, model_method(settings), vocabularies, settings.tree)
        others = lookups or {}
        drafting = [others.get(name, method) for name in settings.methods] if others else [method]
        defaults = tuple(one.name for one in drafting) if others else ()
        model = model_info(settings, loaded, method)
        self.info: DraftInfo = DraftInfo(model, describe(drafting), default_methods=defaults)
        engine = DraftEngine(
            make_methods(drafting),
            settings.max_sequences,
            settings.max_rows,
            flush=self.flush,
            tracer=StepTracer.if_enabled("outrider.draft"),
            default_methods=defaults,
        )
        threads = settings.threads or usable_threads()
        self.thread: Worker[DraftCommand] = Worker(engine, "llm-draft", threads, settings.device)
        self.thread.ended.add_done_callback(lambda _: engine.close())  # as the thread's last act

    @property
    def round_trip_us(self) -> float:
        """None worth counting: a queue."""
        return 0.0

    def open(self, request: Open, on_event: Callable[[DraftEvent | Lost], None]) -> LocalLink | None:
        """Starts a sequence."""
        return self.start(request, on_event)


@dataclass(frozen=True, slots=True)
class LocalBackend:
    """A pair of engines, and the loop that runs between them."""

    runtime: LoopThread
    engine: GenerationEngine
    tokenizer: Tokenizer
    info: ModelInfo
    target: LocalVerifier
    services: tuple[LocalService, ...]  # the target, and the draft if it is a model
    num_draft_tokens: int
    speculation: SpeculationOptions
    by_tokens: LocalDrafter | None = None  # the draft, if it is no model
    adapters: HeldAdapters | None = None  # of the target, where there may be any

    @property
    def can_couple(self) -> bool:
        """Whether requests may be accepted by the coupled rule."""
        return "acceptance.coupled" in self.target.info.capabilities

    def encode(self, text: str) -> tuple[int, ...]:
        """A prompt's ids."""
        return tuple(self.tokenizer.encode(text))

    def generate(
        self, request: GenerationRequest, lora: LoRARequest | None = None
    ) -> AsyncGenerator[GenerationDelta, None]:
        """The deltas of a request, whose adapter `lora` describes. Called on the loop."""
        return self.engine.generate(request) if lora is None else self._with_adapter(request, lora)

    async def _with_adapter(
        self, request: GenerationRequest, lora: LoRARequest
    ) -> AsyncGenerator[GenerationDelta, None]:
        if self.adapters is None:
            raise ValueError("lora_request: this LLM has no adapters; allowed: LLM(enable_lora=True)")
        async with self.adapters.using(lora), aclosing(self.engine.generate(request)) as deltas:
            async for delta in deltas:
                yield delta

    def cache_usage(self) -> float:
        """The share of the target's cache that is in use."""
        return self.target.cache_usage()

    def reset_prefix_cache(self) -> None:
        """Forgets every cached prefix of the target."""
        self.target.reset_prefix_cache()

    def close(self) -> None:
        """Ends the loop, then the device threads."""
        self.runtime.close(self._leave)
        for service in self.services:
            service.stop()
        if self.by_tokens is not None:
            self.by_tokens.close()

    def _leave(self) -> None:
        for service in self.services:
            service.leave()


@dataclass(frozen=True, slots=True)
class LoadedPair:
    """A target that runs, and the draft model that will, with as many blocks as it may take."""

    target: LocalVerifier
    longest: int  # sequence that the target's model takes, whatever its cache holds
    draft: LoadedModel | None
    num_draft_blocks: int | None


def start_local(
    runtime: LoopThread,
    arguments: EngineArguments,
    speculation: SpeculativeConfig | None,
    k: int,
    num_running: Callable[[], int],
) -> LocalBackend:
    """Loads and starts; at most `k` tokens are drafted. Raises ValueError for a pair that is none."""
    model = arguments.model
    if model is None:
        raise ValueError("there is no model to load")
    set_switch_interval()
    device = _device(arguments.device)
    tokenizer = Tokenizer.load(arguments.tokenizer or model)
    folder = _folder(speculation)
    by_tokens = None if speculation is None or folder is not None else _local_drafter(arguments, speculation)
    try:
        pair = _load_pair(runtime, arguments, model, speculation, device, k)
    except UnsupportedModel as error:
        raise ValueError(str(error)) from error
    target, draft = pair.target, pair.draft
    services: list[LocalService] = [target]
    try:
        _warn(check_tokenizer(tokenizer, target.info.model))
        _warn(_shorter(target.info.model.max_model_len, pair.longest))
        drafter: Drafter | None = None
        if draft is not None and folder is not None:
            targets = [source for source in (arguments.tokenizer or model,) if has_tokenizer(source, folder)]
            draft_settings = _draft_settings(arguments, speculation, folder, device, pair.num_draft_blocks, targets)
            lookups = {} if speculation is None else _lookups(arguments, speculation)
            drafter = local = runtime.call(lambda: LocalDraft(draft_settings, draft, runtime.loop, lookups))
            services.append(local)
            _warn(check_pair(target.info.model, local.info.model))
        else:
            drafter = by_tokens
        if drafter is not None and speculation is not None and not speculation.schedule.constant:
            drafter = ScheduledDrafter(drafter, speculation.schedule, num_running)
        media_folder = arguments.allowed_local_media_path
        config = EngineConfig(
            num_draft_tokens=k,
            mode=arguments.mode or "sequential",
            schedule=None if speculation is None or speculation.schedule.constant else speculation.schedule,
            max_draft_tokens=k,  # a controller goes below k, never above
            max_active=arguments.max_num_seqs,
            max_waiting=UNBOUNDED,
            model_name=arguments.served_model_name or "",
            max_logprobs=arguments.max_logprobs,
            media=MediaLimits(MEDIA_BYTES, folder=Path(media_folder) if media_folder else None),
        )
        engine = runtime.call(lambda: GenerationEngine(tokenizer, target, drafter, config))
    except BaseException:
        for service in services:
            service.stop()
        raise
    options = SpeculationOptions()
    if speculation is not None:
        options = SpeculationOptions(
            acceptance=AcceptanceRule.COUPLED  # trees are not for rejection
            if speculation.tree is not None
            else acceptance_of(speculation.rejection_sample_method),
            greedy_draft=speculation.draft_sample_method == "greedy",
            **options_for_draft(speculation),
        )
    adapters = HeldAdapters(target, arguments.num_adapters) if arguments.enable_lora else None
    return LocalBackend(
        runtime, engine, tokenizer, target.info.model, target, tuple(services), k, options, by_tokens, adapters
    )


def _load_pair(
    runtime: LoopThread,
    arguments: EngineArguments,
    model: Path,
    speculation: SpeculativeConfig | None,
    device: str,
    k: int,
) -> LoadedPair:
    """On our engine, or on vLLM, by its arguments, the checkpoint, or since ours refuses it. Raises UnsupportedModel,
    Unsupported."""
    said = read_config(model)
    reason = beyond_ours(arguments, said)
    if not reason and arguments.engine == "auto" and sees(said) and has_vllm():
        reason = "the checkpoint takes pictures, which our engine does not (engine='outrider' runs it without)"
    if choose_engine(arguments, reason, has_vllm()) == OURS:
        settings = _target_settings(arguments, model, device, k, speculation)
        try:
            loaded = load_target(settings)
        except UnsupportedModel as error:
            is_settings_fault = arguments.batch_invariant or arguments.dtype != "auto"
            if isinstance(error, WrongCheckpoint) or is_settings_fault or arguments.engine == OURS:
                raise
            reason = str(error)
            if not has_vllm():
                raise UnsupportedModel(f"{reason}; vLLM may run it: {INSTALL}") from error
        else:
            return _start_ours(runtime, arguments, settings, loaded, speculation, device)
    if arguments.engine == "auto":
        log.warning("the target runs on vLLM: %s", reason)
    require_vllm_can(arguments, speculation)
    target = runtime.run(VllmTarget.started(_vllm_settings(arguments, model, device, k, speculation)))
    try:
        longest = target.info.model.max_model_len
        draft = _load_draft(arguments, speculation, _folder(speculation), device, longest)
        num_blocks = None
        if draft is not None:
            memory = arguments.kv_cache_memory_bytes or (CPU_CACHE_BYTES if device == "cpu" else CACHE_BESIDE_VLLM)
            num_blocks = max(1, memory // bytes_per_block(draft.model.layers, draft.model.dtype))
            num_blocks = min(num_blocks, arguments.max_num_seqs * -(-longest // BLOCK_SIZE))
    except BaseException:
        target.stop()
        raise
    return LoadedPair(target, longest, draft, num_blocks)


def _start_ours(
    runtime: LoopThread,
    arguments: EngineArguments,
    settings: TargetSettings,
    loaded: LoadedModel,
    speculation: SpeculativeConfig | None,
    device: str,
) -> LoadedPair:
    """Beside the target's weights come the draft's, or the head's; both caches share what is left."""
    head = _load_head(settings, loaded, speculation)
    draft = _load_draft(arguments, speculation, _folder(speculation), device, loaded.max_model_len)
    if settings.num_blocks is None:
        beside = sum(sampling_bytes(ROWS[-1], model.vocab_size) for model in (loaded, draft) if model is not None)
        beside += _adapter_bytes(loaded, arguments)
        num_blocks = _num_blocks(loaded, draft, _cache_bytes(arguments, device, beside), arguments, head)
        settings = settings.model_copy(update={"num_blocks": num_blocks})
    target = runtime.call(lambda: LocalTarget(settings, loaded, runtime.loop, head, arguments.tokenizer))
    return LoadedPair(target, loaded.max_model_len, draft, settings.num_blocks)


def _target_settings(
    arguments: EngineArguments, model: Path, device: str, k: int, speculation: SpeculativeConfig | None
) -> TargetSettings:
    has_head = speculation is not None and bool(speculation.head)
    tree = None if speculation is None or not has_head or speculation.tree is None else speculation
    return TargetSettings.model_validate(
        {
            **_any_settings(arguments, model, device),
            "head": _folder(speculation) if has_head else None,
            "speculative_token_tree": None if tree is None else tree.speculative_token_tree,
            "batch_invariant": arguments.batch_invariant,
            "max_window": max(32, k),
        }
    )


def _vllm_settings(
    arguments: EngineArguments, model: Path, device: str, k: int, speculation: SpeculativeConfig | None
) -> TargetSettings:
    """vLLM keeps room for a whole window in every step: it is no longer than what is drafted."""
    given: dict[str, Any] = {
        "max_num_seqs": arguments.max_num_seqs,  # the others wait
        "quantization": arguments.quantization,
        "kv_cache_memory_bytes": arguments.kv_cache_memory_bytes,
        "limit_mm_per_prompt": arguments.limit_mm_per_prompt,
    }
    if speculation is not None and speculation.head:
        given[SPECULATIVE] = vllms_own(speculation)
    return TargetSettings.model_validate(
        {
            **_any_settings(arguments, model, device),
            "engine": VLLM,
            "tensor_parallel_size": arguments.tensor_parallel_size,
            "engine_args": {name: value for name, value in given.items() if value is not None},
            "gpu_memory_utilization": arguments.gpu_memory_utilization,
            "max_window": max(NUM_DRAFT_TOKENS, k),
            "max_media_bytes": MEDIA_BYTES,
        }
    )


def _any_settings(arguments: EngineArguments, model: Path, device: str) -> dict[str, Any]:
    """Of a target on either engine."""
    return {
        "model": model,
        "dtype": arguments.dtype,
        "device": device,
        "threads": arguments.threads,
        **_max_rows(arguments),
        "max_model_len": arguments.max_model_len,
        "num_blocks": arguments.num_gpu_blocks_override,
        "prefix_cache": arguments.enable_prefix_caching is not False,
        "max_logprobs": arguments.max_logprobs,
        "max_sequences": arguments.max_num_seqs * MAX_N,
        "trust_remote_code": arguments.trust_remote_code,
        "name": arguments.served_model_name or "",
        "cuda_graphs": not arguments.enforce_eager,
        "allow_adapter_changes": arguments.enable_lora,
        **({"max_adapters": arguments.max_loras} if arguments.enable_lora else {}),
        **({"max_adapter_rank": arguments.max_lora_rank} if arguments.enable_lora else {}),
    }


def _max_rows(arguments: EngineArguments) -> dict[str, int]:
    """Where it was given: vLLM's own choice is another than ours."""
    rows = arguments.max_num_batched_tokens
    return {} if rows is None else {"max_rows": rows}


def _draft_settings(
    arguments: EngineArguments,
    speculation: SpeculativeConfig | None,
    folder: Path,
    device: str,
    num_blocks: int | None,
    targets: Sequence[Path],
) -> DraftSettings:
    return DraftSettings.model_validate(
        {
            "model": folder,
            "method": "draft_model" if speculation is None else speculation.method,
            "speculative_token_tree": None
            if speculation is None or speculation.tree is None
            else speculation.speculative_token_tree,
            "allow_code": arguments.allow_code,
            "target_tokenizer": targets,
            "device": device,
            "threads": arguments.threads,
            "num_blocks": num_blocks,
            **_max_rows(arguments),
            "max_sequences": arguments.max_num_seqs * MAX_N,
            "cuda_graphs": not arguments.enforce_eager,
        }
    )


def _local_drafter(arguments: EngineArguments, speculation: SpeculativeConfig) -> LocalDrafter:
    """Of methods without a model."""
    return LocalDrafter([*_lookups(arguments, speculation).values()], in_turn=True)


def _lookups(arguments: EngineArguments, speculation: SpeculativeConfig) -> dict[str, TokenProposer]:
    """Of the configuration's methods those without a model."""
    names = [name for name in speculation.methods if not method_of(name).needs_model]
    return {name: make_proposer(name, vars(speculation), arguments.allow_code) for name in names}


def _folder(speculation: SpeculativeConfig | None) -> Path | None:
    """Of the draft model or the head, if there is one."""
    if speculation is None or speculation.model is None or not needs_model(speculation.methods):
        return None
    return Path(speculation.model)


def _load_head(settings: TargetSettings, loaded: LoadedModel, speculation: SpeculativeConfig | None) -> Head | None:
    """What the method names. Raises ValueError where the folder holds another one."""
    head = load_head(settings, loaded)
    if head is not None and speculation is not None:
        if head.name != speculation.head:
            raise ValueError(
                f"speculative_config['method'] is {speculation.head!r}, and {settings.head} holds a head of method "
                f"{head.name!r}; allowed: that one, or none"
            )
        if speculation.parallel_drafting and head.mask is None:
            raise ValueError(
                f"speculative_config['parallel_drafting'] is True, and the head in {settings.head} was not trained for "
                "it: its config.json has no parallel_drafting; allowed: False"
            )
        _require_length(speculation, loaded.max_model_len)
    return head


def _load_draft(
    arguments: EngineArguments,
    speculation: SpeculativeConfig | None,
    folder: Path | None,
    device: str,
    target_len: int,
) -> LoadedModel | None:
    if speculation is None or folder is None or speculation.head:
        return None
    _require_length(speculation, target_len)
    return load_model(
        folder,
        dtype=arguments.dtype,
        quantization=speculation.quantization,
        device=device,
        max_model_len=speculation.max_model_len,
        trust_remote_code=arguments.trust_remote_code,
        lone_file=True,
    )


def _require_length(speculation: SpeculativeConfig, target_len: int) -> None:
    if speculation.max_model_len is not None and speculation.max_model_len > target_len:
        raise ValueError(
            f"speculative_config: max_model_len={speculation.max_model_len} is more than the target's {target_len}"
        )


def _device(name: str) -> str:
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"


def _adapter_bytes(loaded: LoadedModel, arguments: EngineArguments) -> int:
    """What the target will take for adapters beside its weights."""
    if not arguments.enable_lora or not isinstance(loaded.model, TakesAdapters):
        return 0
    numbers = sum(outputs + inputs for outputs, inputs in loaded.model.adapters.linears.values())
    return arguments.max_loras * arguments.max_lora_rank * numbers * loaded.model.dtype.itemsize


def _cache_bytes(arguments: EngineArguments, device: str, beside: int) -> int:
    """What the caches of both models may take, now that the weights are there, on a GPU beside so many bytes of
    sampling and adapters."""
    if arguments.kv_cache_memory_bytes is not None:
        return arguments.kv_cache_memory_bytes
    if torch.device(device).type != "cuda":
        return CPU_CACHE_BYTES
    free, total = torch.cuda.mem_get_info(torch.device(device))
    left = int(arguments.gpu_memory_utilization * total) - (total - free) - int(WORKING_SHARE * total) - beside
    if left <= 0:
        raise ValueError(
            f"gpu_memory_utilization={arguments.gpu_memory_utilization} leaves no memory for the key-value cache: "
            f"{(total - free) >> 20} of {total >> 20} MiB are in use"
        )
    return left


def _num_blocks(
    target: LoadedModel, draft: LoadedModel | None, memory: int, arguments: EngineArguments, head: Head | None = None
) -> int:
    """As many blocks for the draft, or the head, as for the target, and no more than can be used. A length that was
    asked for must fit."""
    size = bytes_per_block(target.model.layers, target.model.dtype) + bytes_beside_block(head, target.model.dtype)
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
