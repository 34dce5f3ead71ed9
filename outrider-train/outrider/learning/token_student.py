"""A student whose model drafts a token a pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from outrider.engine.loader import load_model
from outrider.engine.models.base import TakesAdapters
from outrider.engine.sampler import SamplingRows, SequenceSampler, assemble
from outrider.kernels.sampling.reference import adjust_logits
from outrider.learning.judgement import worth
from outrider.learning.student import LOWEST, Base, Student, StudentPlan, bounded
from outrider.rpc.messages import Lesson
from outrider.training.model import continue_windows


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
            return self._processed(lesson, self._says(lesson))
        with self._model.disable_adapter():
            return self._processed(lesson, self._says(lesson))

    def _loss(self, lesson: Lesson) -> Tensor:
        said, sampling = self._says(lesson), lesson.sampling
        logits = self._processed(lesson, said)
        ids = torch.tensor(lesson.drawn_ids)  # [drawn]
        logits = logits if sampling.greedy else logits / sampling.temperature
        loss = bounded(F.nll_loss(F.log_softmax(logits, dim=-1), ids), said)
        return loss * self.plan.greedy_weight if sampling.greedy else loss

    def _says(self, lesson: Lesson) -> Tensor:  # [drawn, vocab] float32
        """The model, behind every token before one that was drawn."""
        ids = torch.tensor([[*lesson.prompt_ids, *lesson.output_ids[:-1]]])  # [1, tokens]
        said: Tensor = self._model(ids, use_cache=False, logits_to_keep=lesson.num_drawn).logits[0].float()
        return said

    def _processed(self, lesson: Lesson, logits: Tensor) -> Tensor:  # [drawn, vocab], twice
        """By the request's processors but for its temperature."""
        given = tuple(lesson.output_ids[: lesson.num_given])
        drawn = lesson.drawn_ids[:-1]
        sampler = SequenceSampler(lesson.sampling, lesson.prompt_ids, given, self._base.eos_ids, self.vocab_size)
        return adjust_logits(logits, assemble([SamplingRows(sampler, drawn)], for_argmax=True)).clamp_min(LOWEST)

    def _replayed(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """Of texts that the draft as it was writes itself."""
        if self._replay is None:
            self._replay = written(self._model, self.vocab_size, self.plan)
        ids = self._replay[places]
        with torch.no_grad(), self._model.disable_adapter():
            before: Tensor = self._model(ids, use_cache=False).logits
        return before, self._model(ids, use_cache=False).logits
