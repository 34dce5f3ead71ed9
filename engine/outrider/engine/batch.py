"""A ragged batch: the rows of one forward pass, packed over sequences, and where their keys and values live."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class BatchEntry:
    """The rows of one sequence: tokens from `start` on, of which the last `num_logits` rows want logits."""

    token_ids: Sequence[int]
    start: int  # absolute position of the first row; everything before it is in the cache
    block_table: Sequence[int]
    num_logits: int


@dataclass(frozen=True, slots=True)
class Batch:
    """What a model's forward takes. Passed as an argument, never global."""

    token_ids: Tensor  # [rows] int64
    positions: Tensor  # [rows] int64, absolute
    slot_mapping: Tensor  # [rows] int64, block * block_size + offset
    block_tables: Tensor  # [sequences, most blocks] int64, padded with 0
    query_starts: tuple[int, ...]  # [sequences + 1]: rows of sequence i are query_starts[i]:query_starts[i + 1]
    context_lens: tuple[int, ...]  # [sequences]: tokens in the cache with this batch (position of the last row + 1)
    logit_rows: Tensor  # [rows that want logits] int64

    @property
    def num_rows(self) -> int:
        """Rows over all sequences."""
        return self.query_starts[-1]

    @property
    def num_sequences(self) -> int:
        """Sequences in the batch."""
        return len(self.context_lens)


def build_batch(entries: Sequence[BatchEntry], block_size: int, device: torch.device | str = "cpu") -> Batch:
    """Packs entries. Everything is built in Python lists and copied as one tensor: a step has few rows."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    logit_rows: list[int] = []
    tables: list[int] = []
    starts = [0]
    lens: list[int] = []
    most_blocks = max(len(entry.block_table) for entry in entries)
    for entry in entries:
        end = entry.start + len(entry.token_ids)
        table = entry.block_table
        token_ids.extend(entry.token_ids)
        positions.extend(range(entry.start, end))
        slots.extend([table[p // block_size] * block_size + p % block_size for p in range(entry.start, end)])
        tables.extend(table)
        tables.extend([0] * (most_blocks - len(table)))
        starts.append(starts[-1] + len(entry.token_ids))
        logit_rows.extend(range(starts[-1] - entry.num_logits, starts[-1]))
        lens.append(end)
    rows = starts[-1]
    packed = torch.tensor([*token_ids, *positions, *slots, *tables, *logit_rows], dtype=torch.int64)
    if torch.device(device).type != "cpu":
        packed = packed.to(device, non_blocking=True)
    ids, at, mapping, blocks, wanted = torch.split(packed, [rows, rows, rows, len(tables), len(logit_rows)])
    return Batch(
        token_ids=ids,
        positions=at,
        slot_mapping=mapping,
        block_tables=blocks.view(len(entries), most_blocks),
        query_starts=tuple(starts),
        context_lens=tuple(lens),
        logit_rows=wanted,
    )
