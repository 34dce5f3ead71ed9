"""Adapters that come and go while a target serves. They are read on a thread of their own and join between two steps;
what cannot be used is told, and changes nothing. One that goes is not given to new sequences, and its weights go with
the last sequence that has it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from outrider.engine.adapters.loader import WEIGHTS_NAME, LoadedAdapter, load_adapter
from outrider.engine.adapters.ranks import MOST_RANK
from outrider.engine.adapters.resident import AdapterRoom, ResidentAdapters
from outrider.engine.batch import PreparedAdapter
from outrider.engine.loader import LoadedModel
from outrider.engine.memory import free_bytes
from outrider.rpc.engine_service import DeviceThread
from outrider.rpc.errors import (
    AlreadyExists,
    InvalidArgument,
    NotFound,
    OutriderError,
    ResourceExhausted,
    Unavailable,
    Violation,
    Violations,
    one_line,
)
from outrider.rpc.hub import model_name
from outrider.rpc.messages import MAX_NAME_CHARS, Adapter
from outrider.target_service.adapters import NO_ADAPTER, AdapterTable
from outrider.target_service.settings import TargetSettings

log = logging.getLogger(__name__)

MOST_ADAPTERS = 1024  # of a target
COPIES = 3  # of a file, in bytes on the host: as it was read, and laid out with numbers of twice its width
Result = TypeVar("Result")


class AdapterReader(Protocol):
    """How an engine comes by an adapter."""

    def read(self, folder: Path) -> LoadedAdapter:
        """Checks a folder, on any thread. Raises UnsupportedAdapter, and what libraries that read weights raise."""

    async def prepare(self, adapter: LoadedAdapter) -> PreparedAdapter:
        """Brings an adapter into the form that the engine takes; it joins the table at once. Raises the same."""


@dataclass(frozen=True, slots=True)
class OwnAdapters:
    """How adapters of a model on our engine are read."""

    loaded: LoadedModel  # the base
    resident: ResidentAdapters

    def read(self, folder: Path) -> LoadedAdapter:
        """Checks a folder."""
        return load_adapter(folder, self.loaded.model, self.loaded.digest, self.resident.room.max_rank)

    async def prepare(self, adapter: LoadedAdapter) -> PreparedAdapter:
        """Lays an adapter out as a slot has it, on the host."""
        return await asyncio.to_thread(self.resident.prepare, adapter)


class AdapterListener(Protocol):
    """Is told which adapters there are."""

    def __call__(self, adapters: Sequence[Adapter]) -> None: ...


@dataclass(slots=True, eq=False)
class AdapterChanges:
    """Loads and unloads the adapters of one engine, one at a time. Belongs to the event loop."""

    table: AdapterTable  # changed on the engine's thread
    thread: DeviceThread
    reader: AdapterReader
    model_name: str  # which no adapter has
    served: dict[str, Adapter]
    listeners: Sequence[AdapterListener] = ()
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _tasks: set[asyncio.Task[Any]] = field(default_factory=set)

    async def load(self, name: str, path: str) -> Adapter:
        """Adds an adapter of a folder; it goes on where its caller leaves. The same weights under the same name change
        nothing. Raises InvalidArgument, AlreadyExists and ResourceExhausted."""
        check_name(name, self.model_name)
        return await self._shielded(self._load(name, Path(path)))

    async def unload(self, name: str) -> int:
        """Takes an adapter from new sequences; returns how many go on with it. Raises NotFound."""
        return await self._shielded(self._unload(name))

    def move_to(self, table: AdapterTable, reader: AdapterReader, served: Sequence[Adapter]) -> None:
        """Another engine serves, which has these."""
        self.table, self.reader = table, reader
        self._tell({adapter.name: adapter for adapter in served})

    async def _shielded(self, change: Coroutine[Any, Any, Result]) -> Result:
        task = asyncio.create_task(change)
        self._tasks.add(task)
        task.add_done_callback(self._note)
        return await asyncio.shield(task)

    def _note(self, task: asyncio.Task[Any]) -> None:
        """Its caller may have left."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("no change of adapters: %s", one_line(error))

    async def _load(self, name: str, folder: Path) -> Adapter:
        async with self._lock:
            if name not in self.served and len(self.served) >= MOST_ADAPTERS:
                problem = f"{len(self.served)} adapters are there; allowed: at most {MOST_ADAPTERS}. Unload one first"
                raise ResourceExhausted(problem, reason="TOO_MANY_ADAPTERS")
            with _told(folder):
                loaded = await asyncio.to_thread(self._read, folder)
            info = Adapter(name, loaded.digest, loaded.rank)
            if (present := self.served.get(name)) == info:
                return info
            if present is not None:
                there = f"name: is {name!r}, which stands for other weights ({present.digest[:12]})"
                raise AlreadyExists(f"{there}; allowed: another name, or to unload it first")
            with _told(folder):
                prepared = await self.reader.prepare(loaded)
            await self._on_thread(partial(self.table.add, info, prepared))
            self._tell({**self.served, name: info})
            log.info("adapter %s (%s) of rank %d serves", name, info.digest[:12], info.rank)
            return info

    async def _unload(self, name: str) -> int:
        async with self._lock:
            if name not in self.served:
                there = f"allowed: {', '.join(sorted(self.served))}" if self.served else "this target has none"
                raise NotFound(f"name: is {name!r:.130}; {there}", reason=NO_ADAPTER)
            num_sequences: int = await self._on_thread(partial(self.table.remove, name))
            self._tell({one: info for one, info in self.served.items() if one != name})
            log.info("adapter %s goes; %d sequences end with it", name, num_sequences)
            return num_sequences

    async def _on_thread(self, change: partial[Any]) -> Any:
        try:
            call = self.thread.call(change)
        except RuntimeError as error:
            raise Unavailable("the target's device thread has ended", reason="DEVICE_DEAD") from error
        return await asyncio.wrap_future(call)

    def _read(self, folder: Path) -> LoadedAdapter:
        _require_memory(folder)
        return self.reader.read(folder)

    def _tell(self, served: Mapping[str, Adapter]) -> None:
        self.served = dict(served)
        for listener in self.listeners:
            listener(tuple(self.served.values()))


