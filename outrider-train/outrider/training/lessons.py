"""What a draft learns from: windows of text, and what the target gives for every next token of them.

A draft works on what the target writes, so most windows are the target's own: it goes on from places of the corpus,
greedily or sampled by turns; others it only reads. Its likeliest tokens are kept, with their probabilities: they are
nearly all of the distribution, and the target is asked once, however often a draft reads the window. A head beside the
target reads its hidden states, too, so that they are kept with the lesson.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.engine.batch import BatchEntry
from outrider.engine.loader import LoadedModel
from outrider.engine.model_runner import ModelRunner
from outrider.training.corpus import WindowSampler

TOP = 32  # of the target's tokens at every place
ROWS = 4096  # of one pass
TEMPERATURES: tuple[float | None, ...] = (0.0, 1.0, 0.0, None)  # by turns; None: the window is read, and not written


@dataclass(frozen=True)
class Lesson:
    """Windows, and the target's likeliest next tokens after every place of them."""

    ids: Tensor  # [windows, length + 1] int64
    top_ids: Tensor  # [windows, length, TOP] int64
    top_probs: Tensor  # [windows, length, TOP] float32, of the whole distribution
    features: Tensor  # [windows, length, taps, hidden], as wide as they were computed or as they are kept: bfloat16

    def window(self, index: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """One of them: its ids, its likeliest tokens with their probabilities, and its hidden states."""
        return self.ids[index], self.top_ids[index], self.top_probs[index], self.features[index]

    @classmethod
    def joined(cls, parts: Sequence[Lesson]) -> Lesson:
        """The windows of all of them."""
        return cls(
            torch.cat([part.ids for part in parts]),
            torch.cat([part.top_ids for part in parts]),
            torch.cat([part.top_probs for part in parts]),
            torch.cat([part.features for part in parts]),
        )

    def chosen(self, windows: Tensor, taps: Sequence[int]) -> Lesson:
        """Some of its windows, [windows], and taps, by their places."""
        features = self.features[windows][:, :, list(taps)]
        return Lesson(self.ids[windows], self.top_ids[windows], self.top_probs[windows], features)

    def save(self, path: Path) -> None:
        """Writes a file; a crash leaves none, or a whole one."""
        partial = path.with_suffix(".partial")
        tensors = {"ids": self.ids.int(), "top_ids": self.top_ids.int(), "top_probs": self.top_probs.half()}
        if self.features.numel():
            tensors["features"] = self.features.bfloat16()
        save_file(tensors, partial)
        os.replace(partial, path)

    @staticmethod
    def load(path: Path) -> Lesson:
        """What `save` wrote."""
        found = load_file(path)
        ids = found["ids"].long()
        features = found.get("features", torch.empty(len(ids), ids.shape[1] - 1, 0, 0))
        return Lesson(ids, found["top_ids"].long(), found["top_probs"].float(), features)


@dataclass(frozen=True)
class CoursePlan:
    """How much is written, and how often it is read."""

    length: int = 256  # of a window
    num_windows: int = 256  # of a lesson
    prompt: int = 64  # tokens of the corpus before the target's own
    batch_size: int = 8  # windows of a step
    steps: int = 96  # from one lesson to the next
    num_kept: int = 4  # lessons that batches are taken from
    seed: int = 5


class Teacher:
    """A target, with a cache for so many windows at once. Its lessons have the hidden states of the layers `taps`, as
    hidden_states.py numbers them."""

    def __init__(self, loaded: LoadedModel, num_windows: int, length: int, taps: Sequence[int] = ()) -> None:
        self._length = length
        self._blocks = -(-length // 16)  # of a window
        self._runner = ModelRunner(loaded.model, num_windows * self._blocks, taps=taps)

    @torch.inference_mode()
    def lesson(self, prompts: Tensor, temperature: float | None, generator: torch.Generator) -> Lesson:
        """Reads `prompts`, [windows, length or less], and goes on from them: the arg max at temperature 0. With None
        they are whole windows, [windows, length + 1]."""
        ids = torch.zeros(len(prompts), self._length + 1, dtype=torch.int64)
        num_known = prompts.shape[1]
        ids[:, :num_known] = prompts
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        start = 0
        while start < self._length:
            count = max(1, min(num_known - start, self._length - start, ROWS // len(ids)))
            logits = self._logits(ids[:, start : start + count], start)  # [windows, count, vocabulary]
            log_probs = logits - logits.logsumexp(-1, keepdim=True)
            values, tokens = log_probs.topk(min(TOP, logits.shape[-1]), dim=-1)
            parts.append((tokens, values.exp(), self._features(len(ids), count)))
            start += count
            if start >= num_known and temperature is not None:
                probs = (logits[:, -1] / (temperature or 1.0)).softmax(-1)  # [windows, vocabulary]
                drawn = torch.multinomial(probs, 1, generator=generator)[:, 0] if temperature else probs.argmax(-1)
                ids[:, start] = drawn
        top_ids, top_probs, features = (torch.cat(part, dim=1) for part in zip(*parts, strict=True))
        return Lesson(ids, top_ids.clone(), top_probs.clone(), features.clone())

    def _logits(self, ids: Tensor, start: int) -> Tensor:  # [windows, count] -> [windows, count, vocabulary]
        count = ids.shape[1]
        entries = [
            BatchEntry(row, start, range(index * self._blocks, (index + 1) * self._blocks), count)
            for index, row in enumerate(ids.tolist())
        ]
        return self._runner.forward(entries).view(len(ids), count, -1)

    def _features(self, num_windows: int, count: int) -> Tensor:  # [windows, count, taps, hidden]
        """Of the last pass."""
        states = self._runner.hidden_states
        return (
            torch.empty(num_windows, count, 0, 0)
            if states is None
            else states.view(num_windows, count, *states.shape[1:]).clone()
        )


class Course:
    """Lessons one after the other, each written when its first step comes, and batches out of the last few: functions
    of the step alone. What was written is kept in a folder."""

    def __init__(self, teacher: Teacher, stream: Tensor, folder: Path, plan: CoursePlan) -> None:
        """`stream` is the corpus's tokens, [tokens]."""
        self._teacher, self._folder, self._plan = teacher, folder, plan
        self._corpus = WindowSampler(stream, plan.length, plan.num_windows, plan.seed)
        self._lessons: dict[int, Lesson] = {}

    def batch(self, step: int) -> Lesson:
        """Windows for one step."""
        plan, last = self._plan, step // self._plan.steps
        numbers = range(max(0, last + 1 - plan.num_kept), last + 1)
        self._lessons = {number: self._lessons.get(number) or self._lesson(number) for number in numbers}
        generator = torch.Generator().manual_seed(plan.seed + step)
        kept = [(lesson, index) for lesson in self._lessons.values() for index in range(len(lesson.ids))]
        places = torch.randperm(len(kept), generator=generator)[: plan.batch_size]
        parts = [lesson.window(index) for lesson, index in (kept[place] for place in places.tolist())]
        return Lesson(*(torch.stack(part) for part in zip(*parts, strict=True)))

    def _lesson(self, number: int) -> Lesson:
        path = self._folder / f"{number:05}.safetensors"
        if not path.exists():
            temperature = TEMPERATURES[number % len(TEMPERATURES)]
            windows = self._corpus.batch(number)  # [windows, length + 1]
            prompts = windows if temperature is None else windows[:, : self._plan.prompt]
            generator = torch.Generator().manual_seed(self._plan.seed + number)
            self._folder.mkdir(parents=True, exist_ok=True)
            self._teacher.lesson(prompts, temperature, generator).save(path)
        return Lesson.load(path)


TAP_FILE = "tap.json"  # beside the shards of `outrider model tap`


@dataclass(frozen=True)
class Tap:
    """Lessons that `outrider model tap` wrote: a folder of shards."""

    folder: Path
    layers: tuple[int, ...]
    shards: tuple[Path, ...]

    @classmethod
    def read(cls, folder: Path, digest: str) -> Tap:
        """Of a target of that digest. Raises ValueError."""
        path = folder / TAP_FILE
        if not path.is_file():
            raise ValueError(
                f"{folder} holds no {TAP_FILE}; allowed: a text, a .jsonl file or a folder of outrider model tap"
            )
        said = json.loads(path.read_text(encoding="utf-8"))
        if said["digest"] != digest:
            raise ValueError(
                f"{folder} was written by another target, of digest {said['digest']}; this one's: {digest}"
            )
        return cls(folder, tuple(said["taps"]), tuple(sorted(folder.glob("*.safetensors"))))

    def split(self, every: int) -> tuple[Tensor, Tensor]:
        """(tokens to learn, tokens held out): one window in so many of a shard. Raises ValueError where none is."""
        parts: list[tuple[Tensor, Tensor]] = []
        for path in self.shards:
            with safe_open(path, framework="pt") as shard:
                ids = shard.get_tensor("ids").long()  # [windows, length + 1]
            held_out = held_out_windows(len(ids), every)
            parts.append((ids[~held_out].flatten(), ids[held_out].flatten()))
        learnt, held = (torch.cat(part) for part in zip(*parts, strict=True))
        if not len(held):
            raise ValueError(f"{self.folder} has no {every} windows in a shard, of which one could be held out")
        return learnt, held


class TappedCourse(Course):
    """Batches out of a tap's shards, one after the other and over again, but for the windows that are held out."""

    def __init__(self, tap: Tap, layers: Sequence[int], held_out: int, plan: CoursePlan) -> None:
        """`layers` are those that are wanted. Raises ValueError where the tap has them not."""
        absent = [layer for layer in layers if layer not in tap.layers]
        if absent:
            raise ValueError(f"{tap.folder} has layers {list(tap.layers)}; the head reads {list(layers)}")
        self._tap, self._held_out, self._plan = tap, held_out, plan
        self._taps = [tap.layers.index(layer) for layer in layers]
        self._lessons: dict[int, Lesson] = {}

    def _lesson(self, number: int) -> Lesson:
        lesson = Lesson.load(self._tap.shards[number % len(self._tap.shards)])
        learnt = ~held_out_windows(len(lesson.ids), self._held_out)
        return lesson.chosen(learnt.nonzero()[:, 0], self._taps)


def held_out_windows(count: int, every: int) -> Tensor:  # [windows] bool
    """The last of every so many."""
    return torch.arange(count) % every == every - 1
