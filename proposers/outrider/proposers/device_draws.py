"""How a device draws the next token of every sequence of a pass, and leaves it where the next pass reads it.

Nothing is read on the host, so that passes and draws follow one another like one: their launches wait for nobody. What
was drawn lies in a table, a row a pass, which is read once at the end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.engine.batch import StaticBatch
from outrider.engine.device_sampling import row_sampling, sampling_columns
from outrider.engine.staging import Column, StagedColumns
from outrider.kernels.advance import advance
from outrider.kernels.best_ids import best_ids
from outrider.kernels.coupled import coupled_choice
from outrider.kernels.draft_sample import MAX_ENTRIES
from outrider.kernels.logits_to_probs import greedy_choice, logits_to_probs
from outrider.kernels.philox import Purpose, exponential_noise, words

MOST_RANKED = 8  # ids of a row that are ranked: the drawn one, and alternatives to it


class DrawKind(NamedTuple):
    """What a draw has to do beside the arg max of every row."""

    races: bool  # some are coupled
    weighs: bool  # some are drawn from integer weights
    ranks: bool  # some want alternatives


KINDS = (
    DrawKind(False, False, False), DrawKind(False, False, True), DrawKind(True, False, False),
    DrawKind(True, False, True), DrawKind(False, True, False),
)  # fmt: skip


def draw_columns(num_sequences: int) -> list[Column]:
    """What `draw` reads of every sequence, beside the batch."""
    return [
        *sampling_columns(num_sequences),
        Column("seeds", torch.int64, num_sequences),
        Column("completions", torch.int64, num_sequences),
        Column("races", torch.int32, num_sequences),
        Column("weighs", torch.int32, num_sequences),
        Column("passes", torch.int32, 1),  # that ran before
    ]


@dataclass(frozen=True, slots=True)
class DrawLayout:
    """The columns of the table of what was drawn, int32."""

    num_sequences: int
    kind: DrawKind
    slots: int  # entries of a vector of weights

    @property
    def width(self) -> int:
        """Numbers of one pass."""
        per_sequence = 1 + self.kind.ranks * MOST_RANKED + self.kind.weighs * (1 + 2 * self.slots)
        return self.num_sequences * per_sequence

    def split(self, row: Tensor) -> Iterator[Tensor]:
        """Ids [sequences]; then, if there are, ranked ids [sequences, MOST_RANKED]; numbers of entries [sequences], and
        their ids and weights [sequences, slots] each."""
        n, start = self.num_sequences, 0
        shapes = [(n,)] + [(n, MOST_RANKED)] * self.kind.ranks
        shapes += [(n,), (n, self.slots), (n, self.slots)] * self.kind.weighs
        for shape in shapes:
            size = shape[0] * (shape[1] if len(shape) > 1 else 1)
            yield row[start : start + size].view(shape)
            start += size


def slots_of(vocab_size: int) -> int:
    """Entries that a vector of weights may have."""
    return min(MAX_ENTRIES, vocab_size)


def draw(
    logits: Tensor,  # [sequences, vocab] float32
    batch: StaticBatch,  # of the pass that follows: its positions are those of the tokens drawn now
    columns: StagedColumns,
    kind: DrawKind,
    table: Tensor,  # [most passes, width] int32; the row of this pass is written
    block_size: int,
    mass: float,
) -> None:
    """Moves the batch on, draws, and puts what it drew into the batch and the table."""
    passes = columns["passes"]  # [1]
    advance(batch.positions, batch.slot_mapping, batch.context_lens, batch.block_tables, passes, block_size)
    sampling = row_sampling(columns)
    ids, invalid = greedy_choice(logits, sampling)  # [sequences] each
    scores, extra = logits, []
    counters = columns["seeds"], batch.positions.long(), columns["completions"]
    if kind.races or kind.weighs:
        probs, _ = logits_to_probs(logits, sampling)  # [sequences, vocab]
    if kind.races:
        noise = exponential_noise(*counters, logits.shape[1])  # [sequences, vocab]
        is_raced = columns["races"] != 0  # [sequences]
        ids = torch.where(is_raced, coupled_choice(probs, noise), ids)
        scores = torch.where(is_raced[:, None], -noise / probs, logits) if kind.ranks else logits
    if kind.ranks:
        extra.append(best_ids(scores, MOST_RANKED))  # [sequences, MOST_RANKED]
    if kind.weighs:
        drawn, *entries = _weighed(probs, words(*counters[:2], Purpose.DRAFT, counters[2]), mass)
        ids = torch.where(columns["weighs"] != 0, drawn, ids)
        extra += entries
    ids = ids.masked_fill(invalid, -1)
    batch.token_ids.copy_(ids.clamp(min=0))
    found = torch.cat([part.flatten().int() for part in (ids, *extra)])  # [width]
    table.index_copy_(0, passes.long(), found[None])
    passes.add_(1)


def _weighed(probs: Tensor, random: Tensor, mass: float) -> tuple[Tensor, ...]:
    """Ids and numbers of entries, [sequences] each, and the entries, [sequences, slots] each."""
    from outrider.kernels.draft_sample_triton import sample_rows

    return sample_rows(probs, random, mass, MAX_ENTRIES)
