"""A student whose model drafts a token a pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from outrider.engine.loader import load_model
from outrider.engine.models.base import TakesAdapters
from outrider.engine.sampler import SamplingRows, SequenceSampler, assemble
from outrider.learning.judgement import worth
from outrider.learning.student import Base, Student, StudentPlan, bounded, processed
from outrider.rpc.messages import Lesson
from outrider.training.model import continue_windows

MOST_FILLED = 1.25  # times as much, of what one pass reads or says


def base_of(folder: Path) -> Base:
    """A draft's model as it is served; it is not kept. Raises ValueError for one that takes no adapters."""
    served = load_model(folder, lone_file=True)
    if not isinstance(served.model, TakesAdapters):
        raise ValueError(f"model: {folder} takes no adapters; allowed: a model of our own decoder")
    return Base(folder, served.digest, served.vocab_size, served.eos_token_ids, served.model.adapters.linears)


def causal_lm(folder: Path) -> Any:
    """The model that is trained beside."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@torch.no_grad()
def written(model: Any, vocab_size: int, plan: StudentPlan) -> Tensor:  # [windows, length]
    """Texts of a model without learned weights, each behind a token of its own."""
    generator = torch.Generator().manual_seed(plan.seed)
    ids = torch.randint(vocab_size, (plan.replay_windows, 1), generator=generator)
    with model.disable_adapter():
        return continue_windows(model, ids, plan.replay_length, 1.0, generator)


def alike(lessons: Sequence[Lesson]) -> Iterator[list[Lesson]]:
    """Lessons that one pass reads: filling them up adds little."""
    part: list[Lesson] = []
    for lesson in sorted(lessons, key=num_read):
        if part and not fills_little([*part, lesson]):
            yield part
            part = []
        part.append(lesson)
    if part:
        yield part


def fills_little(part: Sequence[Lesson]) -> bool:
    """Neither to the tokens that are read, nor to those of which it is said what follows."""
    longest, kept = max(map(num_read, part)), rows_kept(part)
    read, drawn = sum(map(num_read, part)), sum(lesson.num_drawn for lesson in part)
    return len(part) * longest <= MOST_FILLED * read and len(part) * kept <= MOST_FILLED * drawn


def num_read(lesson: Lesson) -> int:
    """Tokens before the last."""
    return len(lesson.prompt_ids) + len(lesson.output_ids) - 1


def rows_kept(part: Sequence[Lesson]) -> int:
    """From the first place of any behind which a token was drawn, to the last."""
    return max(map(num_read, part)) - min(num_read(lesson) - lesson.num_drawn for lesson in part)


class TokenStudent(Student):
    """Of a causal language model."""

    def __init__(self, folder: Path, plan: StudentPlan) -> None:
        """Raises ValueError for a model that takes no adapters."""
        super().__init__(base_of(folder), causal_lm(folder), plan)
        self._replay: Tensor | None = None  # [windows, length]

    def worth(self, lesson: Lesson, window: int, with_learned: bool = True) -> float:
        """By what the model says behind every token of the text."""
        return worth(lesson, self.logits(lesson, with_learned), window)

    @torch.inference_mode()
    def logits(self, lesson: Lesson, with_learned: bool = True) -> Tensor:  # [drawn, vocab] float32
        """Behind every token before one that was drawn, through the lesson's processors but for its temperature."""
        self._model.eval()
        if with_learned:
            return self._processed(lesson, self._says([lesson])[0])
        with self._model.disable_adapter():
            return self._processed(lesson, self._says([lesson])[0])

    def _losses(self, lessons: Sequence[Lesson]) -> Iterator[Tensor]:
        for part in alike(lessons):
            for lesson, said in zip(part, self._says(part), strict=True):
                yield self._loss(lesson, said)

    def _loss(self, lesson: Lesson, said: Tensor) -> Tensor:  # [drawn, vocab] -> []
        logits, sampling = self._processed(lesson, said), lesson.sampling
        if not sampling.greedy and sampling.temperature != 1:
            logits = logits / sampling.temperature
        ids = torch.tensor(lesson.drawn_ids)  # [drawn]
        loss = bounded(F.cross_entropy(logits, ids), said, sampling)
        return loss * self.plan.greedy_weight if sampling.greedy else loss

    def _says(self, lessons: Sequence[Lesson]) -> list[Tensor]:  # [drawn, vocab] float32 each
        """The model, behind every token before one that was drawn. What fills up a shorter text comes behind it."""
        longest, kept = max(map(num_read, lessons)), rows_kept(lessons)
        texts = [[*lesson.prompt_ids, *lesson.output_ids[:-1]] for lesson in lessons]
        ids = torch.tensor([text + [0] * (longest - len(text)) for text in texts])  # [lessons, tokens]
        said = self._model(ids, use_cache=False, logits_to_keep=kept).logits.float()  # [lessons, kept, vocab]
        ends = [len(text) - longest + kept for text in texts]
        return [one[end - lesson.num_drawn : end] for one, end, lesson in zip(said, ends, lessons, strict=True)]

    def _processed(self, lesson: Lesson, logits: Tensor) -> Tensor:  # [drawn, vocab], twice
        """By the request's processors but for its temperature."""
        given = tuple(lesson.output_ids[: lesson.num_given])
        drawn = lesson.drawn_ids[:-1]
        sampler = SequenceSampler(lesson.sampling, lesson.prompt_ids, given, self._base.eos_ids, self.vocab_size)
        return processed(logits, assemble([SamplingRows(sampler, drawn)], for_argmax=True))

    def _replayed(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """Of texts that the draft as it was writes itself."""
        if self._replay is None:
            self._replay = written(self._model, self.vocab_size, self.plan)
        ids = self._replay[places]
        with torch.no_grad(), self._model.disable_adapter():
            before: Tensor = self._model(ids, use_cache=False).logits
        return before, self._model(ids, use_cache=False).logits
