"""The sizes of steps that are captured: a step runs in the smallest bucket that holds it.

A bucket is a number of rows, a number of sequences and the most rows of one sequence. Sequences bring windows of any
length up to that, next to one another: none is padded. Rows go by ROWS, finely while a step costs the reading of the
weights anyway and coarsely above; sequences by powers of two, since one of padding costs a few empty programs. Steps in
which every sequence has one row (plain decoding, and most of a draft's) have buckets of their own, whose attention
takes smaller tiles."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # a step of more rows is worth its launches


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What the steps of an engine hold at most, chunks of prompts aside."""

    max_rows: int
    max_sequences: int
    max_query_len: int  # rows of one sequence: a window and the token before it


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """The sizes of one captured graph."""

    rows: int
    sequences: int
    max_query_len: int


def all_buckets(limits: StepLimits) -> list[Bucket]:
    """Every bucket that some step within the limits runs in, the largest first: smaller ones find its memory."""
    return sorted(set(_buckets(limits)), reverse=True)


def choose_bucket(limits: StepLimits, num_rows: int, num_sequences: int, longest: int) -> Bucket | None:
    """The bucket of a step, the longest of whose sequences has `longest` rows; None if it holds a prompt's chunk or is
    too large."""
    sizes = _row_sizes(limits)
    if num_rows > sizes[-1] or num_sequences > limits.max_sequences or longest > limits.max_query_len:
        return None
    rows = next(size for size in sizes if size >= num_rows)
    if longest == 1:
        return Bucket(rows, rows, 1)
    return Bucket(rows, _power(num_sequences), limits.max_query_len)


def _buckets(limits: StepLimits) -> Iterator[Bucket]:
    for before, rows in itertools.pairwise((0, *_row_sizes(limits))):
        if before < limits.max_sequences:
            yield Bucket(rows, rows, 1)
        if limits.max_query_len == 1:
            continue
        for num_sequences in range(1, min(rows - 1, limits.max_sequences) + 1):
            if num_sequences * limits.max_query_len > before:  # else its steps have fewer rows
                yield Bucket(rows, _power(num_sequences), limits.max_query_len)


def _row_sizes(limits: StepLimits) -> tuple[int, ...]:
    most = min(limits.max_rows, limits.max_sequences * limits.max_query_len)
    return tuple(size for before, size in itertools.pairwise((0, *ROWS)) if before < most)


def _power(number: int) -> int:
    """The least power of two that is no less."""
    return 1 << (number - 1).bit_length()
