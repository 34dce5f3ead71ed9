"""Other weights in the place of a target's while an LLM lives, as after a step of training (vLLM's `update_weights`),
and its memory given back meanwhile (`sleep`). What is put in place is a checkpoint of the same shape and tokenizer: it
is loaded beside the present one, judged, and takes its place between two calls; what cannot be used changes nothing. No
request sees two models: a change waits for the calls of other threads, and theirs wait for it. The cache of prefixes
goes with the old weights; drafts, and what they learnt of texts, stay."""

from __future__ import annotations

import gc
import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from outrider.engine import checkpoint
from outrider.engine.loader import LoadedModel
from outrider.engine.models.base import UnsupportedModel
from outrider.llm.lora.held import HeldAdapters
from outrider.llm.services import LocalTarget
from outrider.llm.validation import Unsupported
from outrider.rpc.hub import TOKENIZER_FILES, locate
from outrider.target_service.boot import load, load_head
from outrider.target_service.head_trial import TriedHead
from outrider.target_service.reload import require_room, require_same_shape, require_same_tokenizer

TAGS = ("weights", "kv_cache", "scheduling")
FLOATS = torch.float32, torch.bfloat16, torch.float16


class Doorway:
    """Calls pass it together, a change alone: it waits until they have passed, and they wait for it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_inside, self._is_closed = 0, False

    @contextmanager
    def passing(self) -> Iterator[None]:
        """One call."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_closed)
            self._num_inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_inside -= 1
                self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """A change."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_closed)
            self._is_closed = True
            self._changed.wait_for(lambda: not self._num_inside)
        try:
            yield
        finally:
            with self._changed:
                self._is_closed = False
                self._changed.notify_all()


@dataclass(slots=True)
class ServedWeights:
    """The weights of a target on our engine, and whether they are there."""

    target: LocalTarget
    adapters: HeldAdapters
    door: Doorway = field(default_factory=Doorway)
    version: str = ""  # that the last update was given
    _awaited: dict[str, Tensor] | None = None  # of an update under way; None: there is none
    _folder: Path | None = None  # that the update names
    _made: ExitStack = field(
        default_factory=ExitStack
    )  # removes the folder of the present ones, where it was made here

    @contextmanager
    def passing(self) -> Iterator[None]:
        """A call that generates. Raises RuntimeError where it finds no engine."""
        with self.door.passing():
            if self.target.is_asleep:
                raise RuntimeError("this LLM is asleep; call wake_up() first")
            yield

    def refuse_transfer(self, request: Any) -> None:
        """Raises Unsupported where a channel between processes is asked for."""
        info = request.get("init_info") if isinstance(request, Mapping) else getattr(request, "init_info", None)
        if info:
            problem = "tensors are of this process, or in a folder; allowed: no init_info"
            raise Unsupported(f"init_weight_transfer_engine: {problem}")

    def start(self) -> None:
        """Begins an update of one or several parts. Raises RuntimeError where one is under way."""
        if self._awaited is not None:
            raise RuntimeError("a weight update is under way; call finish_weight_update() first")
        self._awaited, self._folder = {}, None

    def update(self, request: Any) -> None:
        """Takes a part of an update, or, where none was started, all of one. Raises ValueError, Unsupported."""
        given, single = parts_of(request), self._awaited is None
        if single:
            self.start()
        awaited = self._awaited
        if isinstance(given, Path):
            self._folder = locate(given)
            if awaited is not None:
                awaited.clear()
        elif awaited is not None:
            awaited.update({name: tensor.detach().cpu().clone() for name, tensor in given.items()})
        if single:
            self.finish(None)

    def finish(self, version: str | None) -> None:
        """Puts what was given in place. Raises ValueError for what cannot be used; the weights of before serve on, and
        nothing of the update is kept."""
        tensors, folder = self._awaited, self._folder
        if tensors is None:
            raise RuntimeError("no weight update is under way; call start_weight_update() first")
        self._awaited = self._folder = None
        with self.door.alone(), ExitStack() as made:
            present = folder or self.target.folder
            if tensors:
                parent = made.enter_context(tempfile.TemporaryDirectory(prefix="outrider-weights-"))
                present = merged(present, tensors, Path(parent) / present.name)
            self._replace(present)
            self._made.close()
            self._made = made.pop_all()
        self.version = version or ""

    def close(self) -> None:
        """Gives back what is kept on a disk."""
        self._made.close()

    def sleep(self, level: int) -> None:
        """Gives back the cache (1), and the weights, too (2)."""
        if level:
            with self.door.alone():
                self.target.rest(keeps_weights=level == 1)
                gc.collect()

    def wake_up(self, tags: list[str] | None) -> None:
        """Takes the weights (again), and the cache. Who asks for weights alone may update them first."""
        wanted = TAGS if tags is None else tags
        with self.door.alone():
            if not self.target.is_asleep:
                return
            if self.target.loaded is None and {"weights", "kv_cache"}.intersection(wanted):
                self._take(*self._loaded(self.target.folder))
            if "kv_cache" in wanted:
                self._start()

    def _replace(self, folder: Path) -> None:
        target, before = self.target, self.target.loaded
        if before is not None:
            require_room(folder, before, 0, "to call sleep(level=2) before")
        loaded, tried = self._loaded(folder)
        if target.is_asleep:
            self._take(loaded, tried, folder)
            return
        kept = before, target.tried, target.folder
        target.rest(keeps_weights=True)
        try:
            self._take(loaded, tried, folder)
            self._start()
        except BaseException as error:
            if kept[0] is not None:
                self._take(kept[0], kept[1], kept[2])
                self._start()
            if isinstance(error, RuntimeError | ValueError | MemoryError):
                raise refused(folder, error) from error
            raise

    def _loaded(self, folder: Path) -> tuple[LoadedModel, TriedHead]:
        """Of the shape and the tokenizer of the present ones. Raises ValueError."""
        target = self.target
        settings = target.settings.model_copy(update={"model": folder})
        require_same_tokenizer(folder, target.info.model.tokenizer_fingerprint)
        try:
            loaded = load(settings)
            require_same_shape(folder, loaded, target.shape)
            head = load_head(settings, loaded)
        except UnsupportedModel as error:
            raise refused(folder, error) from error
        return loaded, TriedHead(head, target.tried.trial)

    def _take(self, loaded: LoadedModel, tried: TriedHead, folder: Path | None = None) -> None:
        self.target.take_weights(loaded, tried, folder or self.target.folder)

    def _start(self) -> None:
        self.target.start_engine()
        self.adapters.forget()  # each is loaded again with the first request that names it


def parts_of(request: Any) -> Path | Mapping[str, Tensor]:
    """What an update brings: a checkpoint's folder, or tensors by the checkpoint's names. `request` is a folder, or
    what vLLM's method takes: an object or dict with `update_info`, here of `path` or `tensors`. Raises ValueError."""
    if isinstance(request, str | Path):
        return Path(request)
    info = request.get("update_info") if isinstance(request, Mapping) else getattr(request, "update_info", None)
    if not isinstance(info, Mapping):
        raise ValueError(f"update_weights: is {request!r:.100}; allowed: a folder, or update_info of path or tensors")
    if info.keys() == {"path"}:
        return Path(info["path"])
    tensors = info.get("tensors")
    if info.keys() != {"tensors"} or not isinstance(tensors, Mapping) or not tensors:
        fields = ", ".join(map(str, info)) or "nothing"
        raise ValueError(
            f"update_weights: update_info has {fields:.200}; allowed: path, a folder, or tensors, of this process by "
            "name: no tensors are sent between processes here"
        )
    wrong = next((name for name, tensor in tensors.items() if not isinstance(tensor, Tensor)), None)
    if wrong is not None:
        raise ValueError(f"update_weights: tensors[{wrong!r}] is {tensors[wrong]!r:.100}; allowed: a tensor")
    return dict(tensors)


