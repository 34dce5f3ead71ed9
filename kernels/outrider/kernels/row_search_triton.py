"""Which sequence of a ragged batch a program works on: a search on the device, so that a grid depends on the batch's
sizes alone and a captured graph can be replayed with other lengths."""

# mypy: allow-untyped-decorators, disable-error-code="import-untyped,import-not-found"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def find_sequence(
    query_starts: tl.tensor, place: tl.tensor, num_sequences: tl.tensor, TILE_ROWS: tl.constexpr
) -> tl.tensor:
    """The last sequence that begins at or before `place`. With TILE_ROWS, `place` counts tiles of up to TILE_ROWS rows:
    those of sequence i begin at tile starts[i] // TILE_ROWS + i, which leaves room for the part-filled tiles before."""
    low = tl.zeros((), tl.int32)
    high = tl.zeros((), tl.int32) + num_sequences
    while low < high:
        middle = (low + high) // 2
        begin = tl.load(query_starts + middle)
        if TILE_ROWS > 0:
            begin = begin // TILE_ROWS + middle
        before = begin <= place
        low = tl.where(before, middle + 1, low)
        high = tl.where(before, high, middle)
    return low - 1
