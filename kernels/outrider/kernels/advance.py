"""Moves sequences on by one token, on the device: the next pass then needs nothing from the host but its launch."""

from __future__ import annotations

from torch import Tensor

from outrider.kernels import dispatch


def advance(
    positions: Tensor,  # [sequences] int32: of the token that is computed next; changed in place, as the next two
    slots: Tensor,  # [sequences] int32: where its keys and values go; -1: nowhere
    context_lens: Tensor,  # [sequences] int32: tokens in the cache with it; 0: padding, which stays where it is
    block_tables: Tensor,  # [sequences, most blocks] int32
    passes: Tensor,  # [1] int32: passes that ran; before the first one the numbers are right as they are
    block_size: int,
) -> None:
    """The sequences' blocks must hold the position that follows."""
    if dispatch.runs_triton(positions):
        from outrider.kernels import advance_triton

        advance_triton.advance(positions, slots, context_lens, block_tables, passes, block_size)
        return
    moves = ((context_lens > 0) & (passes > 0)).int()  # [sequences]
    positions += moves
    context_lens += moves
    blocks = block_tables.gather(1, (positions // block_size).long()[:, None]).squeeze(1)  # [sequences]
    slots.copy_(blocks * block_size + positions % block_size).masked_fill_(context_lens == 0, -1)
