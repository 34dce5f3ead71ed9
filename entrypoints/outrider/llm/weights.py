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
from collections.abc import Iterator, Mapping, Sequence
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
from outrider.target_service.heads.trial import TriedHead
from outrider.target_service.reload import require_room, require_same_shape, require_same_tokenizer

TAGS = ("weights", "kv_cache", "scheduling")
LEVELS, MODES = (0, 1, 2), ("abort", "wait", "keep")
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
class Update:
    """What an update brought so far: a folder, and tensors in the place of some of its own."""

    folder: Path | None = None
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def add(self, part: Update) -> None:
        """What comes last holds; a folder, for all tensors."""
        if part.folder is not None:
            self.folder = part.folder
            self.tensors.clear()
        self.tensors.update(part.tensors)


@dataclass(slots=True)
class ServedWeights:
    """The weights of a target on our engine, and whether they are there."""

    target: LocalTarget
    adapters: HeldAdapters
    door: Doorway = field(default_factory=Doorway)
    version: str = ""  # that the last update was given
    _update: Update | None = None  # that is under way, in parts
    _made: ExitStack = field(default_factory=ExitStack)  # of a folder that was made here: the present one

    @contextmanager
    def passing(self) -> Iterator[None]:
        """A call that generates. Raises RuntimeError where it finds no engine."""
        with self.door.passing():
            if self.target.is_asleep:
                raise RuntimeError("this LLM is asleep; call wake_up() first")
            yield

    def refuse_transfer(self, request: Any) -> None:
        """Raises Unsupported where a channel between processes is asked for."""
        if _field(request, "init_info"):
            problem = "tensors are of this process, or in a folder; allowed: no init_info"
            raise Unsupported(f"init_weight_transfer_engine: {problem}")

    def start(self) -> None:
        """Begins an update in parts. Raises RuntimeError where one is under way."""
        if self._update is not None:
            raise RuntimeError("a weight update is under way; call finish_weight_update() first")
        self._update = Update()

    def update(self, request: Any) -> None:
        """Takes a part of an update, or, where none was started, all of one. Raises ValueError, Unsupported."""
        part = part_of(request)
        if self._update is None:
            self._put(part)
        else:
            self._update.add(part)

    def finish(self, version: str | None) -> None:
        """Puts what was given in place. Raises ValueError for what cannot be used; the weights of before serve on, and
        nothing of the update is kept."""
        if (update := self._update) is None:
            raise RuntimeError("no weight update is under way; call start_weight_update() first")
        self._update = None
        self._put(update, version or "")

    def _put(self, update: Update, version: str = "") -> None:
        with self.door.alone(), ExitStack() as made:
            folder = update.folder or self.target.folder
            if update.tensors:
                parent = made.enter_context(tempfile.TemporaryDirectory(prefix="outrider-weights-"))
                folder = merged(folder, update.tensors, Path(parent) / folder.name)
            self._replace(folder)
            self._made.close()
            self._made = made.pop_all()
            self.version = version

    def close(self) -> None:
        """Gives back what is kept on a disk."""
        self._made.close()

    def sleep(self, level: int, mode: str) -> None:
        """Gives back the cache (1), and the weights, too (2). Raises ValueError."""
        for name, value, allowed in (("level", level, LEVELS), ("mode", mode, MODES)):
            if value not in allowed:
                raise ValueError(f"{name}: is {value!r:.100}; allowed: {', '.join(map(str, allowed))}")
        if level:
            with self.door.alone():
                self.target.rest(keeps_weights=level == 1)
                gc.collect()

    def wake_up(self, tags: Sequence[str] | None) -> None:
        """Takes the weights (again), and the cache. Who asks for weights alone may update them first. Raises
        ValueError."""
        wanted = TAGS if tags is None else tags
        if wrong := [tag for tag in wanted if tag not in TAGS]:
            raise ValueError(f"tags: is {wrong[0]!r:.100}; allowed: {', '.join(TAGS)}")
        with self.door.alone():
            if not self.target.is_asleep:
                return
            if self.target.loaded is None and {"weights", "kv_cache"}.intersection(wanted):
                self.target.take_weights(*self._loaded(self.target.folder), self.target.folder)
            if "kv_cache" in wanted:
                self._start()

    def _replace(self, folder: Path) -> None:
        target, before = self.target, self.target.loaded
        if before is not None:
            require_room(folder, before, 0, "to call sleep(level=2) before")
        loaded, tried = self._loaded(folder)
        if target.is_asleep or before is None:
            target.take_weights(loaded, tried, folder)
            return
        kept = before, target.tried, target.folder
        target.rest(keeps_weights=True)
        target.take_weights(loaded, tried, folder)
        try:
            self._start()
        except BaseException as error:
            target.take_weights(*kept)
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

    def _start(self) -> None:
        self.target.start_engine()
        self.adapters.forget()  # each is loaded again with the first request that names it


def part_of(request: Any) -> Update:
    """What a request brings: a checkpoint's folder, or tensors by the checkpoint's names. `request` is a folder, or
    what vLLM's method takes: an object or dict with `update_info`, here of `path` or `tensors`. Raises ValueError."""
    info = {"path": request} if isinstance(request, str | Path) else _field(request, "update_info")
    if not isinstance(info, Mapping):
        raise ValueError(f"update_weights: is {request!r:.100}; allowed: a folder, or update_info of path or tensors")
    if info.keys() == {"path"}:
        return Update(locate(Path(info["path"])))
    tensors = info.get("tensors")
    if info.keys() != {"tensors"} or not isinstance(tensors, Mapping) or not tensors:
        fields = ", ".join(map(str, info)) or "nothing"
        raise ValueError(
            f"update_weights: update_info has {fields:.200}; allowed: path, a folder, or tensors, of this process by "
            "name: no tensors are sent between processes here"
        )
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise ValueError(f"update_weights: tensors[{name!r}] is {tensor!r:.100}; allowed: a tensor")
    return Update(None, {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()})


def _field(request: Any, name: str) -> Any:
    """Of a dict, or of an object; None where it has none."""
    return request.get(name) if isinstance(request, Mapping) else getattr(request, name, None)


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
