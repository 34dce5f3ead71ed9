"""`advance` in Triton: one program for a few sequences each."""

# mypy: allow-untyped-decorators, disable-error-code="import-untyped,import-not-found"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

SEQUENCES = 64  # of a program


def advance(
    positions: Tensor, slots: Tensor, context_lens: Tensor, block_tables: Tensor, passes: Tensor, block_size: int
) -> None:
    """Launches `advance.advance`."""
    num_sequences = len(positions)
    _advance_kernel[(triton.cdiv(num_sequences, SEQUENCES),)](
        positions, slots, context_lens, block_tables, passes, num_sequences, block_tables.stride(0), block_size,
        SEQUENCES,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_sequences"])
def _advance_kernel(
    positions: tl.tensor,
    slots: tl.tensor,
    context_lens: tl.tensor,
    block_tables: tl.tensor,
    passes: tl.tensor,
    num_sequences: tl.tensor,
    table_stride: tl.tensor,
    block_size: tl.constexpr,
    SEQUENCES: tl.constexpr,
) -> None:
    index = tl.program_id(0) * SEQUENCES + tl.arange(0, SEQUENCES)
    inside = index < num_sequences
    length = tl.load(context_lens + index, inside, 0)
    moves = ((length > 0) & (tl.load(passes) > 0)).to(tl.int32)
    position = tl.load(positions + index, inside, 0) + moves
    place = block_tables + index.to(tl.int64) * table_stride + position // block_size
    slot = tl.load(place, inside & (length > 0), 0) * block_size + position % block_size
    tl.store(positions + index, position, inside)
    tl.store(context_lens + index, length + moves, inside)
    tl.store(slots + index, tl.where(length > 0, slot, -1), inside)