def adapters_at_start(settings: TargetSettings, read: Callable[[Path], LoadedAdapter]) -> dict[str, LoadedAdapter]:
    """The adapters that the settings name, by name. Raises ValueError for the model's own, and what `read` raises."""
    if (own := settings.name or model_name(Path(settings.model))) in settings.adapters:
        raise ValueError(f"adapter (--adapter): has {own!r}, the model's own name; allowed: another one")
    return {name: read(folder) for name, folder in settings.adapters.items()}


def adapter_room(settings: TargetSettings, adapters: Mapping[str, LoadedAdapter]) -> AdapterRoom | None:
    """What the engine shall have for adapters; None where there are none, and none may come."""
    if settings.allow_adapter_changes:
        return AdapterRoom(settings.max_adapters, settings.max_adapter_rank or MOST_RANK)
    if not adapters:
        return None
    greatest = max(adapter.rank for adapter in adapters.values())
    return AdapterRoom(min(settings.max_adapters, len(adapters)), settings.max_adapter_rank or greatest)


def check_name(name: str, models: str) -> None:
    """Raises InvalidArgument for what no adapter can be called; `models` is the model's own name."""
    found = Violations()
    if name:
        found.name("name", name, MAX_NAME_CHARS)
    else:
        found.add("name", "is empty", f"1 to {MAX_NAME_CHARS} characters")
    if name == models:
        found.add("name", f"is {name!r}, the model's own", "another name")
    found.raise_if_any()


@contextmanager
def _told(folder: Path) -> Iterator[None]:
    """Whatever a folder raises is told of it. Raises OutriderError."""
    try:
        yield
    except OutriderError:
        raise
    except MemoryError as error:
        raise ResourceExhausted(f"path: {folder} finds no memory", reason="NO_MEMORY") from error
    except Exception as error:  # the libraries that read weights have errors of their own
        problem = f"is {str(folder)!r:.200}, which cannot be used ({one_line(error)})"
        allowed = "the folder of an adapter of this model, in PEFT's layout"
        raise InvalidArgument.of([Violation("path", f"{problem}; allowed: {allowed}")]) from error


def _require_memory(folder: Path) -> None:
    """Raises ResourceExhausted where an adapter's weights find no room; it is read, and then laid out."""
    path = folder / WEIGHTS_NAME
    size = path.stat().st_size if path.is_file() else 0
    needed, free = COPIES * size, free_bytes(torch.device("cpu"))
    if needed > free:
        raise ResourceExhausted(
            f"path: {folder} needs {needed >> 20} MiB, and {free >> 20} MiB are free", reason="NO_MEMORY"
        )