def merged(folder: Path, tensors: Mapping[str, Tensor], to: Path) -> Path:
    """Writes a checkpoint whose weights are the folder's, but for these. Raises ValueError for names and shapes that it
    does not have, and for numbers that are none. They keep their type."""
    config = checkpoint.read_config(folder)
    if "quantization_config" in config or folder.suffix == ".gguf":
        raise ValueError(f"update_weights: tensors for {folder}, which is quantised; allowed: a folder's path")
    state = checkpoint.read_weights(folder, checkpoint.weight_files(folder))
    for name, tensor in tensors.items():
        if name not in state:
            raise ValueError(f"update_weights: tensors[{name!r}] is not in the checkpoint; allowed: its names")
        if tensor.shape != state[name].shape:
            shapes = f"has shape {tuple(tensor.shape)}; allowed: {tuple(state[name].shape)}"
            raise ValueError(f"update_weights: tensors[{name!r}] {shapes}")
        if tensor.dtype not in FLOATS:
            allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOATS)
            raise ValueError(f"update_weights: tensors[{name!r}] is of {tensor.dtype}; allowed: {allowed}")
        if not bool(tensor.isfinite().all()):
            raise ValueError(f"update_weights: tensors[{name!r}] holds NaN or infinity; allowed: finite numbers")
    to.mkdir(parents=True)
    for pattern in ("config.json", *TOKENIZER_FILES):
        for file in folder.glob(pattern):
            if not file.name.endswith(".index.json"):
                shutil.copyfile(file, to / file.name)
    every = {name: tensors.get(name, state[name]).contiguous() for name in state}
    save_file(every, to / "model.safetensors", {"format": "pt"})
    return to


def refused(folder: Path, error: BaseException) -> ValueError:
    """What is raised in an error's place."""
    return ValueError(f"the weights in {folder} cannot be used: {error}; those of before serve on")
