"""Parallel drafting (PARD, An et al., arXiv 2504.18583): one forward for all tokens of a window.

The model is an ordinary one, trained with a mask token that its config.json names. Behind the tokens that a sequence
has not computed yet stand masks, one for every drafted token but the first: the last token's row gives the next one,
each mask's row the one behind it, whatever is drawn between. Tokens are drawn as by any draft model, the state at a
position counting those drawn before it. What a mask left in the cache is no token's: these positions count as not
computed, and the tokens drawn there are rows of the next pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import ClassVar, Self

import torch
from torch import Tensor

from outrider.engine.batch import BatchEntry
from outrider.engine.loader import LoadedModel
from outrider.engine.model_runner import ModelRunner
from outrider.engine.sampler import is_numeric_only
from outrider.kernels.sampling.reference import DEFAULT_MASS
from outrider.proposers.draft_model import DraftModelProposer, append_drawn
from outrider.proposers.draft_rows import DraftedToken, DraftRows

MOST_MASKS = 512  # of one pass, over all sequences


class PardProposer(DraftModelProposer):
    """Steps the chains of many sequences, several tokens each. Their blocks must hold the rows of the step."""

    name = "pard"
    parallel: ClassVar[bool] = True

    def __init__(self, runner: ModelRunner, mask_token_id: int, mass: float = DEFAULT_MASS) -> None:
        super().__init__(runner, mass)
        self._mask_token_id = mask_token_id

    @classmethod
    def of(cls, runner: ModelRunner, loaded: LoadedModel) -> Self:
        """For the model that the runner runs. Raises ValueError for one without a mask token."""
        if loaded.mask_token_id is None:
            raise ValueError(
                "method: is pard, and the draft's config.json names no mask token; allowed: a model that was trained "
                "to draft in parallel, whose config.json has pard_token or ptd_token_id"
            )
        return cls(runner, loaded.mask_token_id)

    def tokens_at_once(self, rows: Sequence[DraftRows], wanted: Sequence[int]) -> list[int]:
        """How many tokens of each sequence `run` draws: all that are wanted, as far as there is room for masks."""
        most = 1 + MOST_MASKS // len(rows)
        return [max(1, min(count, most)) if row.draws else 1 for row, count in zip(rows, wanted, strict=True)]

    @torch.inference_mode()
    def run(self, rows: Sequence[DraftRows], counts: Sequence[int]) -> list[list[DraftedToken]]:
        """The next tokens of each sequence, as many as `tokens_at_once` said; fewer where its logits are not finite,
        and none for a chunk of a prompt. For several, blocks hold as many tokens more."""
        logits = self.runner.forward([self._batch_entry(row, count) for row, count in zip(rows, counts, strict=True)])
        logits[:, self._mask_token_id] = -torch.inf  # it is no token of any text
        computed = [row.sequence.num_computed_tokens + row.num_rows for row in rows]
        draws = [row.draws for row in rows]
        drawing = [(row, count) for row, count, wanted in zip(rows, counts, draws, strict=True) if wanted]
        drawn = iter(self._draw_several(logits, drawing))
        for row, num_computed in zip(rows, computed, strict=True):
            row.sequence.num_computed_tokens = min(num_computed, len(row.sequence) - 1)
        return [next(drawn) if wanted else [] for wanted in draws]

    def _batch_entry(self, row: DraftRows, count: int) -> BatchEntry:
        """Its own rows, and a mask for every token after the next one."""
        entry = row.batch_entry()
        if not row.draws:
            return entry
        return replace(entry, token_ids=[*entry.token_ids, *[self._mask_token_id] * (count - 1)], num_logits=count)

    def _draw_several(self, logits: Tensor, drawing: Sequence[tuple[DraftRows, int]]) -> list[list[DraftedToken]]:
        """`logits` are [sum of counts, vocab], sequence by sequence. What is drawn is appended to the sequences. All
        is drawn together, but where the law of a token depends on those before it: there one after the other."""
        starts = list(accumulate((count for _, count in drawing), initial=0))
        drafted: list[list[DraftedToken]] = [[] for _ in drawing]
        num_drawn = [0] * len(drawing)  # of the draft's own tokens
        for turn in range(max((count for _, count in drawing), default=0)):
            lines: list[tuple[int, int]] = []  # of which sequence, which token
            for index, (row, count) in enumerate(drawing):
                if is_numeric_only(row.sampler):
                    lines += [(index, place) for place in range(count)] if turn == 0 else []
                elif turn < count and turn == num_drawn[index]:
                    lines.append((index, turn))
            rows = [replace(drawing[index][0], offset=place - turn) for index, place in lines]
            if not rows:
                break
            tokens = self._drawer.draw(logits[[starts[index] + place for index, place in lines]], rows)
            for (index, place), token in zip(lines, tokens, strict=True):
                if token is not None and place == num_drawn[index]:
                    drafted[index] += append_drawn(drawing[index][0], token)
                    num_drawn[index] += 1
        return drafted
