"""The engines of an LLM in the caller's own process, as what the loop between draft and target asks: a Drafter and a
Verifier whose links are the queues of the two device threads, with no socket in between; or a Verifier over vLLM, whose
processes are this one's children."""

from __future__ import annotations

import asyncio
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from outrider.draft_service.admission import make_methods
from outrider.draft_service.boot import build_model_method, describe, model_info, model_method, runner_options
from outrider.draft_service.engine import DraftEngine
from outrider.draft_service.observer import DraftEngineCommand
from outrider.draft_service.settings import DraftSettings
from outrider.draft_service.vocabularies import join_all
from outrider.engine.loader import LoadedModel
from outrider.engine.profile import Profile
from outrider.engine.worker import DeviceStopped, DeviceWorker
from outrider.gateway.speculation.backends import Lost, VerifierLink
from outrider.llm.engine_choice import VLLM
from outrider.proposers.base import TokenProposer
from outrider.rpc.errors import FailedPrecondition, Internal
from outrider.rpc.messages import (
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
from outrider.rpc.servicer import Deliver
from outrider.rpc.settings import usable_threads
from outrider.rpc.telemetry import StepTracer
from outrider.target_service.adapter_changes import AdapterChanges
from outrider.target_service.boot import (
    info_of,
    limits_of,
    new_adapter_changes,
    new_engine,
    new_grammars,
    new_runner,
)
from outrider.target_service.engine import TargetEngineCommand
from outrider.target_service.engines import engine_of
from outrider.target_service.heads.trial import NO_HEAD, TriedHead
from outrider.target_service.reload import shape_of
from outrider.target_service.settings import TargetSettings
from outrider.target_service.threads import thread_split

STREAM = 1  # each engine has one caller
WATCH_S = 1.0  # how often a device thread is looked after
STOP_S = 30.0


class LocalLink:
    """One sequence in an engine of this process. It sets the sequence id of what it sends."""

    __slots__ = ("_service", "on_event", "sequence_id")

    def __init__(self, service: LocalService, sequence_id: int, on_event: Callable[[Any], None]) -> None:
        self._service, self.sequence_id, self.on_event = service, sequence_id, on_event

    @property
    def model(self) -> ModelInfo:
        """The model of the engine."""
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

    thread: Any  # that owns the model: a DeviceWorker, or vLLM's engine
    info: TargetInfo | DraftInfo  # what a service over the engine would say of itself
    is_asleep = False  # its engine has ended, and another one will come

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
        if isinstance(self.thread, DeviceWorker):
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
        if not self.thread.is_alive and not self.is_asleep:
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
    longest: int  # sequence that the model takes, whatever its cache holds
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
    """A Verifier over our own engine."""

    def __init__(
        self,
        settings: TargetSettings,
        loaded: LoadedModel,
        loop: asyncio.AbstractEventLoop,
        tried: TriedHead = NO_HEAD,
        tokenizer: Path | None = None,
    ) -> None:
        """The head drafts beside the model; `tokenizer` is the folder of what grammars are over, by default the
        model's."""
        super().__init__(loop)
        self.settings, self._tokenizer = settings, tokenizer
        self.loaded: LoadedModel | None = loaded  # None: they were given back
        self.tried, self.shape = tried, shape_of(loaded)
        self.is_asleep = True
        self._profile: Profile | None = None  # of the engine before, whose steps take the same
        self.start_engine()

    @property
    def folder(self) -> Path:
        """Of the weights."""
        return Path(self.settings.model)

    def take_weights(self, loaded: LoadedModel, tried: TriedHead, folder: Path) -> None:
        """Other weights are the target's, of the same shape. The engine has ended, or never was; its next one has
        them. The model keeps its name."""
        self.loaded, self.tried = loaded, tried
        self.settings = self.settings.model_copy(update={"model": folder, "name": self.info.model.name})

    def rest(self, *, keeps_weights: bool) -> None:
        """Ends the engine, on any thread but the loop's, while nothing is open: its cache goes."""
        if not self.is_asleep:
            self.is_asleep, self._profile = True, self.engine.profiled
            self.thread.stop(timeout=STOP_S)
            del self.engine
            self.change_by(None)  # what changes adapters has the weights
        if not keeps_weights:
            self.loaded, self.tried = None, TriedHead(None, self.tried.trial)

    def start_engine(self) -> None:
        """Starts one over the weights, on any thread while nothing is open."""
        if self.loaded is None:
            raise RuntimeError("there are no weights")
        settings, loaded, tried = self.settings, self.loaded, self.tried
        self.longest, head = loaded.max_model_len, tried.head
        runner = new_runner(settings, loaded, head)
        limits = limits_of(settings, loaded, runner)
        longest = min(limits.max_model_len, limits.num_blocks * limits.block_size)  # what the cache can hold at all
        limits = replace(limits, max_model_len=longest)
        grammars = new_grammars(self._tokenizer or Path(settings.model), loaded, settings.device)
        self.engine = new_engine(settings, runner, limits, self.flush, head=head, grammars=grammars)
        threads = settings.threads or usable_threads()
        self.thread: DeviceWorker[TargetEngineCommand] = DeviceWorker(
            self.engine, "llm-target", threads, settings.device
        )
        self.thread.ended.add_done_callback(lambda _: self.engine.close())
        try:
            costs = self.thread.call(partial(self.engine.profile, self._profile)).result()
        except BaseException:
            self.thread.stop(timeout=STOP_S)
            raise
        self.engine.parts += thread_split(settings.threads, loaded.kernels, costs)
        info = info_of(
            settings, loaded, limits, costs, tried, capabilities=self.engine.capabilities,
            expert_costs=self.engine.expert_costs,
        )  # fmt: skip
        self.info: TargetInfo = replace(info, model=replace(info.model, max_model_len=longest))
        self.change_by(new_adapter_changes(settings, loaded, self.engine, self.thread, self.info))
        self.is_asleep = False

    def cache_usage(self) -> float:
        """The share of its cache that is in use."""
        if self.is_asleep:
            return 0.0
        pool = self.engine.cache.pool
        return 1 - pool.num_free / pool.num_blocks

    def reset_prefix_cache(self) -> None:
        """Forgets every cached prefix."""
        if not self.is_asleep:
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
    """A Verifier over vLLM, whose processes are this one's children."""

    def __init__(self, engine: Any, info: TargetInfo, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self.engine, self._own_loop = engine, loop
        self.thread = engine
        self.info: TargetInfo = info
        self.longest = info.model.max_model_len

    @classmethod
    async def started(cls, settings: TargetSettings) -> VllmTarget:
        """Starts vLLM, which loads the model. Raises what `start_engine` raises."""
        vllm = engine_of(VLLM)
        with without_main():
            engine, info = await vllm.start_engine(settings, lambda: target.flush())
        target: VllmTarget = cls(engine, info, asyncio.get_running_loop())
        target.change_by(vllm.adapter_changes_of(settings, engine, info))
        return target

    def leave(self) -> None:
        """The link to vLLM's processes is of the loop, too."""
        super().leave()
        self.engine.unlink()

    def cache_usage(self) -> float:
        """The share of its cache that was in use after the last step."""
        used: float = 1 - self.engine.load().free_blocks / self.engine.limits.num_blocks
        return used

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
        options = runner_options(settings).beside_another()
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
        self.thread: DeviceWorker[DraftEngineCommand] = DeviceWorker(engine, "llm-draft", threads, settings.device)
        self.thread.ended.add_done_callback(lambda _: engine.close())  # as the thread's last act

    @property
    def round_trip_us(self) -> float:
        """The way to the draft is a queue, and takes no time worth counting."""
        return 0.0

    def open(self, request: Open, on_event: Callable[[DraftEvent | Lost], None]) -> LocalLink | None:
        """Starts a sequence."""
        return self.start(request, on_event)
