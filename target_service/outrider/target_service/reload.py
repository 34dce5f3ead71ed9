"""Other weights in the place of a target's while it serves, of the same family, shape and tokenizer. They are loaded
beside the present ones, which serve on; then gateways hear of them, what is open ends, and an engine over the new ones
takes the thread. What cannot be used is told, and changes nothing."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from outrider.engine.loader import LoadedModel, loaded_bytes
from outrider.engine.memory import free_bytes
from outrider.engine.worker import DeviceWorker
from outrider.rpc.errors import (
    WEIGHTS_RESTART,
    FailedPrecondition,
    InvalidArgument,
    OutriderError,
    Unavailable,
    Violation,
    one_line,
)
from outrider.rpc.messages import Reloaded, TargetInfo
from outrider.rpc.reloads import OneReload
from outrider.rpc.vocabulary import read_vocabulary
from outrider.target_service.engine import TargetEngine
from outrider.target_service.succession import Succession

log = logging.getLogger(__name__)

LOOK_S = 0.02  # between two looks at what is still open
SHAPE = ("model_type", "vocab_size", "hidden_size", "number of layers", "keys and values", "longest sequence")


def shape_of(loaded: LoadedModel) -> tuple[Any, ...]:
    """What other weights keep, by the names of SHAPE."""
    model = loaded.model
    return (
        loaded.model_type, model.vocab_size, model.hidden_size, len(model.layers), model.layers, loaded.max_model_len,
    )  # fmt: skip


def require_same_shape(folder: Path, loaded: LoadedModel, shape: Sequence[Any]) -> None:
    """Raises ValueError where the cache, or what drafts, would not fit."""
    for name, ours, theirs in zip(SHAPE, shape, shape_of(loaded), strict=True):
        if ours != theirs:
            raise ValueError(f"the weights in {folder} have {name} {theirs!r:.100}; allowed: {ours!r:.100}, as before")


def require_same_tokenizer(folder: Path, fingerprint: str) -> None:
    """Raises ValueError where there is another one: prompts and drafts have the present one's ids."""
    found = read_vocabulary(folder)
    if found is not None and fingerprint and found.fingerprint != fingerprint:
        raise ValueError(f"the weights in {folder} have another tokenizer; allowed: the present one")


def require_room(folder: Path, present: LoadedModel, beside: int, remedy: str) -> None:
    """Raises ValueError where the weights, and so many bytes beside them, find no room beside the present ones."""
    model = present.model
    needed, free = loaded_bytes(folder, model.dtype) + beside, free_bytes(model.device)
    if needed > free:
        room = f"need {needed >> 20} MiB beside the present ones, and {free >> 20} MiB are free"
        raise ValueError(f"the weights in {folder} {room}; allowed: {remedy}")


@dataclass(frozen=True, slots=True)
class Successor:
    """Weights that were read, and what comes of them."""

    loaded: LoadedModel
    info: TargetInfo
    build: Callable[[], TargetEngine]  # an engine over them, not profiled yet


