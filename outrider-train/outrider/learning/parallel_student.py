"""A student whose model drafts several tokens in one pass (PARD): it learns what every row of a pass says, that of the
last token read and those of the masks behind it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.engine.checkpoint import mask_token_id, read_config
from outrider.engine.sampler import SamplingRows, SequenceSampler, assemble
from outrider.kernels.sampling.reference import adjust_logits
from outrider.learning.judgement import drafted, is_weighed, share_accepted
from outrider.learning.student import LOWEST, Student, StudentPlan
from outrider.rpc.messages import Lesson
from outrider.training.parallel import LEAST_REACHED, MaskedRows, draft_head, masked_states

ENDS_AT_ONCE = 64  # places of one pass that drafts are judged after
ENDS_LEARNT = 12  # places of a lesson that a step learns to draft after


def student_of(folder: Path, plan: StudentPlan) -> Student:
    """For the model of a folder, by how it drafts: in parallel if its config.json names a mask token. Raises
    ValueError."""
    mask = mask_token_id(read_config(folder))
    return Student(folder, plan) if mask is None else ParallelStudent(folder, plan, mask)


class ParallelStudent(Student):
    """Drafts `plan.num_tokens` tokens a pass."""

    def __init__(self, folder: Path, plan: StudentPlan, mask_id: int) -> None:
        super().__init__(folder, plan)
        self._mask_id = mask_id
        self._dice = torch.Generator().manual_seed(plan.seed)
        self._causal_lm: Any = self._model.get_base_model()
        self._head = draft_head(self._causal_lm.eval())

    @torch.inference_mode()
    def worth(self, lesson: Lesson, window: int, with_learned: bool = True) -> float:
        """Each round's drafts are those of one pass behind the last token read."""
        self._model.eval()
        count = len(lesson.output_ids) - lesson.num_given
        windows: list[list[bool]] = []
        probs: list[Tensor] = []
        for ends in torch.arange(count).split(ENDS_AT_ONCE):
            logits, places = self._at(lesson, ends, window, with_learned)
            ids = self._drawn(lesson)[places]
            if is_weighed(lesson):
                law = (logits / lesson.sampling.temperature).softmax(-1)
                probs.append(law.gather(1, ids[:, None])[:, 0])
                continue
            agreed = iter((drafted(lesson, logits, places) == ids).tolist())
            windows += [[next(agreed) for _ in range(size)] for size in self._sizes(count, ends, window)]
        return float(torch.cat(probs).mean()) if probs else share_accepted(windows, window)

    def _loss(self, lesson: Lesson) -> Tensor:
        """A token far behind the end counts as much as it would be reached."""
        count, sampling = len(lesson.output_ids) - lesson.num_given, lesson.sampling
        ends = torch.randperm(count, generator=self._dice)[:ENDS_LEARNT].sort().values
        logits, places = self._at(lesson, ends, self.plan.num_tokens)
        logits = logits if sampling.greedy else logits / sampling.temperature
        losses = F.nll_loss(F.log_softmax(logits, dim=-1), self._drawn(lesson)[places], reduction="none")
        reached = torch.cat(
            [reached_by(part) for part in losses.detach().split(self._sizes(count, ends, self.plan.num_tokens))]
        )
        loss = (reached * losses).sum() / reached.sum()
        return loss * self.plan.greedy_weight if sampling.greedy else loss

    def _at(
        self, lesson: Lesson, ends: Tensor, num_tokens: int, with_learned: bool = True
    ) -> tuple[Tensor, Tensor]:  # [rows, vocab] float32, [rows]
        """What is said of the next tokens where a pass begins before the drawn ones of these places, [ends], as far as
        the text goes; and the places of these tokens among those drawn."""
        ids = torch.tensor([[*lesson.prompt_ids, *lesson.output_ids[:-1]]])  # [1, tokens]
        first = len(lesson.prompt_ids) + lesson.num_given - 1  # of the last token before any was drawn
        rows = MaskedRows.of(first + ends, ids.shape[1], num_tokens)
        if with_learned:
            states = masked_states(self._causal_lm, ids, rows, self._mask_id)
        else:
            with self._model.disable_adapter():
                states = masked_states(self._causal_lm, ids, rows, self._mask_id)
        places = ends[:, None] + torch.arange(num_tokens)  # [ends, tokens]
        there = places < len(lesson.output_ids) - lesson.num_given
        logits = self._head.product(states[0][there]).float()  # [rows, vocab]
        logits = logits.index_fill(1, torch.tensor([self._mask_id]), LOWEST)  # it is no token of any text
        return self._processed(lesson, ends, logits, num_tokens), places[there]

    def _processed(self, lesson: Lesson, ends: Tensor, logits: Tensor, num_tokens: int) -> Tensor:
        """By the request's processors but for its temperature; what was drafted before counts, as it was drawn."""
        given, drawn = lesson.output_ids[: lesson.num_given], lesson.output_ids[lesson.num_given :]
        plans = []
        for end in ends.tolist():
            before = (*given, *drawn[:end])
            sampler = SequenceSampler(lesson.sampling, lesson.prompt_ids, before, self._eos_ids, self.vocab_size)
            plans.append(SamplingRows(sampler, drawn[end : min(end + num_tokens, len(drawn)) - 1]))
        return adjust_logits(logits, assemble(plans, for_argmax=True)).clamp_min(LOWEST)

    def _kept(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Of its own texts what a pass says behind a few of their tokens."""
        ends = torch.randperm(ids.shape[1] - 1, generator=self._dice)[:ENDS_LEARNT].sort().values
        rows = MaskedRows.of(ends, ids.shape[1], self.plan.num_tokens)
        with torch.no_grad(), self._model.disable_adapter():
            before = self._head.product(masked_states(self._causal_lm, ids, rows, self._mask_id))
        return before, self._head.product(masked_states(self._causal_lm, ids, rows, self._mask_id))

    @staticmethod
    def _drawn(lesson: Lesson) -> Tensor:  # [drawn]
        return torch.tensor(lesson.output_ids[lesson.num_given :])

    @staticmethod
    def _sizes(count: int, ends: Tensor, num_tokens: int) -> list[int]:
        """Tokens that are there behind each end."""
        return (count - ends).clamp_max(num_tokens).tolist()


def reached_by(losses: Tensor) -> Tensor:  # [tokens] -> [tokens]
    """How likely the tokens of one end are reached, if each is accepted by its likelihood."""
    before = torch.cat([losses.new_ones(1), (-losses[:-1]).exp()])
    return before.cumprod(0).clamp_min(LEAST_REACHED)
