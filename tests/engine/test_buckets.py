"""Which steps are captured, and in which bucket each runs."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from outrider.engine.batch import (
    ALIGNMENT,
    ROWS,
    BatchEntry,
    Bucket,
    PackedRows,
    StepBuffer,
    StepLimits,
    all_buckets,
    buffer_size,
    choose_bucket,
)

LIMITS = [
    StepLimits(512, 256, 33), StepLimits(512, 8, 33), StepLimits(16, 4, 5), StepLimits(512, 1, 1),
    StepLimits(512, 3, 129), StepLimits(7, 256, 2),
]  # fmt: skip


@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_every_step_within_the_limits_has_the_smallest_bucket_that_holds_it(limits: StepLimits) -> None:
    buckets, used = all_buckets(limits), set()
    assert buckets == sorted(set(buckets), reverse=True)
    generator = random.Random(0)
    for _ in range(5000):
        lengths = [
            generator.randint(1, limits.max_query_len) for _ in range(generator.randint(1, limits.max_sequences))
        ]
        if generator.random() < 0.3:
            lengths = [1] * len(lengths)
        if sum(lengths) > min(limits.max_rows, ROWS[-1]):
            continue
        bucket = choose_bucket(limits, sum(lengths), len(lengths), max(lengths))
        assert bucket in buckets
        used.add(bucket)
        assert bucket.rows >= sum(lengths) and bucket.sequences >= len(lengths) >= bucket.sequences // 2
        assert bucket.max_query_len >= max(lengths)
        assert all(size >= bucket.rows for size in ROWS if size >= sum(lengths))
    assert len(used) >= len(buckets) // 2


def test_what_has_no_bucket() -> None:
    limits = StepLimits(512, 8, 33)
    assert choose_bucket(limits, 34, 1, 34) is None  # a prompt's chunk
    assert choose_bucket(limits, 257, 8, 33) is None  # too many rows
    assert choose_bucket(limits, 9, 9, 1) is None  # too many sequences
    assert choose_bucket(limits, 8, 8, 1) == Bucket(8, 8, 1)
    assert choose_bucket(limits, 9, 7, 3) == Bucket(16, 8, 33)


def test_the_default_limits_need_few_graphs() -> None:
    assert len(all_buckets(StepLimits(512, 256, 33))) <= 80


def test_a_buffer_holds_the_step_and_its_padding() -> None:
    """Whatever it held before, and as far as anything reads; the blocks of a table that are not reached yet, too."""
    bucket, width = Bucket(8, 4, 5), 6
    host, device = (torch.full((buffer_size(bucket, width) + 9,), poison, dtype=torch.int32) for poison in (77, -77))
    buffer = StepBuffer(bucket, width, host, device)
    entries = [BatchEntry([7, 8], 3, [5, 2, 9], 1), BatchEntry([9, 10, 11], 0, [4], 2)]
    used = buffer.write(PackedRows.of(entries, 4), [entry.block_table for entry in entries])
    device[:used] = host[:used]
    batch = buffer.batch
    assert batch.token_ids.tolist() == [7, 8, 9, 10, 11, 0, 0, 0]
    assert batch.positions.tolist() == [3, 4, 0, 1, 2, 0, 0, 0]
    assert batch.slot_mapping.tolist() == [23, 8, 16, 17, 18, -1, -1, -1]
    assert batch.logit_rows.tolist() == [1, 3, 4, 0, 0, 0, 0, 0]
    assert batch.query_starts.tolist() == [0, 2, 5, 5, 5] and batch.context_lens.tolist() == [5, 3, 0, 0]
    assert batch.block_tables.tolist() == [[5, 2, 9, *[77] * 3], [4, *[77] * 5], [-77] * 6, [-77] * 6]
    assert batch.max_query_len == 5 and host[-9:].tolist() == [77] * 9


@pytest.mark.parametrize("sequences", [1, 2, 3, 8])
def test_parts_keep_the_alignment_that_kernels_are_compiled_for(sequences: int) -> None:
    bucket = Bucket(7, sequences, 3)
    size = buffer_size(bucket, 5)
    batch = StepBuffer(bucket, 5, torch.zeros(size, dtype=torch.int32), torch.zeros(size, dtype=torch.int32)).batch
    parts = [
        batch.token_ids, batch.positions, batch.slot_mapping, batch.logit_rows, batch.query_starts,
        batch.context_lens, batch.block_tables,
    ]  # fmt: skip
    offsets = [part.storage_offset() for part in parts]
    assert all(offset % ALIGNMENT == 0 for offset in offsets)
    assert all(
        left + part.numel() <= right for part, (left, right) in zip(parts, itertools.pairwise(offsets), strict=False)
    )
