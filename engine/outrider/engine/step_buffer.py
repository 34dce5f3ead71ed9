"""How the numbers of a captured step lie in its one buffer, on the host and on the device alike."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import Tensor

from outrider.engine.batch import PackedRows, StaticBatch
from outrider.engine.buckets import Bucket

ALIGNMENT = 4  # numbers: kernels are compiled for pointers to 16 bytes, or else anew
PAD_SLOT = -1  # stored nowhere


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
        ids, positions, slots, logit_rows, query_starts, context_lens, tables = (device[place] for place in places)
        self.batch = StaticBatch(
            ids, positions, slots, logit_rows, query_starts, context_lens, tables.view(-1, table_width),
            bucket.max_query_len,
        )  # fmt: skip
        numbers = host.numpy()
        self._parts = [numbers[place] for place in places[:-1]]
        self._tables = numbers[places[-1]].reshape(-1, table_width)  # a view, [sequences, most blocks]
        self._tables_start = places[-1].start

    def write(self, rows: PackedRows, tables: Sequence[Sequence[int]]) -> int:
        """Writes a step and its padding to the host's buffer; returns how many numbers from its start on hold it.
        Tables are written whole: passes that follow without the host may reach further than this one."""
        paddings = (0, 0, PAD_SLOT, 0, rows.query_starts[-1], 0)
        values = (
            rows.token_ids, rows.positions, rows.slots, rows.logit_rows, rows.query_starts, rows.context_lens,
        )  # fmt: skip
        for part, value, padding in zip(self._parts, values, paddings, strict=True):
            part[: len(value)] = value
            part[len(value) :] = padding
        for row, table in zip(self._tables, tables, strict=False):
            row[: len(table)] = table
        return int(self._tables_start + len(tables) * self._tables.shape[1])


def _sizes(bucket: Bucket, table_width: int) -> tuple[int, ...]:
    """Of token ids, positions, slots, logit rows, query starts, context lengths and block tables."""
    rows, sequences = bucket.rows, bucket.sequences
    return rows, rows, rows, rows, sequences + 1, sequences, sequences * table_width


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
