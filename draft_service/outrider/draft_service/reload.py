"""Other weights in the place of the draft model's while it serves. They are loaded beside the present ones, on a thread
of their own, and take their place between two steps: what is open goes on with them, and nothing that was drafted is
drafted again. What cannot be used is told, and the model of before drafts on."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from outrider.draft_service.admission import ModelMethod
from outrider.draft_service.engine import DraftEngine
from outrider.engine import checkpoint
from outrider.engine.loader import loaded_bytes
from outrider.engine.memory import free_bytes
from outrider.rpc.engine_service import DeviceThread
from outrider.rpc.errors import (
    FailedPrecondition,
    InvalidArgument,
    OutriderError,
    ResourceExhausted,
    Violation,
    one_line,
)
from outrider.rpc.hub import is_hub_id, locate
from outrider.rpc.messages import ModelInfo, Reloaded
from outrider.rpc.reloads import OneReload
from outrider.rpc.vocabulary import read_vocabulary

logger = logging.getLogger(__name__)

Build = Callable[[], tuple[ModelMethod, ModelInfo]]  # gives loaded weights their cache


@dataclass(slots=True, eq=False)
class Reloads:
    """Gives one engine other weights, one change at a time. Belongs to the event loop. `load` reads the weights of a
    folder."""

    engine: DraftEngine
    thread: DeviceThread
    folder: Path  # of the present model
    info: ModelInfo  # what is said of it
    load: Callable[[Path], Build]
    allow_hub: bool = False  # whether callers may have a model downloaded
    listeners: Sequence[Callable[[ModelInfo], None]] = ()  # are told which one drafts
    on_method: Callable[[ModelMethod], None] = lambda method: None  # is told how, before these
    one: OneReload = field(default_factory=OneReload)

    async def reload(self, model: str) -> Reloaded:
        """Puts a model (empty: the present one's folder, read again) in the place of the present one; it goes on where
        its caller leaves. Raises InvalidArgument, FailedPrecondition and ResourceExhausted."""
        return await self.one.run(lambda: self._reload(Path(model) if model else self.folder))

    async def _reload(self, model: Path) -> Reloaded:
        before, began = self.info, time.monotonic()
        folder, build = await asyncio.to_thread(self._loaded, model)
        try:
            if self._device.type == "cpu":
                method, after = await asyncio.to_thread(build)
            else:  # passes are captured, beside which no other thread may use the device
                method, after = await asyncio.wrap_future(self.thread.call(build))
            load_s = time.monotonic() - began
            pause_s, num_sequences = await asyncio.wrap_future(self.thread.call(partial(self._swap, method)))
        except (ValueError, MemoryError, RuntimeError) as error:  # the engine's and PyTorch's, of memory for one
            raise FailedPrecondition(
                f"model: {model} cannot be used: {one_line(error)}; {before.name} drafts on", reason="NOT_LOADED"
            ) from error
        after = replace(after, mapped_fingerprints=before.mapped_fingerprints)
        self.folder, self.info = folder, after
        self.on_method(method)
        for listener in self.listeners:
            listener(after)
        logger.info("%s (%s) drafts in place of %s", after.name, after.digest[:12], before.digest[:12])
        return Reloaded(before, after, round(1000 * load_s), round(1000 * pause_s), num_sequences)

    @property
    def _device(self) -> torch.device:
        return self.engine.model.proposer.runner.model.device

    def _loaded(self, model: Path) -> tuple[Path, Build]:
        """The folder, and its weights."""
        try:
            may_load = self.allow_hub or not is_hub_id(model)
            folder = locate(model, drafts_by="draft_model") if may_load else model
            self._check_vocabulary(folder)
            require_memory(folder, self.engine.model)
            return folder, self.load(folder)
        except OutriderError:
            raise
        except Exception as error:  # the libraries that read a checkpoint have errors of their own
            problem = f"is {str(model)!r:.200}, which cannot be loaded ({one_line(error)})"
            allowed = "the folder of a checkpoint with the tokenizer of the present one"
            raise InvalidArgument.of([Violation("model", f"{problem}; allowed: {allowed}")]) from error

    def _check_vocabulary(self, folder: Path) -> None:
        """Gateways have judged the present model's tokenizer, and open sequences hold its ids."""
        if not folder.is_dir():
            hub = "; ids of the hub are for a draft with --allow-hub-reload" if is_hub_id(folder) else ""
            raise FileNotFoundError(f"there is no such folder{hub}")
        found = read_vocabulary(folder)
        fingerprint = "" if found is None else found.fingerprint
        vocab_size = checkpoint.read_config(folder).get("vocab_size")
        named = bool(fingerprint and self.info.tokenizer_fingerprint)
        if (fingerprint != self.info.tokenizer_fingerprint) if named else (vocab_size != self.info.vocab_size):
            has = f"{found.num_tokens} tokens" if found is not None else f"{vocab_size} logits and no tokenizer.json"
            raise FailedPrecondition(
                f"model: {folder} has another tokenizer ({has}) than {self.info.name}, which drafts on; allowed: the "
                "same one. For another vocabulary start another draft, and drain this one",
                reason="NOT_A_PAIR",
            )

    def _swap(self, method: ModelMethod) -> tuple[float, int]:
        """Puts other weights in place, on the device thread."""
        began = time.monotonic()
        num_sequences = self.engine.replace_model(method)
        return time.monotonic() - began, num_sequences


def require_memory(folder: Path, present: ModelMethod) -> None:
    """Raises ResourceExhausted where a folder's weights, with a cache like the present one, find no room beside it."""
    runner = present.proposer.runner
    model, cache = runner.model, runner.cache
    held = sum(tensor.nbytes for tensor in (*cache.keys, *cache.values)) if model.device.type == "cpu" else 0
    needed, free = loaded_bytes(folder, model.dtype, lone_file=True) + held, free_bytes(model.device)
    if needed > free:
        raise ResourceExhausted(
            f"model: {folder} needs {needed >> 20} MiB beside the present model, and {free >> 20} MiB are free; "
            "start another draft with it elsewhere, and drain this one",
            reason="NO_MEMORY",
        )
