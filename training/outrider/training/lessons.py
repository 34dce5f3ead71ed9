"""What a draft learns from: windows of text, and what the target gives for every next token of them.

A draft works on what the target writes, so most windows are the target's own: it goes on from places of the corpus,
greedily or sampled by turns; others it only reads. Its likeliest tokens are kept, with their probabilities: they are
nearly all of the distribution, and the target is asked once, however often a draft reads the window. A head beside the
target reads its hidden states, too, so that they are kept with the lesson.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
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
        places = torch.randperm(len(numbers) * plan.num_windows, generator=generator)[: plan.batch_size]
        parts = [
            self._lessons[numbers[place // plan.num_windows]].window(place % plan.num_windows)
            for place in places.tolist()
        ]
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