@dataclass(slots=True, eq=False)
class WeightReloads:
    """Gives one target other weights, one change at a time. Belongs to the event loop."""

    engine: TargetEngine  # that serves
    thread: DeviceWorker[Any]
    folder: Path  # of the present weights
    loaded: LoadedModel
    said: Callable[[], TargetInfo]  # what is said of the target now
    read: Callable[[Path, TargetInfo], Successor]  # raises ValueError, and what libraries that read weights raise
    listeners: Sequence[Callable[[TargetInfo], None]] = ()  # are told which ones new sequences are of
    on_engine: Callable[[TargetEngine, Successor], None] = lambda engine, successor: None  # is told which one serves
    one: OneReload = field(default_factory=OneReload)

    async def reload(self, model: str, drain_s: float, restart: bool = False) -> Reloaded:
        """Puts weights (empty: those of the present folder, read again) in the place of the present ones; it goes on
        where its caller leaves. What is open after `drain_s` ends, and is to `restart` or not. Raises InvalidArgument
        and FailedPrecondition."""
        return await self.one.run(lambda: self._reload(Path(model) if model else self.folder, drain_s, restart))

    async def _reload(self, folder: Path, drain_s: float, restart: bool) -> Reloaded:
        before, began = self.said(), time.monotonic()
        is_on_cpu = self.loaded.model.device.type == "cpu"
        try:
            successor = await asyncio.to_thread(self._read, folder)
            engine = await asyncio.to_thread(successor.build) if is_on_cpu else None
        except OutriderError:
            raise
        except Exception as error:  # the libraries that read a checkpoint have errors of their own
            problem = f"is {str(folder)!r:.200}, which cannot be used ({one_line(error)})"
            allowed = "the folder of a checkpoint of the present family, shape and tokenizer"
            raise InvalidArgument.of([Violation("model", f"{problem}; allowed: {allowed}")]) from error
        load_s, paused = time.monotonic() - began, time.monotonic()
        digests = {successor.info.model.digest, *(adapter.digest for adapter in successor.info.adapters)}
        await self._on_thread(partial(self._begin, digests))
        self._tell(successor.info)
        num_ended = await self._drained(drain_s, WEIGHTS_RESTART if restart else "WEIGHTS_CHANGED")
        try:
            built = await self._on_thread(partial(self._succeed, successor, engine))
        except Exception as error:  # of memory, for one
            await self._on_thread(self._go_back)
            self._tell(before)
            told = f"model: {folder} cannot be used: {one_line(error)}; {before.model.name} serves on"
            raise FailedPrecondition(told, reason="NOT_LOADED") from error
        self.engine, self.folder, self.loaded = built, folder, successor.loaded
        self.on_engine(built, successor)
        after = successor.info.model
        log.info("%s (%s) serves in place of %s", after.name, after.digest[:12], before.model.digest[:12])
        pause_s = time.monotonic() - paused
        return Reloaded(before.model, after, round(1000 * load_s), round(1000 * pause_s), num_ended)

    def _read(self, folder: Path) -> Successor:
        if not folder.is_dir():
            raise FileNotFoundError("there is no such folder")
        present = self.said()
        require_same_tokenizer(folder, present.model.tokenizer_fingerprint)
        cache = self.engine.cache_bytes if self.loaded.model.device.type == "cpu" else 0
        require_room(folder, self.loaded, cache, "another target with them elsewhere, and to drain this one")
        successor = self.read(folder, present)
        require_same_shape(folder, successor.loaded, shape_of(self.loaded))
        return successor

    async def _drained(self, drain_s: float, reason: str) -> int:
        """Waits until nothing is open that is of the weights of before; how many sequences had to be ended, for this
        reason."""
        until = time.monotonic() + drain_s
        while await self._on_thread(lambda: len(self.engine.scheduler.sequences)):
            if time.monotonic() >= until:
                return int(await self._on_thread(partial(self._end_all, reason)))
            await asyncio.sleep(LOOK_S)
        return 0

    def _begin(self, digests: set[str]) -> None:
        self.engine.succession = Succession(digests)

    def _end_all(self, reason: str) -> int:
        error = Unavailable("the target's weights are others now", reason=reason)
        return self.engine.end_all(error)

    def _succeed(self, successor: Successor, built: TargetEngine | None) -> TargetEngine:
        """On the device thread, between two steps: the new engine takes what was held, and all that comes."""
        engine = built or successor.build()
        engine.profile(self.engine.profiled)
        succession = self.engine.succession
        self.thread.replace_engine(engine)
        for command in () if succession is None else succession.held:
            engine.handle(command)
        return engine

    def _go_back(self) -> None:
        """The engine of before takes what was held: sequences of other weights fail, and gateways ask again."""
        succession, self.engine.succession = self.engine.succession, None
        for command in () if succession is None else succession.held:
            self.engine.handle(command)

    def _tell(self, info: TargetInfo) -> None:
        for listener in self.listeners:
            listener(info)

    async def _on_thread(self, function: Callable[[], Any]) -> Any:
        try:
            call = self.thread.call(function)
        except RuntimeError as error:
            raise Unavailable("the target's device thread has ended", reason="DEVICE_DEAD") from error
        return await asyncio.wrap_future(call)


def with_weights(info: TargetInfo, loaded: LoadedModel) -> TargetInfo:
    """What is said of a target whose weights are others: its name and all that follows from its shape stay."""
    return replace(info, model=replace(info.model, digest=loaded.digest))
