"""Lessons in a row, and batches out of them.

A draft works on what the target writes, so most windows are the target's own: it goes on from places of the corpus,
greedily or sampled by turns; others it only reads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from outrider.training.corpus import WindowSampler
from outrider.training.lessons import Lesson, num_windows, write_lessons
from outrider.training.teacher import Teacher

TEMPERATURES: tuple[float | None, ...] = (0.0, 1.0, 0.0, None)  # by turns; None: the window is read, and not written
TAP_FILE = "tap.json"  # beside the shards of `outrider model tap`


@dataclass(frozen=True)
class CoursePlan:
    """How much is written, and how often it is read: each window three times. Small lessons, so that the first step
    comes soon."""

    length: int = 256  # of a window
    num_windows: int = 16  # of a lesson
    prompt: int = 64  # tokens of the corpus before the target's own
    batch_size: int = 8  # windows of a step
    steps: int = 6  # from one lesson to the next
    num_kept: int = 64  # lessons that batches are taken from
    num_measured: int = 64  # windows of the held-out text
    seed: int = 5


class Course:
    """Lessons one after the other, each written when its first step comes, and batches out of the last few: functions
    of the step alone. What was written is kept in a folder, of which a batch's windows are read."""

    def __init__(self, teacher: Teacher, stream: Tensor, folder: Path, plan: CoursePlan) -> None:
        """`stream` is the corpus's tokens, [tokens]."""
        self._teacher, self._folder, self._plan = teacher, folder, plan
        self._corpus = WindowSampler(stream, plan.length, plan.num_windows, plan.seed)
        self._taps: tuple[int, ...] | None = None

    def batch(self, step: int) -> Lesson:
        """Windows for one step."""
        plan, last = self._plan, step // self._plan.steps
        numbers = range(max(0, last + 1 - plan.num_kept), last + 1)
        kept = [window for number in numbers for window in self._windows(number)]
        generator = torch.Generator().manual_seed(plan.seed + step)
        places = torch.randperm(len(kept), generator=generator)[: plan.batch_size]
        chosen = [kept[place] for place in places.tolist()]
        return Lesson.joined([Lesson.read(path, index, self._taps) for path, index in chosen])

    def _windows(self, number: int) -> list[tuple[Path, int]]:
        """Those of a lesson: of which file, and which of them."""
        path = self._folder / f"{number:05}.safetensors"
        if not path.exists():
            temperature = TEMPERATURES[number % len(TEMPERATURES)]
            windows = self._corpus.batch(number)  # [windows, length + 1]
            prompts = windows if temperature is None else windows[:, : self._plan.prompt]
            generator = torch.Generator().manual_seed(self._plan.seed + number)
            self._folder.mkdir(parents=True, exist_ok=True)
            parts = self._teacher.lessons(f"lesson {number + 1}", prompts, temperature, generator)
            write_lessons(path, len(windows), parts)
        return [(path, index) for index in range(self._plan.num_windows)]


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
    """Batches out of a tap's windows, one lesson after the other and over again, but for those that are held out."""

    def __init__(self, tap: Tap, layers: Sequence[int], held_out: int, plan: CoursePlan) -> None:
        """`layers` are those that are wanted. Raises ValueError where the tap has them not."""
        absent = [layer for layer in layers if layer not in tap.layers]
        if absent:
            raise ValueError(f"{tap.folder} has layers {list(tap.layers)}; the head reads {list(layers)}")
        self._plan = plan
        self._taps = tuple(tap.layers.index(layer) for layer in layers)
        self._learnt = [
            (path, index)
            for path in tap.shards
            for index in (~held_out_windows(num_windows(path), held_out)).nonzero()[:, 0].tolist()
        ]

    def _windows(self, number: int) -> list[tuple[Path, int]]:
        count, size = len(self._learnt), self._plan.num_windows
        return [self._learnt[place % count] for place in range(number * size, (number + 1) * size)]


def held_out_windows(count: int, every: int) -> Tensor:  # [windows] bool
    """The last of every so many."""
    return torch.arange(count) % every == every - 1
