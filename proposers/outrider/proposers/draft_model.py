"""Drafting with a model: one batched forward per drafted token, for many sequences at once.

A sequence brings the rows it has not computed yet: one in the middle of a chain, two after a bonus token, a chunk of a
prompt at the start. Drafts are drawn from the logits after the same processors as the target's: under rejection from
integer weights that travel with the token, under coupling by the noise that both sides share, else by the arg max.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Self

import torch

from outrider.engine.batch import BatchEntry
from outrider.engine.loader import LoadedModel
from outrider.engine.model_runner import ModelRunner
from outrider.kernels.sampling.reference import (
    DEFAULT_MASS,
)
from outrider.proposers.device_draft import DeviceChains
from outrider.proposers.device_draw import MOST_PASSES
from outrider.proposers.draft_rows import DraftedToken, DraftRows, DraftSampling
from outrider.proposers.drawing import Drawer
from outrider.proposers.tree import Fork, GrowingTree, grow


class DraftModelProposer:
    """Steps the chains of many sequences. Their blocks must hold the rows of the step."""

    name = "draft_model"
    parallel: ClassVar[bool] = False  # one pass gives several tokens

    def __init__(self, runner: ModelRunner, mass: float = DEFAULT_MASS) -> None:
        self.runner = runner
        self._drawer = Drawer(runner.model.vocab_size, runner.model.device, mass)
        self._chains = None if self.parallel else _chains(runner, mass)

    @classmethod
    def of(cls, runner: ModelRunner, loaded: LoadedModel) -> Self:
        """For the model that the runner runs. Raises ValueError for one that cannot draft so."""
        return cls(runner)

    def tokens_at_once(self, rows: Sequence[DraftRows], wanted: Sequence[int]) -> list[int]:
        """How many tokens of each sequence `run` draws, of those wanted: with captured passes several, one a pass."""
        several = self._chains is not None and self._chains.holds(rows)
        return [max(1, min(*wanted, MOST_PASSES)) if several else 1] * len(rows)

    def run(self, rows: Sequence[DraftRows], counts: Sequence[int]) -> list[list[DraftedToken]]:
        """The next tokens of each sequence, as many as `tokens_at_once` said; fewer where its logits are not finite,
        and none for a chunk of a prompt. For several, blocks hold as many tokens more."""
        if counts[0] > 1 and self._chains is not None:
            return self._chains.run(rows, counts[0])
        return self.step(rows)

    @torch.inference_mode()
    def step(self, rows: Sequence[DraftRows]) -> list[list[DraftedToken]]:
        """One forward. Returns the target's token that each sequence drew, in the order of `rows`: none for a chunk of
        a prompt, and where the logits are not finite; any number where it is re-encoded. Tokens drawn are appended to
        their sequences."""
        logits = self.runner.forward([row.batch_entry() for row in rows])  # [rows that draw, vocab]
        drawn = iter(self._drawer.draw(logits, [row for row in rows if row.draws]))
        drafted = [next(drawn) if row.draws else None for row in rows]
        return [_advance(row, token) for row, token in zip(rows, drafted, strict=True)]

    @torch.inference_mode()
    def grow(self, rows: Sequence[DraftRows], roots: Sequence[DraftedToken], trees: Sequence[GrowingTree]) -> None:
        """Of sequences that have just drawn `roots` behind their committed tokens, `rows`: grows a tree of each, one
        forward a level. Their blocks hold as many tokens as the tree has nodes, and nothing of it stays computed."""
        row_of = {id(tree): row for tree, row in zip(trees, rows, strict=True)}
        forks = {
            index: Fork(tree, -1, row.sampler, row.draft_sampling, row.position, row.limit)
            for index, (tree, row) in enumerate(zip(trees, rows, strict=True))
        }
        drawn: Sequence[DraftedToken | None] = roots
        while grown := grow(forks, drawn):
            entries: list[BatchEntry] = []
            forks, num_rows = {}, 0
            for one in grown:
                tree, row = one.tree, row_of[id(one.tree)]
                place = len(row.sequence), row.sequence.block_table
                entries.append(BatchEntry(tuple(tree.ids), *place, len(tree.level), tuple(tree.parents), row.adapter))
                forks |= one.forks(num_rows)
                num_rows += len(tree.level)
            logits = self.runner.forward(entries)  # [nodes of the level, vocab]
            drawn = self._drawer.draw(logits[list(forks)], list(forks.values()))

    @torch.inference_mode()
    def prepare(self, draft_sampling: DraftSampling, first: int, end: int) -> bool:
        """Draws a sequence's random numbers of positions `first` to `end` - 1 while there is time; whether any were
        missing."""
        # Captured draws compute them where they use them.
        return self._chains is None and self._drawer.prepare(draft_sampling, first, end)


def _chains(runner: ModelRunner, mass: float) -> DeviceChains | None:
    """Where passes are captured."""
    if runner.captured is None:
        return None
    with torch.cuda.device(runner.model.device):
        return DeviceChains(runner.captured, mass)


def append_drawn(row: DraftRows, drawn: DraftedToken) -> list[DraftedToken]:
    """Appends what was drawn to its text; what that adds for the target, one token unless it is re-encoded."""
    return [replace(drawn, token_id=token_id) for token_id in row.text.draw(drawn.token_id, row.limit)]


def _advance(row: DraftRows, drafted: DraftedToken | None) -> list[DraftedToken]:
    sequence = row.sequence
    computed = sequence.num_computed_tokens + row.num_rows
    tokens = [] if drafted is None else append_drawn(row, drafted)
    sequence.num_computed_tokens = min(computed, len(sequence) - 1)
    return tokens
