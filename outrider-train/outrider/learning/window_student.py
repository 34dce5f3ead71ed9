"""A student of what drafts several tokens behind the last one that is known: it learns what is said of each of them,
and is judged by rounds that begin anywhere in a text."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outrider.engine.sampler import SamplingRows, SequenceSampler, assemble
from outrider.learning.judgement import drafted, is_weighed, share_accepted
from outrider.learning.student import Base, Student, StudentPlan, bounded, processed
from outrider.rpc.messages import Lesson
from outrider.training.parallel import LEAST_REACHED

ENDS_AT_ONCE = 64  # places of one pass that drafts are judged after
ENDS_LEARNT = 12  # places of a text that a step learns to draft after


class WindowStudent(Student):
    """Drafts `plan.num_tokens` tokens in a row."""

    first_end = 0  # the first of the drawn tokens that may be drafted

    def __init__(self, base: Base, model: nn.Module, plan: StudentPlan) -> None:
        super().__init__(base, model, plan)
        self._dice = torch.Generator().manual_seed(plan.seed)

    @torch.inference_mode()
    def worth(self, lesson: Lesson, window: int, with_learned: bool = True) -> float:
        """Each round's drafts are those behind the last token that is known."""
        self._model.eval()
        count = lesson.num_drawn
        windows: list[list[bool]] = []
        probs: list[Tensor] = []
        for ends in torch.arange(self.first_end, count).split(ENDS_AT_ONCE):
            said, places = self._at(lesson, ends, window, with_learned)
            logits = self._processed(lesson, ends, said, window)
            ids = torch.tensor(lesson.drawn_ids)[places]
            if is_weighed(lesson):
                law = (logits / lesson.sampling.temperature).softmax(-1)
                probs.append(law.gather(1, ids[:, None])[:, 0])
                continue
            agreed = iter((drafted(lesson, logits, places) == ids).tolist())
            windows += [[next(agreed) for _ in range(size)] for size in sizes(count, ends, window)]
        return float(torch.cat(probs).mean()) if probs else share_accepted(windows, window)

    @abstractmethod
    def _says(self, lesson: Lesson, ends: Tensor, num_tokens: int) -> Tensor:  # [ends, tokens, vocab]
        """Of the next tokens where a round begins before the drawn ones of these places, [ends]; what is said of those
        behind the text is not looked at."""

    def _at(
        self, lesson: Lesson, ends: Tensor, num_tokens: int, with_learned: bool = True
    ) -> tuple[Tensor, Tensor]:  # [rows, vocab] float32, [rows]
        """What is said of the next tokens, as far as the text goes; and the places of these among those drawn."""
        if with_learned:
            said = self._says(lesson, ends, num_tokens)
        else:
            with self._model.disable_adapter():
                said = self._says(lesson, ends, num_tokens)
        places = ends[:, None] + torch.arange(num_tokens)  # [ends, tokens]
        there = places < lesson.num_drawn
        return said[there].float(), places[there]

    def _losses(self, lessons: Sequence[Lesson]) -> Iterator[Tensor]:
        yield from map(self._loss, lessons)

    def _loss(self, lesson: Lesson) -> Tensor:
        """A token far behind the end counts as much as it would be reached."""
        count, sampling = lesson.num_drawn, lesson.sampling
        ends = self._some_ends(count - self.first_end) + self.first_end
        said, places = self._at(lesson, ends, self.plan.num_tokens)
        logits = self._processed(lesson, ends, said, self.plan.num_tokens)
        logits = logits if sampling.greedy else logits / sampling.temperature
        losses = F.nll_loss(F.log_softmax(logits, dim=-1), torch.tensor(lesson.drawn_ids)[places], reduction="none")
        parts = losses.detach().split(sizes(count, ends, self.plan.num_tokens))
        reached = torch.cat([reached_by(part) for part in parts])
        loss = bounded((reached * losses).sum() / reached.sum(), said, sampling)
        return loss * self.plan.greedy_weight if sampling.greedy else loss

    def _some_ends(self, count: int) -> Tensor:  # [ends]
        """Of so many places some that a step learns to draft after, ascending."""
        return torch.randperm(count, generator=self._dice)[:ENDS_LEARNT].sort().values

    def _processed(self, lesson: Lesson, ends: Tensor, logits: Tensor, num_tokens: int) -> Tensor:
        """By the request's processors but for its temperature; what was drafted before counts, as it was drawn."""
        given, drawn = lesson.output_ids[: lesson.num_given], lesson.drawn_ids
        plans = []
        for end in ends.tolist():
            before = (*given, *drawn[:end])
            sampler = SequenceSampler(lesson.sampling, lesson.prompt_ids, before, self._base.eos_ids, self.vocab_size)
            plans.append(SamplingRows(sampler, drawn[end : min(end + num_tokens, len(drawn)) - 1]))
        return processed(logits, assemble(plans, for_argmax=True))


def sizes(count: int, ends: Tensor, num_tokens: int) -> list[int]:
    """Tokens that are there behind each end."""
    found: list[int] = (count - ends).clamp_max(num_tokens).tolist()
    return found


def reached_by(losses: Tensor) -> Tensor:  # [tokens] -> [tokens]
    """How likely the tokens of one end are reached, if each is accepted by its likelihood."""
    before = torch.cat([losses.new_ones(1), (-losses[:-1]).exp()])
    return before.cumprod(0).clamp_min(LEAST_REACHED)
