"""Which rows of a drafted tree see which: ancestor bits and depths, built on the device from parent indices; and the
same of a block, whose tokens are drafted in one pass.

A sequence's rows of one step are its *window*. A row of a tree sees everything before the window, its ancestors in it,
and itself; its position is the window's first plus its depth. Its slot in the cache is that of its index. A block's
rows see all of it, or those before them; sliding windows are counted back from its first row."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.kernels import dispatch
from outrider.kernels.types import ROOT, TREE_ROWS, TreeMask

CHAIN = -2  # parent of a row that sees all rows before it: those of sequences without a tree, of any length


def tree_mask(parents: Tensor, query_starts: Tensor) -> TreeMask:
    """parents: [rows] int32, indices into the row's own window, below its own; query_starts: [sequences + 1] int32."""
    if dispatch.runs_triton(parents):
        from outrider.kernels.attention.tree_mask_triton import launch_tree_mask

        return launch_tree_mask(parents, query_starts)
    return tree_mask_reference(parents, query_starts)


def block_mask(query_starts: Tensor, num_rows: int, whole: bool) -> TreeMask:
    """Every window a block of fewer than TREE_ROWS rows, of which each row sees all (`whole`) or those up to itself.
    query_starts: [sequences + 1]; of [num_rows], padding behind the last start has any bits."""
    starts = query_starts.long()
    rows = torch.arange(num_rows, device=starts.device)
    window = torch.searchsorted(starts, rows, right=True).clamp(max=len(starts) - 1) - 1  # [rows]
    seen = (starts[window + 1] - starts[window]) if whole else rows - starts[window] + 1  # [rows]
    bits = (1 << seen.clamp(0, TREE_ROWS - 1)) - 1
    return TreeMask(bits, torch.zeros(num_rows, dtype=torch.int32, device=starts.device))


def tree_mask_reference(parents: Tensor, query_starts: Tensor) -> TreeMask:
    """Climbs from all rows at once, a generation a turn."""
    rows, lengths = parents.shape[0], query_starts.diff().long()
    begins = torch.repeat_interleave(query_starts[:-1].long(), lengths, output_size=int(lengths.sum()))
    begins = torch.cat(
        [begins, begins.new_full((rows - begins.shape[0],), rows)]
    )  # [rows]; padding rows have no window
    index = torch.arange(rows) - begins  # [rows]: place in the window
    is_tree = (parents >= ROOT) & (index >= 0) & (index < TREE_ROWS)
    node = torch.where(is_tree, index, -1)
    bits, depths = torch.zeros(rows, dtype=torch.int64), torch.full((rows,), -1, dtype=torch.int32)
    while bool((node >= 0).any()):
        climbing = node >= 0
        bits |= torch.where(climbing, 1 << node.clamp(min=0), 0)
        depths += climbing.int()
        parent = parents.long()[torch.where(climbing, begins + node, 0)]
        node = torch.where(climbing & (parent < node), parent, -1)
    return TreeMask(bits, torch.where(is_tree, depths, index.clamp(min=0).int()))
