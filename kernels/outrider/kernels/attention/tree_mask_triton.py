"""The ancestor bits of drafted trees: one program a row climbs to the root."""

# mypy: allow-untyped-decorators, disable-error-code="import-untyped,import-not-found"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.common_triton import find_sequence
from outrider.kernels.types import ROOT, TREE_ROWS, TreeMask


@triton.jit(do_not_specialize=["num_sequences"])
def _tree_mask_kernel(
    bits: tl.tensor,  # [rows] int64, written
    depths: tl.tensor,  # [rows] int32, written
    parents: tl.tensor,  # [rows] int32
    query_starts: tl.tensor,  # [sequences + 1] int32
    num_sequences: tl.tensor,
    ROOT: tl.constexpr,
    TREE_ROWS: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    sequence = find_sequence(query_starts, row, num_sequences, 0)
    begin = tl.load(query_starts + sequence)
    index = row - begin
    inside = row < tl.load(query_starts + sequence + 1)
    is_tree = inside & (index < TREE_ROWS) & (tl.load(parents + row) >= ROOT)
    node = tl.where(is_tree, index, -1)
    seen = tl.zeros((), tl.int64)
    depth = tl.zeros((), tl.int32) - 1
    while node >= 0:
        seen = seen | (tl.full((), 1, tl.int64) << node)
        depth += 1
        parent = tl.load(parents + begin + node)
        node = tl.where(parent < node, parent, -1)  # always falls, so the climb ends whatever the parents hold
    tl.store(bits + row, seen)
    tl.store(depths + row, tl.where(is_tree, depth, tl.where(inside, index, 0)))


def launch_tree_mask(parents: Tensor, query_starts: Tensor) -> TreeMask:
    """parents: [rows] int32; query_starts: [sequences + 1] int32."""
    rows = parents.shape[0]
    mask = TreeMask(
        torch.empty(rows, dtype=torch.int64, device=parents.device),
        torch.empty(rows, dtype=torch.int32, device=parents.device),
    )
    _tree_mask_kernel[(rows,)](
        mask.bits, mask.depths, parents, query_starts, query_starts.shape[0] - 1, ROOT, TREE_ROWS, num_warps=1
    )
    return mask
