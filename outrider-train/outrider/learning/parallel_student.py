"""A student whose model drafts several tokens in one pass (PARD): it learns what every row of a pass says, that of the
last token read and those of the masks behind it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.learning.student import LOWEST, StudentPlan
from outrider.learning.token_student import base_of, causal_lm, written
from outrider.learning.window_student import WindowStudent
from outrider.rpc.messages import Lesson
from outrider.training.parallel import MaskedRows, draft_head, masked_states


class ParallelStudent(WindowStudent):
    """Drafts `plan.num_tokens` tokens a pass."""

    def __init__(self, folder: Path, plan: StudentPlan, mask_id: int) -> None:
        """Raises ValueError for a model that takes no adapters."""
        super().__init__(base_of(folder), causal_lm(folder), plan)
        self._mask_id = mask_id
        self._causal_lm: Any = self._model.get_base_model()
        self._head = draft_head(self._causal_lm.eval())
        self._replay: Tensor | None = None  # [windows, length]

    def _says(self, lesson: Lesson, ends: Tensor, num_tokens: int) -> Tensor:
        ids = torch.tensor([[*lesson.prompt_ids, *lesson.output_ids[:-1]]])  # [1, tokens]
        first = len(lesson.prompt_ids) + lesson.num_given - 1  # of the last token before any was drawn
        rows = MaskedRows.of(first + ends, ids.shape[1], num_tokens)
        said = self._head.product(masked_states(self._causal_lm, ids, rows, self._mask_id)[0])
        return said.index_fill(-1, torch.tensor([self._mask_id]), LOWEST)  # it is no token of any text

    def _replayed(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """Of texts that the draft as it was writes itself, behind a few of their tokens."""
        if self._replay is None:
            self._replay = written(self._model, self.vocab_size, self.plan)
        ids = self._replay[places]
        rows = MaskedRows.of(self._some_ends(ids.shape[1] - 1), ids.shape[1], self.plan.num_tokens)
        with torch.no_grad(), self._model.disable_adapter():
            before = self._head.product(masked_states(self._causal_lm, ids, rows, self._mask_id))
        return before, self._head.product(masked_states(self._causal_lm, ids, rows, self._mask_id))
