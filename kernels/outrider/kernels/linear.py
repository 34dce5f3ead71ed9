"""Matrix products with weights laid out once, at load, for the kernel that runs them.

Measured on 2 threads (float32, ms a product of [rows, 1024] by [8192, 1024]): F.linear 2.3-3.3 (1-2 rows), 6.7 (5), 9.5
(8); oneDNN's packed layout 2.5-3.5, 4.0, 4.4. A packed call costs 20 microseconds more than `torch.mm` with the
transposed weight, which is the fastest for weights that fit the second-level cache, at every number of rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.kernels import dispatch
from outrider.kernels.batch_invariant import TILE_ROWS, by_row_tiles

SMALL_WEIGHT = 512 * 1024  # elements: up to here the transposed layout wins
PLAIN_ROWS = 2  # up to this many rows the plain layout is 10-25 % faster than the packed one


class Linear:
    """y = x W^T + b. The layout is a function of shape, dtype and device alone, so that equal processes compute equal
    bits. Batch-invariant products are row tiles on a CPU and a kernel of one tile shape elsewhere."""

    __slots__ = ("_batch_invariant", "_bias", "_packed", "_plain", "_transposed")

    def __init__(
        self,
        weight: Tensor,  # [out, in]
        bias: Tensor | None = None,  # [out]
        *,
        batch_invariant: bool = False,
        keep_plain: bool = True,  # a second copy, for one and two rows
    ) -> None:
        self._bias = bias
        self._batch_invariant = batch_invariant
        self._packed: Tensor | None = None
        self._plain: Tensor | None = None
        self._transposed: Tensor | None = None
        has_layouts = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        if dispatch.runs_triton(weight) or weight.device.type != "cpu" or not has_layouts:
            self._plain = weight
        elif weight.numel() <= SMALL_WEIGHT:
            self._transposed = weight.t().contiguous()
        else:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), TILE_ROWS)
            self._plain = weight if keep_plain and not batch_invariant else None

    def __call__(self, x: Tensor) -> Tensor:  # [rows, in] -> [rows, out]
        """The product."""
        if dispatch.runs_triton(x) and self._batch_invariant and self._plain is not None:
            from outrider.kernels import linear_triton

            return linear_triton.linear(x, self._plain, self._bias)
        return by_row_tiles(self._product, x) if self._batch_invariant else self._product(x)

    def _product(self, x: Tensor) -> Tensor:  # [rows, in] -> [rows, out]
        if self._transposed is not None:
            return torch.mm(x, self._transposed) if self._bias is None else torch.addmm(self._bias, x, self._transposed)
        if self._packed is None or (self._plain is not None and x.shape[0] <= PLAIN_ROWS):
            return F.linear(x, self._plain, self._bias)  # type: ignore[arg-type]
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return product
