"""A ragged batch: the rows of one forward pass, packed over sequences, and where their keys and values live."""

from __future__ import annotations

import itertools
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


@dataclass(frozen=True, slots=True)
class StaticBatch:
    """A batch whose lengths are on the device, for a captured pass: of fixed shapes, filled anew for every step. Rows
    past the last start are padding, of slot -1, and so are sequences without rows."""

    token_ids: Tensor  # [rows] int32
    positions: Tensor  # [rows] int32
    slot_mapping: Tensor  # [rows] int32
    logit_rows: Tensor  # [rows] int32: the rows that want logits, then padding
    query_starts: Tensor  # [sequences + 1] int32
    context_lens: Tensor  # [sequences] int32
    block_tables: Tensor  # [sequences, most blocks] int32; what lies past a sequence's context is not read
    max_query_len: int  # no sequence has more rows


@dataclass(frozen=True, slots=True)
class PackedRows:
    """The rows of entries, one after the other."""

    token_ids: list[int]
    positions: list[int]
    slots: list[int]
    logit_rows: list[int]
    query_starts: list[int]
    context_lens: list[int]

    @staticmethod
    def of(entries: Sequence[BatchEntry], block_size: int) -> PackedRows:
        """Everything is built in Python lists: a step has few rows."""
        rows = PackedRows([], [], [], [], [0], [])
        for entry in entries:
            start, end, table = rows.query_starts[-1], entry.start + len(entry.token_ids), entry.block_table
            rows.token_ids.extend(entry.token_ids)
            rows.positions.extend(range(entry.start, end))
            rows.slots.extend([table[p // block_size] * block_size + p % block_size for p in range(entry.start, end)])
            rows.query_starts.append(start + len(entry.token_ids))
            rows.logit_rows.extend(range(rows.query_starts[-1] - entry.num_logits, rows.query_starts[-1]))
            rows.context_lens.append(end)
        return rows


def build_batch(entries: Sequence[BatchEntry], block_size: int, device: torch.device | str = "cpu") -> Batch:
    """Packs entries, and copies them as one tensor."""
    rows = PackedRows.of(entries, block_size)
    most_blocks = max(len(entry.block_table) for entry in entries)
    tables: list[int] = []
    for entry in entries:
        tables.extend(entry.block_table)
        tables.extend([0] * (most_blocks - len(entry.block_table)))
    parts = (rows.token_ids, rows.positions, rows.slots, tables, rows.logit_rows)
    on_cpu = torch.device(device).type == "cpu"
    packed = torch.tensor(list(itertools.chain(*parts)), dtype=torch.int64, pin_memory=not on_cpu)
    if not on_cpu:
        packed = packed.to(device, non_blocking=True)
    ids, at, mapping, blocks, wanted = torch.split(packed, [len(part) for part in parts])
    return Batch(
        token_ids=ids,
        positions=at,
        slot_mapping=mapping,
        block_tables=blocks.view(len(entries), most_blocks),
        query_starts=tuple(rows.query_starts),
        context_lens=tuple(rows.context_lens),
        logit_rows=wanted,
    )
