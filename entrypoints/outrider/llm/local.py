"""Draft and target in the caller's own process: a Drafter and a Verifier whose links are the queues of the two device
threads. The loop above them is the gateway's; there is no socket in between."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from outrider.draft_service.admission import installed_tracer, make_methods
from outrider.draft_service.boot import build_model_method, model_info
from outrider.draft_service.boot import runner_options as draft_options
from outrider.draft_service.engine import DraftEngine
from outrider.draft_service.engine import DraftEngineCommand as DraftCommand
from outrider.draft_service.settings import DraftSettings
from outrider.engine.loader import LoadedModel
from outrider.engine.model_runner import build_runner
from outrider.engine.worker import DeviceStopped, Worker
from outrider.gateway.speculation.backends import Lost, VerifierLink
from outrider.rpc.messages import (
    Arithmetic,
    Close,
    Closed,
    Commit,
    DraftEvent,
    DraftInfo,
    DraftMethod,
    Failure,
    ModelInfo,
    Open,
    TargetEvent,
    TargetInfo,
)
from outrider.rpc.servicer import Deliver
from outrider.rpc.settings import usable_threads
from outrider.target_service.boot import info_of, limits_of, new_engine
from outrider.target_service.boot import runner_options as target_options
from outrider.target_service.engine import TargetEngineCommand as TargetCommand
from outrider.target_service.profile import thread_split
from outrider.target_service.settings import TargetSettings

STREAM = 1  # each engine has one caller
WATCH_S = 1.0  # how often a device thread is looked after


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


class LocalService(ABC):
    """One engine's sequences, seen from the event loop. `take` and `flush` are called on the device thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._links: dict[int, LocalLink] = {}
        self._last_id = 0
        self._taken: list[Any] = []
        self._watch = loop.call_later(WATCH_S, self._check_alive)

    @property
    @abstractmethod
    def thread(self) -> Worker[Any]:
        """The thread that owns the model."""

    @property
    @abstractmethod
    def info(self) -> TargetInfo | DraftInfo:
        """What a service over the engine would say of itself."""

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
            message = replace(message, fork_of=parent.sequence_id, prompt_ids=())
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

    def stop(self) -> None:
        """Ends the device thread. Called from any thread."""
        self._watch.cancel()
        self.thread.stop(timeout=30.0)

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


class LocalTarget(LocalService):
    """A Verifier over a target engine in this process."""

    def __init__(self, settings: TargetSettings, loaded: LoadedModel, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        runner = build_runner(loaded.model, target_options(settings))
        limits = limits_of(settings, loaded, runner)
        longest = min(limits.max_model_len, limits.num_blocks * limits.block_size)  # what the cache can hold at all
        limits = replace(limits, max_model_len=longest)
        info = info_of(settings, loaded, limits)
        self._info = replace(info, model=replace(info.model, max_model_len=longest))
        self.engine = new_engine(settings, runner, limits, self.flush)
        self._thread: Worker[TargetCommand] = Worker(
            self.engine, "llm-target", settings.threads or usable_threads(), settings.device
        )
        costs = self._thread.call(self.engine.profile).result()
        self.engine.threads = thread_split(settings.threads, loaded.kernels, costs)
        self._info = replace(self._info, step_costs=costs)

    @property
    def thread(self) -> Worker[TargetCommand]:
        """The thread that owns the target's model."""
        return self._thread

    @property
    def info(self) -> TargetInfo:
        """What a target service would say of itself."""
        return self._info

    def open(
        self,
        request: Open,
        on_event: Callable[[TargetEvent | Lost], None],
        fork_of: VerifierLink | None = None,
        like: Arithmetic | None = None,
        refused_by: Sequence[VerifierLink] = (),
    ) -> LocalLink | None:
        """Starts a sequence, or a fork of one that is open."""
        return None if refused_by else self.start(request, on_event, fork_of)


class LocalDraft(LocalService):
    """A Drafter over a draft model in this process."""

    def __init__(self, settings: DraftSettings, loaded: LoadedModel, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        method = build_model_method(loaded, draft_options(settings).beside_another())
        self._info = DraftInfo(model_info(settings, loaded, method), (DraftMethod(method.name),))
        engine = DraftEngine(
            make_methods([method]),
            settings.max_sequences,
            settings.max_rows,
            flush=self.flush,
            tracer=installed_tracer(),
        )
        self._thread: Worker[DraftCommand] = Worker(
            engine, "llm-draft", settings.threads or usable_threads(), settings.device
        )

    @property
    def thread(self) -> Worker[DraftCommand]:
        """The thread that owns the draft's model."""
        return self._thread

    @property
    def info(self) -> DraftInfo:
        """What a draft service would say of itself."""
        return self._info

    @property
    def round_trip_us(self) -> float:
        """None worth counting: a queue."""
        return 0.0

    def open(self, request: Open, on_event: Callable[[DraftEvent | Lost], None]) -> LocalLink | None:
        """Starts a sequence."""
        return self.start(request, on_event)
