"""The ids of the few greatest scores of every row."""

from __future__ import annotations

from ctypes import c_int64, c_void_p

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.kernels.cpu_library import cpu_library

MOST = 64  # that the C kernel keeps


def best_ids(
    scores: Tensor,  # [rows, vocab] float32
    count: int,  # at least 1
) -> Tensor:  # [rows, count] int64
    """The greatest first; -1 where no finite score is left. Of equal scores the lowest id comes first on a CPU with the
    C kernels; elsewhere their order is PyTorch's."""
    library = cpu_library() if scores.device.type == "cpu" and scores.dtype == torch.float32 else None
    if library is None or count > MOST:
        usable = scores.masked_fill(~scores.isfinite(), -torch.inf)
        best = usable.topk(min(count, scores.shape[1]), dim=-1)
        found = best.indices.masked_fill(best.values == -torch.inf, -1)
        return F.pad(found, (0, count - found.shape[1]), value=-1)
    scores = scores.contiguous()
    ids = torch.empty(scores.shape[0], count, dtype=torch.int64)
    library.best_ids(
        c_void_p(scores.data_ptr()), c_int64(scores.shape[0]), c_int64(scores.shape[1]), c_int64(count),
        c_void_p(ids.data_ptr()),
    )  # fmt: skip
    return ids
