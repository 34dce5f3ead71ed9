"""The input embeddings, which Gemma scales."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class Embedding:
    """Looks up rows of `weight`, times `scale` where there is one: rounded to the type of the rows, as in training."""

    def __init__(
        self,
        weight: Tensor,  # [vocab, hidden]
        scale: float | None,
        dtype: torch.dtype,  # of the rows
    ) -> None:
        self.weight = weight
        self._scale = None if scale is None else torch.tensor(scale, dtype=dtype).item()
        self._dtype = dtype

    def __call__(self, token_ids: Tensor) -> Tensor:  # [rows] -> [rows, hidden]
        """The residual stream before the first layer, in memory of its own."""
        hidden = F.embedding(token_ids, self.weight).to(self._dtype)
        return hidden if self._scale is None else hidden.mul_(self._scale)
