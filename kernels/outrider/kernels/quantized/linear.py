"""Products with quantised weights that stay packed on their device, and rows of them, as an embedding has."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.kernels import dispatch
from outrider.kernels.batch_invariant import by_row_tiles
from outrider.kernels.quantized.packed import PackedMatrix, unpack


def packed_linear(
    x: Tensor,  # [rows, in]
    weight: PackedMatrix,  # [out, in]
    bias: Tensor | None = None,  # [out]
    *,
    out: Tensor | None = None,  # [rows, out], the type of x, whose rows lie together: written
    batch_invariant: bool = False,
) -> Tensor:  # [rows, out]
    """y = x W^T + b of the numbers that the codes stand for, of which none is rounded; sums are float32, and rounded
    once, to the type of x."""
    if dispatch.runs_triton(x):
        from outrider.kernels.quantized.triton import linear

        return linear(x, weight, bias, out=out, batch_invariant=batch_invariant)
    numbers, wide = unpack(weight), None if bias is None else bias.float()

    def product(rows: Tensor) -> Tensor:
        return F.linear(rows.float(), numbers, wide).to(x.dtype)

    found = by_row_tiles(product, x) if batch_invariant else product(x)
    return found if out is None else out.copy_(found)


def packed_rows(weight: PackedMatrix, ids: Tensor, dtype: torch.dtype) -> Tensor:  # [rows] -> [rows, in]
    """The rows of these outputs, each number rounded once, to `dtype`."""
    if dispatch.runs_triton(ids):
        from outrider.kernels.quantized.triton import rows

        return rows(weight, ids, dtype)
    return unpack(weight)[ids.long()].to(dtype)
