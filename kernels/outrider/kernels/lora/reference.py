"""What adapters add to a product: of each row its own adapter's, y += scaling * B (A x) (LoRA, Hu et al., arXiv
2106.09685). Rows of several adapters, and of none, share a call."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from outrider.kernels import dispatch
from outrider.kernels.batch_invariant import by_row_tiles
from outrider.kernels.types import LowRankWeights


def add_low_rank(
    y: Tensor,  # [rows, out], changed
    x: Tensor,  # [rows, in], the rows of which y is the product
    weights: LowRankWeights,
    slots: Tensor,  # [rows] int32: whose adapter a row has; -1: none, and its y stays as it is
    *,
    batch_invariant: bool = False,
) -> None:
    """Computed in float32, and rounded once, to the type of y."""
    if dispatch.runs_triton(y):
        from outrider.kernels.lora.triton import add_low_rank as launch

        launch(y, x, weights, slots)
        return
    present = set(slots.tolist())
    for slot in sorted(present - {-1}):
        rows = slice(None) if len(present) == 1 else (slots == slot).nonzero()[:, 0]  # all, or [n]
        product = partial(_product, weights, slot)
        wide = x[rows].float()  # [n, in]
        update = by_row_tiles(product, wide) if batch_invariant else product(wide)  # [n, out]
        y[rows] = (y[rows].float() + update).to(y.dtype)


def _product(weights: LowRankWeights, slot: int, x: Tensor) -> Tensor:  # [n, in] float32 -> [n, out] float32
    down, up, scaling = weights.down[slot].float(), weights.up[slot].float(), weights.scaling[slot]
    inner = (x @ down.flatten(0, 1).t()).view(len(x), *down.shape[:2])  # [n, slices, rank]
    inner = inner * scaling[:, None]
    spans = zip(weights.bounds[:-1], weights.bounds[1:], strict=True)
    return torch.cat([inner[:, index] @ up[start:end].t() for index, (start, end) in enumerate(spans)], 1)
