"""A ragged batch: the rows of one forward pass, packed over sequences, and where their keys and values live; and how
its numbers lie in the one buffer of a captured step, which runs in the smallest bucket that holds it.

A bucket is a number of rows, a number of sequences and the most rows of one sequence. Sequences bring windows of any
length up to that, next to one another: none is padded. Rows go by ROWS, finely while a step costs the reading of the
weights anyway and coarsely above; sequences by powers of two, since one of padding costs a few empty programs. Steps in
which every sequence has one row (plain decoding, and most of a draft's) have buckets of their own, whose attention
takes smaller tiles; and so have steps with drafted trees, of which others read no mask."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.engine.token_tree import CHAIN, positions_of, window_parents

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # a step of more rows is worth its launches
ALIGNMENT = 4  # numbers: kernels are compiled for pointers to 16 bytes, or else anew
PAD_SLOT = -1  # stored nowhere


@dataclass(frozen=True, slots=True)
class BatchEntry:
    """The rows of one sequence: tokens from `start` on, of which the last `num_logits` rows want logits."""

    token_ids: Sequence[int]
    start: int  # absolute position of the first row; everything before it is in the cache
    block_table: Sequence[int]
    num_logits: int
    parents: Sequence[int] = ()  # the last rows are a drafted tree, see token_tree.py: its root is the row before them
    adapter: PreparedAdapter | None = None  # that all of them have


@dataclass(frozen=True, slots=True, eq=False)
class PreparedAdapter:
    """An adapter as a model takes it into a slot. It is itself: two of the same weights have two places."""

    digest: str
    rank: int
    weights: Any  # what the model's `prepare` gave


@dataclass(frozen=True, slots=True)
class Batch:
    """What a model's forward takes. Passed as an argument, never global."""

    token_ids: Tensor  # [rows] int64
    positions: Tensor  # [rows] int64, absolute
    slot_mapping: Tensor  # [rows] int64, block * block_size + offset
    block_tables: Tensor  # [sequences, most blocks] int64, padded with 0
    query_starts: tuple[int, ...]  # [sequences + 1]: rows of sequence i are query_starts[i]:query_starts[i + 1]
    context_lens: tuple[int, ...]  # [sequences]: places in the cache with this batch (that of the last row + 1)
    logit_rows: Tensor  # [rows that want logits] int64
    parents: Tensor | None = None  # [rows] int32, where there are trees: see kernels' tree_mask
    adapter_slots: Tensor | None = None  # [rows] int32, where some row has an adapter; -1: none

    @property
    def num_rows(self) -> int:
        """How many rows all sequences have together."""
        return self.query_starts[-1]

    @property
    def num_sequences(self) -> int:
        """How many sequences the batch has."""
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
    parents: Tensor | None = None  # [rows] int32, of a bucket for trees: see kernels' tree_mask
    adapter_slots: Tensor | None = None  # as a Batch has them


@dataclass(frozen=True, slots=True)
class PackedRows:
    """The rows of entries, one after the other."""

    token_ids: list[int]
    positions: list[int]
    slots: list[int]
    logit_rows: list[int]
    query_starts: list[int]
    context_lens: list[int]
    parents: list[int]  # of all rows, or none where there is no tree

    @staticmethod
    def of(entries: Sequence[BatchEntry], block_size: int) -> PackedRows:
        """Everything is built in Python lists: a step has few rows."""
        rows = PackedRows([], [], [], [], [0], [], [])
        has_trees = any(entry.parents for entry in entries)
        for entry in entries:
            start, end, table = rows.query_starts[-1], entry.start + len(entry.token_ids), entry.block_table
            rows.token_ids.extend(entry.token_ids)
            at, tree = range(entry.start, end), entry.parents
            rows.positions.extend(positions_of(entry.start, len(at), tree) if tree else at)
            rows.slots.extend([table[p // block_size] * block_size + p % block_size for p in at])
            rows.query_starts.append(start + len(entry.token_ids))
            rows.logit_rows.extend(range(rows.query_starts[-1] - entry.num_logits, rows.query_starts[-1]))
            rows.context_lens.append(end)
            if has_trees:
                rows.parents.extend(window_parents(len(at), tree))
        return rows


def build_batch(
    entries: Sequence[BatchEntry],
    block_size: int,
    device: torch.device | str = "cpu",
    adapter_slots: Sequence[int] | None = None,  # of each entry; -1: none
) -> Batch:
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
        parents=torch.tensor(rows.parents, dtype=torch.int32).to(device) if rows.parents else None,
        adapter_slots=None if adapter_slots is None else _by_row(adapter_slots, rows.query_starts).to(device),
    )


def _by_row(values: Sequence[int], query_starts: Sequence[int]) -> Tensor:  # [sequences] -> [rows] int32
    counts = [end - start for start, end in itertools.pairwise(query_starts)]
    return torch.tensor(values, dtype=torch.int32).repeat_interleave(torch.tensor(counts))


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What the steps of an engine hold at most, chunks of prompts aside."""

    max_rows: int
    max_sequences: int
    max_query_len: int  # rows of one sequence: a window and the token before it
    trees: bool = False  # windows may be trees


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """The sizes of one captured graph."""

    rows: int
    sequences: int
    max_query_len: int
    trees: bool = False  # some sequence's rows are a tree


def all_buckets(limits: StepLimits) -> list[Bucket]:
    """Every bucket that some step within the limits runs in, the largest first: smaller ones find its memory."""
    return sorted(set(_buckets(limits)), reverse=True)


def choose_bucket(
    limits: StepLimits, num_rows: int, num_sequences: int, longest: int, trees: bool = False
) -> Bucket | None:
    """The bucket of a step, the longest of whose sequences has `longest` rows; None for a prompt's chunk and what is
    too large."""
    sizes = _row_sizes(limits)
    too_large = num_rows > sizes[-1] or num_sequences > limits.max_sequences or longest > limits.max_query_len
    if too_large or trees > limits.trees:
        return None
    rows = next(size for size in sizes if size >= num_rows)
    if longest == 1:
        return Bucket(rows, rows, 1)
    return Bucket(rows, _power(num_sequences), limits.max_query_len, trees)


def bucket_of(limits: StepLimits, entries: Sequence[BatchEntry]) -> Bucket | None:
    """The bucket of a step of these entries, as `choose_bucket` gives it."""
    lengths, trees = [len(entry.token_ids) for entry in entries], any(entry.parents for entry in entries)
    return choose_bucket(limits, sum(lengths), len(lengths), max(lengths), trees)


def _buckets(limits: StepLimits) -> Iterator[Bucket]:
    for before, rows in itertools.pairwise((0, *_row_sizes(limits))):
        if before < limits.max_sequences:
            yield Bucket(rows, rows, 1)
        if limits.max_query_len == 1:
            continue
        for num_sequences in range(1, min(rows - 1, limits.max_sequences) + 1):
            if num_sequences * limits.max_query_len > before:  # else its steps have fewer rows
                for trees in {False, limits.trees}:
                    yield Bucket(rows, _power(num_sequences), limits.max_query_len, trees)


def _row_sizes(limits: StepLimits) -> tuple[int, ...]:
    most = min(limits.max_rows, limits.max_sequences * limits.max_query_len)
    return tuple(size for before, size in itertools.pairwise((0, *ROWS)) if before < most)


def _power(number: int) -> int:
    """The least power of two that is no less."""
    return 1 << (number - 1).bit_length()


def buffer_size(bucket: Bucket, table_width: int) -> int:
    """How many numbers a bucket needs."""
    return sum(map(_aligned, _sizes(bucket, table_width)))


class StepBuffer:
    """One bucket's view of the buffers, which the next step in another bucket overwrites."""

    def __init__(
        self,
        bucket: Bucket,
        table_width: int,  # most blocks of a sequence
        host: Tensor,  # [at least buffer_size] int32
        device: Tensor,  # the same
    ) -> None:
        sizes = _sizes(bucket, table_width)
        starts = list(itertools.accumulate(map(_aligned, sizes), initial=0))
        places = [slice(start, start + size) for start, size in zip(starts, sizes, strict=False)]
        ids, at, slots, logit_rows, starts_of, lens, parents, tables = (device[place] for place in places)
        tables, tree = tables.view(-1, table_width), parents if bucket.trees else None
        self.batch = StaticBatch(ids, at, slots, logit_rows, starts_of, lens, tables, bucket.max_query_len, tree)
        numbers = host.numpy()
        self._parts = [numbers[place] for place in places[:-1]]
        self._tables = numbers[places[-1]].reshape(-1, table_width)  # a view, [sequences, most blocks]
        self._tables_start = places[-1].start

    def write(self, rows: PackedRows, tables: Sequence[Sequence[int]]) -> int:
        """Writes a step and its padding to the host's buffer; returns how many numbers from its start on hold it.
        Tables are written whole: passes that follow without the host may reach further than this one."""
        paddings = (0, 0, PAD_SLOT, 0, rows.query_starts[-1], 0, CHAIN)
        values = rows.token_ids, rows.positions, rows.slots, rows.logit_rows, rows.query_starts, rows.context_lens
        for part, value, padding in zip(self._parts, (*values, rows.parents), paddings, strict=True):
            part[: len(value)] = value
            part[len(value) :] = padding
        for row, table in zip(self._tables, tables, strict=False):
            row[: len(table)] = table
        return int(self._tables_start + len(tables) * self._tables.shape[1])


def _sizes(bucket: Bucket, table_width: int) -> tuple[int, ...]:
    """The sizes of token ids, positions, slots, logit rows, query starts, context lengths, parents and block tables."""
    rows, sequences = bucket.rows, bucket.sequences
    return rows, rows, rows, rows, sequences + 1, sequences, rows * bucket.trees, sequences * table_width


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
